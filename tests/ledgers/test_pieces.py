"""The book as pieces: what is read back, what is not decoded again, and a damaged page."""

import contextlib
import errno
import os
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Book,
    Device,
    Drain,
    Event,
    Ghost,
    Lease,
    Phase,
    Sample,
    Section,
    Share,
    Ticket,
)
from gpu_runtime.facts.book import _claims_after
from gpu_runtime.ledgers import liveness, pieces
from gpu_runtime.ledgers.liveness import OwnerFile, read_roster
from gpu_runtime.ledgers.pieces import (
    SHARED,
    STATE,
    Part,
    Piece,
    Pieces,
    Shared,
    State,
    Unwritable,
    encoded_change,
    require_readable,
    sealed,
)
from gpu_runtime.ledgers.redis.connection import NOT_A_PAGE, page_in
from gpu_runtime.ledgers.redis.page import Living, rebuilt
from gpu_runtime.scheduler.transitions import Truth, publish
from tests.worlds import book, lease, owner, ticket, world

GIB = 2**30


def shares(devices: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[Share, ...]]:
    one = st.builds(Share, devices, st.integers(0, 80 * GIB))
    return st.lists(one, max_size=2, unique_by=lambda share: share.device).map(tuple)


devices = st.sampled_from(["sim:0", "sim:1", HOST])
names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)


@st.composite
def books(draw) -> Book:
    """Draws books with up to four owners. Some owners have only requests."""
    sections, tickets = {}, []
    for pid in range(1, draw(st.integers(1, 4)) + 1):
        me = replace(owner(pid), notebook=draw(names))
        for n in range(draw(st.integers(0, 2))):
            arrived = draw(st.floats(0, 1e6))
            tickets.append(
                Ticket(f"{pid}:{n}", me.id, "use", draw(names), arrived, arrived, because="x" * 40)
            )
        if draw(st.booleans()):
            held = draw(st.lists(names, max_size=4, unique=True))
            leases = tuple(
                Lease(
                    me.id,
                    name,
                    shares=draw(shares(devices)),
                    target=draw(shares(devices)),
                    phase=draw(st.sampled_from(Phase)),
                    settled_at=draw(st.floats(0, 1e6)),
                )
                for name in held
            )
            residue = draw(st.dictionaries(devices, st.integers(0, GIB), max_size=2))
            sections[me.id] = Section(me, leases, residue)
    order = draw(st.permutations(tickets))
    return Book(
        devices=(Device("sim:0", 80 * GIB),),
        limits={"sim:0": 70 * GIB},
        samples={"sim:0": Sample("sim:0", 3.0, None)},
        sections=sections,
        tickets=tuple(order),
        events=(Event(1, 0.0, draw(names), "loaded", "request", "asked"),),
        seq=1,
        counts={"loaded": 3},
        ghosts=(Ghost("1.1.0", 1, "sim:0", draw(st.integers(0, GIB)), 1.0, 2.0),),
        opens=draw(st.floats(0, 1e6)),
    )


def raw(page: Book, rev: int, known: dict[str, Piece] | None = None) -> dict[str, Piece]:
    """The pieces of `page`. A piece that is the same in `known` keeps its revision."""
    facts = {name: getattr(page, name) for name in Shared.__struct_fields__}
    queue = tuple([ticket.key for ticket in page.tickets])
    found = {SHARED: Shared(**facts), STATE: State({}, (), queue)}
    for id in page.owner_ids():
        mine = tuple([ticket for ticket in page.tickets if ticket.owner == id])
        found[id] = Part(page.sections.get(id), mine)
    fresh = {key: Piece.of(rev, pieces.encode(value)) for key, value in found.items()}
    last = known or {}
    return {
        key: last[key] if key in last and last[key].content == piece.content else piece
        for key, piece in fresh.items()
    }


@given(books(), books(), st.integers(1, 2**40))
def test_a_page_that_is_read_back_is_the_same_book(before, after, rev):
    """Also for a reader that has read an earlier page, and decodes only what changed."""
    first, second = raw(before, rev), raw(after, rev + 1, raw(before, rev))
    assert page_in("a", sealed(rev, first), rev).book == before
    known = page_in("a", sealed(rev, first), rev)
    found = page_in("a", sealed(rev + 1, second), rev + 1, known)
    assert found.book == after and found.raw == second
    assert known.book == before, "the earlier page stays as it is"


def test_what_has_not_changed_is_not_decoded_again():
    """Its values are the same objects as before, so that comparing them costs nothing."""
    page = book(lease("a", by=1, sim0=1), lease("b", by=2, sim0=1), tickets=[ticket("q", by=3)])
    first = raw(page, 1)
    seen = page_in("a", sealed(1, first), 1)
    after = page.with_lease(lease("a", by=1, sim0=2))
    found = page_in("a", sealed(2, raw(after, 2, first)), 2, seen).book
    assert found == after
    assert found.sections[owner(2).id] is seen.book.sections[owner(2).id]
    assert found.tickets[0] is seen.book.tickets[0] and found.devices is seen.book.devices


@given(books(), st.data())
def test_a_page_with_any_byte_changed_or_cut_off_is_no_page(page, data):
    """It is then made again from the owners' own files, so a changed byte frees nothing."""
    content = bytearray(sealed(7, raw(page, 7)))
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    for damaged, rev in ((changed, 7), (content[:place], 7), (content, 8)):
        with pytest.raises(NOT_A_PAGE):
            page_in("a", bytes(damaged), rev)


def test_a_part_in_anothers_name_is_no_page():
    page = book(lease("a", by=1, sim0=1), tickets=[ticket("q", by=2)])
    for id in page.owner_ids():
        parts = raw(page, 1)
        parts["9.9.9"] = parts.pop(id)
        with pytest.raises(ValueError, match="not its owner's"):
            page_in("a", sealed(1, parts), 1)


@given(books(), books())
def test_claims_of_a_changed_book_are_the_sums_of_its_parts(before, after):
    """The claims of unchanged sections are taken over from the earlier book. The sums are right all
    the same.
    """
    after = replace(after, ghosts=before.ghosts)
    changed = [id for id, it in after.sections.items() if before.sections.get(id) is not it]
    gone = before.sections.keys() - after.sections.keys()
    found = _claims_after(before, after, changed, gone)
    expected: dict[str, int] = {}
    for claim in (*after.leases(), *after.ghosts):
        for share in (claim,) if isinstance(claim, Ghost) else claim.claims():
            expected[share.device] = expected.get(share.device, 0) + share.bytes
    for part in after.sections.values():
        for device, size in part.residue.items():
            expected[device] = expected.get(device, 0) + size
    assert {id: size for id, size in found.items() if size or id in expected} == expected
    assert after.claims() == expected


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"quantization": None}, "leases[0].quantization"),
        ({"keep": "yes"}, "leases[0].keep"),
        ({"model_type": 3.5}, "leases[0].model_type"),
        ({"name": "broken \ud800"}, "leases[0].name"),
        ({"backend": object()}, "leases[0].backend"),
        ({"shares": (Share("sim:0", 1.5),)}, "shares[0].bytes"),
        ({"name": "n" * (2 << 20)}, "lease 'nnnn"),
    ],
)
def test_what_others_could_not_read_is_not_written(wrong, named):
    """A field that other owners could not read is refused. In an earlier version one such field
    made the whole page unreadable for all other processes.
    """
    page = book(replace(lease("a", by=1, sim0=1), **wrong))
    with pytest.raises(Unwritable) as refused:
        require_readable(*encoded_change(book(owners=(1,)), page, owner(1).id))
    assert named in str(refused.value)
    assert len(str(refused.value)) < 400


def test_an_event_that_others_could_not_read_is_not_written():
    before, event = book(owners=(1,)), Event(1, 0.0, "a", "loaded", "request", "asked")
    for model in ("\udcff", 3.5):
        page = replace(before, events=(replace(event, model=model),))
        with pytest.raises(Unwritable):
            require_readable(*encoded_change(before, page, owner(1).id))


def test_facts_that_do_not_change_keep_the_fields_of_a_later_version():
    """Else an older process would erase them, and a newer keeper would refuse its writes."""
    one, two = ({"device": id, "taken_at": 1.0, "free_bytes": 5, "later": id} for id in ("a", "b"))
    events = [{"seq": n, "wall": 0.0, "model": "m", "action": "x", "reason": "y", "because": "z",
               "later": n} for n in (1, 2)]  # fmt: skip
    written = {"events": events, "samples": {"a": one, "b": two}, "seq": 2, "later": [{"x": 1}]}
    before = pieces.encode(written)
    facts = pieces.decode_shared(before)
    old = Book(**{name: getattr(facts, name) for name in Shared.__struct_fields__})
    sample, event = Sample("b", 2.0, 4), replace(old.events[1], seq=3)
    new = replace(
        old,
        events=(old.events[1], event),
        samples=old.samples | {"b": sample},
        seq=3,
        drained={"c": Drain("ann", 1.0)},
    )
    put = pieces.changed(old, new, "1.1.1", before)["shared"]
    assert pieces.decode_shared(put) == Shared(
        events=new.events, samples=new.samples, seq=3, drained=new.drained
    )
    assert pieces.encode(
        {
            "events": [events[1], event],
            "samples": {"a": one, "b": sample},
            "seq": 3,
            "later": [{"x": 1}],
            "drained": new.drained,
        }
    ) == bytes(put)


def test_nobody_fills_the_facts_of_all_owners_with_what_others_keep():
    """A member of a shared ledger may write anything there. The next write leaves it out."""
    before = pieces.encode({"seq": 1, "junk": "x" * pieces.MOST_KEPT_FACTS})
    put = pieces.changed(Book(seq=1), Book(seq=2), "1.1.1", before)["shared"]
    assert pieces.decode_shared(put) == Shared(seq=2) and b"junk" not in bytes(put)


def known(page: Book, pid: int, rev: int) -> dict[str, Living]:
    """The roster of the owner `pid` of `page`, as a living owner has it."""
    id = owner(pid).id
    mine = tuple([ticket for ticket in page.tickets if ticket.owner == id])
    shared = Shared(devices=page.devices, limits=page.limits, drained=page.drained)
    return {id: Living(rev, Part(page.sections.get(id), mine), shared)}


@given(st.lists(st.sampled_from(["whole", "torn", "refused", "too large"]), max_size=8))
def test_after_any_failed_writes_the_last_whole_roster_is_read(tmp_path_factory, fates):
    """Two slots are written in turn. A turn that was lost overwrote the only whole roster."""
    file = OwnerFile(tmp_path_factory.mktemp("owners"), owner(1))
    usual, last = os.pwrite, None
    for number, fate in enumerate(fates):
        payload = bytes([number]) * (OwnerFile.SLOT_BYTES if fate == "too large" else 100)

        def write(fd, frame, at, fate=fate):
            if fate == "refused":
                raise OSError(errno.ENOSPC, "No space left on device")
            return usual(fd, frame if fate == "whole" else frame[:90], at)

        with patch.object(liveness.os, "pwrite", write), contextlib.suppress(OSError):
            file.write_roster(payload, rev=number, schema=1)
            last = (number, payload)
        found = read_roster(file.path)
        assert (found and (found.rev, found.payload)) == last
    file.release(remove=True)


@given(books())
def test_a_book_is_made_again_from_the_files_of_its_owners(page):
    """Of its owners' bytes nothing is missing. The tickets are in the order of their arrival."""
    rosters: dict[str, Living] = {}
    for pid in range(1, 5):
        if owner(pid).id in page.owner_ids():
            rosters |= known(page, pid, rev=pid)
    found = rebuilt(Pieces(), rosters).book
    assert found.sections == page.sections and found.entries == page.entries
    arrivals = [ticket.arrived for ticket in found.tickets]
    assert arrivals == sorted(arrivals)
    assert all(found.ticket(ticket.key) == ticket for ticket in page.tickets)
    assert not rosters or (found.devices, found.limits) == (page.devices, page.limits)


def test_what_an_owner_wrote_last_counts_in_a_page_that_is_made_again():
    """An old copy of the page has the owner's earlier lease, and owners that this host cannot see."""
    old = book(lease("a", by=1, sim0=1), lease("far", by=3, sim0=4), owners=(1, 2, 3))
    new = book(lease("a", by=1, sim0=2))
    read = page_in("a", sealed(1, raw(old, 1)), 1).pieces
    found = rebuilt(read, known(new, 1, 9) | {owner(2).id: Living(8, Part(), Shared())}).book
    assert found.claims() == book(lease("a", sim0=2), lease("far", by=3, sim0=4)).claims()
    assert set(found.sections) == {owner(1).id, owner(3).id}, "the second owner has left"


def test_a_rebuilt_book_has_the_cards_of_all_owners_and_the_drains_of_the_newest():
    """On common cards the first owner's limits count. The newest section knows that a drain ended."""
    first = publish(Book(), Truth(owner(1)), world(sim0=20, host=10))
    both = publish(first, Truth(owner(2)), world(sim0=7, sim1=5, host=1))
    drains = {card: Drain("ann", 1.0) for card in ("sim:0", "sim:1")}
    first = replace(first, drained=drains)
    both = replace(both, drained={"sim:1": drains["sim:1"]})
    found = rebuilt(Pieces(), known(both, 2, rev=2) | known(first, 1, rev=1)).book
    assert (found.limits, found.drained) == (both.limits, both.drained)
    assert {one.id: one for one in found.devices} == {one.id: one for one in both.devices}
