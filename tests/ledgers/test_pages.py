"""The bytes of a page: which parts are decoded and written again, and what happens if bytes are
damaged.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Book,
    Device,
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
from gpu_runtime.ledgers import page_parts, pages
from gpu_runtime.ledgers.page_parts import Unwritable
from gpu_runtime.ledgers.pages import EMPTY, body, encoded, pack, unpack
from tests.worlds import at, book, lease, owner, ticket

GIB = 2**30
DAMAGED = (ValueError, pages.msgspec.MsgspecError)


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


@given(books(), st.integers(0, 2**40))
def test_a_page_that_is_read_back_is_the_same_book(page, rev):
    found, packed = unpack(encoded(page, rev), rev)
    assert found == page
    assert list(found.sections) == list(page.sections)
    assert body(packed, found.tickets, rev)[1] == encoded(page, rev)


@given(books(), books())
def test_a_page_made_from_another_one_is_the_same_book(before, after):
    """Sections that did not change are taken over from the earlier page. The result is the same as
    if all sections were encoded again.
    """
    first = pack(before, EMPTY, 1)
    second, content = body(pack(after, first, 2), after.tickets, 2)
    assert unpack(content, 2)[0] == unpack(content, 2, first)[0] == after
    assert unpack(content, 2, second)[0] == after


def test_what_has_not_changed_is_not_decoded_again(monkeypatch):
    """The values of an unchanged section are the same objects as before, so that comparing them
    costs nothing.
    """
    page = book(lease("a", by=1, sim0=1), lease("b", by=2, sim0=1), tickets=[ticket("q", by=3)])
    first = pack(page, EMPTY, 1)
    seen, packed = unpack(body(first, page.tickets, 1)[1], 1)
    after = page.with_lease(lease("a", by=1, sim0=2))
    _, content = body(pack(after, packed, 2), after.tickets, 2)
    decoded = []
    decode = pages.decode_small_parts
    monkeypatch.setattr(
        pages, "decode_small_parts", lambda parts: decoded.extend(parts) or decode(parts)
    )
    found, _ = unpack(content, 2, packed)
    assert found == after and len(decoded) == 1
    assert found.sections[owner(2).id] is seen.sections[owner(2).id]
    assert found.tickets[0] is seen.tickets[0] and found.devices is seen.devices


def test_of_many_leases_only_the_changed_one_is_encoded_and_decoded(monkeypatch):
    """A section may have hundreds of leases. A change of one lease encodes and decodes only that
    lease.
    """
    page = book(*(lease(f"m{n}", by=1, sim0=1) for n in range(50)))
    seen, packed = unpack(encoded(page, 1), 1)
    after = seen.with_lease(lease("m7", by=1, sim0=2))
    decoded = []
    decode = page_parts._decode_lease
    monkeypatch.setattr(page_parts, "_decode_lease", lambda it: decoded.append(1) or decode(it))
    _, content = body(pack(after, packed, 2), after.tickets, 2)
    assert len(decoded) == 1, "what is written is read once"
    found, _ = unpack(content, 2, packed)
    assert found == after and len(decoded) == 2
    unchanged = [one for one in found.leases() if one.name != "m7"]
    assert all(seen.lease(one.owner, one.name) is one for one in unchanged)


def test_a_fact_that_only_equals_the_last_one_is_read_back():
    """True equals 1, so a comparison finds no change. But other processes cannot read True as a
    number.
    """
    page = book(lease("a", by=1, sim0=1))
    me = page.sections[owner(1).id]
    page = page.with_section(replace(me, counts={"loaded": 1}))
    packed = pack(page, EMPTY, 1)
    after = page.with_lease(lease("a", by=1, sim0=2))
    after = after.with_section(replace(after.sections[me.owner.id], counts={"loaded": True}))
    with pytest.raises(Unwritable, match="counts"):
        pack(after, packed, 2)


@given(books(), books())
def test_claims_of_a_changed_book_are_the_sums_of_its_parts(before, after):
    """The claims of unchanged sections are taken over from the earlier book. The sums are right all
    the same.
    """
    after = replace(after, ghosts=before.ghosts, quarantined=before.quarantined)
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


def test_a_write_changes_only_its_own_bytes():
    """SQLite writes only the disk pages that differ. A write of 300 KB takes 77 µs, and 687 µs if
    all bytes move.
    """
    page = book(*(lease(f"m{n}", by=by, sim0=1) for by in range(1, 9) for n in range(9)))
    packed, first = body(pack(page, EMPTY, 1), (), 1)
    for rev in range(2, 9):
        page = page.with_lease(lease("m4", by=4, sim0=rev, uses=10**rev))
        packed, second = body(pack(page, packed, rev), (), rev)
        assert len(second) == len(first)
        part = packed.parts[owner(4).id]
        start = second.index(part.content)
        beyond = start + part.room
        assert second[beyond:] == first[beyond:]
        index = packed.head_room
        assert second[index:start] == first[index:start]


def test_a_lease_that_comes_and_goes_moves_nobody():
    """A section keeps the room in the page that it once needed, unless that is far too much. So a
    lease that comes and goes does not move the other sections.
    """
    page = book(*(lease(f"m{n}", by=by, sim0=1) for by in (1, 2) for n in range(4)))
    more = page.with_lease(lease("new", by=1, sim0=1))
    packed = pack(more, pack(page, EMPTY, 1), 2)
    rooms = {len(body(packed, (), 2)[1])}
    for rev in range(3, 9):
        packed = pack(more if rev % 2 else page, packed, rev)
        rooms.add(len(body(packed, (), rev)[1]))
    assert len(rooms) == 1
    full = book(*(lease(f"m{n}", by=1, sim0=1) for n in range(500)))
    packed = pack(page, pack(full, EMPTY, 1), 2)
    assert packed.parts[owner(1).id].room < 8000, "an owner that held much releases its room"


@given(books(), st.data())
def test_a_page_with_any_byte_changed_claims_no_less(page, data):
    """A changed byte never leads to an overcommit. Either the page is damaged and rebuilt, or a
    section is quarantined.
    """
    content = bytearray(encoded(page, 7))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    try:
        found, _ = unpack(bytes(content), 7)
    except DAMAGED:
        return
    assert found.claims() == page.claims()
    assert found.owner_ids() == page.owner_ids()
    assert found.entries == page.entries
    if not found.quarantined:
        assert found == page, "a blank was changed"


@given(books(), st.data())
def test_a_page_that_is_cut_off_claims_no_less(page, data):
    content = encoded(page, 7)
    try:
        found, _ = unpack(content[: data.draw(st.integers(0, len(content)))], 7)
    except DAMAGED:
        return
    assert found.claims() == page.claims() and found.entries == page.entries


@given(books(), st.data())
def test_what_cannot_be_read_is_passed_on_as_it_is(page, data):
    """A process that cannot read a section writes it back unchanged. A process that can read the
    section later finds all of it.
    """
    _, packed = unpack(encoded(page, 7), 7)
    ids = sorted(packed.parts)
    if not ids:
        return
    victim = data.draw(st.sampled_from(ids))
    content = encoded(page, 7)
    part = packed.parts[victim].content
    start = content.index(part)
    found, torn = unpack(content[:start] + b"#" + content[start + 1 :], 7)
    assert set(found.quarantined) == {victim}
    later = found.with_section(Section(owner(9), (lease("new", by=9, sim0=1),)))
    again, _ = unpack(body(pack(later, torn, 8), later.tickets, 8)[1], 8)
    assert again == later
    assert again.quarantined[victim].content == b"#" + part[1:]
    own = again.with_section(Section(replace(owner(1), pid=int(victim.split(".")[0]))))
    assert victim not in own.quarantined, "its owner writes it anew"


def test_a_part_that_its_owner_still_has_is_taken_from_there():
    """Each owner's file has the same bytes as its section of the page. A section that is damaged in
    the page is taken from the file.
    """
    page = book(lease("a", by=1, sim0=1), lease("b", by=2, sim0=1))
    content = encoded(page, 7)
    _, packed = unpack(content, 7)
    mine = packed.parts[owner(1).id]
    start = content.index(mine.content)
    torn = content[:start] + b"#" + content[start + 1 :]
    asked = []

    def mend(id: str, entry: bytes):
        asked.append(id)
        return mine if entry == mine.entry else None

    assert unpack(torn, 7, mend=mend)[0] == page and asked == [owner(1).id]


def test_a_part_in_anothers_name_is_quarantined():
    page = book(lease("a", by=1, sim0=1), lease("b", by=2, sim0=1))
    packed = pack(page, EMPTY, 1)
    one, two = (packed.parts[owner(pid).id] for pid in (1, 2))
    swapped = {
        owner(1).id: replace(one, content=two.content.ljust(one.room)),
        owner(2).id: two,
    }
    found, _ = unpack(body(packed._replace(parts=swapped), (), 1)[1], 1)
    assert set(found.quarantined) == {owner(1).id}
    assert found.claims() == page.claims()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"quantization": None}, "leases[0].quantization"),
        ({"keep": "yes"}, "leases[0].keep"),
        ({"model_type": 3.5}, "leases[0].model_type"),
        ({"name": "broken \ud800"}, "section.leases[0].name"),
        ({"last_used": float("nan")}, "leases[0].last_used"),
        ({"backend": object()}, "section.leases[0].backend"),
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
        pack(page, EMPTY, 1)
    assert named in refused.value.why
    assert len(refused.value.why) < 400


def test_an_event_that_others_could_not_read_is_not_written():
    page = replace(book(), events=(Event(1, 0.0, "\udcff", "loaded", "request", "asked"),))
    with pytest.raises(Unwritable, match=r"events\[0\].model"):
        pack(page, EMPTY, 1)


def test_an_unreadable_section_is_described_in_one_sentence():
    page = book(lease("a", by=1, sim0=7))
    content = encoded(page, 1)
    start = content.index(unpack(content, 1)[1].parts[owner(1).id].content)
    found, _ = unpack(content[:start] + b"#" + content[start + 1 :], 1)
    [unread] = found.quarantined.values()
    assert str(unread) == (
        f"The ledger's section of {owner(1).label} cannot be read. 7.0 GiB on sim:0 stay claimed "
        "until that process writes it again or ends."
    )
    assert found.owner(owner(1).id).inode == owner(1).inode
    assert found.find(at(1, "a")) is None
