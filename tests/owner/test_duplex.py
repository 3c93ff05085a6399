"""A return from host memory overlaps the departures that make its room. Hooks prove it without a clock."""

import copy
import gc
import itertools
import threading
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gpu_runtime import LoadFailed, Runtime
from gpu_runtime.backends.pytorch import torch_model
from gpu_runtime.facts import HOST, Phase
from gpu_runtime.owner import arrivals, release
from gpu_runtime.scheduler import admission
from gpu_runtime.units import GIB
from tests.clock import PATIENCE

from .conftest import alongside, together

pytestmark = pytest.mark.thorough

BOX = {
    "devices": "sim:40GiB,host:256GiB",
    "eviction_grace_seconds": 0,
    "gpu_memory_max_percent": 1,
    "gpu_shadows": "never",
}


class Crossing:
    """The hooks of two models, one of which leaves while the other returns."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.armed = False
        self.stages = self.parts = 0
        self.overlapped: bool | None = None
        self.broken_stage = self.broken_part = 0  # this one raises; 0: none
        self.error: BaseException = RuntimeError("the bus is gone")

    def leaving(self, verb: str) -> None:
        """The hook of the model that leaves."""
        if verb != "move" or not self.armed:
            return
        self.stages += 1
        if self.stages == self.broken_stage:
            raise RuntimeError("the bus is gone")
        if self.stages == 3:
            self.overlapped = self.began.wait(PATIENCE)

    def returning(self, verb: str) -> None:
        """The hook of the model that returns."""
        if verb != "move" or not self.armed:
            return
        self.parts += 1
        self.began.set()
        if self.parts == self.broken_part:
            raise self.error


def crossing(leaver: Runtime, returner: Runtime) -> Crossing:
    """Two models of 40 GiB: "new" of `returner` is in host memory, and "old" of `leaver` on the card."""
    hooks = Crossing()
    returner.register("new", hooks.returning, backend="fake", size="40GiB", pieces=40)
    leaver.register("old", hooks.leaving, backend="fake", size="40GiB", pieces=40)
    returner.preload("new")
    leaver.preload("old")
    assert places(returner) == {"new": {HOST: 40 * GIB}, "old": {"sim:0": 40 * GIB}}
    hooks.armed = True
    return hooks


def places(rt: Any) -> dict[str, dict[str, int]]:
    """Maps each model to its bytes on each device, as the book has them."""
    return {
        lease.name: {share.device: share.bytes for share in lease.shares}
        for lease in rt.status().leases()
    }


def events(rt: Any, name: str, action: str) -> list[int]:
    return [event.bytes for event in rt.why(name) if event.action == action]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_returns_while_another_leaves(runtime, shared_book, processes):
    leaver = runtime(**BOX, ledger=shared_book)
    returner = runtime(**BOX, ledger=shared_book) if processes == 2 else leaver
    hooks = crossing(leaver, returner)
    with returner.use("new", timeout=PATIENCE):
        assert places(returner) == {"new": {"sim:0": 40 * GIB}, "old": {HOST: 40 * GIB}}
    assert hooks.overlapped, "the return began only after the departure"
    assert hooks.stages == 8 and hooks.parts > 1
    assert events(leaver, "old", "offloaded") == [40 * GIB], "one departure is one event"
    assert events(returner, "new", "restored")[-1] == 40 * GIB
    totals = returner.status().totals
    assert (totals["offloads"], totals["restorations"]) == (2, 1)


def test_a_return_in_parts_measures_the_time_of_the_whole_and_shows_all_its_bytes(
    runtime, monkeypatch
):
    """Each copy takes one second of the clock. The waits between the copies do not count."""
    ticks = itertools.count()
    monkeypatch.setattr(arrivals, "time", types.SimpleNamespace(perf_counter=ticks.__next__))
    rt = runtime(**BOX)
    shown: list[tuple[str, int, float]] = []
    rt.tell_waits(None, lambda a: shown.append((a.verb, a.all_bytes, a.earlier_seconds)))
    hooks = crossing(rt, rt)
    shown.clear()
    with rt.use("new", timeout=PATIENCE):
        assert hooks.parts > 1
        assert rt._session.residents["new"].lease.restore_seconds == hooks.parts
    last = ("restoring", 40 * GIB, hooks.parts - 1.0)
    assert shown == [last, last], "its beginning and its end"
    [event] = [event for event in rt.why("new") if event.action == "restored"]
    assert (event.bytes, event.seconds) == (40 * GIB, hooks.parts)


def test_where_a_stage_fails_the_rest_is_tried_again(runtime):
    rt = runtime(**BOX)
    hooks = crossing(rt, rt)
    hooks.broken_stage = 2
    rt._session.residents["old"].backend.droppable = lambda _: False
    with pytest.raises(Exception, match=r"old|busy|in use"), rt.use("new", timeout=0.3):
        pass
    here = places(rt)
    assert here["old"] == {"sim:0": 35 * GIB, HOST: 5 * GIB}
    assert sum(here["new"].values()) == 40 * GIB
    rt._session.residents["old"].moves_again_at = 0.0
    with rt.use("new", timeout=PATIENCE):
        assert places(rt) == {"new": {"sim:0": 40 * GIB}, "old": {HOST: 40 * GIB}}


@pytest.mark.parametrize("error", [RuntimeError("the bus is gone"), KeyboardInterrupt()], ids=repr)
def test_where_a_part_fails_to_return_the_model_is_whole_in_parts(runtime, error):
    """No ticket and no pin stay behind, and the next use gets the model."""
    rt = runtime(**BOX)
    hooks = crossing(rt, rt)
    hooks.broken_part, hooks.error = 2, error
    expected = LoadFailed if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected), rt.use("new", timeout=PATIENCE):
        pass
    del error
    book = rt._session.ledger.read()
    assert not book.tickets
    new = book.lease(rt._session.me, "new")
    assert new.in_parts and new.phase is Phase.SETTLED and not new.pins and new.bytes == 40 * GIB
    with rt.use("new", timeout=PATIENCE):
        assert places(rt) == {"new": {"sim:0": 40 * GIB}, "old": {HOST: 40 * GIB}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def counting(counts: dict[str, int], name: str) -> Any:
    """The function `name` of `duplex`, which also counts its calls in `counts`."""
    function = getattr(admission, name)

    def counted(*args: Any) -> Any:
        counts[name] += 1
        return function(*args)

    return counted


def test_modules_that_cross_keep_every_bit(runtime, monkeypatch):
    monkeypatch.setattr(torch_model, "LEAST_BYTES_IN_PARTS", 1)
    monkeypatch.setattr(release, "STAGE_BYTES", 1)
    gc.collect()
    torch.manual_seed(1)
    modules = {name: Net().eval().requires_grad_(False) for name in ("one", "two")}
    twins = copy.deepcopy(modules)
    size = sum(p.nbytes for p in modules["one"].parameters())
    rt = runtime(
        devices=f"sim:{size + size // 3}B,host:256MiB",
        eviction_grace_seconds=0,
        gpu_memory_max_percent=1,
    )
    crossed = {"part_left": 0, "grant_part": 0}
    for name in crossed:
        monkeypatch.setattr(admission, name, counting(crossed, name))
    for name, module in modules.items():
        rt.adopt(name, module)
    for turn in range(12):
        name = ("one", "two")[turn % 2]
        with rt.use(name, timeout=PATIENCE):
            assert rt._session.probe.place("sim:0").held_bytes() <= size + size // 3
            for pair in (modules, twins):
                for weight in pair[name].parameters():
                    weight.add_(turn)
            x = torch.randn(2, 64)
            assert torch.equal(modules[name](x), twins[name](x))
    assert crossed["part_left"] >= 12 and crossed["grant_part"] >= 4, "they left and returned whole"
    for name, module in modules.items():
        with rt.use(name, timeout=PATIENCE):
            state, expected = module.state_dict(), twins[name].state_dict()
            assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("end", ["close", "forget"])
def test_the_end_of_a_leaving_model_is_no_failed_move(runtime, caplog, end):
    """A user may forget the model between two of its stages, or close the runtime."""
    rt = runtime(**BOX)
    hooks = crossing(rt, rt)
    ended, outcome = threading.Event(), []

    def pause(verb: str) -> None:
        """Lets the test end the model after the second stage."""
        if verb == "move" and hooks.armed:
            hooks.stages += 1
            if hooks.stages == 2:
                ended.set()

    rt._session.residents["old"].handle.hook = pause

    def use() -> None:
        try:
            with rt.use("new", timeout=PATIENCE):
                outcome.append("used")
        except Exception as error:
            outcome.append(type(error).__name__)

    with alongside(use):
        assert ended.wait(PATIENCE)
        rt.close() if end == "close" else rt.forget("old")
    assert outcome == ["used"] or end == "close"
    assert "AttributeError" not in caplog.text and "did not leave" not in caplog.text


def test_models_of_two_processes_cross_in_four_threads(runtime, shared_book, monkeypatch):
    monkeypatch.setattr(torch_model, "LEAST_BYTES_IN_PARTS", 1)
    monkeypatch.setattr(release, "STAGE_BYTES", 1)
    gc.collect()
    modules = {f"m{n}": Net().eval().requires_grad_(False) for n in range(4)}
    twins = copy.deepcopy(modules)
    size = sum(p.nbytes for p in modules["m0"].parameters())
    box = {**BOX, "devices": f"sim:{size * 22 // 10}B,host:256MiB", "ledger": shared_book}
    owners = [runtime(**box), runtime(**box)]
    crossed = {"part_left": 0, "grant_part": 0}
    for name in crossed:
        monkeypatch.setattr(admission, name, counting(crossed, name))
    ended = []

    def work(rt: Any, name: str) -> None:
        for turn in range(150):
            with rt.use(name, timeout=PATIENCE):
                for pair in (modules, twins):
                    for weight in pair[name].parameters():
                        weight.add_(turn)
        ended.append(name)

    for n, (name, module) in enumerate(modules.items()):
        owners[n % 2].adopt(name, module)
    together(*(partial(work, owners[n % 2], name) for n, name in enumerate(modules)))
    assert sorted(ended) == list(modules)
    assert crossed["part_left"], "they left whole"
    for n, (name, module) in enumerate(modules.items()):
        with owners[n % 2].use(name, timeout=PATIENCE):
            state, expected = module.state_dict(), twins[name].state_dict()
            assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert not owners[0]._session.ledger.read().tickets
