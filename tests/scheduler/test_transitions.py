"""The changes that are made to the book after a step was done."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    MOST_EVENTS,
    Book,
    Device,
    Drop,
    Event,
    Move,
    Phase,
    Sample,
    Section,
    Share,
    decode_book,
    encode,
    overdrafts,
)
from gpu_runtime.ledgers import pieces
from gpu_runtime.scheduler import transitions
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.transitions import Truth, device_names, publish
from tests.worlds import NOW, at, block, book, decide, lease, owner, request, size, ticket, world

ME = owner(1)
THERE = world(sim0=20)


def whole(device, gib):
    return (Share(device, size(gib)),)


def arriving(name="qwen", gib=8, **fields):
    return lease(name, phase=Phase.ARRIVING, key="k", target=whole("sim:0", gib), pins=1, **fields)


def going(name="qwen", gib=8, **fields):
    moving = {"sim0": gib, "target": whole(HOST, gib)}
    return lease(name, phase=Phase.LEAVING, key="k", **moving | fields)


# -- arrived ---------------------------------------------------------------------------------------
def test_a_grant_is_settled_with_measured_bytes():
    told = dict(reload_seconds=3.0, droppable=True)
    before = arriving(reload_seconds=9.0, restore_seconds=1.0)
    page = books.arrived(book(before), ME.id, "qwen", whole("sim:0", 7), THERE, **told)
    times = dict(settled_at=NOW, reload_seconds=3.0, restore_seconds=1.0)  # only the measured one
    settled = lease("qwen", sim0=7, key="k", pins=1, **times)
    assert list(page.leases()) == [settled]
    [event] = page.events
    assert (event.action, event.bytes) == ("loaded", size(7))
    assert event.because == "qwen is on sim:0 now."


def test_facts_are_accepted_even_if_they_show_an_overdraft():
    """The process holds the bytes whether or not the book has them (law 2 in docs/architecture.md)."""
    before = book(arriving(gib=8), lease("other", sim0=12), limits={"sim:0": size(20)})
    after = books.arrived(before, ME.id, "qwen", whole("sim:0", 11), THERE)
    assert after.claims()["sim:0"] == size(23) and overdrafts(before, after) == {}
    [step] = decide(after, request("more", 1), THERE)[1].steps
    assert step.lease == at(1, "other")


def test_a_move_is_recorded_by_where_the_model_was():
    page = book(arriving(host=8, away_since=1.0, reload_seconds=9.0))
    page = books.arrived(page, ME.id, "qwen", whole("sim:0", 8), THERE, restore_seconds=0.5)
    assert (page.events[-1].action, page.sections[ME.id].counts) == ("restored", {"restored": 1})
    qwen = page.find(at(1, "qwen"))
    assert (qwen.away_since, qwen.restore_seconds, qwen.reload_seconds) == (0.0, 0.5, 9.0)
    page = books.arrived(book(arriving(sim1=8)), ME.id, "qwen", whole("sim:0", 8), THERE)
    assert page.events[-1].action == "moved" and page.sections[ME.id].counts == {}
    held = block(phase=Phase.ARRIVING, key="k", target=whole("sim:0", 8))
    page = books.arrived(book(held), ME.id, "code", whole("sim:0", 8), THERE)
    assert page.find(at(1, "code")).where == "sim:0" and page.events == ()


# -- left ------------------------------------------------------------------------------------------
def step(to=HOST):
    qwen, source = at(1, "qwen"), whole("sim:0", 8)
    move = Move(qwen, source, whole(to or HOST, 8), "because", "recall")
    return move if to else Drop(qwen, source, "because")


def test_an_offload_and_an_unload_are_counted_and_recorded():
    page = books.left(book(going()), step(), whole(HOST, 8), THERE, by="pid 2")
    assert list(page.leases()) == [lease("qwen", host=8, key="k", settled_at=NOW, away_since=NOW)]
    [event] = page.events
    assert (event.action, event.reason, event.because) == ("offloaded", "recall", "because")
    assert (event.bytes, event.device, event.by) == (size(8), "sim:0", "pid 2")
    assert page.sections[ME.id].counts == {"offloaded": 1}
    page = books.left(book(going()), step(None), (), THERE)
    assert list(page.leases()) == [] and page.sections[ME.id].counts == {"unloaded": 1}


@pytest.mark.parametrize("to", [HOST, None])
def test_a_departure_reported_twice_is_recorded_once(to):
    shares = whole(to, 8) if to else ()
    once = books.left(book(going()), step(to), shares, THERE)
    assert books.left(once, step(to), shares, THERE) == once


def test_a_late_report_of_a_departure_does_not_remove_an_arriving_lease():
    """Before the report arrives, the lease was dropped and another thread has begun to load the model again."""
    page = book(arriving())
    assert books.left(page, step(None), (), THERE) == page


def test_evictions_are_offloads_and_unloads_and_outlive_their_processes():
    """Offloaded and then unloaded is two. A reaping, or a release by the owner, is none."""
    page = book(going(), lease("other", sim0=1), lease("third", by=2, sim0=1))
    page = books.left(page, step(), whole(HOST, 8), THERE)
    page = books.left(page, replace(step(None), source=whole(HOST, 8)), (), THERE)
    page = books.reap(page.without_lease(ME.id, "other"), [owner(2).id], THERE)
    none = dict(restorations=0, loads=0, refusals=0)
    assert books.totals(page) == dict(evictions=2, offloads=1, unloads=1, **none)
    # Totals count events since the book began, so the evictions of a kernel that has ended still count.
    page = books.left(book(going(), owners=(1, 2)), step(), whole(HOST, 8), THERE)
    assert books.totals(books.resign(page, ME.id)) == books.totals(page)
    vain = page.with_section(Section(owner(3), counts={"loaded": 2**64 - 1}))
    assert books.resign(vain, owner(3).id).counts["loaded"] == 2**62, "what can be written"
    assert books.totals(books.reap(page, [ME.id], THERE)) == books.totals(page)


# -- abandon, release, withdraw --------------------------------------------------------------------
def test_an_abandoned_decision_leaves_the_book_as_it_was():
    before = book(lease("other", sim0=2))
    page, _ = decide(before, request("qwen", 8, key="k"), THERE)
    after = books.abandon(page, ME.id, "qwen", "k", THERE, "it failed")
    assert (after.sections, after.tickets) == (before.sections, before.tickets)
    assert [(e.action, e.because) for e in after.events[-1:]] == [("failed", "it failed")]
    before = book(lease("qwen", host=8))
    page, _ = decide(before, request("qwen", 8, key="k"), THERE)
    after = books.abandon(page, ME.id, "qwen", "k", THERE)
    assert after.claims() == before.claims()
    assert after.find(at(1, "qwen")).shares == whole(HOST, 8)
    assert after.find(at(1, "qwen")).pins == 0
    after = books.abandon(book(going()), ME.id, "qwen", "k", THERE)
    assert list(after.leases()) == [lease("qwen", sim0=8)]


@pytest.mark.parametrize(
    "page",
    [book(lease("qwen", sim0=8, key="k")), book(replace(going(), key="another")), book()],
    ids=["settled", "another", "gone"],
)
def test_a_late_abandon_changes_nothing(page):
    assert books.abandon(page, ME.id, "qwen", "k", THERE, "late") == page


def test_a_withdrawn_ticket_takes_its_recalls_along():
    page = book(tickets=[ticket("big", key="k", recalls={"2.1.0/x": 0})])
    assert page.without_ticket("k").tickets == ()
    assert page.without_ticket("other") is page


# -- waiting ---------------------------------------------------------------------------------------

WAITED_FOR = book(
    lease("a", sim0=8, pins=1, uses=3),
    tickets=[ticket("b", by=2), ticket("c", by=3)],
    owners=(1, 2, 3),
)


SECTIONS = WAITED_FOR.sections
BUSY = SECTIONS | {ME.id: replace(SECTIONS[ME.id], busy_since=NOW)}
OTHERS = {id: section for id, section in SECTIONS.items() if id != ME.id}
ANSWER = Event(1, NOW, "a", "defrag", "defrag", "0 B came free", answers="2:b")


def asked_again(**fields):
    return replace(WAITED_FOR, tickets=tuple(replace(t, **fields) for t in WAITED_FOR.tickets))


def with_a(gib=8, **fields):
    return WAITED_FOR.with_lease(lease("a", sim0=gib, **fields))


NEEDLESS = {
    "looked at once more": asked_again(refreshed=NOW + 1),
    "waits for another time": asked_again(because="used 3 ms ago"),
    "measured": replace(WAITED_FOR, samples={"sim:0": Sample("sim:0", NOW, 0)}),
    "used by more": with_a(pins=2, uses=4, last_used=NOW),
    "a cell began": replace(WAITED_FOR, sections=BUSY),
}


@pytest.mark.parametrize("after", NEEDLESS.values(), ids=NEEDLESS)
def test_a_write_that_helps_no_waiting_request_wakes_none(after):
    """Two requests that wait in one process would wake each other for ever."""
    assert after != WAITED_FOR and not transitions.affects_waiters(WAITED_FOR, after)


HELPFUL = {
    "came free": with_a(),
    "grew less": with_a(7, pins=1, uses=3),
    "is kept": with_a(pins=1, uses=3, keep=True),
    "one waits less": WAITED_FOR.without_ticket("2:b"),
    "is recalled": WAITED_FOR.with_ticket(ticket("b", by=2, recalls={f"{ME.id}/a": 0})),
    "a budget": replace(WAITED_FOR, limits={"sim:0": size(20)}),
    "an owner less": replace(WAITED_FOR, sections=OTHERS),
    "is answered": replace(WAITED_FOR, events=(ANSWER,), seq=1),
}


@pytest.mark.parametrize("after", HELPFUL.values(), ids=HELPFUL)
def test_a_write_that_may_help_a_waiting_request_wakes_it(after):
    assert transitions.affects_waiters(WAITED_FOR, after)


def test_a_repeated_ticket_is_written_when_it_is_old_or_says_something_new():
    """Each ring makes all requests decide again; most writes of a busy box would only repeat a ticket."""
    mine = ticket("b", by=2, recalls={f"{ME.id}/a": 0}, refreshed=NOW)
    page, again = with_a().with_ticket(mine), replace(mine, refreshed=NOW + 0.2, because="in 3 ms")
    assert transitions.with_refreshed(page, again) is page
    for other in (
        replace(mine, refreshed=NOW + 0.25),
        replace(again, blocked_since=NOW),
        replace(again, recalls={f"{ME.id}/a": size(1)}),
        replace(again, key="another"),
    ):
        assert transitions.with_refreshed(page, other).ticket(other.key) == other
    left = page.with_lease(replace(page.lease(ME.id, "a"), away_since=NOW + 0.1))
    assert transitions.with_refreshed(left, again).ticket(mine.key) == again


def test_a_ticket_concerns_the_owner_of_what_it_recalls_when_that_is_new():
    """Owners that wait for each other's models would wake each other for ever by repeated words."""
    mine = ticket("b", by=2, recalls={f"{ME.id}/a": 0}, refreshed=NOW)
    there = with_a().with_ticket(mine)
    again = there.with_ticket(replace(mine, refreshed=NOW + 0.9, because="used 3 ms ago"))
    later = there.with_ticket(replace(mine, refreshed=NOW + 1))
    other = there.with_ticket(replace(mine, recalls={f"{ME.id}/a": size(1)}, refreshed=NOW + 0.9))
    ordered = WAITED_FOR.with_ticket(ticket(f"{ME.id}/", by=2, key="who", verb="who"))
    left = again.with_lease(replace(again.lease(ME.id, "a"), away_since=NOW + 0.5))
    two = there.with_ticket(replace(mine, recalls={**mine.recalls, "another/c": 0}))
    copied = there.with_ticket(replace(mine, recalls={}, shadows=(f"{ME.id}/a",)))

    def concerned(before, after):
        return transitions.newly_addressed(before, after, mine.owner)

    assert concerned(WAITED_FOR, there) == {ME.id} == concerned(WAITED_FOR, ordered)
    assert concerned(there, again) == set()
    assert concerned(there, later) == {ME.id}  # it may not have been heard
    assert concerned(there, other) == {ME.id}  # another part of it
    assert concerned(there, left) == {ME.id}  # the part left; this one is recalled after it
    assert concerned(two, there) == {ME.id}  # c has left RAM, and `a` may have waited for that room
    assert concerned(copied, there) == {ME.id}  # its copy did not move to a disk


def test_room_in_ram_concerns_the_owners_of_what_is_recalled():
    """A recalled model that RAM had no room for left at its owner's next look only, a second later."""
    there = with_a().with_ticket(ticket("b", by=2, recalls={f"{ME.id}/a": 0}))
    full = there.with_lease(lease("c", by=3, host=4))
    assert transitions.able_to_offload(full, there) == {ME.id}
    assert transitions.able_to_offload(there, full) == set()
    assert transitions.able_to_offload(there, there) == set()


# -- publish ---------------------------------------------------------------------------------------
def truth(*leases, keys=(), **fields):
    return Truth(ME, leases, keys, **fields)


def test_nothing_new_writes_nothing_and_uses_are_written_by_the_owner():
    """64 idle kernels publish every second. If each of them wrote, this would cost a core."""
    page = book(lease("a", sim0=1), tickets=[ticket("q", key="t")])
    assert publish(page, truth(lease("a", sim0=1), keys=("t",)), THERE) is page
    used = lease("a", sim0=1, pins=2, last_used=NOW, uses=7)
    page = publish(book(lease("a", sim0=1, uses=1)), truth(used), THERE)
    assert list(page.leases()) == [used]
    known = truth(lease("old", sim0=8), keys=("t",), residue={"sim:0": 1})
    page = book(arriving("new"), going("old"), tickets=[ticket("q", key="t")])
    once = publish(page, known, THERE)
    assert publish(once, known, THERE) is once


def test_a_decision_in_progress_is_kept_by_its_key_and_what_has_none_is_withdrawn():
    """The owner publishes the keys of its decisions in progress. So no lease with such a key is withdrawn."""
    page = book(arriving("new"), going("old"), tickets=[ticket("q", key="t")])
    after = publish(page, truth(lease("old", sim0=8, last_used=5.0), keys=("k", "t")), THERE)
    assert list(after.leases()) == [arriving("new"), going("old", last_used=5.0)]
    assert after.tickets == page.tickets
    # What an interrupt left (law 9): a reservation, a departure, a ticket. Their keys are not
    # published.
    tickets = [ticket("q", key="t"), ticket("q", by=2, key="theirs")]
    page = book(arriving("new"), going("old"), tickets=tickets)
    after = publish(page, truth(lease("old", sim0=8)), THERE)
    assert list(after.leases()) == [lease("old", sim0=8)]
    assert [t.key for t in after.tickets] == ["theirs"]
    assert after.claims() == {"sim:0": size(8)}


def test_a_settled_lease_is_as_its_owner_publishes_it_and_an_arrival_stays_pinned():
    page = book(lease("a", sim0=8, key="k"))
    for known in ([lease("a", sim0=7)], []):
        assert list(publish(page, truth(*known, keys=("k",)), THERE).leases()) == known
    # The process that loads a new lease pins it, so that it is not evicted before its first use
    # (law 6).
    page = publish(book(arriving(host=8)), truth(lease("qwen", host=8, pins=0), keys=("k",)), THERE)
    assert page.find(at(1, "qwen")).pins == 1


def test_residue_is_published_and_counters_kept():
    section = replace(book().sections[ME.id], counts={"loaded": 3})
    page = publish(Book(sections={ME.id: section}), truth(residue={"sim:0": 5}), THERE)
    assert page.sections[ME.id] == Section(ME, residue={"sim:0": 5}, counts={"loaded": 3})
    assert page.claims() == {"sim:0": 5}


@pytest.mark.parametrize("coming", [arriving(), going(sim0=0, sim1=8, target=whole("sim:0", 8))])
def test_what_has_grown_for_the_target_of_a_lease_is_no_residue(coming):
    """The target claims these bytes already. Counted twice, a load kept others waiting, and idle models left."""
    section = replace(book(coming).sections[ME.id], residue={"sim:0": size(1)})
    page = Book(sections={ME.id: section})
    for used, residue in ((1, 1), (5, 1), (9, 1), (11, 3)):  # GiB beyond the settled leases
        after = publish(page, truth(keys=("k",), residue={"sim:0": size(used)}), THERE)
        assert after.sections[ME.id].residue == {"sim:0": size(residue)}


def test_an_event_of_more_bytes_than_can_be_written_has_the_most():
    """The refusal of such a request raised an error about the book."""
    page = books.note(book(), THERE, lease("a"), "refused", "hopeless", "", size=1 << 80)
    assert pieces.encode(page.events[-1]) and page.events[-1].bytes == books.MOST_COUNT


def test_the_first_owner_sets_the_limits_and_later_ones_add_devices():
    first = publish(Book(), truth(), world(sim0=20, host=10))
    assert first.limits == {"sim:0": size(20), HOST: size(10)}
    second = publish(first, Truth(owner(2)), world(sim0=99, sim1=5, host=99))
    assert second.limits == {"sim:0": size(20), HOST: size(10), "sim:1": size(5)}
    assert [device.id for device in second.devices] == ["sim:0", HOST, "sim:1"]
    old = Book(limits={"gone:0": 1}, devices=(Device("gone:0", 1),))
    alone = publish(old, truth(), world(sim0=7, host=1))
    assert alone.limits == {"sim:0": size(7), HOST: size(1)}, "who is alone begins anew"


# -- dead owners -----------------------------------------------------------------------------------
def test_dead_owners_are_reaped_completely_and_each_lease_is_an_event():
    made = [lease("a", by=2, sim0=3), lease("b", by=2, sim0=4), lease("c", sim0=1)]
    page = book(*made, tickets=[ticket("q", by=2), ticket("r", by=1)])
    after = books.reap(page, [owner(2).id], THERE, "ann")
    assert list(after.sections) == [ME.id] and [t.name for t in after.tickets] == ["r"]
    assert after.claims() == {"sim:0": size(1)}
    told = [(e.model, e.action, e.bytes) for e in after.events]
    assert told == [("a", "reaped", size(3)), ("b", "reaped", size(4))]
    assert {(e.because, e.by) for e in after.events} == {
        ("pid 2 ended; its memory is free again.", "ann")
    }
    # A command has a ticket and no section. The ledger refuses to remove the ticket of a living
    # process.
    page = replace(book(), tickets=(ticket("q", by=2), ticket("r", by=3)))
    assert [t.name for t in books.reap(page, [owner(2).id], THERE).tickets] == ["r"]
    assert books.reap(page, [], THERE) is page
    assert books.resign(page, owner(9).id) is page


# -- samples and events ----------------------------------------------------------------------------
def test_a_newer_sample_replaces_an_old_one_and_an_older_never():
    """It must be newer by half of the time for which samples count, or every process writes each second."""
    there = world(cuda0=10, free={"cuda:0": 1}, taken_at=NOW)
    old, future = Sample("cuda:0", NOW - 2.6, 5), Sample("cuda:0", NOW + 9, 5)
    recent = Book(samples={"cuda:0": Sample("cuda:0", NOW - 2.5, 5)})
    assert transitions.measure(recent, there) is recent
    assert transitions.measure(Book(), there).samples == there.samples
    assert transitions.measure(Book(samples={"cuda:0": old}), there).samples == there.samples
    newest = Book(samples={"cuda:0": future})
    assert transitions.measure(newest, there) is newest


ENDS = ("offloaded", "unloaded", "lost", "reaped", "released")


@pytest.mark.parametrize("action", [*ENDS, "loaded", "granted", "refused"])
def test_the_event_of_a_stays_end_has_the_uses(action):
    """A back-test reads the uses from these events; in others they would be counted twice."""
    used = lease("a", sim0=1, recent_uses="x", model_type="llm", quantization="q8")
    [event] = books.note(book(used), THERE, used, action, "request", "because").events
    told = (event.uses, event.model_type, event.quantization)
    assert told == (("x", "llm", "q8") if action in ENDS else ("", "", ""))


def test_a_page_keeps_the_last_events_and_counts_them_all():
    page = book()
    for n in range(MOST_EVENTS + 5):
        page = books.note(page, THERE, lease("a", sim0=1), "refused", "hopeless", f"because {n}")
    assert len(page.events) == MOST_EVENTS
    assert [e.seq for e in page.events] == list(range(6, MOST_EVENTS + 6))
    assert page.seq == MOST_EVENTS + 5
    assert page.sections[ME.id].counts == {"refused": MOST_EVENTS + 5}


names = st.sampled_from("abcd")
gibs = st.integers(0, 20)


def _leased(name, by, gib, to):
    return replace(lease(name, by=by, sim0=gib), target=whole(HOST, to) if to else ())


_leases = st.builds(_leased, names, st.integers(1, 3), gibs, gibs)


@given(
    st.lists(_leases, max_size=6, unique_by=lambda lease: lease.id),
    st.dictionaries(st.integers(1, 3), gibs.map(lambda n: {"sim:0": n})),
)
def test_bytes_are_conserved_however_leases_end(leases, residue):
    """Leases are released, reaped or resigned in any order. In the end every byte is free again (law 3)."""
    page = book(*leases, owners=(1, 2, 3), residue=residue)
    expected: Counter[str] = Counter()
    for share in (share for lease_ in leases for share in lease_.claims()):
        expected[share.device] += share.bytes
    for held in residue.values():
        expected["sim:0"] += held["sim:0"]
    assert page.claims() == decode_book(encode(page)).claims() == expected
    for lease_ in leases[::2]:
        page = page.without_lease(lease_.owner, lease_.name)
    page = books.resign(books.reap(page, [owner(2).id, owner(3).id], THERE), ME.id)
    assert page.claims() == {} and page.sections == {}


def test_default_values_take_no_room_in_the_page():
    """Every process decodes all sections. A script's section contains only the script's name."""
    page = publish(Book(), Truth(ME), THERE)
    written = encode(page.sections[ME.id]).decode()
    assert "since" not in written
    assert encode(decode_book(encode(page))) == encode(page)
    noted = books.note(page, THERE, lease("qwen"), "granted", "request", "")
    assert '"seconds"' not in encode(noted.events[0]).decode()


# -- the names of cards ----------------------------------------------------------------------------
def card(id, uuid, **fields):
    return Device(id, 80, uuid=uuid, **fields)


def test_a_card_has_the_name_that_the_book_gives_it():
    assert device_names((card("cuda:3", "GPU-d"), Device(HOST, 64)), Book()) == {}
    # Two processes see both cards, in containers that number them differently.
    book = Book(devices=(card("cuda:0", "GPU-a"), card("cuda:1", "GPU-b"), Device(HOST, 64)))
    assert device_names((card("cuda:0", "GPU-b"), card("cuda:1", "GPU-a")), book) == {
        "cuda:0": "cuda:1",
        "cuda:1": "cuda:0",
    }
    book = Book(devices=(card("cuda:0", "GPU-a"),))
    assert device_names((card("cuda:0", "GPU-b"),), book) == {"cuda:0": "cuda:1"}
    assert device_names((card("cuda:0", "GPU-b"), card("cuda:1", "GPU-c")), book) == {
        "cuda:0": "cuda:2"
    }
    assert device_names((card("cuda:1", "GPU-b"),), book) == {}
    # After a new partitioning, other MIG instances are at the same positions of the card.
    book = Book(devices=(card("cuda:0.0", "MIG-a"), card("cuda:0.1", "MIG-b")))
    assert device_names((card("cuda:0.0", "MIG-c"), card("cuda:0.1", "MIG-b")), book) == {
        "cuda:0.0": "cuda:0.2"
    }
    book = Book(devices=(card("sim:0", "SIM-0", simulated=True),))
    assert (
        device_names(
            (card("sim:0", "SIM-0", simulated=True), card("sim:1", "SIM-1", simulated=True)), book
        )
        == {}
    )


@given(st.lists(st.permutations(range(5)).map(lambda seen: seen[:3]), min_size=1, max_size=6))
def test_all_processes_agree_on_names_in_whatever_order_they_start(processes):
    """Each process sees three of five cards, numbered from 0. Each card has exactly one name."""
    book = Book()
    called: dict[int, str] = {}
    for seen in processes:
        mine = tuple(
            card(f"cuda:{place}", f"GPU-{physical}") for place, physical in enumerate(seen)
        )
        theirs = device_names(mine, book)
        mine = tuple(replace(device, id=theirs.get(device.id, device.id)) for device in mine)
        for physical, device in zip(seen, mine, strict=True):
            assert called.setdefault(physical, device.id) == device.id
        known = {device.id: device for device in book.devices}
        book = replace(
            book, devices=tuple({**{device.id: device for device in mine}, **known}.values())
        )
    assert len(set(called.values())) == len(called)
