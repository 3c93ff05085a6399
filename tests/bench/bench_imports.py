"""Measures the time of imports, compared with `import torch` in the same run, and what a kernel's first table takes.

Each case has its own process.
"""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from statistics import median

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
# A kernel as ipykernel starts it, without pandas. Processor time, which other processes of the machine do not change.
_FIRST_TABLE = """
import os, sys, time
os.environ["GPU_DEVICES"], os.environ["GPU_LEDGER"] = "sim:2x24GiB,host:64GiB", "memory:"
sys.modules["pandas"] = None
import ipykernel.ipkernel
from IPython.core.interactiveshell import InteractiveShell

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

shell, began, before = InteractiveShell.instance(), time.process_time(), resident()
import gpu
imported = time.process_time() - began
shell.run_line_magic("load_ext", "gpu")
began = time.process_time()
assert shell.run_line_magic("gpu", "catalog").columns
took = time.process_time() - began
print(imported, took, resident() - before, file=sys.stderr)
"""


def _output(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _seconds(statement: str) -> float:
    return float(_output(_PROGRAM, statement).stdout)


def rows() -> Iterator[Row]:
    torch, ours, extension = medians(7, *(partial(_seconds, case) for case in _CASES))
    yield Row.against("`import gpu_runtime`, against `import torch`", ours, torch, 0.1)
    yield Row.against("`%load_ext gpu`, against `import torch`", extension, torch, 0.2)
    measured = [map(float, _output(_FIRST_TABLE).stderr.split()) for _ in range(7)]
    imported, took, mib = map(median, zip(*measured, strict=True))
    for what, figure, most, unit in (
        ("`import gpu` in a kernel, processor time", imported * 1e3, 10, "ms"),
        ("the first table of a kernel without pandas, processor time", took * 1e3, 100, "ms"),
        (
            "memory of a kernel beside IPython, after its first table, without pandas",
            mib,
            60,
            "MiB",
        ),
    ):
        yield Row(what, f"{figure:.0f} {unit}", f"≤ {most} {unit}", figure <= most)
