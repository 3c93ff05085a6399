"""How one owner requests something of another owner, and how that owner obeys."""

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    IMPORTANCE,
    MOST_ENTRIES,
    Asker,
    Drop,
    Event,
    Grant,
    Lease,
    Move,
    Phase,
    Refuse,
    Share,
    Wait,
)
from gpu_runtime.scheduler.recall import (
    DISK,
    Order,
    answer,
    ask,
    declined,
    must_pause,
    new_order,
    obey,
)
from gpu_runtime.scheduler.transitions import left
from tests.worlds import NOW, at, book, lease, owner, replayed, size, ticket, world

THERE = world(sim0=20)


def asked(verb, target="qwen", by=2, of=1):
    return new_order(f"{by}:{verb}", owner(by).id, verb, at(of, target), NOW)


def asking(page, verb, target="qwen", there=THERE):
    return replayed(lambda book: ask(book, asked(verb, target), there), page)


def obeying(page, by=1, there=THERE):
    return replayed(lambda book: obey(book, owner(by).id, there, "k"), page)


def two(*leases, **fields):
    return book(*leases, owners=(1, 2), **fields)


# -- evict -----------------------------------------------------------------------------------------
def test_an_evict_is_a_ticket_of_the_asker_that_the_owner_obeys():
    """Other processes request, and only the owner acts. Grace does not apply to a person's request."""
    qwen = lease("qwen", sim0=8, last_used=NOW - 1)
    page, verdict = asking(two(qwen), "evict")
    assert verdict == Wait("pid 1 was asked to evict qwen", recalls={qwen.id: 0}, silent=(qwen.id,))
    page, steps, orders = obeying(page)
    [step] = steps
    to_host = (Share(HOST, size(8)),)
    move = Move(qwen.id, qwen.shares, to_host, "pid 2 asked to evict it.", "evict", "pid 2")
    assert (step, orders) == (move, ())
    assert (page.find(qwen.id).phase, page.find(qwen.id).key) == (Phase.LEAVING, "k")
    page = left(page, step, step.shares, THERE, by="pid 2")
    page, verdict = asking(page, "evict")
    assert isinstance(verdict, Grant)
    assert verdict.because == "qwen is in RAM"
    assert page.tickets == ()
    assert page.events[-1].by == "pid 2"


def test_a_model_in_use_is_not_evicted_and_the_refusal_names_its_user():
    page, verdict = asking(two(lease("qwen", sim0=8, pins=1, pinned_since=NOW - 200)), "evict")
    because = "qwen (8.0 GiB on sim:0) is in use by pid 1 for 3 min"
    assert verdict == Refuse(because, kind="in use", holders=(at(1, "qwen"),))
    assert page.tickets == ()
    busy = two(lease("qwen", sim0=8, pins=1), tickets=[evicting()])
    after, steps, orders = obeying(busy)
    assert (steps, orders) == ((), ()), "nor where the ask came before the use"
    [event] = after.events
    assert (event.action, event.answers) == ("declined", busy.tickets[0].key)
    assert obeying(after)[0] == after, "an owner answers once"


def test_whether_a_lease_is_in_use_is_asked_of_its_owner():
    """The end of a use is published seconds later: `gpu park` was refused "in use for 745 ms"."""
    used = two(lease("qwen", sim0=8, pins=1))
    move = replace(asked("move"), places=("sim:1",))
    for believes, verdict in ((True, Refuse), (False, Wait)):
        assert isinstance(ask(used, move, THERE, believes_book=believes)[1], verdict)
    wish = asked("evict")
    page, verdict = ask(used, wish, THERE, believes_book=False)
    assert isinstance(verdict, Wait) and page.tickets
    idle = page.with_lease(lease("qwen", sim0=8))
    page, steps, _ = obeying(idle)
    assert [step.lease for step in steps] == [at(1, "qwen")]
    said, _, _ = obeying(ask(used, wish, THERE, believes_book=False)[0])
    _, verdict = ask(said, wish, THERE, believes_book=False)
    assert isinstance(verdict, Refuse) and verdict.kind == "in use"
    assert verdict.because == "qwen (8.0 GiB on sim:0) is in use by pid 1"


@pytest.mark.parametrize(
    "reason, again",
    [
        ("a cell runs", ". Request it again in 30 s"),
        ("a thread of its own runs (loader)", ""),
        ("a process group is open (torch.distributed)", ""),
    ],
)
def test_a_request_is_repeated_only_where_that_helps(reason, again):
    """A thread, a process group or a pool ends by an act of the notebook's user, and not by itself."""
    held = lease("kernel", sim0=8, kind="kernel", droppable=False, moves_again_at=NOW + 30)
    event = Event(
        1, 0.0, "kernel", "failed", "move", f"pid 1 stays where it is: {reason}.", owner=held.owner
    )
    _, verdict = asking(replace(two(held), events=(event,)), "evict", target="kernel")
    assert verdict.because == f"pid 1 (8.0 GiB on sim:0) could not be moved: {reason}{again}"


def evicting(by=2):
    return ticket(at(1, "qwen"), by=by, verb="evict", recalls={at(1, "qwen"): 0})


FIXED = dict(droppable=False, movable=False)
CODE = "is memory of running code of pid 1; it is freed when that code ends"


@pytest.mark.parametrize(
    "fields, kind, because",
    [
        (dict(keep=True), "kept", "is pinned to its device; unpin it first"),
        (dict(kind="block", **FIXED), "in use", CODE),
        (FIXED, "stays", "exists nowhere else, and its process cannot move it"),
        (dict(kind="kernel", **FIXED), "stays", "is exempt from parking"),
        (
            dict(moves_again_at=NOW + 30),
            "failed",
            "could not be moved. Request it again in 30 s",
        ),
    ],
    ids=["kept", "block", "precious", "exempt", "failed"],
)
def test_an_eviction_that_is_impossible_is_refused_at_once(fields, kind, because):
    """A person's request that can never be met is refused at once, and does not wait for its time-out."""
    stays = lease("qwen", sim0=8, **fields)
    name = "pid 1" if kind == "stays" and stays.kind == "kernel" else "qwen"
    because = f"{name} {because}" if kind == "kept" else f"{name} (8.0 GiB on sim:0) {because}"
    page, verdict = asking(two(stays), "evict")
    assert verdict == Refuse(because, kind=kind, holders=(stays.id,)) and page.tickets == ()
    waiting = two(stays, tickets=[evicting()])
    assert obeying(waiting) == (waiting, (), ())


def test_an_eviction_by_a_person_unloads_the_owners_warm_pool_if_needed():
    """First the owner drops models in host memory, then the host has room for precious weights."""
    there = world(sim0=20, host=8)
    only = lease("qwen", sim0=8, droppable=False)
    page, verdict = asking(two(only, lease("warm", host=8)), "evict", there=there)
    assert isinstance(verdict, Wait)
    page, [drop], _ = obeying(page, there=there)
    assert isinstance(drop, Drop) and drop.lease == at(1, "warm")
    assert drop.because == "RAM is full; pid 2 asked to evict it."
    page = left(page, drop, (), there)
    _, [move], _ = obeying(page, there=there)
    assert (type(move), move.lease) == (Move, at(1, "qwen"))
    theirs = two(only, lease("warm", by=2, host=8))
    assert asking(theirs, "evict", there=there)[1].kind == "stays", "others keep theirs"


@pytest.mark.parametrize("droppable", [True, False])
@pytest.mark.parametrize("place", ["sim0", "host"])
def test_an_eviction_to_the_disk_leaves_nothing_in_host_memory(place, droppable):
    """`gpu evict --drop`, also of a model that is in host memory. The only copy of weights stays."""
    qwen = lease("qwen", droppable=droppable, **{place: 8})
    wish = replace(asked("evict"), places=(DISK,))
    page, verdict = ask(two(qwen), wish, THERE)
    stays = place == "host" and not droppable
    assert isinstance(verdict, Grant if stays else Wait)
    steps = () if stays else obeying(page)[1]
    assert [type(step) for step in steps] == ([] if stays else [Drop if droppable else Move])


@pytest.mark.parametrize(("host", "leaves"), [(7, False), (8, True)])
def test_a_copy_of_some_bytes_is_no_room_for_the_others(host, leaves):
    """The offload needs the whole model's bytes in host memory. The copy takes some of them already."""
    half = lease("qwen", sim0=8, shadow_bytes=size(4), droppable=False)
    _, verdict = asking(two(half), "evict", there=world(sim0=20, host=host))
    assert isinstance(verdict, Wait) == leaves


def test_evicting_what_is_gone_is_granted_and_an_owner_that_is_gone_cannot_act():
    assert asking(two(), "evict")[1] == Grant(Lease("1.1.0", "qwen"), (), "qwen is not loaded")
    assert asking(two(lease("qwen", host=8)), "evict")[1].because == "qwen is in RAM"
    page = two(lease("qwen", sim0=8))
    page, _ = asking(page, "evict")
    sections = {id: one for id, one in page.sections.items() if id == owner(2).id}
    page, verdict = asking(replace(page, sections=sections), "evict")
    assert verdict == Refuse("the process that held qwen is gone", kind="gone")
    assert page.tickets == ()


def test_a_full_page_refuses_a_request_to_an_owner_but_no_repeated_one():
    """The ledger would refuse another ticket, so the verdict refuses the request and explains why."""
    page = two(lease("qwen", sim0=8), *(lease(f"m{n}", host=0) for n in range(MOST_ENTRIES - 1)))
    after, verdict = asking(page, "evict")
    assert (after, verdict.kind) == (page, "full")
    page, _ = asking(two(lease("qwen", sim0=8)), "evict")
    again, _ = replayed(lambda book: ask(book, asked("evict"), world(sim0=20, now=NOW + 1)), page)
    assert [t.refreshed for t in again.tickets] == [NOW + 1]


# -- pin, unpin, preload, restore, defrag: orders --------------------------------------------------
@pytest.mark.parametrize("verb, before", [("pin", False), ("unpin", True)])
def test_pin_and_unpin_are_orders_to_the_owner(verb, before):
    page, verdict = asking(two(lease("qwen", sim0=8, keep=before)), verb)
    asked = (at(1, "qwen"),)
    assert verdict == Wait(f"pid 1 was asked to {verb} qwen", recalls={asked[0]: 0}, silent=asked)
    order = Order(f"2:{verb}", verb, "qwen", who="pid 2", asker="2.1.0")
    assert obeying(page)[1:] == ((), (order,))
    assert obeying(page, by=2)[1:] == ((), ()), "nobody else obeys it"
    page, verdict = asking(two(lease("qwen", sim0=8, keep=not before), tickets=page.tickets), verb)
    assert isinstance(verdict, Grant) and page.tickets == ()


def test_a_model_without_a_lease_can_be_loaded_and_not_pinned():
    assert asking(two(), "pin")[1] == Refuse("pid 1 does not hold qwen", kind="unknown")
    target = (Share("sim:0", size(8)),)
    arriving = lease("qwen", host=8, phase=Phase.ARRIVING, target=target, pins=1)
    leaving = lease("qwen", sim0=8, phase=Phase.LEAVING, key="x")
    for moving in (arriving, leaving):
        assert isinstance(asking(two(moving), "preload")[1], Wait)


def test_a_model_is_loaded_by_a_process_that_has_registered_it():
    page, verdict = asking(two(), "preload")
    assert isinstance(verdict, Wait)
    assert obeying(page)[2] == (Order("2:preload", "preload", "qwen", who="pid 2", asker="2.1.0"),)
    there = two(lease("qwen", sim0=8), tickets=page.tickets)
    assert asking(there, "preload")[1].because == "qwen is on sim:0"


def test_an_owner_answers_an_order_and_the_requester_gets_the_answer():
    page, _ = asking(two(), "defrag")
    [order] = obeying(page)[2]
    because = "1.0 GiB of cached blocks were given back."
    page = answer(page, THERE, "1.1.0", order, "defragmented", because, size(1))
    # the order is carried out once, even if the requester reads the answer late
    assert obeying(page)[2] == ()
    page, verdict = asking(page, "defrag")
    assert isinstance(verdict, Grant) and verdict.because == because
    assert verdict.bytes == size(1)
    assert page.tickets == ()
    order = Order("2:preload", "preload", "qwen")
    failed = answer(two(), THERE, "1.1.0", order, "failed", "it does not fit")
    assert asking(failed, "preload")[1] == Refuse("it does not fit", kind="failed")
    page, _ = asking(two(), "preload")
    forged = answer(page, THERE, "2.1.0", order, "failed", "another owner answers")
    assert isinstance(asking(forged, "preload")[1], Wait) and len(obeying(forged)[2]) == 1


# -- recalls ---------------------------------------------------------------------------------------
def recalling(of=1, **fields):
    return ticket("big", by=2, sim0=14, recalls={at(of, "qwen"): 0}, **fields)


def test_a_recall_is_obeyed_once_where_the_requester_saw_the_model():
    qwen = lease("qwen", sim0=8)
    [step] = obeying(two(qwen, tickets=[recalling()]))[1]
    to_host, because = (Share(HOST, size(8)),), "pid 2 needs room for big."
    assert step == Move(qwen.id, qwen.shares, to_host, because, "recall", "pid 2")
    # It was seen in host memory, whose room is needed; or on its device, from where it has moved
    # since.
    saw_it_warm = two(lease("qwen", host=8, away_since=NOW - 5), tickets=[recalling()])
    assert [type(s) for s in obeying(saw_it_warm)[1]] == [Drop]
    for ago in (0, 0.1):
        earlier = [recalling(refreshed=NOW - ago)]
        saw_it_on_its_device = two(lease("qwen", host=8, away_since=NOW), tickets=earlier)
        assert obeying(saw_it_on_its_device) == (saw_it_on_its_device, (), ())
    only = lease("qwen", host=8, away_since=NOW - 5, droppable=False)
    precious = two(only, tickets=[recalling()])
    assert obeying(precious) == (precious, (), ())


@pytest.mark.parametrize(
    "stays",
    [
        dict(pins=1),
        dict(keep=True),
        dict(importance="high"),
        dict(last_used=NOW - 4),
        dict(phase=Phase.LEAVING, key="x"),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_recall_overrides_no_rule(stays):
    """The book that the requester saw may be a second old. The owner decides by the present state."""
    page = two(lease("qwen", sim0=8, **stays), tickets=[recalling(arrived=NOW - 2)])
    assert obeying(page) == (page, (), ())


@pytest.mark.parametrize(("cap", "leaves"), [("low", False), ("urgent", True)])
def test_a_recall_is_as_important_as_its_user_may_be(cap, leaves):
    """The requester writes the importance of its ticket, so the owner holds it against the user's cap."""
    wish = recalling(importance="urgent")
    page = two(lease("qwen", sim0=8, importance="normal"), tickets=[wish])
    asker = Asker("bob", importance=IMPORTANCE[cap])
    _, steps, _ = obey(page, owner(1).id, THERE, "k", {wish.key: asker})
    assert bool(steps) == leaves


def test_no_lease_is_evicted_for_a_stopped_process_by_another_owner_or_without_proof():
    page = two(lease("qwen", sim0=8), tickets=[recalling(refreshed=NOW - 2.5)])
    assert obeying(page) == (page, (), ())
    pushed = two(lease("qwen", sim0=8), tickets=[evicting()])
    later = world(sim0=20, now=NOW + 60)
    assert obeying(pushed, there=later)[1], "a button that was pushed without waiting still counts"
    copied = lease("qwen", by=3, sim0=8, shadow_bytes=8)
    page = two(copied, tickets=[recalling(of=3, shadows=(copied.id,))])
    assert obeying(page) == (page, (), ())
    # Any member of a shared ledger can write a ticket in another's name. Own tickets need no proof.
    page = two(lease("qwen", sim0=8), tickets=[recalling(), evicting()])
    assert obey(page, owner(1).id, THERE, "k", {}) == (page, (), ())
    own = two(lease("qwen", sim0=8), tickets=[evicting(by=1)])
    assert len(obey(own, owner(1).id, THERE, "k", {})[1]) == 1


def test_recalled_leases_share_the_hosts_bytes_and_move_once():
    full = world(sim0=20, host=4)
    [step] = obeying(two(lease("qwen", sim0=8), tickets=[recalling()]), there=full)[1]
    assert isinstance(step, Drop)
    precious = two(lease("qwen", sim0=8, droppable=False), tickets=[recalling()])
    assert obeying(precious, there=full) == (precious, (), ())
    big = ticket("big", by=2, sim0=16, recalls={at(1, "a"): 0, at(1, "b"): 0})
    page = two(lease("a", sim0=8), lease("b", sim0=8, droppable=False), tickets=[big])
    steps = obeying(page, there=world(sim0=20, host=8))[1]
    assert {step.lease: type(step) for step in steps} == {at(1, "b"): Move, at(1, "a"): Drop}
    page = two(lease("qwen", sim0=8), tickets=[recalling(key="x"), recalling(key="y")])
    assert len(obeying(page)[1]) == 1


# -- who asked -------------------------------------------------------------------------------------
def test_the_events_of_a_request_and_its_outcome_name_the_person():
    """The requester checks the state many times, but only one event is written."""
    wish = replace(asked("evict"), because="ops", said_by="ann, console")
    page, _ = ask(two(lease("qwen", sim0=8)), wish, THERE)
    page, _ = ask(page, wish, THERE)
    [event] = page.events
    assert (event.action, event.model, event.reason) == ("asked", "qwen", "evict")
    assert event.by == "ann, console (ops, pid 2)"
    wish = replace(asked("evict"), because="ops", said_by="ann, console")
    page, _ = ask(two(lease("qwen", sim0=8)), wish, THERE)
    _, steps, _ = obey(page, owner(1).id, THERE, "1:obey", {wish.key: Asker("ops")})
    [step] = steps
    assert step.by == "ann, console (ops, pid 2)"
    assert step.because == "ann, console (pid 2) asked to evict it."


def test_an_answer_and_a_decline_name_the_requester():
    wish = replace(asked("pin"), said_by="ann")
    page, _ = ask(two(lease("qwen", sim0=8)), wish, THERE)
    _, _, [order] = obey(page, owner(1).id, THERE, "1:obey")
    page = answer(page, THERE, owner(1).id, order, "failed", "it is not to be")
    assert ask(page, wish, THERE)[1] == Refuse("it is not to be", kind="failed")
    assert (page.events[-1].by, page.events[-1].device) == ("ann (pid 2)", "sim:0")
    # An event says that a request was declined. For example, a person clicks `evict` while the
    # model is in use.
    wish = replace(asked("evict"), said_by="ann")
    page = declined(two(lease("qwen", sim0=8, pins=1)), wish, THERE, "it is in use")
    [event] = page.events
    assert (event.action, event.model) == ("declined", "qwen")
    assert (event.because, event.by) == ("it is in use", "ann (pid 2)")


# -- ending a wait ---------------------------------------------------------------------------------
def test_a_wait_is_ended_by_its_owner_for_its_own_user():
    """Only the owner withdraws its ticket. The requester reads in the book that this has happened."""
    waits = ticket("qwen", by=1, sim0=14, arrived=NOW - 5)
    page, verdict = asking(two(tickets=[waits]), "cancel")
    qwen = (at(1, "qwen"),)
    assert verdict == Wait(
        "pid 1 was asked to end its wait for qwen", recalls={qwen[0]: 0}, silent=qwen
    )
    _, steps, orders = obeying(page)
    assert (steps, [(order.verb, order.name) for order in orders]) == ((), [("cancel", "qwen")])
    page, verdict = asking(page.without_ticket(waits.key), "cancel")
    assert isinstance(verdict, Grant) and verdict.because == "pid 1 no longer waits for qwen"
    assert page.tickets == ()
    waits = ticket("qwen", by=1, sim0=14, arrived=NOW - 5)
    page, _ = asking(two(tickets=[waits]), "cancel")
    eve = {asked("cancel").key: Asker("eve")}
    _, _, [order] = obey(page, owner(1).id, THERE, "k", eve)
    assert order.refused.startswith("eve may not ask to end its wait for qwen in pid 1: only ")


@pytest.mark.parametrize(
    ("arrived", "by", "done"), [(NOW, 1, Wait), (NOW + 1, 1, Grant), (NOW - 5, 3, Grant)]
)
def test_only_an_earlier_wait_of_the_owner_keeps_the_request(arrived, by, done):
    """A later wait for the same model, or that of another process, is another request."""
    other = ticket("qwen", by=by, sim0=14, arrived=arrived)
    assert isinstance(asking(two(tickets=[other]), "cancel")[1], done)


@pytest.mark.parametrize(
    ("verb", "there", "begun"),
    [
        ("preload", {"tickets": [ticket("qwen", by=1, because="in use")]}, "in use"),
        ("evict", {"phase": Phase.LEAVING}, "and is moving it"),
        ("preload", {"phase": Phase.ARRIVING}, "and is moving it"),
    ],
)
def test_an_owner_that_has_begun_is_not_silent(verb, there, begun):
    """The asker's time-out then gives the owner's reason."""
    tickets = there.pop("tickets", [])
    leases = [lease("qwen", sim0=8, **there)] if there else [lease("other", sim0=1)]
    _, verdict = asking(two(*leases, tickets=tickets), verb)
    assert begun in verdict.because and verdict.silent == ()
    foreign = [replace(one, owner=owner(3).id) for one in tickets]
    if foreign:
        assert asking(two(*leases, tickets=foreign), verb)[1].silent, "another process waits"


# -- uses that overlap
@pytest.mark.parametrize(
    ("waited", "pauses"),
    [(3.9, False), (4, True), (7.4, True), (7.6, False), (8, True), (14.9, True), (15.1, False)],
)
def test_new_uses_pause_for_a_request_that_has_waited(waited, pauses):
    """They begin again for a while, since a use may wait for another one. The pauses double."""
    there = world(sim0=20, most_wait_seconds=4.0)
    used = lease("qwen", sim0=8, pins=2)
    waiting = ticket("llama", by=2, sim0=14, arrived=NOW - waited)
    assert must_pause(two(used, tickets=(waiting,)), used, there) is pauses


@pytest.mark.parametrize(
    ("lease_fields", "ticket_fields"),
    [
        ({"keep": True}, {}),
        ({"importance": 1}, {}),
        ({}, {"by": 1}),
        ({}, {"verb": "evict"}),
        ({}, {"refreshed": NOW - 1000}),
        ({}, {"sim0": 0, "sim1": 14}),
    ],
)
def test_new_uses_pause_for_no_request_that_could_not_have_the_room(lease_fields, ticket_fields):
    there = world(sim0=20, sim1=20, most_wait_seconds=4.0)
    used = lease("qwen", sim0=8, pins=1, **lease_fields)
    fields = {"by": 2, "sim0": 14, "arrived": NOW - 5, **ticket_fields}
    if not fields["sim0"]:
        del fields["sim0"]
    assert not must_pause(two(used, tickets=(ticket("llama", **fields),)), used, there)
