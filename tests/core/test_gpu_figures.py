"""`make gpu-figures` measures a simulated accelerator with the same code as a real card."""

from __future__ import annotations

import datetime
import re
import sys
import types

import pytest

from gpu_runtime.devices import nvml
from gpu_runtime.devices.drivers import Card, Listing
from gpu_runtime.facts import Device
from tests.bench import gpu_figures


@pytest.mark.thorough  # it measures for three seconds
def test_without_a_card_the_table_has_the_bytes_and_says_what_was_not_run(capsys, monkeypatch):
    monkeypatch.setattr(gpu_figures, "ROUNDS", 1)
    monkeypatch.setattr(gpu_figures.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_figures, "LAYER_BYTES", 1 << 20)
    gpu_figures.main(["--gib", "0.02"])
    first, _, *table = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Measured {datetime.date.today()}, simulated accelerator, ")
    rows = [re.split(r" \| ", line.strip("| ")) for line in table[2:]]
    reached = {what.partition(" ")[0] + what.partition(":")[2]: mark for what, *_, mark in rows}
    del reached["restore"]  # a speed, which depends on the load of this machine
    assert reached == {
        "pinned": "not run",
        "duplex: one model out and another in at once, against the longer of the two": "not run",
        "clean bytes copied": "reached",
        "clean seconds": "not run",
        "1.0 bytes moved each way": "reached",
    }


@pytest.mark.parametrize("known", [True, False])
def test_the_clocks_are_those_of_the_measured_card(monkeypatch, known):
    """With CUDA_VISIBLE_DEVICES=2 the card under test is NVML's third card. Not every card has clocks."""
    nvml_module = types.ModuleType("pynvml")
    nvml_module.NVML_CLOCK_SM, nvml_module.NVML_CLOCK_MEM = 1, 2
    nvml_module.NVMLError = ValueError

    def clock(handle, kind):
        if not known:
            raise ValueError("Not Supported")
        return {"third": 1000}[handle] * kind

    nvml_module.nvmlDeviceGetClockInfo = nvml_module.nvmlDeviceGetMaxClockInfo = clock
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module)
    card = Card(Device("cuda:2", 80 << 30), nvml.Handle("instance", "third"), torch="cuda:0")
    found = gpu_figures.clocks(Listing(nvml, (card,)))
    expected = "SM 1000 of 1000 MHz, memory 2000 MHz"
    assert found == (expected if known else "clocks unknown (Not Supported)")
