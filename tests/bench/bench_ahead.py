"""Measures look-ahead in real kernels: the load time that it hides, and what it costs the running cell."""

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.stories.test_look_ahead import run_all, running_kernel

ROUNDS = 4
# Three models that take a second to load, and cells that each use one of them for longer than that.
THREE = """
%env GPU_DEVICES=sim:24GiB,host:64GiB
%env GPU_PREFETCH=auto
import time
%load_ext gpu
waited = []
def slow(what):
    time.sleep(1.0 if what == "load" else 0.05)
for name in "abc":
    rt.register(name, slow, backend="fake", size="10GiB")
def used(name):
    began = time.perf_counter()
    with rt.use(name):
        waited.append(time.perf_counter() - began)
        time.sleep(1.3)
"""
THEIR_CELLS = ("time.sleep(1.3)", "used('a')", "used('b')", "used('c')", "print('end', waited)")
LAYERS = 24  # of 16 MiB each
# A model of LAYERS in a file, and a cell that computes without pause for some 3 seconds.
SETUP = """
%env GPU_DEVICES=sim:24GiB,host:64GiB
%env GPU_PREFETCH={mode}
import time
import torch
from safetensors.torch import load_file, save_file
%load_ext gpu
torch.set_num_threads(1)
def built():
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range({layers})]
    model = torch.nn.Sequential(*layers)
    model.load_state_dict(load_file({file!r}))
    return model
if {new}:
    save_file({{f"{{n}}.weight": torch.zeros(2048, 2048) for n in range({layers})}}, {file!r})
rt.register("model", built, size="400MiB")
def queued():
    "The seconds for which this thread could have run, and waited for a processor."
    return int(open("/proc/thread-self/schedstat").read().split()[1]) / 1e9
def spin():
    began, waited, total = time.perf_counter(), queued(), 0
    for number in range(60_000_000):
        total += number
    return time.perf_counter() - began - (queued() - waited)
"""
# The same load, in a process of its own, for as long as its standard input is open.
BESIDE = """
import sys, threading, torch
from safetensors.torch import load_file
torch.set_num_threads(1)
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
print("ready", flush=True)
while True:
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range({layers})]
    torch.nn.Sequential(*layers).load_state_dict(load_file({file!r}))
"""
USE = """
with rt.use("model"):
    print("end", [seconds, rt.schedule().loaded_ahead])
"""


def hidden_share() -> float:
    """The median share of the load time for which no cell waits. The card holds two of three models."""
    shares = []
    for _ in range(ROUNDS):
        with running_kernel() as (_, client):
            run_all(client, [THREE])
            printed = run_all(client, THEIR_CELLS)[-1][1]
        waited = json.loads(printed.removeprefix("end "))
        shares.append(1 - sum(waited) / 3)
    return statistics.median(shares)


@contextlib.contextmanager
def loading_beside(file: str) -> Iterator[None]:
    """A context manager in which another process loads the model of `file`, again and again."""
    code = BESIDE.format(layers=LAYERS, file=file)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield


def slowdown() -> dict[str, float]:
    """The least seconds of a cell that computes in pure Python, with and without a load beside it.

    The load reads a file and builds a model: `auto` in another thread of the kernel, `beside` in another process,
    again and again. `beside` shows what two busy processors of this machine cost one another. All ways are measured in
    turn. The time in which the cell's thread waits for a processor is left out: other programs cause it.
    """
    taken: dict[str, list[float]] = {"never": [], "auto": [], "beside": []}
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory, "weights.safetensors"))
        for number in range(ROUNDS):
            for mode, times in taken.items():
                setup = SETUP.format(
                    mode="auto" if mode == "auto" else "never",
                    layers=LAYERS,
                    file=file,
                    new=not number and mode == "never",
                )
                with running_kernel() as (_, client), contextlib.ExitStack() as stack:
                    run_all(client, [setup])
                    if mode == "beside":
                        stack.enter_context(loading_beside(file))
                    printed = run_all(client, ["seconds = spin()", USE])[-1][1]
                found = re.search(r"end (.*)", printed)
                assert found, printed
                seconds, ahead = json.loads(found[1])
                assert ahead == (mode == "auto"), printed
                times.append(seconds)
    return {mode: min(times) for mode, times in taken.items()}
