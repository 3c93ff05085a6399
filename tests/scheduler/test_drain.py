"""A drained card takes no new leases. Idle models leave at once, others when they become idle."""

import pytest

from gpu_runtime.errors import DoesNotFit
from gpu_runtime.facts import Device, Drain, Drop, Grant, Move, Phase, Refuse, Share, Shed, Wait
from gpu_runtime.scheduler import caps, relief
from gpu_runtime.scheduler.capacity import views
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.refusals import refusal
from gpu_runtime.units import GIB
from tests.worlds import NOW, WALL, at, block, book, decide, lease, owner, replayed, request, world

ANN = Drain("ann", WALL + NOW - 180)


def test_a_new_lease_is_placed_on_another_card_though_the_drained_one_is_emptier():
    page = book(drained={"sim:0": ANN})
    _, verdict = decide(page, request("qwen", 4, policy="most-free"), world(sim0=20, sim1=8))
    assert isinstance(verdict, Grant) and verdict.lease.target == (Share("sim:1", 4 * GIB),)
    page = book(lease("qwen", host=4), drained={"sim:0": ANN})
    _, verdict = decide(page, request("qwen", 4), world(sim0=20, sim1=8))
    assert isinstance(verdict, Grant) and isinstance(verdict.steps[0], Move)
    assert verdict.lease.target == (Share("sim:1", 4 * GIB),)
    page = book(drained={"sim:0": ANN})
    considered = plan(page, request("qwen", 4), world(sim0=20, sim1=8), lru).considered
    assert [(c.shares[0].device, c.fits) for c in considered] == [("sim:1", True), ("sim:0", False)]
    assert considered[1].because == "sim:0 was drained by ann 3 min ago"
    # All its tensors belong to another model.
    _, verdict = decide(book(drained={"sim:0": ANN}), request("alias", 0), world(sim0=20))
    assert isinstance(verdict, Grant)


def test_if_every_card_is_drained_the_refusal_names_each_and_says_what_to_type():
    """At once and without evictions, because waiting would not help."""
    page = book(lease("idle", sim0=4), drained={"sim:0": ANN})
    after, verdict = decide(page, request("qwen", 4), world(sim0=20))
    assert isinstance(verdict, Refuse) and verdict.kind == "drained"
    assert after.sections == page.sections | {
        k: v for k, v in after.sections.items() if k == owner(1).id
    }
    error = refusal("qwen", verdict)
    assert isinstance(error, DoesNotFit)
    assert "qwen needs 4.0 GiB; sim:0 was drained by ann 3 min ago, and takes nothing new" in str(
        error
    )
    assert "gpu drain sim:0 --undo" in str(error)
    page = book(drained={"sim:0": ANN, "sim:1": Drain("bob", WALL + NOW - 60)})
    _, verdict = decide(page, request("qwen", 4), world(sim0=20, sim1=20))
    assert (
        "sim:0 was drained by ann 3 min ago, sim:1 was drained by bob 60 s ago" in verdict.because
    )


def test_a_request_waits_for_the_remaining_card_and_evicts_nothing_on_the_drained_one():
    page = book(lease("old", sim0=8), lease("busy", sim1=8, pins=1), drained={"sim:0": ANN})
    after, verdict = decide(page, request("qwen", 4), world(sim0=8, sim1=8))
    assert isinstance(verdict, Wait) and verdict.blockers == (at(1, "busy"),)
    assert after.find(at(1, "old")).shares == (Share("sim:0", 8 * GIB),)


def test_idle_leases_leave_even_if_just_used_kept_alive_or_important():
    """A person decided. Precious weights are offloaded first, others while the host has room, the rest dropped."""
    page = book(
        lease("a", sim0=2, last_used=NOW, importance="urgent", keep_alive=600.0),
        lease("b", sim0=2),
        lease("only", sim0=2, droppable=False),
        lease("elsewhere", sim1=2),
        lease("yours", by=2, sim0=2),
        drained={"sim:0": ANN},
    )
    there = world(sim0=20, sim1=20, host=4)
    _, steps = replayed(lambda book: relief.vacate(book, owner(1).id, there, "k"), page)
    assert [(type(step), step.lease) for step in steps] == [
        (Move, at(1, "only")),
        (Move, at(1, "a")),
        (Drop, at(1, "b")),
    ]
    assert {step.reason for step in steps} == {"drain"}
    assert steps[0].because == "sim:0 was drained by ann 3 min ago."


@pytest.mark.parametrize(
    "stays, why",
    [
        (lease("m", sim0=2, pins=1), "in use"),
        (lease("m", sim0=2, keep=True), "kept"),
        (lease("m", sim0=2, phase=Phase.LEAVING, key="x"), ""),
        (block("m", sim0=2), "a block of code"),
        (
            lease("m", sim0=2, droppable=False, movable=False),
            "exists nowhere else, and its process cannot move it",
        ),
    ],
)
def test_leases_that_must_not_move_stay_and_are_listed(stays, why):
    page = book(stays, drained={"sim:0": ANN})
    there = world(sim0=20)
    assert relief.vacate(page, owner(1).id, there, "k") == (page, ())
    assert [(lease.name, said) for lease, said in relief.staying(page, "sim:0", there)] == [
        ("m", why)
    ]


@pytest.mark.parametrize("droppable", [True, False])
def test_a_copy_in_host_memory_is_freed_before_a_model_is_dropped(droppable):
    """The model leaves at the next call, with the room that the copy had."""
    page = book(
        lease("used", sim1=6, shadow_bytes=6 * GIB, pins=1),
        lease("m", sim0=9, droppable=droppable),
        drained={"sim:0": ANN},
    )
    after, steps = relief.vacate(page, owner(1).id, world(sim0=20, sim1=20, host=10), "k")
    assert [type(step) for step in steps] == [Shed] and after is page


@pytest.mark.parametrize("layout", ["balanced", "proportional", "auto"])
def test_a_model_is_not_divided_over_a_drained_card(layout):
    """Neither over its free room, nor over room that evictions there would make."""
    rules = {"margin_bytes": 0, "least_cards": 2}
    wanted = request("qwen", 10, layout=layout, rules=rules)
    there = world(sim0=6, sim1=6, sim2=6)
    for idle in ((), tuple(lease(f"m{n}", **{f"sim{n}": 6}) for n in range(3))):
        _, verdict = decide(book(*idle, drained={"sim:0": ANN}), wanted, there)
        shares = (
            verdict.lease.target if isinstance(verdict, Grant) else verdict.considered[0].shares
        )
        assert {share.device for share in shares} == {"sim:1", "sim:2"}
        assert at(1, "m0") not in {step.lease for step in verdict.steps}
    _, verdict = decide(book(drained={"sim:0": ANN, "sim:1": ANN}), wanted, there)
    assert isinstance(verdict, Refuse)


def test_a_drain_and_its_end_are_both_events():
    there = world(sim0=20, sim1=20)
    page = relief.drain(book(), there.devices[0], "ann", there)
    assert relief.drain(page, there.devices[0], "bob", there) is page, "it is ann's already"
    assert [view.drained and view.drained.by for view in views(page, there)] == ["ann", None, None]
    again = relief.undrain(page, there.devices[0], "bob", there)
    assert again.drained == {} and relief.undrain(again, there.devices[0], "bob", there) is again
    assert [(event.model, event.action) for event in again.events] == [
        ("sim:0", "drained"),
        ("sim:0", "undrained"),
    ]


def test_a_drain_follows_the_card_and_not_its_name():
    """All owners have ended, and the next one sees other cards, under other names."""
    card = Device("cuda:0", 80 * GIB, uuid="GPU-a")
    there = world(cuda0=80)
    page = relief.drain(book(), card, "ann", there)
    renamed = [Device("cuda:1", 80 * GIB, uuid="GPU-a"), Device("cuda:0", 80 * GIB, uuid="GPU-b")]
    from msgspec.structs import replace

    renumbered = replace(there, devices=tuple(renamed), limits={"cuda:0": 1, "cuda:1": 1})
    assert list(caps.drained(page, renumbered)) == ["cuda:1"]
    assert [bool(view.drained) for view in views(page, renumbered)] == [True, False]
    both = relief.drain(page, renamed[1], "bob", renumbered)
    assert list(caps.drained(relief.undrain(both, card, "ann", renumbered), renumbered)) == [
        "cuda:0"
    ]
