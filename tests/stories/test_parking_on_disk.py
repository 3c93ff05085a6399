"""Notebooks whose memory together is more than card and RAM take turns, because a disk has the rest."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from gpu_runtime import Runtime
from gpu_runtime.backends.engines.recipes import Vllm
from gpu_runtime.facts import HOST, Evidence
from gpu_runtime.units import MIB
from tests.backends.test_engine_sleep import place as place
from tests.clock import PATIENCE, until

from .notebooks import CARD, Notebook, leases, park, places, rest

DEVICES = "sim:700MiB,host:800MiB"
WHOLE = {"cpu_memory_max_percent": "1", "gpu_memory_max_percent": "1"}
MAKE = """
import hashlib, torch
def digest(): return hashlib.sha256(memoryview(x.numpy())).hexdigest()
x = torch.rand(600 * 2**18, generator=torch.Generator().manual_seed({}))
before = digest()
"""


@pytest.fixture
def notebooks(tmp_path):
    """Makes a notebook whose parked memory may move to `tmp_path / "disk"`."""
    url, made = f"keeper://{tmp_path}/ledger", []

    def make(name: str) -> Notebook:
        settings = {name.upper(): value for name, value in WHOLE.items()}
        settings |= {"GPU_DEVICES": DEVICES, "GPU_PARK_DIR": str(tmp_path / "disk")}
        made.append(Notebook(name, url, **settings))
        return made[-1]

    with Runtime(devices=DEVICES, ledger=url, monitor=False, **WHOLE) as rt:
        yield make, rt
        for notebook in made:
            notebook.close()


def on_disk(rt: Runtime, name: str) -> int:
    return sum(lease.disk_bytes for lease in leases(rt, name))


def ram(notebook: Notebook) -> int:
    return psutil.Process(notebook.pid).memory_info().rss


def assert_whole(notebook: Notebook, rt: Runtime, size: int = 600 * MIB) -> None:
    shown = notebook.run("print(digest() == before)")
    assert "True" in shown, shown
    rest(rt, notebook.name, size)


def test_three_notebooks_of_600_mib_share_a_card_of_700_a_host_of_800_and_a_disk(
    notebooks, tmp_path
):
    """Nothing is ended, and every value is as it was. Without the disk, the third is refused."""
    make, rt = notebooks
    one, two, three = (make(f"{name}.ipynb") for name in ("one", "two", "three"))
    one.run(MAKE.format(1))
    rest(rt)
    park(rt)
    two.run(MAKE.format(2))
    rest(rt, "two.ipynb")
    used = ram(one)
    assert "came free" in str(rt.hibernate("one.ipynb").because)
    assert on_disk(rt, "one.ipynb") == 600 * MIB and used - ram(one) > 500 * MIB
    assert os.listdir(tmp_path / "disk") == [], "the file has no name"
    park(rt, "two.ipynb")
    three.run(MAKE.format(3))
    rest(rt, "three.ipynb")
    for notebook in (one, two, three, one):
        assert_whole(notebook, rt)
    # Two of them are away, and RAM has room for one.
    held = [(places(rt, one.name), bool(on_disk(rt, one.name))) for one in (two, three)]
    assert sorted(held, key=str) == [({HOST}, False), ({HOST}, True)]
    # What a dead process had on the disk is free at once.
    [gone] = [one for one in (two, three) if on_disk(rt, one.name)]
    os.kill(gone.pid, signal.SIGKILL)
    until(lambda: rt.reap() or not leases(rt, gone.name))
    assert os.listdir(tmp_path / "disk") == []


def test_two_notebooks_that_each_fill_most_of_the_ram_change_places(notebooks):
    """Each is one tensor, so they cannot change places in pieces."""
    make, rt = notebooks
    one, two = make("one.ipynb"), make("two.ipynb")
    one.run(MAKE.format(1))
    rest(rt)
    park(rt)
    two.run(MAKE.format(2))
    rest(rt, "two.ipynb")
    for notebook in (one, two, one):
        shown = notebook.run("print(digest() == before)")
        assert "True" in shown and "came back from the disk" in shown, shown
        rest(rt, notebook.name, 600 * MIB)
        assert places(rt, notebook.name) == {CARD}


def test_two_notebooks_and_an_engine_take_turns_and_nothing_is_ended(place, tmp_path, monkeypatch):
    """A tenth of the sizes: notebooks of 60 MiB, a card of 70 and a host of 80.

    Of the engine's 60 MiB most is its cache: asleep, it keeps weights of 15 MiB in RAM, beside one notebook.
    """
    monkeypatch.setattr(Vllm, "sleeps", lambda self, device: True)
    evidence = Evidence(weight_bytes=15 * MIB, at_load=True)
    monkeypatch.setattr(Vllm, "evidence", lambda self, spec: evidence)
    devices, url = "sim:70MiB,host:80MiB", f"keeper://{tmp_path}/ledger"
    settings = {name.upper(): value for name, value in WHOLE.items()}
    settings |= {"GPU_DEVICES": devices, "GPU_PARK_DIR": str(tmp_path / "disk")}
    with (
        Runtime(devices=devices, ledger=url, eviction_grace_seconds=0, **WHOLE) as rt,
        Notebook("one.ipynb", url, **settings) as one,
        Notebook("two.ipynb", url, **settings) as two,
    ):
        rt.register("engine", "org/name", backend="vllm", size="60MiB")

        def pids() -> tuple[int, ...]:
            with rt.use("engine", timeout=PATIENCE) as served:
                assert served.health()
                return served.pids

        for number, notebook in enumerate((one, two)):
            assert notebook.run(MAKE.replace("600", "60").format(number)) == ""
            rest(rt, notebook.name, 60 * MIB)
        first = pids()
        for _ in range(2):
            for notebook in (one, two):
                assert_whole(notebook, rt, 60 * MIB)
            assert pids() == first
            # Two of the three are away, and RAM has room for one.
            assert any(on_disk(rt, notebook.name) for notebook in (one, two))
        totals = rt.status().totals
        assert (totals["loads"], totals["unloads"]) == (1, 0)


def file_of(notebook: Notebook, directory: Path) -> str:
    """The file of that notebook's parked memory, as another process can open it."""
    of = f"/proc/{notebook.pid}/fd"
    found, *_ = [
        f"{of}/{fd}" for fd in os.listdir(of) if str(directory) in os.readlink(f"{of}/{fd}")
    ]
    return found


def test_a_cell_whose_bytes_the_disk_has_damaged_does_not_run_and_names_them(notebooks, tmp_path):
    make, rt = notebooks
    notebook = make("one.ipynb")
    notebook.run("import torch; x = torch.rand(2**24); y = torch.ones(2**24)")
    rest(rt)
    assert "leaves for the disk when this cell has ended" in notebook.run("%gpu hibernate")
    until(lambda: on_disk(rt, "one.ipynb") == 128 * MIB)
    assert "64.0 MiB" in notebook.run("%gpu who"), "the search reads no byte"
    with open(file_of(notebook, tmp_path / "disk"), "r+b", buffering=0) as file:
        file.write(bytes(100))  # of x or of y
    refused = notebook.run("x += 1; ran = True")
    assert "did not run" in refused and "64.0 MiB of " in refused, refused
    assert str(tmp_path / "disk") in refused and "not what was written" in refused
    lost = "x" if "64.0 MiB of x" in refused else "y"
    assert "is deleted" in refused
    assert "64.0 MiB came free" in notebook.run(f"del {lost}")
    kept = "float(y.sum())" if lost == "x" else "x.numel()"
    shown = notebook.run(f"print({kept}, 'ran' in globals())")
    assert "16777216.0 False" in shown or "16777216 False" in shown, (refused, shown)
    assert places(rt) == {CARD}


def test_a_notebook_saves_what_is_on_the_disk_and_hibernates_while_it_is_parked(
    notebooks, tmp_path
):
    make, rt = notebooks
    notebook = make("one.ipynb")
    notebook.run("import torch; x = torch.full((2**23,), 3.0)")
    rest(rt)
    park(rt)
    assert "32.0 MiB leaves RAM for the disk" in notebook.run("%gpu hibernate")
    until(lambda: on_disk(rt, "one.ipynb") == 32 * MIB)
    path = tmp_path / "x.pt"
    assert notebook.run(f"torch.save(x, {str(path)!r})") == ""
    assert on_disk(rt, "one.ipynb") == 32 * MIB
    assert "25165824.0" in notebook.run(f"print(torch.load({str(path)!r}).sum().item())")
