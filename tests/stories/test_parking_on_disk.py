"""Notebooks whose memory together is more than card and RAM take turns, because a disk has the rest."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from gpu_runtime import Runtime
from gpu_runtime.backends.engines.recipes import Vllm
from gpu_runtime.facts import HOST, Evidence, Lease, Phase
from gpu_runtime.units import GIB, MIB
from tests import tiny_models
from tests.backends.test_engine_sleep import place as place
from tests.clock import PATIENCE, until

from .kernels import Kernel
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


# -- models, whose process or disk ends in the middle of their way

LLMS = "sim:1MiB,host:1MiB"  # the card and RAM each hold one of the models
MIDDLE = """
import os, resource, threading
from gpu_runtime.backends.pytorch import park_file
from gpu_runtime.owner import disk

park_file.PIECE_BYTES = 2**16
rt._session.disk_seconds_per_byte = 0.0  # so that each load is slower than the disk

def sums(name):
    with rt.use(name, timeout=PATIENCE) as model:
        return [float(one.detach().double().sum()) for one in model.parameters()]

def hang(fd):
    open(DISK + ".reached", "w").close()
    threading.Event().wait()

def no_room(fd):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

def removed(fd):
    os.rmdir(DISK)

def cut(fd):
    os.truncate(f"/proc/self/fd/{fd}", 2**16)

def in_the_middle(name, fault):
    call, calls = getattr(os, name), []
    def late(fd, *given):
        calls.append(fd)
        if len(calls) == 4:
            fault(fd)
        return call(fd, *given)
    setattr(os, name, late)
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("transformers")
    return tiny_models.causal_lm(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def there(keeper, llama, tmp_path, monkeypatch):
    """Another process, in which `a` is in RAM and `b` on the card. The disk has room for one of the models."""
    size = sum(one.stat().st_size for one in llama.glob("*.safetensors"))
    settings = {"GPU_PARK_DIR": tmp_path / "disk", "GPU_PARK_DISK_GB": 2.5 * size / GIB}
    for name, value in {**WHOLE, **settings, "GPU_SHADOWS": "never"}.items():
        monkeypatch.setenv(name.upper(), str(value))
    with Kernel(keeper, LLMS) as kernel:
        disk = str(tmp_path / "disk")
        kernel.do(f"PATIENCE, DISK = {PATIENCE}, {disk!r}; exec({MIDDLE!r})")
        kernel.do(*[f"rt.register({name!r}, {str(llama)!r})" for name in "abc"])
        kernel.do("before = sums('a')", "sums('b')")
        yield kernel


@pytest.fixture
def here(there, keeper, llama):
    with Runtime(devices=LLMS, ledger=keeper, eviction_grace_seconds=0) as rt:
        for name in "abc":
            rt.register(name, str(llama))
        yield rt


def held_there(rt: Runtime, name: str) -> Lease | None:
    return next((one for one in rt.status().leases() if one.name == name), None)


def open_files(directory: Path) -> list[str]:
    """What processes have open in that directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            name = os.readlink(path)
        except OSError:  # it has ended
            continue
        found += [name] if name.startswith(f"{directory}/") else []
    return found


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_model_whose_process_is_killed_on_its_way_leaves_no_file_no_lease_and_is_loaded_anew(
    there, here, tmp_path, way
):
    disk, call = tmp_path / "disk", {"there": "pwrite", "back": "preadv"}[way]
    if way == "back":
        there.do("sums('c')")
        until(lambda: held_there(here, "a").on_disk)
    there.do(f"in_the_middle({call!r}, hang)")
    there.send("sums('c')" if way == "there" else "sums('a')")
    until(lambda: Path(f"{disk}.reached").exists())
    lease = held_there(here, "a")
    assert open_files(disk) and not os.listdir(disk)
    if way == "there":
        assert lease.stowing and lease.where == HOST and lease.ram_bytes == lease.bytes
    else:
        assert lease.phase is not Phase.SETTLED and lease.on_disk and lease.target
    os.kill(there.pid, signal.SIGKILL)
    until(lambda: here.reap() or not list(here.status().leases()))
    assert not open_files(disk) and not os.listdir(disk)
    assert [one.claimed_bytes for one in here.status().devices] == [0, 0]
    assert here.status().tickets == ()
    for name in "abc":
        here._session.disk_seconds_per_byte = 0.0
        with here.use(name, timeout=PATIENCE) as model:
            assert sum(one.numel() for one in model.parameters())
    assert held_there(here, "a").on_disk, "the budget of the disk is free again"


def test_a_model_whose_disk_fails_in_the_middle_keeps_its_values(there, here, tmp_path):
    """A full disk, a directory that is removed during the write, a file that is cut during the return."""

    def files() -> list[str]:
        return open_files(tmp_path / "disk")

    there.do("in_the_middle('pwrite', no_room)", "assert sums('c') == before")
    lease = held_there(here, "a")
    assert lease.where == HOST and not lease.stowing and not files()
    there.do("assert rt._session.residents['a'].stow_again_at")
    there.do("resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)")
    there.do("a = rt._session.residents['a']; a.stow_again_at = a.room_seen_at = 0.0")
    there.do("disk.look_after(rt._session)", "in_the_middle('pwrite', removed)")
    there.do("assert sums('b') == before")
    assert held_there(here, "a").on_disk and files()
    there.do("loads = rt.status().totals['loads']", "in_the_middle('preadv', cut)")
    there.do("assert sums('a') == before", "assert rt.status().totals['loads'] == loads + 1")
    lease = held_there(here, "a")
    assert (lease.where, lease.disk_bytes) == (CARD, 0) and not files()
