"""Room for a use (KV cache): requested at registration, claimed on a device, never moved with the weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.errors import Busy
from gpu_runtime.facts import HOST, Lease, Phase, Share, beside
from gpu_runtime.units import MIB
from tests import tiny_models

from .conftest import claims, fakes

ASKED = dict(context_length=256, sequences=8)


@pytest.fixture
def rt(runtime, tmp_path):
    """A runtime with a card of 64 MiB and a model of half a MiB, which needs about 8 MiB for its use."""
    rt = runtime(devices="sim:64MiB,host:64MiB", gpu_shadows="never")
    rt.register("writer", tiny_models.causal_lm(tmp_path / "writer"), **ASKED)
    return rt


def sizes(rt, name="writer"):
    """The planned bytes of the weights, and of the room for use."""
    footprint = rt.plan(name).footprint
    return footprint.bytes - footprint.working_bytes, footprint.working_bytes


def test_the_room_survives_settling(rt):
    promised, room = sizes(rt)
    assert room > 4 * promised
    rt.preload("writer")
    weights = rt.probe.used()["sim:0"]
    assert weights == pytest.approx(promised, rel=0.02)
    assert claims(rt) == {"sim:0": weights + room}
    (row,) = rt.leases().to_dict("records")
    assert (row["bytes"], row["measured_bytes"]) == (weights + room, weights)
    assert sizes(rt) == (weights, room) and rt.plan("writer").steps == ()


def test_where_no_context_was_asked_for_nothing_is_kept(runtime, tmp_path):
    rt = runtime(devices="sim:64MiB,host:64MiB", gpu_shadows="never")
    rt.register("writer", tiny_models.causal_lm(tmp_path / "writer"))
    rt.preload("writer")
    assert claims(rt) == {"sim:0": rt.probe.used()["sim:0"]}


def test_in_host_memory_there_is_none_of_it_and_it_is_asked_for_again_on_the_way_back(rt):
    rt.preload("writer")
    weights, room = sizes(rt)
    assert rt.evict("writer").bytes == weights + room
    assert claims(rt) == {HOST: weights}
    (lease,) = rt.status().leases()
    assert (lease.own_bytes, lease.filled, lease.working_bytes) == (weights, (), room)
    assert rt.plan("writer").shares == (Share("sim:0", weights + room),)
    with rt.use("writer") as model:
        model(torch.tensor([[5, 6]]))
    assert claims(rt) == {"sim:0": weights + room}
    rt.tick()
    assert claims(rt) == {"sim:0": weights + room}


def test_it_goes_to_another_card_with_its_room(runtime, tmp_path):
    rt = runtime(devices="sim:2x64MiB,host:64MiB", gpu_shadows="never")
    rt.register("writer", tiny_models.causal_lm(tmp_path / "writer"), **ASKED)
    rt.preload("writer")
    before = claims(rt)
    rt.move("writer", "sim:1")
    assert claims(rt) == {"sim:1": before["sim:0"]}
    rt.tick()
    assert claims(rt) == {"sim:1": before["sim:0"]}
    assert rt.plan("writer").footprint.working_bytes == before["sim:0"] - rt.probe.used()["sim:1"]


def test_nobody_else_is_given_the_room(runtime, shared_book, tmp_path):
    """The room is reserved for use, so the second model waits although the card is nearly empty."""
    mine, other = (runtime(devices="sim:64MiB,host:64MiB", ledger=shared_book) for _ in range(2))
    mine.register("writer", tiny_models.causal_lm(tmp_path / "writer"), **ASKED)
    fakes(other, drill="54 MiB")
    with mine.use("writer"):
        assert mine.probe.used()["sim:0"] < MIB and sizes(mine)[1] > 5 * MIB
        with pytest.raises(Busy, match="writer .* is in use"):
            other.preload("drill", timeout=0)
    mine.evict("writer")
    other.preload("drill")


def test_weights_that_grow_leave_the_room_as_it_is(rt):
    """Gradients are bytes of the model, claimed in addition to the room that the KV cache still needs."""
    weights, room = sizes(rt)
    with rt.use("writer") as model:
        model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    rt.tick()
    assert claims(rt) == {"sim:0": rt.probe.used()["sim:0"] + room}
    assert rt.probe.used()["sim:0"] > 1.5 * weights


def test_what_grows_in_a_block_after_a_tick_is_counted_after_the_block(runtime):
    rt, module = runtime(), torch.nn.Linear(512, 512, bias=False).eval()
    weight = module.weight
    rt.adopt("net", module)
    with rt.use("net"):
        rt.tick()
        weight.grad = torch.ones(512, 512)
    rt.tick()
    assert claims(rt) == {"sim:0": 2 * weight.nbytes}


def test_a_declared_size_is_claimed_whole_where_a_context_is_asked_for(runtime, tmp_path):
    """If no context is requested, the declared size is only an estimate, and the measured size replaces it."""
    rt = runtime(devices="sim:64MiB,host:64MiB", gpu_shadows="never")
    directory = tiny_models.causal_lm(tmp_path / "writer")
    rt.register("whole", directory, size="20MiB", context_length=256)
    rt.register("guess", directory, size="20MiB")
    rt.preload("whole")
    whole = claims(rt)["sim:0"]
    assert whole == pytest.approx(20 * MIB, rel=1e-4)  # a buffer that no file has came on top
    rt.preload("guess")
    assert claims(rt)["sim:0"] - whole == rt.probe.used()["sim:0"] // 2


SHARES = st.lists(st.integers(1, 10**12), min_size=1, max_size=4).map(
    lambda sizes: tuple(Share(f"sim:{n}", size) for n, size in enumerate(sizes))
)


@given(SHARES, st.integers(0, 10**12), SHARES)
def test_a_lease_claims_what_was_measured_and_its_room_to_the_byte(measured, room, later):
    """Whatever was estimated at first. Repeated measurements do not change the claim."""
    promised = Lease("1", "m", target=beside(later, room), working_bytes=room, phase=Phase.ARRIVING)
    for now in (measured, measured, later):
        promised = promised.holding(now)
        assert (
            sum(share.bytes for share in promised.shares)
            == sum(share.bytes for share in now) + room
        )
        assert promised.own_bytes == sum(share.bytes for share in now)
    away = promised.holding((Share(HOST, 7),))
    assert away.shares == (Share(HOST, 7),) and away.own_bytes == 7 and away.filled == ()
    assert replace(away, target=beside(later, room)).holding(later) == promised


@given(SHARES, st.integers(0, 10**12))
def test_what_is_spread_is_spread_whole(shares, size):
    grown = beside(shares, size)
    assert sum(share.bytes for share in grown) == sum(share.bytes for share in shares) + size
    assert all(after.bytes >= before.bytes for before, after in zip(shares, grown, strict=True))
