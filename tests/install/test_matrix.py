"""Parking, `rt.use`, magics, the ledger and JupyterLab in environments of other versions.

`make matrix` runs this file, which makes one environment after the other and writes MATRIX.md. An environment that
cannot be made here is in that table with the reason, and its test is skipped. One in which a test failed is kept.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from .conftest import ROOT

TABLE = Path(__file__).with_name("MATRIX.md")
SHOWN = ("torch", "jupyterlab", "ipykernel", "pandas")  # packages with a column in MATRIX.md


class Environment(NamedTuple):
    """What is asked for: a release of Python, and packages. What is without a version is the newest."""

    python: str
    packages: str

    @property
    def place(self) -> Path:
        """Its directory."""
        return ROOT / ".venv-matrix" / str(self)

    @property
    def asked(self) -> dict[str, str]:
        """Name of a package -> its version; empty for the newest."""
        return {name: rule.strip("=") for name, rule in re.findall(r"([\w-]+)(\S*)", self.packages)}

    def __str__(self) -> str:
        return f"{self.python}-{self.packages.split()[0].replace('==', '-')}"


OLD = "transformers<5"  # the newest needs a newer torch
ENVIRONMENTS = [
    Environment("3.10", f"torch==2.4.1 jupyterlab==4.2.0 ipykernel==6.29.0 pandas==2.1.0 numpy<2 {OLD}"),
    Environment("3.11", f"torch==2.6.0 jupyterlab==4.3.* ipykernel==6.* pandas==2.2.* {OLD}"),
    Environment("3.12", f"torch==2.8.0 jupyterlab==4.4.* ipykernel==7.0.* pandas==2.3.* {OLD}"),
    Environment("3.12", "torch==2.11.0 jupyterlab==4.5.* ipykernel==7.1.* pandas==3.0.*"),
    Environment("3.11", "torch==2.12.1 jupyterlab ipykernel==6.* pandas"),
    Environment("3.13", "torch jupyterlab ipykernel pandas"),
    Environment("3.14", "torch jupyterlab ipykernel pandas"),
]  # fmt: skip
# What depends on the inner parts of torch and of Python, and on its SQLite; tables of pandas; a real JupyterLab in a
# browser; kernels with gpu-console in their environment, and with an installation for all users.
FILES = """
    backends/test_canaries.py backends/test_old_torch.py backends/test_search.py backends/test_kernel_memory.py
    backends/test_parked_programs.py owner/test_parts.py owner/test_blocks.py ledgers/test_invariants.py
    telemetry faces/test_frames.py browser/test_lab_extension.py
    install/test_environments.py::test_a_kernel_of_each_environment_does_what_the_page_says
""".split()


def made(environment: Environment) -> Path:
    """The Python of the `environment`, which is made, or brought to the newest releases that it allows.

    Skips the test if that cannot be done, and writes the reason into the table.
    """
    tools = "pytest pytest-timeout hypothesis hatchling editables playwright tokenizers"
    place = str(environment.place)
    calls = [
        ["venv", "-q", "--seed", "--allow-existing", "--python", environment.python, place],
        ["pip", "install", "-q", "-U", "--python", place, *tools.split(), *environment.packages.split()]
        + ["-e", f"{ROOT}[transformers,notebook]"],
    ]  # fmt: skip
    for call in calls:
        done = subprocess.run([sys.executable, "-m", "uv", *call], capture_output=True, text=True)
        if done.returncode:
            said = re.findall(r"(?:error|cause:|[├╰]─▶) *(.*)", done.stderr) or [
                done.stderr.strip()
            ]
            why = re.sub(r"\(?https?://\S+", "", said[-1].replace("|", "/"))
            written(environment, {}, f"not installed: {why}")
            pytest.skip(why)
    return environment.place / "bin" / "python"


def written(environment: Environment, versions: dict[str, str], result: str) -> None:
    """Writes the line of the `environment` in the table, and the day."""
    cells = [versions.get("python", environment.python)]
    cells += [versions.get(name) or environment.asked[name] or "newest" for name in SHOWN]
    line = f"| {' | '.join([*cells, result, str(datetime.date.today())])} |"
    number = ENVIRONMENTS.index(environment)
    head, rows = TABLE.read_text().split("|---|\n")
    lines = rows.splitlines()
    lines[number : number + 1] = [line]
    TABLE.write_text(f"{head}|---|\n" + "".join(f"{one}\n" for one in lines))


def test_the_oldest_environment_has_the_lowest_versions_that_the_package_allows_and_the_page_names() -> (
    None
):
    oldest, rules = ENVIRONMENTS[0], (ROOT / "pyproject.toml").read_text()
    page = " ".join((ROOT / "docs/installation.md").read_text().split())
    for name in SHOWN:
        lowest = ".".join(oldest.asked[name].split(".")[:2])
        assert f"{name}>={lowest}" in rules
        assert f"{name} {lowest}" in page.replace("JupyterLab", "jupyterlab")
    assert f'requires-python = ">={oldest.python}"' in rules
    assert f"{oldest.python} to {ENVIRONMENTS[-1].python}" in page


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=str)
def test_the_suite_passes_in_an_environment_of_other_versions(environment: Environment) -> None:
    python = made(environment)
    names = ("python", *SHOWN)
    code = "import json, platform, sys; from importlib.metadata import version as of; "
    code += "print(json.dumps([platform.python_version(), *map(of, sys.argv[1:])]))"
    told = subprocess.run([python, "-c", code, *SHOWN], capture_output=True, text=True, check=True)
    versions = dict(zip(names, json.loads(told.stdout), strict=True))
    places = [str(ROOT), str(ROOT / "kernel_ext"), str(ROOT / "panels")]
    done = subprocess.run(
        [python, *"-m pytest -q -rsfE -p no:cacheprovider --tb=short -m".split(), "not soak"]
        + [f"tests/{name}" for name in FILES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    sys.stdout.write(done.stdout)
    # libraries print after pytest's last line, and a crash leaves none
    found = re.findall(r"^(\d+ \w+.*?)(?:, \d+ warnings?)? in [\d.]+s", done.stdout, re.M)
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, re.M)
    result = found[-1] if found else f"ended with status {done.returncode}"
    written(environment, versions, ": ".join(filter(None, [result, ", ".join(failed)])))
    assert done.returncode == 0, done.stdout[-3000:]
    shutil.rmtree(environment.place)
