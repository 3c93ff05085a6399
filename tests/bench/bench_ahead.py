"""Measures look-ahead in real kernels: the load time that it hides, and what it costs the running cell."""

import json
import re
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.stories.test_look_ahead import run_all, running_kernel

from .results import Row

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
import os
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
if not os.path.exists({file!r}):
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
USE = """
with rt.use("model"):
    print("end", [seconds, any("loaded ahead" in event.because for event in rt.events)])
"""


def hidden() -> Row:
    """The median share of the load time for which no cell waits. The card holds two of three models."""
    shares = []
    for _ in range(ROUNDS):
        with running_kernel() as (_, client):
            run_all(client, [THREE])
            printed = run_all(client, THEIR_CELLS)[-1][1]
        waited = json.loads(printed.removeprefix("end "))
        shares.append(1 - sum(waited) / 3)
    share = statistics.median(shares)
    what = "Run All of three models on a card that holds two: the share of the load time that no cell waits for"
    return Row(what, f"{share:.0%}", "≥ 65 %", share >= 0.65)


def slowdown() -> Row:
    """The least seconds of a cell that computes in pure Python, with and without a load in another thread.

    The load reads a file and builds a model. Both ways are measured in turn. The time in which the cell's thread waits
    for a processor is left out: other programs cause it.
    """
    taken: dict[str, list[float]] = {"never": [], "auto": []}
    with tempfile.TemporaryDirectory() as directory:
        file = str(Path(directory, "weights.safetensors"))
        for _ in range(ROUNDS):
            for mode, times in taken.items():
                setup = SETUP.format(mode=mode, layers=LAYERS, file=file)
                with running_kernel() as (_, client):
                    run_all(client, [setup])
                    printed = run_all(client, ["seconds = spin()", USE])[-1][1]
                found = re.search(r"end (.*)", printed)
                assert found, printed
                seconds, ahead = json.loads(found[1])
                assert ahead == (mode == "auto"), printed
                times.append(seconds)
    alone, beside = (min(times) for times in taken.values())
    return Row(
        f"a pure-Python cell beside the load of a {LAYERS * 16} MiB file, without its waits for a "
        f"processor; the least of {ROUNDS}",
        f"{beside / alone - 1:+.1%} ({beside:.2f} s against {alone:.2f})", "≤ +5 %", beside <= 1.05 * alone
    )  # fmt: skip


def rows() -> Iterator[Row]:
    yield hidden()
    yield slowdown()
