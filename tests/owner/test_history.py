"""The use of the devices over a day: what is recorded, what a chart shows, and damaged files."""

import ctypes
import os
import sqlite3
import stat
import sys
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.devices.sampler_client import Figures
from gpu_runtime.facts import Device, Level, Moment, Sample
from gpu_runtime.ledgers.access import MARK
from gpu_runtime.telemetry import hours
from gpu_runtime.telemetry import recorder as recorders
from gpu_runtime.telemetry.recorder import (
    AHEAD_SECONDS,
    DAY,
    Record,
    Recorder,
    moments_of,
    record_in,
    views_of,
)
from gpu_runtime.units import GIB
from tests.clock import finished
from tests.worlds import book, lease

from .conftest import fakes, loaded

WALL = 1_800_000_000.0


def moment(wall, used=1, device="sim:0", **claims):
    return Moment(wall, device, 24 * GIB, 20 * GIB, used, Level.LOW, claims=claims)


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "history.db")


def shown(record, since=WALL - DAY, until=WALL + 1, most=10**6):
    return record.between(since, until, most)


# -- what is shown ------------------------------------------------------------------------------------------------

days = st.lists(
    st.tuples(st.sampled_from(("sim:0", "sim:1")), st.integers(0, 86_399), st.integers(0, 9)),
    max_size=60,
    unique_by=lambda row: row[:2],
)


@given(days, st.integers(1, 12), st.integers(60, 86_400))
def test_a_chart_has_every_peak_in_order_and_nothing_that_never_was(
    tmp_path_factory, rows, most, seconds
):
    record = Record(tmp_path_factory.mktemp("history") / "history.db")
    told = [moment(WALL - ago, used, device) for device, ago, used in rows]
    assert record.append(told)
    found = shown(record, since=WALL - seconds, most=most)
    inside = [one for one in told if one.wall >= WALL - seconds]
    assert set(map(repr, found)) <= set(map(repr, inside)), "nothing is invented"
    for device in ("sim:0", "sim:1"):
        of = [one for one in found if one.device == device]
        assert len(of) <= most
        assert all(one.wall < later.wall for one, later in pairwise(of))
        assert max((one.peak_bytes for one in of), default=0) == max(
            (one.peak_bytes for one in inside if one.device == device), default=0
        )


@given(days)
def test_thinning_keeps_every_peak_and_forgets_yesterday(tmp_path_factory, rows):
    """Thinning at any times keeps every peak of the last day. Recent moments are not changed."""
    record = Record(tmp_path_factory.mktemp("history") / "history.db")
    told = [moment(WALL - ago, used, device) for device, ago, used in rows]
    record.append(told)
    for now in (WALL, WALL + 77, WALL + 3600):
        record.thin(now)
        left = shown(record, most=10**6)
        assert set(map(repr, left)) <= set(map(repr, told))
        kept = [one for one in told if one.wall >= now - DAY]
        for device in ("sim:0", "sim:1"):
            assert max((one.peak_bytes for one in left if one.device == device), default=0) == max(
                (one.peak_bytes for one in kept if one.device == device), default=0
            )
        assert {repr(one) for one in kept if one.wall > now - 1800} <= set(map(repr, left))


@pytest.mark.thorough
def test_a_full_day_is_bounded_on_disk_and_a_chart_of_it_in_moments(record):
    """Two devices, a dozen leases, a moment every two seconds, written and thinned as the recorder does it."""
    claims = {f"model-{n}@{4000 + n}": n * GIB for n in range(12)}
    for hour in range(25):
        record.append(
            moment(WALL - DAY + 3600 * (hour - 1) + second, second, f"sim:{n}", **claims)
            for second in range(0, 3600, 2)
            for n in range(2)
        )
        record.thin(WALL - DAY + 3600 * hour)
    assert record.path.stat().st_size < 8 << 20
    found = shown(record, most=600)
    assert 1100 < len(found) <= 1200 and found[-1].wall > WALL - 300


def test_a_chart_that_moves_on_does_not_flicker(record):
    """Two charts one after the other show the same moments in the time that both cover."""
    record.append(moment(WALL - ago, ago * 7919 % 100) for ago in range(3600))

    def walls(later):
        found = shown(record, since=WALL - 3600 + later, until=WALL + later, most=60)
        return [one.wall for one in found if WALL - 3500 < one.wall < WALL - 100]

    one, other = walls(0), walls(5)
    assert one == other and len(one) > 50


def test_there_is_always_the_moment_of_now(runtime):
    """A chart has the present moment even without any record, as with a ledger in memory."""
    rt = loaded(runtime(), qwen="10GiB")
    story = rt.history("15m")
    card, host = story.moments
    assert (card.device, host.device) == ("sim:0", "host")
    assert card.claims == {f"qwen@{os.getpid()}": 10 * GIB} and card.measured_bytes == 10 * GIB
    assert [event.action for event in story.events] == ["granted", "loaded"]
    assert story.seconds == 900
    assert story.of("host") == (host,)


def test_only_what_happened_in_that_time_is_told(runtime, clock):
    rt = fakes(runtime(wall=clock), a="1GiB", b="1GiB")
    rt.preload("a")
    clock.advance(600)
    rt.preload("b")
    assert [event.model for event in rt.history(60).events] == ["b", "b"]
    assert len(rt.history("1h").events) == 4


# -- what is recorded ---------------------------------------------------------------------------------------------
def test_real_cards_are_recorded_as_they_were_measured():
    """Cards are identified by UUID. The chart has a gap for a card that does not answer, not a zero."""
    cards = [Device(f"cuda:{n}", 20 * GIB, uuid=f"GPU-{'ab'[n]}") for n in range(2)]
    devices = (*cards, Device("host", 64 * GIB))
    limits = {"cuda:0": 18 * GIB, "cuda:1": 18 * GIB, "host": 32 * GIB}
    page = book(lease("a", cuda0=4), lease("b", cuda1=2), devices=devices, limits=limits)
    figures = dict(utilisation_percent=37.0, temperature_celsius=61.0, power_watts=250.0)
    seen = {"GPU-a": Sample("", 10.0, 12 * GIB, **figures)}
    host = Sample("host", 10.0, 60 * GIB)
    said = Figures(1, 10.0, host, seen, failed={"GPU-b": "GPU is lost"})
    zero, one, host = moments_of(views_of(page, said, 10.0, WALL), page.sections.values(), WALL)
    assert zero == Moment(
        WALL, "cuda:0", 20 * GIB, 18 * GIB, 8 * GIB, Level.LOW, 37.0, 61.0, 250.0, {"a@1": 4 * GIB}
    )
    assert (one.measured_bytes, one.claims) == (None, {"b@1": 2 * GIB})
    assert host.measured_bytes == 4 * GIB


def test_what_a_recorder_sees_is_read_by_everybody_of_the_ledger(runtime, tmp_path):
    """The recorder only reads the book: it has no section there."""
    rt = loaded(runtime(ledger=f"keeper://{tmp_path}/ledger", monitor=False), qwen="10GiB")
    directory = rt._session.ledger.directory
    recorder = Recorder(directory, rt._session.ledger.url)
    before = rt._session.ledger.read()
    recorder.look(Figures(1, 0.0, Sample("host", 0.0, 60 * GIB)))
    assert rt._session.ledger.read() == before
    rt.evict("qwen")
    recorder.look(Figures(1, 0.0, Sample("host", 0.0, 60 * GIB)))
    recorder.flush()
    label = f"qwen@{os.getpid()}"
    story = rt.history(60, points=10**6)
    assert [one.claims for one in story.of("sim:0")] == [{label: 10 * GIB}, {}, {}]
    assert [one.claims for one in story.of("host")] == [{}, {label: 10 * GIB}, {label: 10 * GIB}]
    used = [one.measured_bytes for one in story.of("host")]
    assert used == [0, 10 * GIB, 10 * GIB], "the machine's own figures are no simulated device's"


@pytest.fixture
def recorder(tmp_path, monkeypatch, clock):
    """Lets a recorder look after some seconds, in which the use of its card has changed."""
    device = Device("cuda:0", 20 * GIB, uuid="GPU-a")
    books = (
        book(lease("a", cuda0=size), devices=(device,), limits={"cuda:0": 18 * GIB})
        for size in count(1)
    )
    peeked = SimpleNamespace(look=books.__next__)
    monkeypatch.setattr(recorders, "peek", lambda *_: peeked)
    monkeypatch.setattr(recorders, "boot_seconds", clock)
    monkeypatch.setattr(recorders, "time", SimpleNamespace(time=lambda: WALL + clock() - 1000))
    made = Recorder(tmp_path / "boot", "memory:")

    def look(seconds=0.0):
        clock.advance(seconds)
        made.look(Figures(1, clock(), Sample("host", clock(), GIB)))
        return [one.wall - WALL for one in shown(record_in(tmp_path / "boot"), until=WALL + DAY)]

    return look


def test_a_recorder_writes_every_five_seconds_and_thins_every_minute(recorder, tmp_path):
    assert [len(recorder(seconds)) for seconds in (0, 2, 2, 1, 2, 2, 1)] == [1, 1, 1, 4, 4, 4, 7]
    assert recorder(5)[-1] == 15.0
    record_in(tmp_path / "boot").append([moment(WALL - 2 * DAY)])
    old = [shown(record_in(tmp_path / "boot"), since=0, most=10**6)[0].wall < WALL - DAY]
    for seconds in (44, 1):
        recorder(seconds)
        old.append(shown(record_in(tmp_path / "boot"), since=0, most=10**6)[0].wall < WALL - DAY)
    assert old == [True, True, False]


def test_a_clock_that_is_years_ahead_for_a_minute_removes_nothing(recorder, tmp_path, monkeypatch):
    """The account of three years was deleted, and the history of the day."""
    file = hours.hours_in(tmp_path / "boot")
    key = hours.Key("ann", "n", "m", "cuda:0", hours.IN_USE)
    assert file.add([hours.Hour(int(WALL) - 700 * DAY, key, 5.0, 1.0)], WALL)
    assert recorder(60) == [60.0]
    right = recorders.time.time
    monkeypatch.setattr(recorders.time, "time", lambda: right() + 9000 * DAY)
    recorder(60)
    monkeypatch.setattr(recorders.time, "time", right)
    assert recorder(60) == [60.0, 180.0]
    assert [row.byte_seconds for row in file.between(0, WALL - DAY)] == [5.0]


def test_the_account_of_hours_is_a_minute_old_at_most(recorder, tmp_path):
    """Also if the helper was killed. The minute that ran was not written: up to two minutes were missing."""
    file = hours.hours_in(tmp_path / "boot")
    recorder(59)
    for second in range(2, 300, 2):
        recorder(2)
        free = [row.seconds for row in file.between(0, WALL + DAY) if row.key.state == hours.FREE]
        assert sum(free) >= second - 60


def test_a_recorder_that_cannot_write_keeps_the_last_moments(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "MOST_UNWRITTEN", 3)
    path = record_in(tmp_path / "boot").path
    path.mkdir(parents=True)
    for _ in range(6):
        recorder(5)
    path.rmdir()
    assert recorder(5) == [25.0, 30.0, 35.0]


def test_what_cannot_be_written_now_is_written_later(record):
    """Another process has locked the file. A limited number of moments is kept until the file can be written."""
    record.append([moment(WALL - 10)])
    keeper = Recorder.__new__(Recorder)
    keeper._record, keeper._unwritten = record, [moment(WALL - 5)]
    with sqlite3.connect(record.path) as db:
        db.execute("BEGIN EXCLUSIVE")
        keeper.flush()
        assert keeper._unwritten
    keeper.flush()
    assert [one.wall for one in shown(record)] == [WALL - 10, WALL - 5] and not keeper._unwritten


def test_hours_that_cannot_be_written_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(hours, "MOST_UNWRITTEN", 3)
    keeper = Recorder.__new__(Recorder)
    keeper._account, keeper._hours = hours.Account(), SimpleNamespace(add=lambda *_: False)
    key = hours.Key("ann", "a.ipynb", "a", "sim:0", hours.IN_USE)
    for minute in range(6):
        for seconds in (0, 1):
            keeper._account.look({key: GIB}, 60.0 * minute + seconds, WALL + 60 * minute + seconds)
        keeper._add_hours(WALL)
    assert [row.start - WALL for row in keeper._account.rows()] == [180, 240, 300]


# -- a file that is damaged, foreign or another's -----------------------------------------------------------------


def _full(path):
    Record(path).append(moment(WALL - n, n) for n in range(5000))
    return path


VIEW = "CREATE VIEW moments AS SELECT 1 AS wall, 'x' AS device, 2 AS peak, 'y' AS body"
FOREIGN = {
    "text": lambda path: path.write_text("this is no database at all, and never was " * 100),
    "empty": lambda path: path.write_bytes(b""),
    "another database": lambda path: _made(path, "CREATE TABLE moments(a, b)"),
    "a view": lambda path: _made(path, VIEW),
    "cut off": lambda path: os.truncate(_full(path), path.stat().st_size // 2),
    "garbled": lambda path: _garble(_full(path)),
}


def _made(path, statement):
    with sqlite3.connect(path) as db:
        db.execute(statement)


def _garble(path):
    with open(path, "r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 64)


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_not_ours_is_nothing_to_a_reader_and_set_aside_by_the_writer(record, what):
    FOREIGN[what](record.path)
    for one in shown(record):
        assert isinstance(one, Moment)
    assert record.append([moment(WALL, 77)])
    assert record.append([moment(WALL - 1, 78)])
    assert [one.measured_bytes for one in shown(record)[-2:]] == [78, 77]


def test_a_row_that_says_nothing_is_left_out(record):
    record.append([moment(WALL - 2), moment(WALL)])
    with sqlite3.connect(record.path) as db:
        for body in (b"\xc1", "text", None, 7, 1.5):
            db.execute("INSERT INTO moments VALUES (?, 'sim:0', 99, ?)", (WALL - 1, body))
    assert [one.wall for one in shown(record, most=10**6)] == [WALL - 2, WALL]


def test_a_link_is_neither_read_nor_written(record, tmp_path):
    """In a shared ledger, another user's link could point to a database of ours."""
    elsewhere = Record(tmp_path / "elsewhere.db")
    elsewhere.append([moment(WALL)])
    record.path.symlink_to(elsewhere.path)
    assert shown(record) == () and not record.append([moment(WALL - 1)])
    assert len(shown(elsewhere)) == 1


def test_a_moment_of_a_clock_that_was_wrong_is_forgotten(record):
    kept = [WALL - DAY, WALL - 60, WALL + AHEAD_SECONDS]
    record.append(map(moment, [WALL - DAY - 1, *kept, WALL + AHEAD_SECONDS + 1, WALL + 7 * DAY]))
    record.thin(WALL)
    assert [one.wall for one in shown(record, until=WALL + 30 * DAY)] == kept


def test_a_period_has_its_beginning_and_not_its_end(record):
    record.append(map(moment, (WALL, WALL + 10, WALL + 20)))
    found = shown(record, since=WALL, until=WALL + 20)
    assert [one.wall for one in found] == [WALL, WALL + 10]


def test_a_shared_ledgers_history_is_its_groups_and_a_private_ones_nobody_elses(tmp_path):
    old = os.umask(0o077)
    try:
        for name, mode in (("private", 0o600), ("shared", 0o660)):
            ledger = tmp_path / name
            ledger.mkdir()
            if name == "shared":
                (ledger / MARK).touch()
                (ledger / "journal").mkdir()
            record = record_in(ledger / "boot")
            assert record.append([moment(WALL)])
            assert stat.S_IMODE(record.path.stat().st_mode) == mode
    finally:
        os.umask(old)


@pytest.mark.processes
def test_a_reader_who_may_not_write_reads(record):
    """The reader's file is a copy, or on a read-only mount. The reader makes no other file in its directory."""
    record.append([moment(WALL)])
    record.path.chmod(0o400)
    record.path.parent.chmod(0o500)
    try:
        program = (
            f"from gpu_runtime.telemetry.recorder import Record; from pathlib import Path\n"
            f"print(len(Record(Path({str(record.path)!r})).between(0, {WALL + 1}, 10)))"
        )
        assert _as_nobody(program) == "1"
    finally:
        record.path.parent.chmod(0o700)


def _as_nobody(program: str) -> str:
    """The output of `program` in a process without root's capabilities, even if the test runs as root."""

    def renounce() -> None:
        if os.geteuid() == 0:
            libc = ctypes.CDLL(None, use_errno=True)
            for capability in range(41):
                libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, before exec

    ran = finished([sys.executable, "-c", program], preexec_fn=renounce)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
