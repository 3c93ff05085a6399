"""Importing `gpu_runtime` or `gpu` loads no library that is only needed later."""

import re
import sys
from pathlib import Path

import pytest

from tests.clock import finished

NEEDED_LATER = [
    "torch", "transformers", "accelerate", "panel", "bokeh", "llama_cpp", "pandas",
    "pydantic", "ray",
]  # fmt: skip


def output_of(program: str, folder: Path) -> tuple[str, str]:
    """What a new interpreter prints, and writes as errors, when it runs `program` in `folder`."""
    shown = finished([sys.executable, "-c", program], cwd=folder)
    return shown.stdout.strip(), shown.stderr


@pytest.mark.parametrize(
    "package", ["gpu_runtime", "gpu", "gpu_runtime.web.auth", "gpu_panels.launcher"]
)
def test_an_import_loads_no_library_that_is_only_needed_later(package, tmp_path):
    """The import of torch alone takes a second. A notebook that only shows the status must not wait for it."""
    program = (
        f"import sys, {package}; print(*(name for name in {NEEDED_LATER} if name in sys.modules))"
    )
    assert output_of(program, tmp_path) == ("", "")


NEW_IN_3_11 = re.compile(
    r"import tomllib|operator\.call\b|enum\.StrEnum|except\*|asyncio\.(?:timeout|timeout_at|Runner|TaskGroup)\("
    r"|from (?:enum|typing|operator|datetime|asyncio) import .*\b(?:StrEnum|Self|Never|dataclass_transform|call|UTC)\b"
)


def test_only_the_server_uses_what_python_3_10_lacks():
    """`gpu serve` needs 3.11. All else takes it from `compat`. ruff refuses the syntax of newer versions."""
    root = Path(__file__).parents[2]
    folders = (root / "gpu_runtime", root / "kernel_ext", root / "panels")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = [path for path in files if NEW_IN_3_11.search(path.read_text())]
    others = {path.relative_to(root).as_posix() for path in found if "serving" not in path.parts}
    assert others == {"gpu_runtime/compat.py"}


@pytest.mark.parametrize("name", ["runtime", "fleet"])
@pytest.mark.parametrize("module_first", [True, False])
def test_a_function_and_a_module_of_one_name_do_not_replace_each_other(
    name, module_first, tmp_path
):
    """`gpu_runtime.fleet` is the function, whatever was imported first."""
    lines = [f"import gpu_runtime.{name}", "import gpu_runtime"]
    program = "; ".join([
        *(lines if module_first else lines[::-1]), "import gpu_runtime.fleet.wishes",
        f"from gpu_runtime import {name}",
        f"assert callable(gpu_runtime.{name}) and {name} is gpu_runtime.{name}",
        "from gpu_runtime.fleet.wishes import Wishes; from gpu_runtime.runtime import Runtime",
    ])  # fmt: skip
    assert output_of(program, tmp_path) == ("", "")
