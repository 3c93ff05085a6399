"""A section that cannot be read. Its bytes stay claimed, and all other owners continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.errors import Busy, LedgerRefused
from gpu_runtime.facts import Book, Section, Share
from gpu_runtime.ledgers import page_parts
from gpu_runtime.ledgers.base import Ledger
from gpu_runtime.rendering import text

from .conftest import GIB, count, lease, names, put, section


@pytest.fixture
def url(redis, tmp_path: Path) -> str:
    return f"{redis.fresh()}&owners={tmp_path}/owners"


@pytest.fixture
def new_owner(url: str, open_at) -> Callable[[], Ledger]:
    """Opens one ledger, which several processes share, as a new owner at each call."""
    return lambda: open_at(url)


@pytest.fixture
def write_unreadable(monkeypatch) -> Callable[..., None]:
    """Writes a section as a faulty owner would write it, so that no other owner can read it."""

    def write(ledger: Ledger, gib: int = 6) -> None:
        broken = replace(lease(ledger, "broken", gib=gib), quantization=None)
        with monkeypatch.context() as patch:
            patch.setattr(page_parts, "readable", lambda value, *_: page_parts._encode_json(value))
            unreadable = replace(section(ledger), leases=(broken,))
            ledger.transact(lambda book: (book.with_section(unreadable), None))

    return write


def limited(ledger: Ledger, gib: int = 8) -> None:
    ledger.transact(lambda book: (replace(book, limits={"sim:0": gib * GIB}), None))


def promise(ledger: Ledger, gib: int) -> None:
    """Reserves `gib` GiB for a model that is not loaded yet."""

    def decide(book: Book) -> tuple[Book, None]:
        target = replace(lease(ledger, "new"), shares=(), target=(Share("sim:0", gib * GIB),))
        base = book if ledger.owner.id in book.sections else book.with_section(section(ledger))
        return base.with_lease(target), None

    ledger.transact(decide)


def test_its_bytes_stay_claimed_and_others_go_on(new_owner, write_unreadable):
    """The bytes of an unreadable section stay claimed. In an earlier version such a section made
    the whole page count as damaged, and 7.2 GiB were granted a second time.
    """
    a, b, c = new_owner(), new_owner(), new_owner()
    limited(b)
    put(c, "llama", gib=1)
    write_unreadable(a)
    book = b.read()
    assert set(book.quarantined) == {a.owner.id} and names(b) == ["llama"]
    assert book.claims() == {"sim:0": 7 * GIB}
    with pytest.raises(LedgerRefused, match="law 1"):
        promise(b, gib=2)
    promise(b, gib=1)
    assert c.read().claims() == {"sim:0": 8 * GIB}
    assert count(c) == 1 and b.dead(b.read()) == frozenset()


def test_it_cannot_be_removed_or_changed_by_others(new_owner, write_unreadable):
    a, b = new_owner(), new_owner()
    write_unreadable(a)

    def smaller(book: Book) -> tuple[Book, None]:
        unread = replace(book.quarantined[a.owner.id], held={})
        return replace(book, quarantined={a.owner.id: unread}), None

    def removed(book: Book) -> tuple[Book, None]:
        return replace(book, quarantined={}), None

    with pytest.raises(LedgerRefused, match="nobody else may change it"):
        b.transact(smaller)
    with pytest.raises(LedgerRefused, match="proof of death"):
        b.transact(removed)
    with pytest.raises(LedgerRefused, match="only be written by its owner"):
        b.transact(lambda book: (book.with_section(Section(a.owner)), None))


def test_it_ends_when_its_owner_writes_it_anew(new_owner, write_unreadable):
    a, b = new_owner(), new_owner()
    write_unreadable(a)
    assert b.read().quarantined
    put(a, "qwen")
    assert not b.read().quarantined and names(b) == ["qwen"]


def test_it_is_reaped_when_its_owner_is_proven_dead(new_owner, write_unreadable):
    a, b = new_owner(), new_owner()
    write_unreadable(a)
    a._shut(remove=False)  # as if it were killed
    assert b.dead(b.read()) == {a.owner.id}

    def reap(book: Book) -> tuple[Book, None]:
        return replace(book, quarantined={}), None

    b.transact(reap)
    assert b.read().claims() == {}


def test_its_bytes_stay_claimed_in_a_rebuilt_book(new_owner, write_unreadable, url, redis):
    """The copy of the section in the owner's file cannot be read either. Its lease must still not
    vanish.
    """
    a, b = new_owner(), new_owner()
    limited(b)
    put(b, "llama", gib=1)
    write_unreadable(a)
    redis.cli("FLUSHDB", database=redis.databases)
    c = new_owner()
    assert c.read().claims() == {"sim:0": 7 * GIB}
    assert set(c.read().quarantined) == {a.owner.id} and names(c) == ["llama"]
    with pytest.raises(LedgerRefused, match="law 1"):
        promise(c, gib=2)


def test_status_names_it_in_one_sentence_and_a_request_says_why_it_waits(
    url, open_at, write_unreadable
):
    rt = Runtime(devices="sim:8GiB,host:1GiB", ledger=url, gpu_memory_max_percent=1.0)
    with rt.lease("1 GiB", purpose="first"):
        pass
    a = open_at(url)
    write_unreadable(a)
    sentence = (
        f"The ledger's section of {a.owner.label} cannot be read. 6.0 GiB on sim:0 stay claimed "
        "until that process writes it again or ends."
    )
    assert [str(unread) for unread in rt.status().quarantined] == [sentence]
    assert sentence in text.status(rt.status())
    with pytest.raises(Busy, match="section of pid .* cannot be read"):
        with rt.lease("4 GiB", purpose="too much", timeout=0):
            pass
    with rt.lease("2 GiB", purpose="fits"):
        pass
    put(a)
    with rt.lease("4 GiB", purpose="now"):
        pass
    rt.close()
