"""Measures the time of imports, compared with `import torch` in the same run. Each import has its own process."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from .results import Row
from .timing import medians

_CASES = ("import torch", "import gpu_runtime", "shell.run_line_magic('load_ext', 'gpu')")
_PROGRAM = """
import sys, time
statement = sys.argv[1]
if "shell" in statement:
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
began = time.perf_counter()
exec(statement)
print(time.perf_counter() - began)
heavy = {"torch", "transformers", "panel"} & set(sys.modules)
assert statement == "import torch" or not heavy, heavy
"""


def _seconds(statement: str) -> float:
    command = [sys.executable, "-c", _PROGRAM, statement]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def rows() -> Iterator[Row]:
    torch, ours, extension = medians(7, *(partial(_seconds, case) for case in _CASES))
    yield Row.against("`import gpu_runtime`, against `import torch`", ours, torch, 0.1)
    yield Row.against("`%load_ext gpu`, against `import torch`", extension, torch, 0.2)
