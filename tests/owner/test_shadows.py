"""Shadows: copies in host memory of models that are on a card. Their process keeps, uses and frees them."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from msgspec.structs import replace

from gpu_runtime.backends.pytorch import shadows as backend_shadows
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.devices.process_memory import held_by
from gpu_runtime.facts import HOST
from gpu_runtime.ledgers.liveness import Sight
from gpu_runtime.owner import arrivals, release
from gpu_runtime.owner.resident import Place
from gpu_runtime.units import GIB
from tests import tiny_models
from tests.clock import PATIENCE

from .conftest import claims, fakes, loaded, where


def shadowed(rt, **sizes):
    """Registers fake models of which a copy stays in host memory."""
    for name, size in sizes.items():
        rt.register(name, backend="fake", size=size, shadow=True)


def held(rt):
    """The bytes that this process really holds in host memory, in GiB."""
    return rt._session.probe.place(HOST).held_bytes() / GIB


def shadows(rt):
    found = rt.status().sections[rt._session.me].leases
    return {lease.name: lease.shadow_bytes / GIB for lease in found if lease.shadow_bytes}


def leased(rt):
    """The GiB that are claimed on each device."""
    return {device: size / GIB for device, size in claims(rt).items() if size}


def test_a_loaded_model_keeps_a_copy_and_leaves_without_another_one(runtime):
    rt = runtime(devices="sim:24GiB,host:20GiB", cpu_memory_max_percent=1.0)
    shadowed(rt, a="8GiB")
    rt.preload("a")
    assert (shadows(rt), leased(rt)) == ({"a": 8}, {"sim:0": 8, "host": 8})
    model = rt._session.residents["a"].handle
    copy = model.shadow
    rt.evict("a")
    assert model.place[1] == copy  # the same blocks: nothing was copied or allocated
    assert (where(rt), leased(rt), held(rt)) == ({"a": "host"}, {"host": 8}, 8)
    with rt.use("a"):
        assert (shadows(rt), leased(rt)) == ({"a": 8}, {"sim:0": 8, "host": 8})
    assert held(rt) == 8


@pytest.mark.parametrize("copied", [8, 3])
def test_a_model_with_a_copy_leaves_at_once(runtime, copied):
    """In stages, a copy of some of its bytes stayed beside what had left, and claimed nothing."""
    rt = runtime(devices="sim:24GiB,host:20GiB", cpu_memory_max_percent=1.0)
    moves = []

    def hook(verb):
        moves.append((verb, held(rt) - leased(rt).get("host", 0)))

    rt.register("a", hook, backend="fake", size="8GiB", pieces=8, shadow=True)
    rt.preload("a")
    resident = rt._session.residents["a"]
    assert release.free_shadow(resident)
    resident.handle.shadow = (rt.probe.place(HOST).allocate(copied * GIB),)
    resident.shadow_bytes = copied * GIB
    rt._session.publish()
    assert (shadows(rt), held(rt)) == ({"a": copied}, copied)
    rt.evict("a")
    assert moves[1:] == [("move", 0)]
    assert (leased(rt), held(rt)) == ({"host": 8}, 8)


def test_a_dropped_model_has_no_copy_left_to_free(runtime):
    """A request of another process may arrive after the drop. It must not fail on a model that is gone."""
    rt = runtime(devices="sim:24GiB,host:20GiB", cpu_memory_max_percent=1.0)
    shadowed(rt, a="8GiB")
    rt.preload("a")
    rt.evict("a", drop=True)
    assert (where(rt), leased(rt), held(rt)) == ({"a": "disk"}, {}, 0)
    assert not release.free_shadow(rt._session.residents["a"])


def test_no_copy_is_kept_that_the_containers_memory_limit_does_not_allow(runtime, monkeypatch):
    rt = runtime(devices="sim:8GiB,host:16GiB")
    monkeypatch.setattr(rt._session.probe, "simulated", False)
    shadowed(rt, small="4GiB", large="6GiB")
    monkeypatch.setattr(release, "ram_left", lambda: 4 * GIB)
    rt.preload("small")
    assert shadows(rt) == {"small": 4}
    rt.evict("small", drop=True)
    rt.preload("large")
    assert shadows(rt) == {}


@pytest.mark.parametrize(("more", "kept"), [
    ({"gpu_shadows": "never"}, {}), ({"enable_cpu_offload": False}, {}),
    ({"cpu_memory_max_percent": 0.5}, {"a": 6}),
])  # fmt: skip
def test_no_copy_is_kept_if_a_setting_forbids_it_or_leaves_no_room(runtime, more, kept):
    rt = runtime(devices="sim:24GiB,host:20GiB", **more)
    shadowed(rt, a="6GiB", b="6GiB")
    rt.preload("a")
    rt.preload("b")
    assert (shadows(rt), held(rt)) == (kept, sum(kept.values()))


def test_the_book_has_a_copy_until_it_is_freed(runtime, monkeypatch):
    """A copy that has no room any more is not freed while another thread moves the model with it."""
    rt = runtime(devices="sim:24GiB,host:20GiB", cpu_memory_max_percent=1.0)
    shadowed(rt, a="8GiB")
    rt.preload("a")
    resident = rt._session.residents["a"]
    monkeypatch.setattr(arrivals, "has_room_for_shadow", lambda *given: False)
    with monkeypatch.context() as moving:
        moving.setattr(resident, "place", Place.MOVING)
        arrivals._settle(rt._session, resident, "measured")
    assert (shadows(rt), held(rt)) == ({"a": 8}, 8)
    arrivals._settle(rt._session, resident, "measured")
    assert (shadows(rt), held(rt)) == ({}, 0)


def test_the_copy_is_freed_for_another_model_of_the_process(runtime):
    """The copied model is in use meanwhile."""
    rt = runtime(devices="sim:24GiB,host:20GiB", cpu_memory_max_percent=0.5)
    shadowed(rt, used="6GiB")
    fakes(rt, idle="9GiB", new="14GiB")
    rt.preload("idle")
    with rt.use("used"):
        rt.preload("new")
        assert where(rt) == {"used": "sim:0", "idle": "host", "new": "sim:0"}
        assert (shadows(rt), leased(rt)["host"], held(rt)) == ({}, 9, 9)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_copy_is_freed_for_an_eviction_by_hand(runtime, tmp_path, processes):
    ledger = f"keeper:///{tmp_path}/book.db"
    more = dict(devices="sim:24GiB,host:20GiB", cpu_memory_max_percent=0.5, ledger=ledger)
    first = runtime(**more)
    second = runtime(**more) if processes == 2 else first
    shadowed(first, used="6GiB")
    loaded(second, idle="9GiB")
    with first.use("used"):
        assert second.evict("idle").where == "host"
        assert (shadows(first), leased(second)["host"]) == ({}, 9)


def test_forgetting_a_model_frees_its_copy(runtime):
    rt = runtime(devices="sim:24GiB,host:20GiB")
    shadowed(rt, a="6GiB", b="6GiB")
    rt.preload("a")
    rt.forget("a")
    rt.preload("b")
    assert (shadows(rt), held(rt)) == ({"b": 6}, 6)
    session = rt._session
    rt.close()
    assert session.probe.place(HOST).held_bytes() == 0


@pytest.mark.parametrize("kept", [6, 0])
def test_a_failed_move_leaves_the_books_true_of_a_copy_that_is_kept_or_lost(runtime, kept):
    rt = runtime(devices="sim:24GiB,host:20GiB")

    def refuse(step):
        if step == "move":
            resident = rt._session.residents["a"]
            if not kept:  # as for a storage that has changed
                resident.backend.free_shadow(resident.handle)
            raise RuntimeError("no")

    rt.register("a", refuse, backend="fake", size="6GiB", shadow=True)
    rt.preload("a")
    with pytest.raises(RuntimeError):
        rt.evict("a")
    assert (where(rt), shadows(rt), held(rt)) == ({"a": "sim:0"}, {"a": 6} if kept else {}, kept)


# -- one copy for the processes of a user ------------------------------------------------------------
def shared_files():
    return {os.fstat(pages.file).st_ino for pages in held_by([os.getpid()])}


@pytest.mark.parametrize(("mode", "files"), [("auto", 1), ("private", 0)])
def test_two_kernels_share_the_copy_of_one_model(
    runtime, shared_book, tmp_path, monkeypatch, mode, files
):
    llama = tiny_models.causal_lm(tmp_path / "model")
    monkeypatch.setattr(backend_shadows, "LEAST_BYTES", 1)
    gc.collect()
    before = shared_files()
    more = dict(devices="sim:1GiB,host:1GiB", ledger=shared_book, gpu_shadows=mode)
    first, second = runtime(**more), runtime(**more)
    for rt in (first, second):
        rt.register("llama", str(llama))
        rt.preload("llama")
    assert len(shared_files() - before) == files
    assert shadows(first) == shadows(second) and shadows(first)["llama"] > 0
    with second.use("llama") as model:
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert second.evict("llama").where == "host"
    first.forget("llama")
    with second.use("llama") as model:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, weights[name])


# The process that loads first. It stops in the middle of its load until a line comes.
LOADER = """
import sys
from gpu_runtime import Runtime
from gpu_runtime.backends.pytorch import shadows
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
shadows.LEAST_BYTES = 1
read = TransformersBackend._of_files
def slowly(*given):
    print("loading", flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise OSError("the disk is gone")
    return read(*given)
TransformersBackend._of_files = slowly
rt = Runtime(devices="sim:1GiB,host:1GiB", ledger=sys.argv[1])
rt.register("llama", sys.argv[2])
try:
    rt.preload("llama")
finally:
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.processes
@pytest.mark.parametrize("ends", ["loaded", "failed", "killed"])
def test_the_second_of_two_loads_at_once_waits_for_the_first(runtime, tmp_path, monkeypatch, ends):
    llama = tiny_models.causal_lm(tmp_path / "model")
    monkeypatch.setattr(backend_shadows, "LEAST_BYTES", 1)
    reads, waiting = [], threading.Event()
    read, waits = TransformersBackend._of_files, release._waits_for_loader

    def counted(*given):
        reads.append(given)
        return read(*given)

    def told(*given):
        waiting.set()
        return waits(*given)

    monkeypatch.setattr(TransformersBackend, "_of_files", counted)
    monkeypatch.setattr(release, "_waits_for_loader", told)
    book = f"keeper://{tmp_path}/ledger"
    second = runtime(devices="sim:1GiB,host:1GiB", ledger=book)
    second.register("llama", str(llama))
    loader = subprocess.Popen(
        [sys.executable, "-c", LOADER, book, str(llama)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert loader.stdout.readline() == "loading\n"
        thread = threading.Thread(target=second.preload, args=("llama",))
        thread.start()
        assert waiting.wait(PATIENCE) and not reads
        if ends == "killed":
            loader.kill()
        else:
            loader.stdin.write("fail\n" if ends == "failed" else "\n")
            loader.stdin.flush()
        thread.join(PATIENCE)
        assert where(second) == {"llama": "sim:0"}
        assert len(reads) == (0 if ends == "loaded" else 1)
        assert shadows(second)["llama"] > 0
    finally:
        loader.kill()
        loader.communicate()


def test_a_load_does_not_wait_for_a_stopped_process(runtime, shared_book, monkeypatch):
    first, second = (runtime(ledger=shared_book) for _ in "ab")
    loaded(first, a="1GiB")
    loader = first._session.ledger.owner
    monkeypatch.setattr(
        type(second._session.ledger), "sights", lambda *_: {loader.id: Sight.STOPPED}
    )
    assert not release._waits_for_loader(second._session, loader)


def test_only_processes_of_this_user_and_host_are_searched(runtime):
    rt = loaded(runtime(), a="1GiB")
    session, files = rt._session, "f" * 32
    book = session.ledger.read()
    section = book.sections[session.me]
    shared = {"copy": f"{files[:16]}.5", "copy_bytes": 9, "copied_bytes": 9}

    def beside(pid, owner=(), **fields):
        leases = tuple(replace(lease, **{**shared, **fields}) for lease in section.leases)
        other = replace(section.owner, pid=pid, **dict(owner))
        return book.with_section(replace(section, owner=other, leases=leases))

    others = {"user": "somebody", "host": "elsewhere", "namespaces": "1:2", "boot": "earlier"}
    for pid, (field, value) in enumerate(others.items(), 100):
        book = beside(pid, {field: value})
    for pid in (7, 8):
        book = beside(pid)
    book = beside(9, copy=f"{files[:16]}.6")
    book = beside(10, copy="0" * 16 + ".5")
    book = beside(11, copied_bytes=0)
    assert release._copies(session, book, files) == {
        f"{files[:16]}.5": (7, 8),
        f"{files[:16]}.6": (9,),
    }


def test_the_host_counts_a_shared_copy_once_until_its_last_lease_ends(
    runtime, shared_book, tmp_path, monkeypatch
):
    """Host memory has room for only one copy, so a second kernel could not keep a copy of its own."""
    llama = tiny_models.causal_lm(tmp_path / "model")
    monkeypatch.setattr(backend_shadows, "LEAST_BYTES", 1)
    size = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    more = dict(devices=f"sim:1GiB,host:{size * 3 // 2}", ledger=shared_book)
    more |= {"cpu_memory_max_percent": 1.0}
    first, second = runtime(**more), runtime(**more)
    for rt in (first, second):
        rt.register("llama", str(llama))
        rt.preload("llama")
    copy = shadows(first)["llama"]
    assert shadows(second) == {"llama": copy}
    for act in (
        lambda: None,
        lambda: first.evict("llama"),
        lambda: second.evict("llama"),
        lambda: first.restore("llama"),
        lambda: first.forget("llama"),
    ):
        act()
        first.tick()
        second.tick()
        assert leased(second)["host"] == copy
    second.forget("llama")
    assert leased(second).get("host", 0) == 0


def test_pages_stay_counted_when_a_storage_of_them_was_changed(
    runtime, shared_book, tmp_path, monkeypatch
):
    """A changed storage is copied when it leaves, and its old page stays in the shared file."""
    llama = tiny_models.causal_lm(tmp_path / "model")
    monkeypatch.setattr(backend_shadows, "LEAST_BYTES", 1)
    rt = runtime(devices="sim:1GiB,host:1GiB")
    rt.register("llama", str(llama))
    with rt.use("llama") as model:
        next(model.parameters()).data.zero_()
        changed = next(model.parameters()).untyped_storage().nbytes()
    whole = leased(rt)["host"]
    rt.evict("llama")
    rt.tick()
    assert leased(rt)["host"] == whole + changed / GIB
