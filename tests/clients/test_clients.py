"""Client libraries for Python and JavaScript, unchanged, each in an environment of its own, against a real server.

`make clients` makes the environments and runs this file. The clients that developers of this project have anyway are
also in tests/serving/test_official_clients.py.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clock import finished, scaled
from tests.faces.served import OPERATORS, free_port, serving
from tests.serving.test_official_clients import SERVER

HERE = Path(__file__).parent
NAMES = [row.partition(":")[0] for row in (HERE / "libraries.txt").read_text().splitlines()]
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-clients"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not (ENVIRONMENTS / ".ready").exists(),
        reason="the environments of the clients are not made: `make clients`",
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("clients"), free_port()
    environment = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CATALOG": str(folder / "none")}
    command = [sys.executable, "-c", SERVER, str(port)]
    with serving(command, folder, environment, port=port, path="/health"):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", NAMES)
def test_a_client_library_works_unchanged(name: str, url: str, tmp_path: Path) -> None:
    """No story needs the network: a client that would read a list of models there gets a setting against it."""
    home, python = ENVIRONMENTS / name, ENVIRONMENTS / name / "bin" / "python"
    story = [python, HERE / "stories.py"]
    if (home / "node_modules").exists():
        story = ["node", shutil.copy(HERE / "stories.mjs", home)]
    elif not python.exists():
        pytest.skip(f"{name} could not be installed")
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
    quiet |= {"HOME": str(tmp_path), "OLLAMA_API_BASE": url, "ANONYMIZED_TELEMETRY": "False"}
    environment = {"PATH": os.environ["PATH"], **quiet}
    told = finished([*story, name, url, OPERATORS], env=environment, timeout=scaled(300))
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.splitlines()[-1] == "ok"
