"""The tests of a real card can be collected where few packages are installed, and they say what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import ready

ROOT = Path(__file__).parents[2]
# Packages of the other tests, which a machine with a card may lack.
ABSENT = (
    "IPython ipykernel jupyter_client jupyter_server jupyterlab nbformat nbval panel bokeh tornado fastapi starlette"
    " uvicorn redis ray gguf llama_cpp diffusers playwright papermill openai ollama schemathesis"
)
COLLECT = f"""
import sys
for name in {ABSENT!r}.split():
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.processes
def test_the_tests_of_a_card_are_collected_without_the_packages_of_other_tests():
    """85 files could not be imported there, and pytest ran no test at all."""
    plain = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout",
    }
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, env=plain, capture_output=True, text=True
    )
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert done.returncode == 0 and len(collected) >= 18, done.stdout
    assert all(line.startswith("tests/gpu/") for line in collected)


def test_all_tests_of_a_card_are_in_one_directory():
    """`pytest -m gpu` reads no other directory."""
    mark = "mark." + "gpu"
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert {path.parts[0] for path in files if mark in (ROOT / "tests" / path).read_text()} == {
        "gpu"
    }


def test_a_missing_package_is_named_with_the_command(monkeypatch, capsys):
    monkeypatch.setitem(ready.NEEDED, "no_such_module", "no-such-package")
    assert ready.main(["--quiet"]) == 1
    assert "pip install no-such-package" in capsys.readouterr().out


def test_a_fact_that_cannot_be_read_does_not_end_the_report(monkeypatch, capsys):
    """A driver in a container may refuse some questions."""

    def refuses():
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(ready, "why_not", lambda: "")
    monkeypatch.setattr(ready, "FACTS", {"driver": refuses, "host": lambda: "2 processors"})
    assert ready.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "driver:       unknown (RuntimeError: Not Supported)",
        "host:         2 processors",
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("says", "python"),
    [("ready", "python3"), ("python3 lacks packages. msgspec", ".venv-gpu/bin/python")],
)
def test_make_uses_the_python_of_the_machine_if_it_has_everything(tmp_path, says, python):
    """A machine with a card may reach no package index, and an installation may take the whole session."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/sh\necho '{says}'\n")
    stub.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    path = f"{stub.parent}:{os.environ['PATH']}"
    planned = subprocess.run(
        ["make", "-n", "gpu-figures"],
        cwd=tmp_path,
        env={**outside, "PATH": path},
        capture_output=True,
        text=True,
    )
    last = planned.stdout.splitlines()[-1]
    assert last == f"{python} -m tests.bench.gpu_figures --out build/gpu/figures.md", planned.stderr
    assert planned.stderr == "" and ("pip install" in planned.stdout) == (python != "python3")
