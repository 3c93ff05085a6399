"""Recorded decisions are decided again, from the journal alone, by the scheduler of now."""

import sqlite3

import pytest
from msgspec.structs import replace

from gpu_runtime import DoesNotFit, GpuError, UnknownModel
from gpu_runtime.scheduler import policies
from gpu_runtime.scheduler.plan import replayed
from gpu_runtime.telemetry import journal as decisions
from gpu_runtime.telemetry.journal import Journal, pack, unpack

from .conftest import fakes, loaded


@pytest.fixture
def busy(runtime, tmp_path, clock):
    """A runtime whose journal has a grant, an eviction that the policy chose, and a refusal."""
    rt = runtime(
        ledger=f"keeper://{tmp_path}/ledger",
        devices="sim:20GiB,host:64GiB",
        gpu_memory_max_percent=1.0,
        eviction_grace_seconds=0.0,
        policy="lru",
        monitor=False,
        clock=clock,
    )
    fakes(rt, a="8GiB", b="8GiB", c="8GiB", huge="100GiB")
    for name in "abc":
        clock.advance(60.0)
        rt.preload(name)
    with pytest.raises(DoesNotFit):
        rt.preload("huge")
    return rt


def test_every_recorded_decision_comes_out_the_same(busy):
    found = [again for name in ("a", "b", "c", "huge") for again in busy.why(name, replay=True)]
    kinds = [(again.model, again.decided.partition(":")[0]) for again in found]
    assert kinds == [
        ("a", "granted"),
        ("b", "granted"),
        ("c", "granted"),
        ("c", "waiting"),
        ("huge", "refused"),
    ]
    assert all(again.same and not again.differs for again in found)
    assert "a (8.0 GiB, idle 2 min) is offloaded to RAM." in found[3].decided


def test_a_scheduler_that_decides_otherwise_is_named_with_what_it_does(busy, monkeypatch):
    """With the changed scheduler the model that was used last leaves first, so b leaves instead of a."""
    monkeypatch.setitem(policies.POLICIES, "lru", lambda lease, world: -lease.last_used)
    granted, waiting = busy.why("c", replay=True)
    assert granted.same and not waiting.same
    assert waiting.differs == (
        "The steps: move a (8.0 GiB, host) then, move b (8.0 GiB, host) now.",
    )
    assert "The steps: move a" in str(waiting) and "b (8.0 GiB" in waiting.now


def test_a_block_that_gets_free_memory_at_once_is_not_recorded(busy):
    """A program may lease ten times a second. The records would displace those of real decisions."""
    with busy.lease("1 GiB", purpose="quick") as quick:
        pass
    with pytest.raises(DoesNotFit):
        with busy.lease("100 GiB", purpose="vast"):
            pass
    assert not busy._session.journal.decided(quick.lease.name, 1)
    assert [again.model for again in busy.why("4", replay=True)] == ["c"]
    [refused] = busy._session.journal.decided("6", 1)
    assert refused.model.startswith("vast")


def test_one_decision_is_replayed_by_its_number(busy):
    _, waiting = busy.why("c", replay=True)
    assert busy.why(str(waiting.id), replay=True) == (waiting,)
    with pytest.raises(UnknownModel, match="No recorded decision has this number"):
        busy.why("999", replay=True)


def test_a_later_runtime_replays_what_an_earlier_one_decided(busy, runtime, tmp_path):
    busy.close()
    later = runtime(ledger=f"keeper://{tmp_path}/ledger", devices="sim:20GiB,host:64GiB")
    assert [again.same for again in later.why("c", replay=True)] == [True, True]


def test_a_request_that_waits_is_recorded_once(runtime, shared_book):
    """A waiting request is decided again whenever the book changes; one record is enough."""
    other, rt = runtime(ledger=shared_book), runtime(ledger=shared_book)
    fakes(other, a="20GiB")
    fakes(rt, b="20GiB")
    with other.use("a"), pytest.raises(Exception, match="in use"):
        rt.preload("b", timeout=0.3)
    [waiting] = rt.why("b", replay=True)
    assert waiting.same and waiting.decided.startswith("waiting: ")


def decided_of(busy):
    return busy._session.journal.decided("c", 20)[0]


def test_a_record_has_all_that_was_decided_from_in_few_bytes(busy):
    one = decided_of(busy)
    assert unpack(pack(one)) == one
    assert len(pack(one)) < 1_000


def test_a_record_that_this_version_cannot_read_is_left_out(busy):
    content = pack(decided_of(busy))
    assert unpack(b"\x01" + content[1:]) is None
    assert unpack(content[:-9]) is None
    assert unpack(b"") is None


def test_the_journal_keeps_the_newest_decisions_and_none_on_a_large_book(
    busy, tmp_path, monkeypatch
):
    monkeypatch.setattr(decisions, "KEPT_DECISIONS", 3)
    one, path = decided_of(busy), tmp_path / "journal.db"
    for journal in (Journal(path), Journal()):
        for wall in range(5):
            journal.record(replace(one, wall=float(wall)))
            journal.flush()
        assert [kept.wall for kept in journal.decided("c", 2)] == [4.0, 3.0]
        section = next(iter(one.book.sections.values()))
        for more in (0, 1):
            count = decisions.MOST_ENTRIES + more - one.book.entries + len(section.leases)
            many = replace(section, leases=tuple(section.leases[:1] * count))
            journal.record(replace(one, wall=9.0 + more, book=one.book.with_section(many)))
        walls = [kept.wall for kept in journal.decided("c", 20)]
        assert walls[:3] == [9.0, 4.0, 3.0]
    [(rows,)] = sqlite3.connect(path).execute("SELECT count(*) FROM decisions")
    assert rows == 3


def test_a_decision_is_kept_until_it_is_in_the_file(busy, tmp_path):
    one = decided_of(busy)
    (tmp_path / "file").touch()
    for place, in_file in (("place", 2), ("file", 0)):
        journal = Journal(tmp_path / place / "a.db", clock=lambda: 5.0)
        for wall in (1.0, 2.0):
            journal.record(replace(one, wall=wall))
        journal.flush()
        assert len(Journal(tmp_path / place / "a.db").decided("c", 9)) == in_file
        assert [kept.wall for kept in journal.decided("c", 9)] == [2.0, 1.0]


def test_a_record_of_another_version_says_so(busy):
    again = replayed(replace(decided_of(busy), version="0.1"), "0.2")
    assert again.same and again.result.endswith("It was recorded by version 0.1.")


def test_an_address_replays_the_decisions_of_that_process(runtime, tmp_path):
    """`why qwen@PID --replay` had the decisions of all processes, and a notebook was no name."""
    ledger = f"keeper://{tmp_path}/ledger"
    train, other = (runtime(ledger=ledger, monitor=False) for _ in range(2))
    train._session.notebook = "/work/train.ipynb"
    for rt, size in ((train, "3GiB"), (other, "4GiB")):
        loaded(rt, qwen=size)
        rt.tick()
    everybodys = other.why("qwen", replay=True)
    assert len(everybodys) == 2
    for address, size in (
        ("qwen@train.ipynb", "3.0 GiB"),
        (f"qwen@{other._session.me}", "4.0 GiB"),
    ):
        [mine] = other.why(address, replay=True)
        assert mine in everybodys and size in mine.decided, mine
    with pytest.raises(GpuError, match="no notebook 'nope.ipynb' holds memory"):
        other.why("nope.ipynb", replay=True)
    assert other.why("train.ipynb", replay=True) == ()
