"""A part of a model leaves its card, and only that part returns. Calls restore a model in parts first."""

import copy
import gc
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from gpu_runtime import NotResident
from gpu_runtime.backends.pytorch import torch_model
from gpu_runtime.facts import HOST
from gpu_runtime.units import GIB, MIB
from tests.clock import PATIENCE

from .conftest import fakes, loaded, where

BOX = {"devices": "sim:40GiB,host:128GiB", "eviction_grace_seconds": 0, "gpu_memory_max_percent": 1}


def shares(rt: Any, name: str) -> dict[str, int]:
    """Maps each device to the bytes of the lease in the book. Checks that the model holds the same bytes there."""
    lease = next(lease for lease in rt.status().leases() if lease.name == name)
    held = {share.device: share.bytes for share in lease.shares}
    for device, size in held.items():
        others = sum(other.bytes_on(device) for other in rt.status().leases() if other.name != name)
        assert rt._session.probe.place(device).held_bytes() == size + others
    return held


def big(rt: Any, size: str = "40GiB", pieces: int = 40, hook: Any = None) -> None:
    rt.register("big", hook, backend="fake", size=size, pieces=pieces)
    rt.preload("big")


def moved(rt: Any, *actions: str) -> int:
    return sum(event.bytes for event in rt.why("big") if event.action in actions)


def test_three_gib_of_a_model_of_forty_leave_and_return(runtime):
    """At most 3 GiB and one piece are copied each way."""
    rt = fakes(runtime(**BOX), big="40GiB", small="3GiB")
    rt.preload("big")
    with rt.use("small"):
        assert shares(rt, "big") == {"sim:0": 37 * GIB, HOST: 3 * GIB}
    rt.forget("small")
    with rt.use("big"):
        assert shares(rt, "big") == {"sim:0": 40 * GIB}
    assert (moved(rt, "offloaded"), moved(rt, "restored")) == (3 * GIB, 3 * GIB)
    totals = rt.status().totals
    assert totals["evictions"] == totals["offloads"] == totals["restorations"] == 1


def test_where_the_move_of_a_part_fails_the_model_is_whole(runtime, monkeypatch):
    broken = [RuntimeError("no pinned memory left")]

    def step(verb: str) -> None:
        if verb == "move" and broken:
            raise broken.pop()

    rt = runtime(**BOX)
    rt.register("big", step, backend="fake", size="20GiB", pieces=20)
    rt.preload("big")
    resident = rt._session.residents["big"]
    monkeypatch.setattr(resident.backend, "droppable", lambda _: False)
    resident.lease = replace(resident.lease, droppable=False)
    fakes(rt, other="20GiB", small="3GiB")
    rt.preload("other")
    with rt.use("small"):
        assert shares(rt, "big") == {"sim:0": 20 * GIB}


def test_where_the_return_of_a_part_fails_the_parts_stay(runtime):
    broken: list[Exception] = []

    def step(verb: str) -> None:
        if verb == "move" and broken:
            raise broken.pop()

    rt = runtime(**BOX)
    big(rt, hook=step)
    loaded(rt, small="3GiB")
    rt.forget("small")
    broken.append(RuntimeError("the bus is gone"))
    with pytest.raises(Exception, match="the bus is gone"), rt.use("big"):
        pass
    assert shares(rt, "big") == {"sim:0": 37 * GIB, HOST: 3 * GIB}
    with rt.use("big"):
        assert shares(rt, "big") == {"sim:0": 40 * GIB}


def test_the_verbs_of_a_model_in_parts(runtime):
    """A person can evict the rest of a model in parts, drop it, forget it, or restore it whole."""
    rt = runtime(**BOX)
    big(rt)
    loaded(rt, small="3GiB")
    with pytest.raises(NotResident):
        rt.move("big", "sim:0")
    rt.evict("big")
    assert shares(rt, "big") == {HOST: 40 * GIB}
    rt.forget("small")
    rt.preload("big")
    rt.register("small", backend="fake", size="3GiB")
    rt.preload("small")
    assert shares(rt, "big") == {"sim:0": 37 * GIB, HOST: 3 * GIB}
    rt.forget("big")
    assert rt._session.probe.place("sim:0").held_bytes() == 3 * GIB
    assert rt._session.probe.place(HOST).held_bytes() == 0


def test_another_owner_gives_a_part(runtime, shared_book):
    """Another process requests 3 GiB. The owner frees them, and most of its own model stays on the card."""
    first = runtime(**BOX, ledger=shared_book)
    second = runtime(**BOX, ledger=shared_book)
    big(first)
    fakes(second, small="3GiB")
    with second.use("small", timeout=PATIENCE):
        [lease] = [one for one in second.status().leases() if one.name == "big"]
        assert [share.bytes for share in lease.shares] == [37 * GIB, 3 * GIB]
    second.forget("small")
    with first.use("big", timeout=PATIENCE):
        assert where(first)["big"] == "sim:0"


# -- modules
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


LAYER = 128 * 128 * 4 + 128 * 4


@pytest.fixture
def small_card(runtime, monkeypatch):
    """A runtime whose card has room for one module of these tests and 3 more layers."""
    monkeypatch.setattr(torch_model, "LEAST_BYTES_IN_PARTS", 1)
    gc.collect()
    return runtime(
        devices=f"sim:{11 * LAYER}B,host:64MiB", eviction_grace_seconds=0, gpu_memory_max_percent=1
    )


def in_parts(rt: Any, module: nn.Module, optimizer: Any = None, layers: int = 5) -> None:
    """Adopts the module, and makes the bytes of `layers - 3` layers of it leave the card."""
    rt.adopt("net", module, optimizer=optimizer)
    rt.preload("net")
    rt.register("other", backend="fake", size=layers * LAYER)
    rt.preload("other")
    assert rt._session.residents["net"].lease.in_parts
    rt.forget("other")


CALLS = {
    "a call": lambda module: module(torch.ones(1, 128)),
    "forward": lambda module: module.forward(torch.ones(1, 128)),
    "a call of a layer": lambda module: module.layers[7](torch.ones(1, 128)),
    "state_dict": lambda module: module.state_dict(),
    "a copy": lambda module: copy.deepcopy(module).layers[7].weight,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_restores_the_missing_part_first(small_card, call):
    module = Net().eval()
    expected = call(copy.deepcopy(module))
    in_parts(small_card, module)
    result = call(module)
    assert not small_card._session.residents["net"].lease.in_parts
    if isinstance(result, dict):
        assert all(torch.equal(result[name], expected[name]) for name in expected)
    else:
        assert torch.equal(result, expected)


def test_training_continues_bit_for_bit(runtime, monkeypatch):
    """Gradients and optimizer state leave and return with the pieces of their parameters."""
    monkeypatch.setattr(torch_model, "LEAST_BYTES_IN_PARTS", 1)
    gc.collect()
    torch.manual_seed(1)
    rt = runtime(
        devices=f"sim:{36 * LAYER}B,host:64MiB", eviction_grace_seconds=0, gpu_memory_max_percent=1
    )
    module = Net()
    twin = copy.deepcopy(module)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (module, twin)]
    rt.adopt("net", module, optimizer=optimizers[0])
    rt.register("other", backend="fake", size=12 * LAYER)
    resident = rt._session.residents["net"]
    parts = 0
    for _ in range(4):
        x = torch.randn(2, 128)
        with rt.use("net"):
            for one, optimizer in zip((module, twin), optimizers, strict=True):
                optimizer.zero_grad()
                one(x).square().mean().backward()
                optimizer.step()
        rt.tick()
        if resident.lease.bytes < 30 * LAYER:  # the optimizer's state is measured at its next step
            continue
        with resident.training.waived():
            rt.preload("other")
        parts += resident.lease.in_parts
        rt.forget("other")
        rt.register("other", backend="fake", size=12 * LAYER)
    assert parts >= 2
    with rt.use("net"):
        pairs = zip(module.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_small_model_leaves_whole(runtime):
    rt = runtime(devices="sim:2MiB,host:64MiB", eviction_grace_seconds=0, gpu_memory_max_percent=1)
    rt.adopt("net", Net().eval())
    rt.preload("net")
    assert rt._session.residents["net"].lease.piece_bytes == 0 < MIB


# -- with a copy in host memory
def test_a_part_of_a_model_with_a_copy_in_host_memory_leaves_and_returns(runtime):
    """Its part of the copy becomes the share in host memory, which holds the same bytes all the time."""
    rt = runtime(**BOX)
    rt.register("big", backend="fake", size="40GiB", pieces=40, shadow=True)
    rt.preload("big")
    resident = rt._session.residents["big"]
    host = rt._session.probe.place(HOST)
    assert resident.shadow_bytes == host.held_bytes() == 40 * GIB
    fakes(rt, small="3GiB")
    with rt.use("small"):
        assert [share.bytes for share in resident.lease.shares] == [37 * GIB, 3 * GIB]
        assert (resident.shadow_bytes, host.held_bytes()) == (37 * GIB, 40 * GIB)
        assert rt._session.ledger.read().claims()[HOST] == 40 * GIB
    rt.forget("small")
    with rt.use("big"):
        assert (resident.shadow_bytes, host.held_bytes()) == (40 * GIB, 40 * GIB)
        assert rt._session.ledger.read().claims()[HOST] == 40 * GIB
    rt.evict("big")
    assert (resident.shadow_bytes, host.held_bytes()) == (0, 40 * GIB)


# -- a model that is on one card at one time, and on several at another
def lease_of(rt: Any, name: str) -> Any:
    return next(lease for lease in rt.status().leases() if lease.name == name)


@pytest.mark.parametrize("way", ["return", "move"])
def test_on_several_cards_it_leaves_as_a_whole_and_on_one_card_in_pieces_again(runtime, way):
    """It kept its pieces on several cards, where no part can leave: each request for a part failed."""
    rt = runtime(**BOX | {"devices": "sim:2x24GiB,host:64GiB", "gpu_split_margin_mb": 0})
    rt.register("m", backend="fake", size="20GiB", pieces=10, layout="auto")
    rt.preload("m")
    assert lease_of(rt, "m").piece_bytes == 2 * GIB
    for number in (0, 1):
        rt.register(f"in{number}", backend="fake", size="12GiB", devices=(f"sim:{number}",))
    if way == "move":
        rt.move("m", ("sim:0", "sim:1"))
    else:
        rt.evict("m")
        with rt.use("in0"), rt.use("in1"):
            rt.preload("m")
    assert shares(rt, "m").keys() == {"sim:0", "sim:1"} and lease_of(rt, "m").piece_bytes == 0
    rt.register("other", backend="fake", size="20GiB", devices=("sim:1",))
    with rt.use("other", timeout=PATIENCE):
        assert shares(rt, "m") == {HOST: 20 * GIB}
    rt.forget("other")
    rt.evict("*")
    rt.preload("m")
    assert lease_of(rt, "m").piece_bytes == 2 * GIB


@pytest.mark.parametrize("pieces", [1, 16])
def test_a_lease_in_parts_does_not_block_the_warm_pool(runtime, pieces):
    """Two models took turns beside a third in parts, whose bytes were never given back: 23 loads from disk."""
    whole = dict(gpu_memory_max_percent=1.0, cpu_memory_max_percent=1.0)
    rt = runtime(devices="sim:10GiB,host:10GiB", gpu_shadows="never", **whole)
    for name, size in (("a", "10GiB"), ("b", "9GiB"), ("c", "9GiB")):
        rt.register(name, backend="fake", size=size, pieces=pieces)
    for name in "abc" + "bc" * 11:
        with rt.use(name):
            pass
    actions = list(rt.events()["action"])
    assert (actions.count("loaded"), actions.count("restored")) == (14, 11)
