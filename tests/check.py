"""The fast tests, in processes that are forked from one that has imported the libraries.

    python -m tests.check [argument of pytest ...]

Each process has its own folders, its own state directory and its own output, which is shown at its end. Workers of
xdist would each import every library and all tests.
"""

import gc
import os
import sys
import tempfile

import pytest

# What takes long to import, starts no thread at import, and reads nothing of the environment but these two numbers.
# `tests.clock` measures the machine, once for all.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
LIBRARIES = """
    bokeh.models fastapi.testclient gpu_runtime.serving.api.app hypothesis.stateful IPython.core.interactiveshell
    mcp.server msgspec openai panel pandas psutil torch torch._dynamo transformers tests.clock
""".split()
# Each takes about as long.
PARTS = (
    ["tests/backends", "tests/serving"],
    ["tests/owner", "tests/scheduler", "tests/ledgers"],
    ["tests"],
)
ARGUMENTS = [
    "-q", "-m", "not processes and not thorough and not soak", "--hypothesis-profile=quick",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
    *(word for name in "anyio frontrun langsmith_plugin nbval platformdirs schemathesis xdist".split()
      for word in ("-p", f"no:{name}")),
]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Runs all parts. Returns how many of them failed."""
    for library in LIBRARIES:
        __import__(library)
    gc.collect()
    gc.freeze()  # else the first search for garbage of each process copies all their pages
    running = {}
    for part in PARTS:
        others = [f"--ignore={folder}" for one in PARTS[:-1] for folder in one if part is PARTS[-1]]
        output = tempfile.TemporaryFile()
        pid = os.fork()
        if not pid:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.exit(pytest.main([*ARGUMENTS, *arguments, *others, *part]))
        running[pid] = output
    failed = 0
    while running:
        pid, status = os.wait()
        output = running.pop(pid)
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
        failed += status != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
