"""`make gpu-figures` measures a simulated accelerator with the same code as a real card."""

import datetime
import re
import sys
import types

import pytest

from gpu_runtime.devices import nvml
from gpu_runtime.devices.drivers import Card, Listing
from gpu_runtime.facts import Device
from tests.bench import gpu_figures
from tests.bench.results import HEAD, MEASURED, RESULTS, Row


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(gpu_figures, "ROUNDS", 1)
    monkeypatch.setattr(gpu_figures, "LAYER_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_figures.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_figures, "SMALL_STORAGES", 100)


def figures_of(table: list[str]) -> dict[str, str]:
    """Maps the beginning of each row to its mark."""
    rows = [line.strip("| ").split(" | ") for line in table]
    return {re.split(r",|:| of | from ", row[0])[0]: row[3] for row in rows}


@pytest.mark.thorough  # it measures for three seconds
def test_without_a_card_the_table_has_the_bytes_and_says_what_was_not_run(capsys, tmp_path):
    out = tmp_path / "new" / "figures.md"
    days = [str(datetime.date.today())]
    assert gpu_figures.main(["--gib", "0.02", "--out", str(out)]) == 0
    days.append(str(datetime.date.today()))  # another one at midnight
    printed = capsys.readouterr().out
    assert out.read_text() == printed
    _, _, *table = printed.splitlines()
    assert all(
        re.search(rf"\| ({'|'.join(days)}) \| simulated accelerator, ", line) for line in table
    )
    assert len(table) == 12
    marks = figures_of(table)
    del marks["restore"]  # a speed, which depends on the load of this machine
    del marks["clean offload"]  # two rows: bytes and seconds
    assert marks == {
        "pinned bytes": "not run", "duplex": "not run", "1.0 MiB taken": "reached",
        "park": "not run", "return": "not run", "100 storages": "not run",
        "the second phase": "not run", "beginning and end": "not run", "a model": "not run",
    }  # fmt: skip
    clean = [line for line in table if "clean offload" in line]
    assert [line.split(" | ")[3] for line in clean] == ["reached", "not run"]


def test_a_figure_that_fails_is_a_row_and_the_others_are_measured(capsys, monkeypatch):
    """On a rented card nobody can start again because one of eight figures had an error."""

    def fails(bench):
        yield Row("before", "1 ms", MEASURED, None)
        raise RuntimeError("CUDA error: a | b\nmore")

    def works(bench):
        yield Row("after", "2 ms", "≤ 3 ms", True)

    monkeypatch.setattr(gpu_figures, "FIGURES", {"fails": fails, "works": works})
    assert gpu_figures.main(["--gib", "0.02"]) == 1
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.partition(f" | {datetime.date.today()}")[0] for line in lines] == [
        "| before | 1 ms | – | measured",
        "| fails | **failed**: RuntimeError: CUDA error: a / b |  | **missed**",
        "| after | 2 ms | ≤ 3 ms | reached",
    ]


def test_the_rows_of_a_card_go_into_the_results(tmp_path, monkeypatch):
    """Each takes the place of its earlier row. A figure that was not run keeps its row."""
    old, table = tmp_path / "RESULTS.md", tmp_path / "figures.md"
    old.write_text(f"words\n\n{HEAD}\n| a | 1 ms |\n| b | 2 ms |\n")
    table.write_text(
        f"{HEAD}\n| b | 3 ms | – | measured |\n| a | not run | – | not run |\n| c | 4 |\n"
    )
    monkeypatch.setattr(gpu_figures, "RESULTS", old)
    assert gpu_figures.main(["--put", str(table)]) == 0
    rows = "| a | 1 ms |\n| b | 3 ms | – | measured |\n| c | 4 |\n"
    assert old.read_text() == f"words\n\n{HEAD}\n{rows}"


def test_the_results_are_one_table_with_a_line_for_each_figure():
    """The history of a figure is git's."""
    words, _, rows = RESULTS.read_text().partition(HEAD)
    lines = rows.strip().splitlines()
    assert all(len(line.split(" | ")) == 6 for line in lines) and "|" not in words
    assert len({line.split(" | ")[0] for line in lines}) == len(lines) > 60


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
