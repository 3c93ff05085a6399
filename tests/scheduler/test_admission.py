"""The decision tree of `admit`, branch by branch."""

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    MOST_ENTRIES,
    Candidate,
    Drop,
    Event,
    Grant,
    Load,
    Move,
    Phase,
    Refuse,
    Share,
    Wait,
)
from gpu_runtime.scheduler import refusals
from gpu_runtime.scheduler.admission import MOST_LEASES, MOST_WAITING, admit
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.recall import Order, answer, ask, new_order, obey
from gpu_runtime.scheduler.transitions import left
from gpu_runtime.units import show_seconds
from tests.worlds import (
    GIB,
    NOW,
    WALL,
    ask_until,
    at,
    block,
    book,
    decide,
    lease,
    owner,
    request,
    size,
    ticket,
    world,
)


def leaving(page, asked, there):
    """The names of the leases that the requester evicts itself."""
    return [step.lease.split("/")[1] for step in decide(page, asked, there)[1].steps]


def whole(device: str, gib: float) -> tuple[Share, ...]:
    return (Share(device, size(gib)),)


def bare(steps):
    """The steps without their reasons."""
    return [replace(step, because="") for step in steps]


# -- 1. settled here already -----------------------------------------------------------------------
def test_a_model_on_its_device_is_granted_without_a_step_and_before_any_elder():
    qwen = lease("qwen", sim0=8)
    page = book(qwen)
    assert decide(page, request("qwen", 8), world(sim0=20)) == (
        page,
        Grant(qwen, (), "qwen is on sim:0 already"),
    )
    # A request for a model that is loaded already takes no room from the request ahead
    # of it.
    page = book(lease("qwen", sim0=8), tickets=[ticket("big", by=2, sim0=20, importance="urgent")])
    after, verdict = decide(page, request("qwen", 8), world(sim0=20))
    assert (after, verdict.steps) == (page, ())


def test_a_grant_ends_the_ticket():
    """A grant ends the request's ticket, also if another thread of the process loaded the model meanwhile."""
    page = book(lease("qwen", sim0=8), tickets=[ticket("qwen", key="k", sim0=8)])
    after, _ = decide(page, request("qwen", 8, key="k"), world(sim0=20))
    assert after == book(lease("qwen", sim0=8))


def test_what_was_decided_and_never_received_is_returned_again():
    """The stop button may interrupt the caller after the write, so it asks again (law 9)."""
    page, first = decide(book(), request("qwen", 8, key="k"), world(sim0=20))
    again, second = decide(page, request("qwen", 8, key="k"), world(sim0=20, now=NOW + 1))
    assert again == page
    assert second == Grant(
        first.lease, (Load(at(1, "qwen"), whole("sim:0", 8), "granted before"),), "granted before"
    )
    # Otherwise their leases would be leaving for ever, since no caller has the steps.
    page, first = decide(book(lease("old", sim0=16)), request("qwen", 14, key="k"), world(sim0=20))
    again, second = decide(page, request("qwen", 14, key="k"), world(sim0=20))
    assert again == page
    assert (
        bare(second.steps)
        == bare(first.steps)
        == [Move(at(1, "old"), whole("sim:0", 16), whole(HOST, 16))]
    )
    assert isinstance(second, Wait) and second.because


# -- 2. on its way in or out -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "phase, word", [(Phase.ARRIVING, "arriving"), (Phase.LEAVING, "being evicted")]
)
def test_a_request_waits_for_a_model_that_is_arriving_or_leaving(phase, word):
    """It reserves no second room: what is already reserved for the model is enough."""
    going = lease("qwen", host=8, key="another", phase=phase, target=whole("sim:0", 8))
    after, verdict = decide(book(going), request("qwen", 8, key="k"), world(sim0=20))
    assert verdict == Wait(f"qwen is {word}")
    assert after.ticket("k").need == ()


def test_two_threads_that_request_one_model_make_room_for_it_once():
    """If the second thread also made room, other models would be evicted for a model that is loaded only once."""
    page = book(lease("other", by=2, sim0=15), lease("old", by=3, sim1=10))
    first, heard = decide(page, request("qwen", 14, key="first"), world(sim0=20, sim1=20))
    both, verdict = decide(first, request("qwen", 14, key="second"), world(sim0=20, sim1=20))
    assert heard.asked == (at(3, "old"),)
    assert verdict.asked == verdict.steps == ()
    assert verdict.because == "Another thread of this process is waiting for qwen already"
    assert both.ticket("second").need == ()


# -- 3. hopeless -----------------------------------------------------------------------------------
def test_larger_than_any_budget_is_refused_and_nothing_is_evicted():
    """The budget is 7,200 MB. A model of 3,000 MB is resident, and the request is for 9,000 MB."""
    page = book(lease("resident", sim0="3000 MB"))
    there = world(sim0="7200 MB", sim1="1200 MB")
    after, verdict = decide(page, request("big", "9000 MB"), there)
    assert verdict == Refuse(
        "big needs 8.4 GiB on one device; the largest budget is 6.7 GiB (sim:0)",
        need_bytes=9 * 10**9,
        budget_bytes=72 * 10**8,
        device="sim:0",
    )
    assert list(after.leases()) == list(page.leases()) and after.tickets == ()


@pytest.mark.parametrize(
    "more, because, hint",
    [
        ({"movable": False}, "is exempt from parking", "%gpu park asked"),
        (
            {"movable": False, "fixed": "torch 2.3.1 is old"},
            "exists nowhere else, and its process cannot move it (torch 2.3.1 is old)",
            "%gpu free",
        ),
        ({}, "exists nowhere else, and RAM has no room for it", "CPU_MEMORY_MAX_PERCENT"),
    ],
)
def test_a_notebook_that_cannot_be_parked_is_named_with_what_to_do_about_it(more, because, hint):
    """An exempt notebook stays although the host has room. The advice never forgets its memory."""
    other = lease("kernel", sim0=12, kind="kernel", droppable=False, **more)
    host = 64 if more else 4
    page = book(other)
    asked = request("qwen", 10, by=2)
    _, verdict = decide(page, asked, world(sim0=20, host=host))
    assert verdict.because == (
        f"qwen needs 10.0 GiB; sim:0 has 20.0 GiB, and pid 1 (12.0 GiB) {because}"
    )
    told = str(refusals.refusal("qwen", verdict))
    assert hint in told and "forget" not in told


def test_the_own_pinned_models_count_against_a_request_and_the_kind_is_of_the_lease_freed_most_easily():
    """A thread cannot wait for the end of its own `with` blocks, so the request is hopeless (law 7)."""
    mine = lease("mine", sim0=12, pins=1)
    _, verdict = decide(book(mine), request("qwen", 10, held=(mine.id,)), world(sim0=20))
    assert (verdict.kind, verdict.holders) == ("nested", (mine.id,))
    assert verdict.because == (
        "qwen needs 10.0 GiB; sim:0 has 20.0 GiB, "
        "and mine (12.0 GiB) is held by the block that makes the request"
    )
    # A block of the requesting thread, else a kept model, else weights that need room in RAM.
    only, kept = lease("only", sim0=4, droppable=False), lease("kept", sim0=4, keep=True)
    mine = lease("mine", sim0=4, pins=1)
    for held, kind in (
        ((only,), "precious"),
        ((only, kept), "kept"),
        ((only, kept, mine), "nested"),
    ):
        wanted = request("qwen", 17, held=(mine.id,))
        _, verdict = decide(book(*held), wanted, world(sim0=20, host=1))
        assert verdict.kind == kind
        assert verdict.holders[0] == held[-1].id, "the advice names this one"


def test_a_request_that_waits_beside_a_pinned_model_calls_it_pinned():
    """It said *is kept*, a word of the code. The user types *unpin*."""
    busy, kept = lease("busy", sim0=12, pins=1), lease("llama", sim0=4, keep=True)
    _, verdict = decide(book(busy, kept), request("qwen", 16, by=2), world(sim0=20))
    assert "llama (4.0 GiB on sim:0) is pinned (unpin it to let it go)" in verdict.because


def test_over_several_cards_only_what_cannot_leave_is_named():
    """RAM has room for the memory of `train`, so it is no reason; the advice names the own block."""
    kept = lease("kept", sim0=4, keep=True)
    train = lease("train", by=2, sim0=1, droppable=False)
    mine = lease("mine", sim1=20, pins=1)
    wanted = request("qwen", 20, layout="auto", held=(mine.id,), rules={"margin_bytes": 0})
    _, verdict = decide(book(kept, train, mine), wanted, world(sim0=20, sim1=20))
    assert verdict.because == (
        "qwen needs 20.0 GiB, over several cards; sim:0,1 could give 16.0 GiB + 0 B, and "
        "mine (20.0 GiB) is held by the block that makes the request; "
        "kept (4.0 GiB) is pinned (unpin it to let it go)"
    )
    assert "Leave the block of mine first" in str(refusals.refusal("qwen", verdict))


def test_a_request_waits_for_a_card_that_is_allowed_and_can_hold_it():
    page = book(lease("kept", sim0=8, keep=True))
    _, verdict = decide(page, request("qwen", 14, devices=("sim:0",)), world(sim0=20, sim1=20))
    assert isinstance(verdict, Refuse) and verdict.device == "sim:0"
    _, verdict = decide(page, request("qwen", 14, devices=("cuda:7",)), world(sim0=20))
    assert verdict.because == "qwen may only go to cuda:7, and this machine has no such device"
    # The ticket held a place on a small card that could never take the model, and small ones took
    # the large card.
    page = book(lease("busy", by=2, sim0=16, pins=1))
    after, verdict = decide(page, request("big", 10, key="k"), world(sim0=20, sim1=8))
    assert after.ticket("k").need == whole("sim:0", 10)
    assert verdict.because == "busy (16.0 GiB on sim:0) is in use by pid 2"
    small = request("small", 6, arrived=NOW + 1)
    assert isinstance(decide(after, small, world(sim0=20, sim1=8))[1], Grant)


def test_the_obstacle_of_a_notebook_that_could_leave_is_its_size():
    """Its memory exists nowhere else, and RAM had no room for it, the sentence said. RAM was empty."""
    idle = lease("kernel", by=3, sim0=6, kind="kernel", droppable=False)
    page = book(lease("busy", by=2, sim0=12, pins=1), idle)
    _, verdict = decide(page, request("big", 16), world(sim0=20, host=64))
    assert verdict.because == (
        "busy (12.0 GiB on sim:0) is in use by pid 2; pid 3 (6.0 GiB on sim:0) would not free enough"
    )


def test_a_process_may_take_less_than_the_hosts_limit_but_never_more():
    for ours, theirs in ((10, 20), (20, 10)):
        page = book(limits={"sim:0": size(ours)})
        assert isinstance(decide(page, request("qwen", 12), world(sim0=theirs))[1], Refuse)


# -- 4. fits in what is free -----------------------------------------------------------------------
def test_a_grant_is_a_reservation_pinned_by_its_loader():
    """The bytes of a grant count at once. The model cannot be evicted before its first use (law 6)."""
    page, verdict = decide(book(), request("qwen", 14, key="k"), world(sim0=20))
    because = "qwen needs 14.0 GiB; sim:0 has 20.0 GiB free and would keep 6.0 GiB."
    phase = {"phase": Phase.ARRIVING, "target": whole("sim:0", 14), "key": "k"}
    reserved = lease("qwen", pins=1, pinned_since=NOW, last_used=NOW, droppable=False, **phase)
    assert verdict == Grant(
        reserved,
        (Load(at(1, "qwen"), whole("sim:0", 14), because),),
        because,
        (Candidate(whole("sim:0", 14), True, "sim:0 has 20.0 GiB free and would keep 6.0 GiB"),),
    )
    assert list(page.leases()) == [reserved]
    assert room(page, world(sim0=20))["sim:0"] == 6 * GIB


def test_a_model_in_host_memory_moves_back_at_its_measured_size():
    """A model returns with the size that was measured at its first load. The declared size was only an estimate."""
    page = book(lease("qwen", host=6, importance=1, keep_alive=9.0))
    _, verdict = decide(page, request("qwen", 14, keep_alive=60.0), world(sim0=8))
    assert (verdict.lease.importance, verdict.lease.keep_alive) == (10, 60.0), "as requested now"
    assert bare(verdict.steps) == [Move(at(1, "qwen"), whole(HOST, 6), whole("sim:0", 6))]
    assert verdict.lease.shares == whole(HOST, 6), "and lies there until it has moved"


def test_what_requests_ahead_need_is_set_aside():
    """Otherwise a stream of small requests would starve a large one."""
    first = ticket("big", by=2, sim0=14)
    elsewhere = ticket("other", by=4, sim1=20)
    page = book(lease("busy", by=3, sim0=10, pins=1), tickets=[first, elsewhere])
    small = request("small", 4, devices=("sim:0",))
    _, verdict = decide(page, small, world(sim0=20, sim1=20))
    assert isinstance(verdict, Wait) and verdict.ahead == 2
    assert verdict.because.startswith(
        "10.0 GiB is reserved for big, which is ahead in the queue; busy (10.0 GiB on sim:0) is in use"
    )
    [there] = plan(page, small, world(sim0=20), lru).considered
    # all other requests see these bytes as free
    assert there.because.endswith("10.0 GiB is reserved for big, which is ahead in the queue")
    _, verdict = decide(
        book(lease("busy", by=3, sim0=1, pins=1), tickets=[first]),
        request("small", 4),
        world(sim0=20),
    )
    assert isinstance(verdict, Grant), "what is left beside it is free"


# -- 5. fits once idle leases have left ------------------------------------------------------------
def test_three_models_of_4000_and_a_request_of_5000_offloads_only_the_oldest():
    models = [
        lease(name, sim0="4000 MB", last_used=used)
        for name, used in (("new", 300), ("old", 100), ("mid", 200))
    ]
    page, verdict = decide(book(*models), request("next", "5000 MB"), world(sim0="14400 MB"))
    [step] = verdict.steps
    assert isinstance(step, Move) and step.lease == at(1, "old")
    assert step.because == "next needs 4.7 GiB on sim:0; old was idle for 15 min."
    assert page.find(step.lease).phase is Phase.LEAVING
    assert verdict.because == (
        "next needs 4.7 GiB; sim:0 has 2.2 GiB free. "
        "old (3.7 GiB, idle 15 min) is offloaded to RAM."
    )


def test_other_owners_are_asked_and_evict_their_leases_themselves():
    """Only the owner moves tensors. The recall is part of the requester's ticket, and ends with this ticket."""
    page = book(lease("theirs", by=2, sim0=14))
    after, verdict = decide(page, request("qwen", 14, key="k"), world(sim0=20))
    assert (verdict.asked, verdict.steps) == ((at(2, "theirs"),), ())
    assert after.ticket("k").recalls == {at(2, "theirs"): 0}
    assert list(after.leases()) == list(page.leases())
    assert "pid 2 is asked to evict theirs (14.0 GiB, idle 17 min)" in verdict.because


def test_a_busy_neighbour_has_five_seconds_of_grace_as_long_as_the_operator_says_and_own_leases_none():
    """A request of another program must not evict a model between two calls of the model's owner."""
    just_used = dict(sim0=14, last_used=NOW - 4)
    _, verdict = decide(
        book(lease("theirs", by=2, **just_used)), request("qwen", 14), world(sim0=20)
    )
    assert (verdict.asked, verdict.retry_at) == ((), NOW + 1)
    assert "was used 4.0 s ago by pid 2, and can leave in 1.0 s" in verdict.because
    page = book(lease("theirs", by=2, **just_used))
    wanted = request("qwen", 14, arrived=NOW + 1)
    assert decide(page, wanted, world(sim0=20, now=NOW + 1))[1].asked == (at(2, "theirs"),)
    later = book(lease("theirs", by=2, sim0=14, last_used=NOW + 1))  # after the clock was read
    there = world(sim0=20, grace_seconds=0.0)
    assert decide(later, request("qwen", 14), there)[1].asked == (at(2, "theirs"),)
    _, verdict = decide(book(lease("mine", **just_used)), request("qwen", 14), world(sim0=20))
    assert len(verdict.steps) == 1
    # Used every second, it was never asked. The bound is five swaps, at least 3 s; a model in use
    # stays.
    theirs = lease("theirs", by=2, sim0=14, last_used=NOW - 1)
    wanted = request("qwen", 14, reload_seconds=1.0, arrived=NOW - 4)
    _, verdict = decide(book(theirs), wanted, world(sim0=20))
    assert (verdict.asked, verdict.retry_at) == ((), NOW + 1)  # the bound, before the grace ends
    _, verdict = decide(book(theirs), wanted, world(sim0=20, now=NOW + 1))
    assert verdict.asked == (theirs.id,)
    _, verdict = decide(book(theirs), wanted, world(sim0=20, most_wait_seconds=4.0))
    assert verdict.asked == (theirs.id,)
    in_use = replace(theirs, pins=1)
    assert decide(book(in_use), wanted, world(sim0=20, now=NOW + 60))[1].asked == ()


def test_retry_at_counts_grace_periods_on_other_cards_too():
    """The lease on the nearest card stays in use. The lease on the other card may leave when its grace ends."""
    used = [lease(f"m{n}", by=2, last_used=NOW - n, **{f"sim{n}": 14}) for n in (4, 2)]
    page = book(lease("busy", by=2, sim0=10, pins=1), *used)
    there = world(sim0=20, sim2=20, sim4=20)
    assert decide(page, request("qwen", 14), there)[1].retry_at == NOW + 1, "the first of them"


@pytest.mark.parametrize("owner", [1, 2])
def test_keep_alive_is_no_reservation(owner):
    """It says when an idle model may leave by itself. Equal importance takes the room, less waits."""
    alive = lease("alive", by=owner, sim0=14, keep_alive=600, last_used=NOW - 100)
    _, verdict = decide(book(alive), request("qwen", 14), world(sim0=20))
    assert [*(step.lease for step in verdict.steps), *verdict.asked] == [alive.id]
    _, verdict = decide(book(alive), request("qwen", 14, importance="low"), world(sim0=20))
    assert (verdict.steps, verdict.asked) == ((), ())


def test_a_lease_whose_last_move_failed_is_no_victim_until_its_time():
    """However long it is idle or how urgent the request is."""
    failed = lease("failed", sim0=14, last_used=1, moves_again_at=NOW + 8)
    after, verdict = decide(book(failed), request("qwen", 14, importance=1), world(sim0=20))
    assert (verdict.steps, verdict.retry_at) == ((), NOW + 8)
    assert verdict.because == (
        "failed (14.0 GiB on sim:0) could not be moved; its process tries again"
    )
    assert leaving(after, request("qwen", 14), world(sim0=20, now=NOW + 8)) == ["failed"]
    page = book(failed, lease("next", sim0=14, last_used=2))
    assert leaving(page, request("qwen", 14), world(sim0=34)) == ["next"]
    # The answer to an order is a `failed` event too, and does not explain why a lease stays.
    stuck = lease("stuck", sim0=14, last_used=1, moves_again_at=NOW + 8)
    because = "stuck stays where it is: a thread of its own runs (loader)."
    earlier = Event(1, WALL, "stuck", "failed", "abandoned", "a: busy.", owner=stuck.owner)
    event = replace(earlier, seq=2, because=because)
    page = replace(book(stuck), events=(earlier, event))
    order = Order("a pin", "pin", "stuck")
    page = answer(page, world(), stuck.owner, order, "failed", "bob may not pin it: only ann may")
    _, verdict = decide(page, request("qwen", 14), world(sim0=20))
    assert verdict.because == (
        "stuck (14.0 GiB on sim:0) could not be moved: a thread of its own runs (loader); "
        "its process tries again"
    )


def test_a_request_never_displaces_a_more_important_lease():
    """A request that waited long is served earlier, but it may evict no more than before."""
    high = lease("mine", sim0=14, importance="high")
    _, verdict = decide(book(high), request("qwen", 14, arrived=1.0), world(sim0=20))
    assert (verdict.steps, verdict.because) == (
        (),
        "mine (14.0 GiB on sim:0) is more important (importance 5, ours 10)",
    )


def test_the_least_important_leave_first_whatever_their_card_and_the_policy_decides_among_equals():
    batch = lease("batch", sim0=5, importance="batch", last_used=900)
    page = book(batch, lease("old", sim0=5, last_used=1), lease("new", sim0=5, last_used=2))
    assert leaving(page, request("q", 10), world(sim0=20)) == ["batch"]
    assert leaving(page, request("q", 15), world(sim0=20)) == ["batch", "old"]
    page = book(
        lease("high", sim0=14, importance="high", reload_seconds=1),
        lease("low", sim1=14, importance="low", reload_seconds=60),
    )
    urgent = request("urgent", 14, importance="urgent")
    assert leaving(page, urgent, world(sim0=20, sim1=20)) == ["low"]
    asked, there = request("q", 14), world(sim0=20, sim1=20)
    quick = lease("quick", sim1=14, restore_seconds=1, reload_seconds=99)
    assert leaving(book(lease("slow", sim0=14, reload_seconds=60), quick), asked, there) == [
        "quick"
    ]
    page = book(lease("newer", sim0=14, last_used=2), lease("older", sim1=14, last_used=1))
    assert leaving(page, asked, there) == ["older"]


def test_models_are_offloaded_first_the_precious_before_others():
    old, asked, there = lease("old", sim0=10), request("q", 14), world(sim0=20, host=10)
    assert isinstance(decide(book(old), asked, there)[1].steps[0], Move)
    _, verdict = decide(book(old, lease("warm", host=4)), asked, there)
    assert isinstance(verdict.steps[0], Drop) and "is unloaded." in verdict.because
    _, verdict = decide(book(old), asked, world(sim0=20, host=10, offload=False))
    assert isinstance(verdict.steps[0], Drop)
    # They cannot be dropped, so they go to the host; the other model can be loaded again.
    adopted = lease("adopted", sim0=10, droppable=False, last_used=900)
    page = book(adopted, lease("old", sim0=10, last_used=1))
    _, verdict = decide(page, request("q", 20), world(sim0=20, host=10))
    steps = {step.lease: type(step) for step in verdict.steps}
    assert steps == {adopted.id: Move, at(1, "old"): Drop}


@pytest.mark.parametrize("warm_owner", [1, 2])
def test_the_warm_pool_makes_room_for_precious_weights(warm_owner):
    """The host is full with a warm model, which is dropped, whoever owns it."""
    page = book(lease("warm", by=warm_owner, host=8), lease("adopted", sim0=8, droppable=False))
    page, heard = ask_until(page, request("q", 8), world(sim0=8, host=8))
    assert isinstance(heard[-1], Grant)
    assert page.find(at(1, "adopted")).on_host and page.find(at(warm_owner, "warm")) is None
    assert [event.action for event in page.events if event.model == "warm"] == ["unloaded"]


def test_the_sentences_about_a_notebooks_own_memory_name_the_notebook():
    """They read "a notebook's memory is being evicted", and "pid 2 is asked to evict pid 2"."""
    memory = lease("kernel", by=2, sim0=12, kind="kernel", droppable=False)
    page, verdict = decide(book(memory), request("qwen", 12), world(sim0=20))
    assert verdict.because == (
        "qwen needs 12.0 GiB; sim:0 has 8.0 GiB free. "
        "pid 2 is asked to move its memory (12.0 GiB, idle 17 min) to RAM."
    )
    leaving = replace(memory, phase=Phase.LEAVING, key="x", target=whole(HOST, 12))
    _, verdict = decide(book(leaving), request("qwen", 12), world(sim0=20))
    assert verdict.because.endswith(" free. pid 2 is being moved to RAM.")
    because = "pid 2 stays where it is: a thread of its own runs (loader)."
    event = Event(1, WALL, "kernel", "failed", "move", because, owner=leaving.owner)
    page = replace(book(leaving), events=(event,))
    _, verdict = decide(page, request("qwen", 12), world(sim0=20))
    assert "being moved" not in verdict.because
    assert verdict.because.endswith(
        "could not be moved: a thread of its own runs (loader); its process tries again."
    )


@pytest.mark.parametrize("holder", [1, 2])
def test_a_block_of_code_evicts_the_memory_of_other_notebooks_only(holder):
    """The block runs in its own kernel, and needs what that kernel holds."""
    kernel = lease("kernel", by=holder, sim0=12, kind="kernel", droppable=False)
    page = book(kernel, owners=(1, 2))
    _, verdict = decide(page, request("code#1", 12, kind="block"), world(sim0=20))
    assert verdict.asked == ((kernel.id,) if holder == 2 else ()) and not verdict.steps


def test_room_that_is_being_made_is_not_made_twice():
    there = world(sim0=20)
    page = book(lease("a", by=2, sim0=10), lease("b", by=2, sim0=10))
    page, first = decide(page, request("big", 10, key="1"), there)
    page, second = decide(page, request("big2", 10, by=3, key="2", arrived=NOW + 1), there)
    assert first.asked == (at(2, "a"),) and second.asked == (at(2, "b"),)
    page = book(lease("going", sim0=10, phase=Phase.LEAVING, key="x"), lease("idle", sim0=10))
    page, verdict = decide(page, request("q", 10), world(sim0=20))
    assert verdict.because == "q needs 10.0 GiB; sim:0 has 0 B free. going is being evicted."
    assert verdict.steps == ()


# -- 6. deadlocked: see test_deadlock.py -----------------------------------------------------------


# -- 7. otherwise ----------------------------------------------------------------------------------
def test_the_leases_in_the_way_are_named():
    page = book(
        lease("llama", by=2, sim0=8, pins=1, pinned_since=NOW - 200),
        block("training", by=3, sim0=4),
    )
    _, verdict = decide(page, request("qwen", 14), world(sim0=20))
    assert verdict.because == (
        "llama (8.0 GiB on sim:0) is in use by pid 2 for 3 min; "
        "training (4.0 GiB on sim:0) is held by running code by pid 3"
    )
    assert verdict.blockers == (at(2, "llama"), at(3, "training"))
    assert (verdict.asked, verdict.steps) == ((), ())


def test_a_ticket_keeps_its_place_and_is_refreshed_if_its_request_waits():
    busy = lease("busy", by=2, sim0=8, pins=1)
    wanted = replace(request("qwen", 14, key="k"), users=3)
    page, _ = decide(book(busy), wanted, world(sim0=20))
    because = "busy (8.0 GiB on sim:0) is in use by pid 2"
    kept = ticket("qwen", key="k", arrived=NOW, sim0=14, seconds=15.0, blocked_since=NOW, users=3)
    assert page.tickets == (replace(kept, because=because),)
    page, _ = decide(page, wanted, world(sim0=20, now=NOW + 3))
    assert [(t.refreshed, t.blocked_since) for t in page.tickets] == [(NOW + 3, NOW)]
    assert [event.action for event in page.events] == ["waiting"]
    page = book(lease("busy", sim0=8, pins=1))
    assert decide(page, request("qwen", 14, wait=False), world(sim0=20))[0] == page


def test_only_an_owner_that_still_holds_an_idle_lease_is_silent_after_two_seconds():
    """However often the request is decided meanwhile. For other leases the time begins anew."""
    page, wanted = book(lease("theirs", by=2, sim0=14)), request("qwen", 14)
    for seconds in (0, 0.7, 1.4, 1.9, 2):
        page, verdict = decide(page, wanted, world(sim0=20, now=NOW + seconds))
        assert verdict.asked == (at(2, "theirs"),)
        assert verdict.silent == ((at(2, "theirs"),) if seconds == 2 else ())
    used = page.with_lease(lease("theirs", by=2, sim0=14, pins=1))
    other = book(*used.leases(), lease("other", by=3, sim1=14), tickets=page.tickets)
    there = world(sim0=20, sim1=20, now=NOW + 3)
    again, verdict = decide(other, wanted, there)
    assert (verdict.asked, again.tickets[0].recalled_since) == ((at(3, "other"),), NOW + 3)
    # It was loaded again, or its cell began, after the owner had obeyed.
    recall = ticket("qwen", sim0=14, recalls={at(2, "theirs"): 0}, recalled_since=NOW - 9)
    for fields in ({"away_since": NOW - 8}, {"pins": 1}):
        page = book(lease("theirs", by=2, sim0=14, **fields), tickets=[recall])
        assert decide(page, request("qwen", 14), world(sim0=20))[1].silent == ()


def test_a_full_page_refuses_what_is_new_and_restores_what_it_holds():
    """Without an entry for a ticket, the room that victims free could not be reserved."""
    many = [lease(f"m{n}", host=0) for n in range(MOST_ENTRIES - 1)]
    page = book(lease("old", sim0=10), *many)
    after, verdict = decide(page, request("qwen", 14), world(sim0=20))
    assert verdict == Refuse(
        f"the book is full: {MOST_ENTRIES} holders and requests", kind="full", need_bytes=14 * GIB
    )
    assert list(after.leases()) == list(page.leases()) and after.tickets == ()
    assert decide(page, request("small", 1), world(sim0=20))[1].kind == "full"
    many = [lease(f"m{n}", host=0) for n in range(MOST_ENTRIES - 1)]
    _, verdict = decide(book(lease("warm", host=1), *many), request("warm", 1), world(sim0=20))
    assert isinstance(verdict, Grant)


# -- a full page -----------------------------------------------------------------------------------
def full_page(*more, importance="batch", by=2, **fields):
    """A page with as many idle models as it can hold, in addition to the leases `more`."""
    rest = MOST_LEASES - len(more)
    many = [
        lease(f"m{n}", by=by, host=0, importance=importance, last_used=NOW - 1000 - n, **fields)
        for n in range(rest)
    ]
    return book(*many, *more, owners=(1, 2))


def test_an_entry_is_evicted_like_bytes():
    """If the page is full, an idle model leaves: 256 idle `batch` models made an `urgent` request fail."""
    there = world(sim0=20)
    page, verdict = decide(full_page(), request("qwen", 1, importance=0), there)
    assert isinstance(verdict, Wait) and verdict.asked == (at(2, f"m{MOST_LEASES - 1}"),)
    assert verdict.because == (
        f"The book is full ({MOST_LEASES} holders and requests); pid 2 is asked to unload "
        f"m{MOST_LEASES - 1} (idle {show_seconds(999 + MOST_LEASES)})."
    )
    page, steps, _ = obey(page, owner(2).id, there, "k2")
    assert [(type(step), step.lease) for step in steps] == [(Drop, verdict.asked[0])]
    again, waiting = decide(page, request("qwen", 1, importance=0), there)
    assert isinstance(waiting, Wait) and waiting.asked == verdict.asked, "no second one leaves"
    page = left(again, steps[0], (), there)
    assert isinstance(decide(page, request("qwen", 1, importance=0), there)[1], Grant)
    there = world(sim0=20)
    page, verdict = decide(full_page(by=1), request("qwen", 1), there)
    [step] = verdict.steps
    assert isinstance(step, Drop) and verdict.asked == ()
    page = left(page, step, (), there)
    assert isinstance(decide(page, request("qwen", 1), there)[1], Grant)
    found = plan(full_page(), request("qwen", 1, wait=False), world(sim0=20), lru)
    assert found.granted and [type(step) for step in found.steps] == [Drop, Load]


def test_a_model_on_a_device_leaves_for_the_warm_pool_first_and_then_the_page():
    """The owner offloads the model on request, and then drops it. The entry is free after the second step."""
    there = world(sim0=20)
    idle = lease("idle", by=2, sim0=1, importance="batch", last_used=NOW - 9999)
    page = full_page(idle, importance=-1)
    page, verdict = decide(page, request("qwen", 1, importance=0), there)
    assert verdict.asked == (idle.id,), "all others are more important"
    page, [step], _ = obey(page, owner(2).id, there, "k2")
    assert isinstance(step, Move)
    again, waiting = decide(page, request("qwen", 1, importance=0), there)
    assert waiting.asked == (idle.id,)
    page = left(again, step, step.shares, there)
    later = world(sim0=20, now=NOW + 60)
    page, verdict = decide(page, request("qwen", 1, importance=0), later)
    page, [step], _ = obey(page, owner(2).id, later, "k3")
    assert isinstance(step, Drop) and step.lease == idle.id


@pytest.mark.parametrize(
    "kept", [{"pins": 1}, {"keep": True}, {"droppable": False}, {"importance": "urgent"}]
)
def test_an_entry_is_not_evicted_where_bytes_would_not_be(kept):
    """A full page does not evict models that are in use, kept, more important, or the only copy of their weights."""
    fields = {"importance": "batch"} | kept
    page, verdict = decide(full_page(**fields), request("qwen", 1), world(sim0=20))
    assert verdict.kind == "full" and page.tickets == ()


def test_requests_have_entries_that_leases_cannot_take():
    """An operator can still send a request to an owner when the page is full of waiting requests."""
    idle = lease("idle", by=2, sim0=8)
    tickets = [ticket(f"t{n}", by=1, key=f"1:t{n}") for n in range(MOST_WAITING - 1)]
    page = book(idle, owners=(1, 2), tickets=tickets)
    assert decide(page, request("qwen", 14), world(sim0=20))[1].kind == "full"
    asked = new_order("1:evict", owner(1).id, "evict", idle.id, NOW)
    after, verdict = ask(page, asked, world(sim0=20))
    assert isinstance(verdict, Wait) and after.entries == MOST_WAITING + 1 <= MOST_ENTRIES


# -- the limit of one process ----------------------------------------------------------------------
def test_one_process_s_own_limit_makes_its_own_models_leave_first_or_refuses():
    """INFERENCE_MEMORY_LIMIT_GB bounds the bytes of one process on all cards, after possible evictions."""
    page = book(lease("mine", sim0=6), lease("theirs", by=2, sim1=6, last_used=-9))
    for devices in ((), ("sim:1",)):  # whichever card the new model is for
        wanted = request("qwen", 6, devices=devices)
        _, verdict = decide(page, wanted, world(sim0=20, sim1=20, limit_bytes=size(10)))
        assert [step.lease for step in verdict.steps] == [at(1, "mine")] and verdict.asked == ()
    # Weights for which RAM has no room stay, and another own model leaves in their place.
    only = lease("only", sim0=3, last_used=-9, droppable=False)
    there = world(sim0=20, sim1=20, host=1, limit_bytes=size(10))
    _, verdict = decide(
        book(only, lease("mine", sim0=6)), request("qwen", 3, devices=("sim:1",)), there
    )
    assert [step.lease for step in verdict.steps] == [at(1, "mine")]
    there = world(sim0=20, sim1=20, limit_bytes=size(12))
    assert isinstance(decide(page, request("qwen", 6), there)[1], Grant), "exactly the limit"
    page = book(lease("mine", sim0=6, pins=1))
    _, verdict = decide(page, request("qwen", 6), world(sim0=20, limit_bytes=size(10)))
    assert verdict == Refuse(
        "Loading 'qwen' (6.0GB) would exceed memory limit (6.0GB + 6.0GB > 10.0GB)",
        kind="limit",
        need_bytes=6 * GIB,
        budget_bytes=4 * GIB,
    )


def test_the_own_limit_counts_what_stays_and_names_it_on_all_cards():
    """It cannot leave. If its bytes were not counted, the request would wait for ever."""
    page = book(lease("adopted", sim0=9, droppable=False), lease("warm", host=2, droppable=False))
    there = world(sim0=10, sim1=10, host=9, limit_bytes=size(12))
    assert decide(page, request("qwen", 4), there)[1].kind == "limit"
    assert isinstance(decide(page, request("qwen", 3), there)[1], Grant)
    theirs = book(*(replace(one, owner=owner(2).id) for one in page.leases()), owners=(1, 2))
    assert isinstance(decide(theirs, request("qwen", 4), there)[1], Grant), "nor those of others"
    mine = lease("mine", sim1=6, moves_again_at=NOW + 8)
    there = world(sim0=20, sim1=20, limit_bytes=size(10))
    _, verdict = decide(book(mine), request("qwen", 6, devices=("sim:0",)), there)
    assert "mine (6.0 GiB on sim:1) could not be moved" in verdict.because


def test_the_own_limit_counts_neither_leaving_leases_nor_blocks():
    """Otherwise a second model would be evicted for the room that the first one frees."""
    going = lease("going", sim0=6, phase=Phase.LEAVING, key="x")
    there = world(sim0=20, sim1=20, limit_bytes=size(10))
    _, verdict = decide(book(going, lease("mine", sim1=4)), request("qwen", 6), there)
    assert isinstance(verdict, Wait) and verdict.steps == ()
    page, there = book(block(sim0=6, pins=1)), world(sim0=20, limit_bytes=size(10))
    assert isinstance(decide(page, request("qwen", 6), there)[1], Grant)
    wanted = request("code#1", 6, kind="block")
    assert isinstance(decide(book(lease("m", sim0=6)), wanted, there)[1], Grant)


# -- measured devices ------------------------------------------------------------------------------
def real(free, **words):
    return world(cuda0=20, free={"cuda:0": free}, **words)


@pytest.mark.parametrize(
    "there, because",
    [
        (world(cuda0=20), "cuda:0 has not been measured yet"),
        (real(None), "the driver of cuda:0 does not say how much memory is free"),
        (real(20, taken_at=NOW - 8), "the last measurement of cuda:0 is 8.0 s old"),
    ],
)
def test_on_an_unmeasured_card_grants_wait_and_nothing_is_evicted(there, because):
    """Unknown free memory is neither zero nor free (law 11)."""
    page = book(lease("idle", cuda0=18))
    after, verdict = decide(page, request("small", 1), there)
    assert (verdict.because, verdict.steps, verdict.retry_at) == (because, (), NOW + 1)
    assert isinstance(decide(page, request("large", 14), there)[1], Wait)
    assert decide(page, request("large", 14), there)[1].steps == ()


def test_a_measured_card_is_used_if_another_is_not_measured():
    """A sample is believed for five seconds. A model is not divided over a card without one."""
    there = world(cuda0=20, cuda1=20, cuda2=20, free={"cuda:1": 20, "cuda:2": 20}, taken_at=NOW - 5)
    _, verdict = decide(book(), request("q", 4), there)
    assert verdict.lease.target == whole("cuda:1", 4)
    halves = {"layout": "balanced", "rules": {"margin_bytes": 0, "least_cards": 2, "most_cards": 2}}
    _, verdict = decide(book(), request("q", 4, **halves), there)
    assert {share.device for share in verdict.lease.target} == {"cuda:1", "cuda:2"}
    page = book(*(lease(f"m{n}", **{f"cuda{n}": 20}) for n in range(3)))
    full = world(cuda0=20, cuda1=20, cuda2=20, free={"cuda:1": 0, "cuda:2": 0})
    _, verdict = decide(page, request("q", 40, **halves), full)
    assert {step.lease for step in verdict.steps} == {at(1, "m1"), at(1, "m2")}


def test_memory_outside_the_leases_is_named_as_the_reason_to_wait():
    _, verdict = decide(book(), request("q", 14), real(6))
    assert verdict == Wait(
        "cuda:0 has 6.0 GiB free as measured, 14.0 GiB are needed; memory of other programs is in "
        "the way",
        retry_at=NOW + 1,
        considered=verdict.considered,
    )


def test_no_lease_is_evicted_for_bytes_that_left_after_the_sample():
    """A card is measured once a second, so each decision in between would evict another model."""
    there = real(0, taken_at=NOW - 1)
    page = book(lease("a", cuda0=10, last_used=1), lease("b", cuda0=10, last_used=2))
    page, verdict = decide(page, request("q", 10), there)
    for step in verdict.steps:
        page = left(page, step, step.shares, there)
    page, verdict = decide(page, request("q", 10), there)
    assert verdict.steps == () and verdict.retry_at == NOW + 1
    assert verdict.because == (
        "q needs 10.0 GiB; cuda:0 has 0 B free. The next measurement will show what was just freed."
    )
    later = world(cuda0=20, free={"cuda:0": 10}, now=NOW + 1)
    assert isinstance(decide(page, request("q", 10), later)[1], Grant)


# -- plan ------------------------------------------------------------------------------------------
def test_a_plan_lists_every_step_and_does_none():
    page = book(lease("old", sim0=14), lease("qwen", host=14))
    told = plan(page, request("qwen", 14), world(sim0=20), lru)
    assert told.granted and told.shares == whole("sim:0", 14)
    assert bare(told.steps) == [
        Move(at(1, "old"), whole("sim:0", 14), whole(HOST, 14)),
        Move(at(1, "qwen"), whole(HOST, 14), whole("sim:0", 14)),
    ]
    assert told.because == (
        "qwen needs 14.0 GiB; sim:0 has 6.0 GiB free. "
        "old (14.0 GiB, idle 17 min) is offloaded to RAM. "
        "Then sim:0 has 20.0 GiB free and would keep 6.0 GiB."
    )
    page = book(lease("a", cuda0=10, last_used=1), lease("b", cuda0=10, last_used=2))
    told = plan(page, request("q", 10), real(0), lru)
    assert told.granted and [step.lease for step in told.steps] == [at(1, "a"), at(1, "q")]


def test_a_plan_spends_the_hosts_bytes_once_and_shows_every_way():
    """Two models of another owner leave, and the host has room for one. All cards are compared."""
    page = book(lease("a", by=2, sim0=10), lease("b", by=2, sim0=10))
    told = plan(page, request("q", 20), world(sim0=20, host=15), lru)
    assert sorted(type(step).__name__ for step in told.steps) == ["Drop", "Load", "Move"]
    page = book(*(lease(f"m{n}", **{f"sim{n}": 9}) for n in range(12)))
    there = world(**{f"sim{n}": 9 for n in range(12)})
    told = plan(page, request("q", 9, wait=False), there, lru)
    assert sum(bool(one.victims) for one in told.considered) == 12


# -- the sentences ---------------------------------------------------------------------------------
def test_decisions_are_events():
    page, _ = decide(book(), request("qwen", 14), world(sim0=20))
    page, _ = decide(page, request("big", 30), world(sim0=20))
    told = [(e.seq, e.model, e.action, e.reason, e.bytes, e.device) for e in page.events]
    assert told == [
        (1, "qwen", "granted", "request", 14 * GIB, "sim:0"),
        (2, "big", "refused", "hopeless", 30 * GIB, "sim:0"),
    ]
    assert {(e.owner, e.wall) for e in page.events} == {("1.1.0", WALL + NOW)}
    assert all(event.because for event in page.events)
    assert page.sections["1.1.0"].counts == {"refused": 1}


def test_only_a_few_of_many_leases_in_the_way_are_named():
    """Sixty-four models in use on one card once made a message of 5,000 characters."""
    for count, named in ((4, 4), (5, 5), (6, 4), (64, 4)):
        crowd = [lease(f"m{n}", sim0=1, pins=1) for n in range(count)]
        _, verdict = admit(book(*crowd), request("qwen", gib=1), world(sim0=count), lru)
        assert verdict.because.count(" is in use") == named
        assert verdict.because.count("; ") == named - (count == named)
        assert verdict.because.endswith(f"; and {count - named} more") == (count > named)
        assert len(verdict.blockers) == count
