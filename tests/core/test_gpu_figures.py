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
from tests.bench import bench_card, gpu_figures


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(gpu_figures, "ROUNDS", 1)
    monkeypatch.setattr(gpu_figures, "LAYER_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_figures.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench_card, "SMALL_STORAGES", 100)


def figures_of(table: list[str]) -> dict[str, str]:
    """Maps the beginning of each row to its mark."""
    rows = [line.strip("| ").split(" | ") for line in table]
    return {re.split(r",|:| of | from ", what)[0]: mark for what, *_, mark in rows}


@pytest.mark.thorough  # it measures for three seconds
def test_without_a_card_the_table_has_the_bytes_and_says_what_was_not_run(capsys, tmp_path):
    out = tmp_path / "new" / "figures.md"
    assert gpu_figures.main(["--gib", "0.02", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    first, _, _, _, *table = printed.splitlines()
    assert first.startswith(f"Measured {datetime.date.today()}, simulated accelerator, ")
    assert len(table) == 12
    marks = figures_of(table)
    del marks["restore"]  # a speed, which depends on the load of this machine
    del marks["clean offload"]  # two rows: bytes and seconds
    assert marks == {
        "pinned bytes": "not run",
        "duplex": "not run",
        "1.0 MiB taken": "reached",
        "park": "not run",
        "return": "not run",
        "100 storages": "not run",
        "the second phase": "not run",
        "beginning and end": "not run",
        "a model": "not run",
    }
    clean = [line for line in table if "clean offload" in line]
    assert [line.rpartition(" | ")[2] for line in clean] == ["reached |", "not run |"]


def test_a_figure_that_fails_is_a_row_and_the_others_are_measured(capsys, monkeypatch):
    """On a rented card nobody can start again because one of eight figures had an error."""

    def fails(bench):
        yield gpu_figures.Row("before", "1 ms", gpu_figures.MEASURED, None)
        raise RuntimeError("CUDA error: a | b\nmore")

    def works(bench):
        yield gpu_figures.Row("after", "2 ms", "≤ 3 ms", True)

    monkeypatch.setattr(gpu_figures, "_figures", lambda: {"fails": fails, "works": works})
    assert gpu_figures.main(["--gib", "0.02"]) == 1
    assert capsys.readouterr().out.splitlines()[4:] == [
        "| before | 1 ms | – | measured |",
        "| fails | **failed**: RuntimeError: CUDA error: a / b |  | **missed** |",
        "| after | 2 ms | ≤ 3 ms | reached |",
    ]


def test_the_table_of_a_card_goes_into_the_results(tmp_path, monkeypatch):
    results, table = tmp_path / "RESULTS.md", tmp_path / "figures.md"
    results.write_text(f"all\n\n{gpu_figures.SECTION}\nNot run yet.\n")
    table.write_text("Measured today.\n\n| what |\n")
    monkeypatch.setattr(gpu_figures, "RESULTS", results)
    assert gpu_figures.main(["--put", str(table)]) == 0
    assert results.read_text() == f"all\n\n{gpu_figures.SECTION}\nMeasured today.\n\n| what |\n"
    assert (
        gpu_figures.SECTION
        in (gpu_figures.Path(gpu_figures.__file__).with_name("RESULTS.md")).read_text()
    )


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
