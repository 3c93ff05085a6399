"""The laws of a write at their boundaries. That each ledger asks them is in test_contract.py."""

import pytest
from msgspec.structs import replace

from gpu_runtime.errors import LedgerRefused
from gpu_runtime.facts import (
    HOST,
    MOST_ENTRIES,
    Book,
    Device,
    Ghost,
    Lease,
    Owner,
    Sample,
    Section,
    Share,
    Ticket,
)
from gpu_runtime.ledgers.invariants import MOST_CLAIM, MOST_RISE, refuse_unlawful

from .conftest import GIB

ME, OTHER = (Owner("host", "boot", number, 1, number) for number in (1, 2))
SAMPLE = Sample("sim:0", 10.0, GIB)
ALONE = replace(
    Book().with_section(Section(ME)),
    devices=(Device("sim:0", 8 * GIB),),
    limits={"sim:0": 8 * GIB},
    samples={"sim:0": SAMPLE},
    opens=5.0,
    seq=2,
)
SHARED = ALONE.with_section(Section(OTHER))


def why(old: Book, new: Book, *dead: str) -> str:
    """Why the write is refused; empty if it is lawful."""
    try:
        refuse_unlawful(old, new, ME.id, lambda book: frozenset(dead))
    except LedgerRefused as error:
        return error.facts["why"]
    return ""


@pytest.mark.parametrize("opens", [4.0, 6.0])
def test_nobody_moves_the_opening(opens):
    assert "may not be changed" in why(ALONE, replace(ALONE, opens=opens))


def test_only_whoever_is_alone_changes_devices_and_limits_and_removes_samples():
    for fields in (
        {"devices": (Device("sim:0", 9 * GIB),)},
        {"limits": {"sim:0": 7 * GIB}},
        {"samples": {}},
    ):
        assert not why(ALONE, replace(ALONE, **fields))
        assert why(SHARED, replace(SHARED, **fields))
    added = (*SHARED.devices, Device("sim:1", GIB))
    assert not why(SHARED, replace(SHARED, devices=added))


@pytest.mark.parametrize(
    ("taken_at", "free", "lawful"), [(10.0, 0, False), (10.0, GIB, True), (10.5, 0, True)]
)
@pytest.mark.parametrize("book", [ALONE, SHARED])
def test_a_sample_gets_newer(book, taken_at, free, lawful):
    new = replace(book, samples={"sim:0": Sample("sim:0", taken_at, free)})
    assert (not why(book, new)) == lawful


def test_the_number_of_events_rises_also_without_an_event():
    assert not why(ALONE, replace(ALONE, seq=3))
    assert not why(ALONE, replace(ALONE, seq=2 + MOST_RISE))
    assert "seq would rise" in why(ALONE, replace(ALONE, seq=3 + MOST_RISE))
    assert why(ALONE, replace(ALONE, seq=1)) == "seq would fall from 2 to 1"


@pytest.mark.parametrize("size", [-1, 0, MOST_CLAIM, MOST_CLAIM + 1])
@pytest.mark.parametrize("where", ["shares", "target", "residue", "ghosts"])
def test_no_claim_is_negative_or_too_large_to_be_summed(where, size):
    """A member claimed -40 GiB, and the others were granted 30 GiB of a card of 4."""
    section = Section(ME, residue={"sim:0": size if where == "residue" else 0})
    if where in ("shares", "target"):
        lease = Lease(ME.id, "m", **{where: (Share("sim:1", GIB), Share("sim:0", size))})
        section = replace(section, leases=(lease,))
    new = replace(ALONE, limits={"sim:0": MOST_CLAIM}).with_section(section)
    if where == "ghosts":
        new = replace(new, ghosts=(Ghost("7.1.1", 7, "sim:0", size, 0.0, 0.0),))
    assert ("bytes at once" in why(ALONE, new)) == (size not in (0, MOST_CLAIM))


def test_a_page_above_its_limit_may_shrink_but_not_grow():
    def page(count):
        tickets = [Ticket(str(n), ME.id, "use", "m", 1.0, 1.0) for n in range(count)]
        return replace(ALONE, tickets=tuple(tickets))

    assert not why(page(1), page(MOST_ENTRIES))
    assert "that a page holds" in why(page(MOST_ENTRIES), page(MOST_ENTRIES + 1))
    assert not why(page(MOST_ENTRIES + 2), page(MOST_ENTRIES + 1))
    assert why(page(MOST_ENTRIES + 1), page(MOST_ENTRIES + 2))


@pytest.mark.parametrize(
    ("fields", "lawful"),
    [
        ({}, True),
        ({"piece_bytes": 0}, False),
        ({"filled": (Share("sim:0", GIB),)}, False),
        ({"shares": (Share("sim:0", GIB), Share("sim:1", GIB), Share(HOST, GIB))}, False),
    ],
)
def test_only_a_model_of_pieces_is_cut_between_one_card_and_the_host(fields, lawful):
    halves = (Share("sim:0", GIB), Share(HOST, GIB))
    cut = Lease(ME.id, "m", target=halves, shares=halves, piece_bytes=GIB)
    lease = replace(cut, **fields)
    assert lease.in_parts
    new = ALONE.with_section(Section(ME, leases=(lease,)))
    assert ("cannot be cut like that" in why(ALONE, new)) != lawful
