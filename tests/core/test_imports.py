"""Importing `gpu_runtime` or `gpu` loads no library that is only needed later."""

from __future__ import annotations

import subprocess
import sys

import pytest

NEEDED_LATER = [
    "torch",
    "transformers",
    "accelerate",
    "panel",
    "bokeh",
    "llama_cpp",
    "pandas",
    "pydantic_settings",
]


@pytest.mark.parametrize(
    "package", ["gpu_runtime", "gpu", "gpu_runtime.web.auth", "gpu_panels.launcher"]
)
def test_an_import_loads_no_library_that_is_only_needed_later(package, tmp_path):
    """The import of torch alone takes a second. A notebook that only shows the status must not wait
    for it.
    """
    program = (
        f"import sys, {package}; print(*(name for name in {NEEDED_LATER} if name in sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (shown.stdout.strip(), shown.stderr) == ("", "")
