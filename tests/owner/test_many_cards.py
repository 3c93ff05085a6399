"""Models on several cards and moves between cards, through the public methods of the runtime."""

import threading

import pytest

from gpu_runtime.errors import (
    BadSetting,
    DoesNotFit,
    GpuError,
    NotResident,
    StillInUse,
    UnknownDevice,
)
from gpu_runtime.owner import registry
from gpu_runtime.scheduler import capacity
from gpu_runtime.units import GIB
from tests.clock import PATIENCE
from tests.owner.conftest import claims, fakes, loaded, where

FOUR = "sim:4x10GiB,host:64GiB"


def test_move_switches_a_models_card_and_says_why(runtime):
    rt = loaded(runtime(devices=FOUR), qwen="6GiB")
    outcome = rt.move("qwen", "sim:2")
    assert (outcome.done, outcome.where, outcome.bytes) == (True, "sim:2", 6 * GIB)
    assert outcome.because == "qwen moved from sim:0 to sim:2"
    assert where(rt) == {"qwen": "sim:2"} and claims(rt) == {"sim:2": 6 * GIB}
    [event] = [event for event in rt.status().events if event.action == "moved"]
    assert event.because == "qwen moved from sim:0 to sim:2, by hand." and event.reason == "move"
    assert rt.move("qwen", "sim:2").because == "qwen is on sim:2 already"
    assert rt.evictions().empty, "a move is no eviction"


def test_a_move_may_go_over_several_cards_and_come_back(runtime):
    """The bytes are on the cards of the model's shares, also in the allocators. The count of each card is exact."""
    rt = loaded(runtime(devices=FOUR), qwen="6GiB")
    assert rt.move("qwen", "sim:1,3").where == "sim:1,3"
    assert claims(rt) == {"sim:1": 3 * GIB, "sim:3": 3 * GIB}
    assert {d: size for d, size in rt.probe.used().items() if size} == claims(rt)
    assert rt.move("qwen", ["sim:0"]).where == "sim:0"
    assert claims(rt) == {"sim:0": 6 * GIB}
    rt.evict("qwen")
    assert where(rt) == {"qwen": "host"}


@pytest.mark.parametrize(
    "leave",
    [
        lambda rt: rt.evict("qwen"),
        lambda rt: rt.evict("qwen", drop=True),
        lambda rt: rt.forget("qwen"),
        lambda rt: rt.move("qwen", "sim:1"),
    ],
    ids="evict drop forget move".split(),
)
def test_a_model_that_leaves_a_card_leaves_no_cached_memory_there(runtime, leave):
    """Other processes could not take it."""
    rt = loaded(runtime(devices=FOUR), qwen="6GiB")
    assert [map.device for map in rt.probe.maps()] == ["sim:0"]
    leave(rt)
    assert "sim:0" not in [map.device for map in rt.probe.maps()]


def test_where_it_has_no_room_it_stays_and_the_sentence_says_what_to_type(runtime):
    rt = runtime(devices="sim:2x10GiB,host:64GiB", gpu_memory_max_percent=1.0)
    loaded(rt, qwen="6GiB", idle="7GiB")
    before = claims(rt)
    with pytest.raises(
        DoesNotFit, match=r"(?s)qwen needs 6.0 GiB; sim:1 has 3.0 GiB free.*%gpu evict idle  "
    ):
        rt.move("qwen", "sim:1")
    assert claims(rt) == before and where(rt)["qwen"] == "sim:0"
    rt.pin("idle")
    with pytest.raises(DoesNotFit) as refused:
        rt.move("qwen", "sim:1")
    assert "evict" not in str(refused.value), "it would be refused"


def test_what_cannot_be_moved_is_refused_in_one_sentence(runtime):
    rt = fakes(runtime(devices=FOUR), qwen="6GiB", away="1GiB")
    rt.preload("qwen")
    for device in ("sim:9", "cuda:0", ""):
        with pytest.raises(UnknownDevice, match="This machine has sim:0, sim:1"):
            rt.move("qwen", device)
    with pytest.raises(BadSetting, match="%gpu evict qwen"):
        rt.move("qwen", "host")
    with pytest.raises(NotResident, match="%gpu preload away"):
        rt.move("away", "sim:1")
    with rt.use("qwen"), pytest.raises(StillInUse, match="in use by this process"):
        rt.move("qwen", "sim:1")
    rt.pin("qwen")
    with pytest.raises(StillInUse, match="%gpu unpin qwen"):
        rt.move("qwen", "sim:1")
    rt.unpin("qwen")
    rt.register("bound", backend="fake", size="1GiB", devices=("sim:3",))
    rt.preload("bound")
    with pytest.raises(DoesNotFit, match="may not go to sim:1: it was registered for sim:3"):
        rt.move("bound", "sim:1")
    rt.register("whole", backend="fake", size="1GiB", layout="single")
    rt.preload("whole")
    with pytest.raises(DoesNotFit, match="stays on one card"):
        rt.move("whole", "sim:1,2")
    assert where(rt)["qwen"] == "sim:0"


def test_another_processes_model_is_asked_for_and_the_asker_is_told(runtime, shared_book):
    one, other = (runtime(devices=FOUR, ledger=shared_book) for _ in range(2))
    loaded(one, qwen="6GiB")
    outcome = other.move("qwen", "sim:1", timeout=PATIENCE)
    assert outcome.done and outcome.where == "sim:1"
    assert where(one) == {"qwen": "sim:1"}
    with one.use("qwen"), pytest.raises(GpuError, match="is in use by"):
        other.move("qwen", "sim:2", timeout=PATIENCE)
    other.register("there", backend="fake", size="8GiB", devices=("sim:0",))
    other.preload("there")
    with pytest.raises(GpuError, match="qwen needs 6.0 GiB; sim:0 has .* free"):
        other.move("qwen", "sim:0", timeout=PATIENCE)
    assert where(one)["qwen"] == "sim:1"


def test_a_call_meanwhile_waits_and_never_runs_half_moved(runtime):
    """A call during the move waits until all bytes have arrived."""
    rt = runtime(devices=FOUR)
    travelling, go_on, seen = threading.Event(), threading.Event(), []

    def slow(what: str) -> None:
        if what == "move":
            travelling.set()
            go_on.wait(PATIENCE)

    rt.register("qwen", slow, backend="fake", size="6GiB")
    rt.preload("qwen")
    mover = threading.Thread(target=rt.move, args=("qwen", "sim:1"))
    mover.start()
    assert travelling.wait(PATIENCE)
    assert claims(rt) == {"sim:0": 6 * GIB, "sim:1": 6 * GIB}, "both count until it is done"

    def use() -> None:
        with rt.use("qwen") as model:
            seen.append(repr(model))

    user = threading.Thread(target=use)
    user.start()
    user.join(0.2)
    assert not seen
    go_on.set()
    mover.join(PATIENCE)
    user.join(PATIENCE)
    assert seen == ["<fake qwen on sim:1>"]


# -- real modules, on the simulated accelerator -----------------------------------------------------------------------
@pytest.fixture
def llama(tmp_path):
    from tests import tiny_models

    return tiny_models.causal_lm(tmp_path / "llama")


@pytest.fixture
def accelerated(runtime):
    """A runtime with four cards, which torch knows as four devices."""
    from tests import simgpu

    return runtime(
        devices="sim:4x64MiB,host:256MiB", probe=simgpu.SimProbe(), gpu_memory_max_percent=1.0
    )


def test_a_model_goes_over_two_cards_by_itself_and_its_pins_hold_there(accelerated, llama):
    """No single card holds the whole model. A call on a kept reference restores it, perhaps to other cards."""
    import torch

    from tests import simgpu

    rt, ids = accelerated, torch.tensor([[5, 6, 7]])
    rt.register("llama", llama, layout="balanced")
    size = rt.plan("llama").footprint.bytes
    fill = [f"fill{card}" for card in range(4)]
    for card, name in enumerate(fill):
        rest, there = simgpu.CARD_BYTES - int(size * 0.75), (f"simgpu:{card}",)
        rt.register(name, backend="fake", size=rest, devices=there, keep=True)
        rt.preload(name)
    with torch.no_grad(), rt.use("llama") as model:
        expected = model(ids).logits
        assert where(rt)["llama"] == "simgpu:0,1"
        with pytest.raises(StillInUse):
            rt.move("llama", "simgpu:2,3")
    assert rt.move("llama", "simgpu:2,3").where == "simgpu:2,3"
    inside = []
    pins = lambda: max(one.pins for one in rt.status().leases() if one.name == "llama")
    model.model.layers[1].register_forward_pre_hook(lambda *_: inside.append(pins()))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
        rt.evict("llama")
        assert where(rt)["llama"] == "host"
        # called while away, it came back, to whichever cards have room
        assert torch.equal(model(ids).logits, expected)
        rt.evict("llama")
        assert torch.equal(model.forward(ids).logits.cpu(), expected)
    assert min(inside) >= 1 and len(where(rt)["llama"].split(",")) == 2
    rt.forget("llama")
    assert not any(simgpu.used_bytes(card) > 2**20 for card in range(4))


def test_a_call_is_one_use_though_it_leads_through_forward(runtime):
    """Both `__call__` and `forward` pin the model, since either may be called alone."""
    import torch

    rt = runtime()
    module = torch.nn.Linear(4, 4).eval()
    rt.adopt("net", module)
    uses = []
    for call in (module, module.forward):
        call(torch.ones(1, 4))
        uses.append(next(rt.status().leases()).uses)
    assert uses == [1, 2]


def test_what_lies_elsewhere_after_a_load_is_told_by_name(runtime, monkeypatch, caplog):
    rt = fakes(runtime(devices=FOUR), m="1GiB")
    found = tuple(f"layer{i} on cpu" for i in range(5))
    monkeypatch.setattr(registry.find(rt._session, "m").backend, "elsewhere", lambda model: found)
    rt.preload("m")
    [event] = [event for event in rt.status().events if event.action == "misplaced"]
    assert event.because == (
        "m was loaded to sim:0, but these are elsewhere: layer0 on cpu, layer1 on cpu, layer2 on cpu "
        "and 2 more."
    )
    assert event.because in caplog.text


# -- torch's own bound ------------------------------------------------------------------------------------------------
def test_torchs_bound_is_told_once_and_lifted_when_the_last_model_leaves(runtime, monkeypatch):
    rt, told, wanted = runtime(devices=FOUR, monitor=False), [], {}
    session = rt._session
    monkeypatch.setattr(session.probe, "simulated", False)
    monkeypatch.setattr(capacity, "torch_bounds", lambda *_: wanted)
    monkeypatch.setattr(
        session.probe, "bound", lambda card, part: told.append((card, part)) or True
    )
    fakes(rt, m="1GiB")
    wanted = {"sim:0": 0.5}
    rt.preload("m")
    assert told == [("sim:0", 0.5)]
    rt.tick()
    wanted = {"sim:0": 0.4}
    rt.tick()
    wanted = {}
    rt.evict("m")
    assert told == [("sim:0", 0.5), ("sim:0", 0.4), ("sim:0", 1.0)]
    wanted = {"sim:0": 0.3}
    rt.tick()
    with rt.lease("1GiB"):  # a block of code limits torch on its card by itself, and lifts that
        told.clear()
        wanted = {"sim:0": 0.2}
        rt.tick()
        assert told == []
        wanted = {"sim:0": 0.3}
    rt.tick()
    assert told == [("sim:0", 0.3)]
