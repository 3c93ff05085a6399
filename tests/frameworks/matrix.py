"""Runs a notebook of a framework in a real kernel, with a request to park after each cell.

The kernel has an environment of its own, with the frameworks. The requests come from a Runtime of another process, as
those of `gpu park PID` do. The same notebook also runs in a kernel without gpu-console. Both must print the same, and
leave the same tensors and random generators.
"""

import datetime
import json
import os
import platform
import queue
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from jupyter_client.manager import KernelManager

from gpu_runtime import GpuError, Runtime
from gpu_runtime.units import MIB

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-frameworks"
PYTHON = ENVIRONMENT / "bin/python"
RESULTS = HERE / "RESULTS.md"
NOTEBOOKS = {file.stem: file for file in sorted((HERE / "notebooks").glob("*.py"))}
# The package of each notebook that has another name.
PACKAGES = {
    "ddp": "torch", "fsdp2": "torch", "ignite": "pytorch-ignite", "pyro": "pyro-ppl",
    "sentence_transformers": "sentence-transformers", "torch_compile": "torch",
    "torch_geometric": "torch-geometric", "transformers_trainer": "transformers",
}  # fmt: skip
DEVICES = "sim:8GiB,host:8GiB"
CELL_SECONDS = 600.0  # the usual cell takes less than three
# The 4 MiB are for notebooks whose own tensors are small: each cell leaves something to park.
FIRST_CELL = """
import random, numpy, torch
random.seed(0); numpy.random.seed(0); torch.manual_seed(0); torch.set_num_threads(1)
ballast = torch.arange(1 << 20, dtype=torch.float32)
"""
# Of the CPU's tensors, only those of 1 MiB count on a simulated card. Here nearly all do, as on a real card.
ALL_TENSORS = """
from gpu_runtime.backends.pytorch import search as _search
_search.SIMULATED_BYTES = 256
"""
LAST_CELL = (
    f"import runpy; print(runpy.run_path({str(HERE / 'digest.py')!r})['digests'](globals()))"
)


class Request(NamedTuple):
    """The answer to a request to park, which was made after the cell with this number."""

    cell: int
    parked: bool
    seconds: float
    bytes: int
    reason: str


class Run(NamedTuple):
    """What a notebook printed and left, and the answers to the requests."""

    printed: list[str]  # by each cell
    left: dict[str, str]  # the digest of each value
    requests: list[Request]


class Kernel:
    """A kernel in the environment of the frameworks."""

    def __init__(self, environment: dict[str, str], place: Path) -> None:
        self._manager = KernelManager()
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv[0] = str(PYTHON)
        self._manager.start_kernel(env=environment, cwd=str(place), start_new_session=True)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=CELL_SECONDS)

    def run(self, code: str) -> str:
        """Runs a cell. Returns what it printed or displayed. Raises RuntimeError if it fails."""
        ident = self._client.execute(code, allow_stdin=False)
        end, shown = time.monotonic() + CELL_SECONDS, ""
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"this cell does not end:\n{code}") from None
            if message["parent_header"].get("msg_id") != ident:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                shown += content["text"]
            elif kind == "execute_result":
                shown += content["data"]["text/plain"]
            elif kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return shown

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def cells(notebook: Path) -> list[str]:
    """The cells of a script in the percent format, without its docstring."""
    return [cell.partition("\n")[2] for cell in notebook.read_text().split("# %%")[1:]]


def run(notebook: Path, place: Path, *, parked: bool) -> Run:
    """Runs the `notebook` in a new kernel, in the folder `place`/work.

    With `parked`, the kernel loads the extension, and another process asks it to park after each cell.
    """
    work, url = place / "work", f"keeper://{place}/ledger"
    shutil.rmtree(work, ignore_errors=True)  # both runs have the same folder, since cells print it
    work.mkdir()
    environment = {**os.environ, "GPU_LEDGER": url, "GPU_DEVICES": DEVICES}
    printed, requests = [], []
    with Runtime(devices=DEVICES, ledger=url) as rt, closing(Kernel(environment, work)) as kernel:
        pid = kernel.run("import os; print(os.getpid())").strip()
        if parked:
            kernel.run("%load_ext gpu")
            kernel.run(ALL_TENSORS)
        kernel.run(FIRST_CELL)
        for number, code in enumerate(cells(notebook), 1):
            printed.append(kernel.run(code))
            if parked:
                requests.append(_request(rt, pid, number))
        left = json.loads(kernel.run(LAST_CELL))
    return Run(printed, left, requests)


def _request(rt: Runtime, pid: str, cell: int) -> Request:
    began = time.monotonic()
    try:
        outcome = rt.park(pid)
        parked, size, reason = outcome.done, outcome.bytes, outcome.because
    except GpuError as error:
        parked, size, reason = False, 0, str(error).replace(f"pid {pid}", "the notebook")
    return Request(cell, parked, time.monotonic() - began, size, reason)


def differences(plain: Run, parked: Run) -> list[str]:
    """What differs between the two runs, as sentences."""
    printed = zip(plain.printed, parked.printed, strict=True)
    found = [
        f"cell {number} printed {two!r} instead of {one!r}"
        for number, (one, two) in enumerate(printed, 1)
        if one != two
    ]
    names = sorted(plain.left.keys() | parked.left.keys())
    return found + [
        f"{name} is {parked.left.get(name)} instead of {plain.left.get(name)}"
        for name in names
        if parked.left.get(name) != plain.left.get(name)
    ]


def versions() -> dict[str, str]:
    """The version of the package of each notebook."""
    packages = {name: PACKAGES.get(name, name) for name in NOTEBOOKS}
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]), sep='\\n')"
    told = subprocess.run(
        [PYTHON, "-c", code, *packages.values()], check=True, capture_output=True, text=True
    )
    return dict(zip(packages, told.stdout.split(), strict=True))


def share(requests: Iterable[Request]) -> float:
    """The percentage of the `requests` after which the notebook was parked."""
    parked = [request.parked for request in requests]
    return 100 * sum(parked) / len(parked)


def table(runs: dict[str, tuple[Run, Run]]) -> str:
    """The content of RESULTS.md for the two `runs` of each notebook, the plain one first."""
    known, requests = versions(), [one for _, run in runs.values() for one in run.requests]
    within = [one for one in requests if one.parked and one.seconds <= 1.0]
    equal = sum(not differences(*both) for both in runs.values())
    return (
        "# Notebooks of frameworks\n\n"
        "Written by `make frameworks`. Each notebook runs twice: without gpu-console, and with a\n"
        "request to park after each cell. Equal means that both runs printed the same, and left the\n"
        "same tensors, arrays and generators. Tensors of 256 bytes and more are parked.\n\n"
        f"The last run: {datetime.date.today()}, {os.cpu_count()} × {platform.machine()}, "
        f"Python {platform.python_version()}, torch {known['ddp']}. {equal} of {len(runs)} notebooks are equal. "
        f"{sum(one.parked for one in requests)} of {len(requests)} requests parked ({share(requests):.1f} %), "
        f"{len(within)} of them within 1 s, with a load of {os.getloadavg()[2]:.1f} on the machine.\n\n"
        "| notebook | version | cells | parked | most MiB | longest wait (s) | values | equal | refusals |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
        + "".join(_line(name, known[name], *both) for name, both in runs.items())
    )


def _line(name: str, version: str, plain: Run, parked: Run) -> str:
    requests = parked.requests
    reasons = Counter(one.reason for one in requests if not one.parked)
    told = "; ".join(f"{count} × {reason}" for reason, count in reasons.items())
    columns = (
        name,
        version,
        len(requests),
        sum(one.parked for one in requests),
        f"{max(one.bytes for one in requests) / MIB:.1f}",
        f"{max(one.seconds for one in requests):.2f}",
        len(plain.left),
        "no" if differences(plain, parked) else "yes",
        told,
    )
    return f"| {' | '.join(map(str, columns))} |\n"
