"""Measures the time of imports, compared with `import torch` in the same run. Each import has its own process."""

import statistics
import subprocess
import sys

_CASES = {
    "torch": "import torch",
    "gpu_runtime": "import gpu_runtime",
    "load_ext": "shell.run_line_magic('load_ext', 'gpu')",
}
_PROGRAM = """
import sys, time
if {shell}:
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
began = time.perf_counter()
{statement}
print(time.perf_counter() - began)
heavy = {{"torch", "transformers", "panel"}} & set(sys.modules) if {shell} or "gpu_runtime" in {statement!r} else ()
assert not heavy, heavy
"""


def seconds(rounds: int = 7) -> dict[str, float]:
    """The median seconds of each import. Each round measures every import once."""
    taken: dict[str, list[float]] = {name: [] for name in _CASES}
    for _ in range(rounds):
        for name, statement in _CASES.items():
            program = _PROGRAM.format(statement=statement, shell=name == "load_ext")
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            )
            taken[name].append(float(done.stdout))
    return {name: statistics.median(times) for name, times in taken.items()}
