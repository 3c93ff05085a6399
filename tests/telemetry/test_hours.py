"""The account of hours: what one look sees, what the sums are, and what the file keeps."""

import contextlib
import sqlite3
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.attribution import name_of
from gpu_runtime.backtest import FULL, HistoryModel, HistoryRequest, UseHistory, _Replay
from gpu_runtime.devices.sampler_client import Figures, Person
from gpu_runtime.facts import DISK, HOST, NORMAL, Phase, Sample, Section, Share, Ticket
from gpu_runtime.scheduler.capacity import views
from gpu_runtime.scheduler.policies import keep_score
from gpu_runtime.telemetry import hours
from gpu_runtime.telemetry.hours import (
    BLOCKING,
    DAY,
    FREE,
    HOUR,
    IDLE,
    IN_USE,
    ON_CARD,
    ON_DISK,
    OUTSIDE,
    PARKED,
    SAVED,
    WAITED,
    WAITED_FOR,
    Account,
    Hour,
    Hours,
    Key,
    held_now,
    table,
)
from gpu_runtime.units import GIB
from tests.bench.bench_week import WEEK_SECONDS, week
from tests.worlds import NOW, WALL, book, lease, owner, world

PEOPLE = {1: "ann", 2: "bob", 3: "carol"}


def page_of(*leases, tickets=(), **sections):
    """A book in which owner 1 is ann, 2 is bob and 3 is carol. `sections` has fields of a section, as `_2={…}`."""
    page = book(*leases)
    for number, user in PEOPLE.items():
        section = page.sections.get(owner(number).id) or Section(owner(number))
        of = replace(section.owner, user=user, notebook=f"/home/{user}/{user}.ipynb")
        page = page.with_section(replace(section, owner=of, **sections.get(f"_{number}", {})))
    return replace(page, tickets=tuple(tickets))


def waits(number, gib, device="sim:0"):
    return Ticket(
        "k", owner(number).id, "use", "big", NOW - 5, NOW, need=(Share(device, gib * GIB),)
    )


def seen(page, devices):
    """What is held, in GiB, by (user, name, device, state)."""
    held = held_now(page, views(page, devices))
    return {
        (key.user, key.name, key.device, key.state): size / GIB
        for key, size in held.items()
        if size
    }


def test_each_byte_of_a_card_has_one_state():
    """bob's idle model keeps carol waiting. On ann's card nobody waits."""
    page = page_of(
        lease("a", sim0=3, pins=1),
        lease("b", by=2, sim1=4),
        lease("c", by=2, sim0=2),
        lease("d", by=3, host=5),
        replace(lease("e", by=3, host=4), disk_bytes=3 * GIB),
        tickets=[waits(3, 6, "sim:1")],
    )
    assert seen(page, world(sim0=10, sim1=8, host=64)) == {
        ("ann", "a", "sim:0", IN_USE): 3,
        ("bob", "c", "sim:0", IDLE): 2,
        ("bob", "b", "sim:1", BLOCKING): 4,
        ("carol", "d", HOST, PARKED): 5,
        ("carol", "e", HOST, PARKED): 1,
        ("carol", "e", DISK, ON_DISK): 3,
        ("carol", "big", "sim:1", WAITED): 6,
        ("carol", "bob", "sim:1", WAITED_FOR): 6,
        ("", "", "sim:0", FREE): 5,
        ("", "", "sim:1", FREE): 4,
    }


@pytest.mark.parametrize(("fields", "state"), [
    ({"pins": 1}, IN_USE), ({}, IDLE), ({"kind": "block"}, IN_USE),
    ({"phase": Phase.ARRIVING}, IN_USE), ({"phase": Phase.LEAVING}, IDLE),
])  # fmt: skip
def test_what_is_in_use(fields, state):
    page = page_of(replace(lease("a", sim0=3), **fields))
    assert seen(page, world(sim0=10, host=64))["ann", "a", "sim:0", state] == 3


@pytest.mark.parametrize(("since", "state"), [(NOW - 3, IN_USE), (0.0, IDLE)])
def test_a_notebook_s_own_code_is_in_use_while_a_cell_runs(since, state):
    """Its CUDA context too. A model that no cell uses stays idle meanwhile."""
    own = replace(lease("kernel", sim0=3), kind="kernel")
    fields = {"busy_since": since, "residue": {"sim:0": GIB}}
    found = seen(page_of(own, lease("m", sim0=1), _1=fields), world(sim0=10, host=64))
    assert found["ann", "kernel", "sim:0", state] == 4 and found["ann", "m", "sim:0", IDLE] == 1


def test_who_waits_for_himself_blocks_nobody():
    page = page_of(lease("a", sim0=3), tickets=[waits(1, 9)])
    assert ("ann", "a", "sim:0", IDLE) in seen(page, world(sim0=10, host=64))


@pytest.mark.parametrize(
    ("used", "pins", "saved"), [(1, 1, 0), (6, 1, 3), (8, 1, 5), (9, 1, 6), (10, 0, 0)]
)
def test_saved_is_what_would_not_have_fitted_beside_the_parked_notebook(used, pins, saved):
    """bob's 7 GiB are parked. On a card of 10 GiB, he would have had what ann leaves free, or does not use."""
    page = page_of(lease("a", sim0=used, pins=pins), lease("b", by=2, host=7))
    found = seen(page, world(sim0=10, host=64))
    assert found.get(("bob", "", "", SAVED), 0) == saved


def test_memory_without_a_lease_has_its_program_and_user_where_the_driver_tells():
    page = page_of(lease("a", cuda0=4))
    devices = world(cuda0=20, free={"cuda:0": 9})
    sample = replace(
        devices.samples["cuda:0"], processes={owner(1).pid: 4 * GIB, 99: 5 * GIB, 98: GIB}
    )
    devices = replace(devices, samples={"cuda:0": sample})
    people = {99: Person(0, "python train.py"), 98: Person(2**31 - 2, "python")}
    figures = Figures(1, 0.0, Sample(HOST, 0.0, None), people=people)
    held = held_now(page, views(page, devices), figures.programs)
    assert held[Key("root", "python train.py", "", "cuda:0", OUTSIDE)] == 5 * GIB
    assert held[Key(name_of(2**31 - 2), "python", "", "cuda:0", OUTSIDE)] == GIB, (
        "as its leases say"
    )
    assert held[Key("", "", "", "cuda:0", OUTSIDE)] == GIB
    assert held[Key("", "", "", "cuda:0", FREE)] == 9 * GIB


LEASES = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 12), st.integers(0, 12), st.booleans(),
        st.sampled_from(Phase), st.sampled_from(("", "sim:0", "host")), st.integers(0, 5),
    ),
    max_size=6,
)  # fmt: skip


@st.composite
def pages(draw):
    leases = []
    for number, (by, on_zero, on_one, pinned, phase, target, moved) in enumerate(draw(LEASES)):
        made = lease(f"m{number}", by=by, sim0=on_zero, sim1=on_one, pins=int(pinned))
        to = (Share(target, moved * GIB),) if target and moved else ()
        leases.append(replace(made, phase=phase, target=to))
    tickets = [waits(draw(st.integers(1, 3)), 3)] if draw(st.booleans()) else []
    residue = {"residue": {"sim:0": draw(st.integers(0, 3)) * GIB}}
    return page_of(*leases, tickets=tickets, _2=residue)


STEPS = st.lists(st.tuples(pages(), st.floats(0.1, 300.0), st.floats(-7200, 7200)), max_size=8)


@given(STEPS)
def test_the_states_of_a_card_add_up_to_its_capacity_times_the_recorded_time(steps):
    """Also over pauses in which nobody recorded, and jumps of the wall clock."""
    devices, account, now = world(sim0=10, sim1=20, host=64), Account(), 0.0
    expected, recorded, before = defaultdict(float), 0.0, None
    for page, later, jump in steps:
        now += later
        held = held_now(page, views(page, devices))
        if before is not None and later <= hours.GAP_SECONDS:
            recorded += later
            for view in views(before, devices):
                if not view.device.is_host:
                    full = max(view.device.total_bytes, view.claimed_bytes)
                    expected[view.device.id] += full * later
        account.look(held, now, WALL + now + jump)
        before = page
    found, free = defaultdict(float), defaultdict(float)
    for row in account.rows():
        if row.key.state in ON_CARD:
            found[row.key.device] += row.byte_seconds
        if row.key.state == FREE:
            free[row.key.device] += row.seconds
    assert found == pytest.approx(expected, rel=1e-3)
    assert all(time == pytest.approx(recorded) for time in free.values())


def test_each_request_waits_as_long_as_it_waits():
    """Two scripts of one user that wait for the same model are two requests. One for two cards is one request."""
    both = (Share("sim:0", 4 * GIB), Share("sim:1", 4 * GIB))
    tickets = [waits(3, 6), replace(waits(3, 6), key="k2"), replace(waits(2, 0), need=both)]
    page = page_of(lease("a", sim0=3, sim1=3), tickets=tickets)
    account, held = Account(), held_now(page, views(page, world(sim0=10, sim1=8, host=64)))
    for second in (0.0, 6.0):
        account.look(held, second, WALL + second, hours.requests_now(page))
    waited = defaultdict(float)
    for row in account.rows():
        if row.key.state == WAITED:
            waited[row.key.user] += row.seconds
    assert waited == {"carol": 12, "bob": 6}
    [ann, *_] = table([row._replace(seconds=row.seconds * HOUR) for row in account.rows()], "waits")
    assert ann == {"user": "carol", "waited_for": "ann", "waited_h": 12.0}


def test_a_minute_is_written_in_parts_and_the_file_adds_it_up(tmp_path):
    """A helper that ends in the middle of a minute writes its part; the next one adds to it."""
    file, wall = Hours(tmp_path / "hours.db"), 120_000_000.0
    page = page_of(lease("a", sim0=3, pins=1))
    held = held_now(page, views(page, world(sim0=10, host=64)))
    for start in (0.0, 40.0):  # two helpers
        account = Account()
        for second in range(0, 41, 2):
            account.look(held, start + second, wall + start + second)
        rows = account.rows()
        assert file.add(rows, wall + start)
        account.forget(rows)
        assert account.rows() == []
    [mine] = [row for row in file.between(0, 1e12) if row.key.state == IN_USE]
    assert (mine.byte_seconds, mine.seconds) == (3 * GIB * 80, 80)
    by_minute = [row for row in file.between(0, 1e12, 60) if row.key.state == IN_USE]
    assert [(row.start, row.seconds) for row in by_minute] == [(wall, 60), (wall + 60, 20)]
    assert file.between(wall + 1, wall + 60) == []


def test_the_reports_of_two_weeks_have_each_hour_once(tmp_path):
    """Cron types them a moment after seven. The first hour of each week was in no report."""
    file, began = Hours(tmp_path / "hours.db"), 20_000 * DAY + 7 * HOUR
    key, reports = Key("ann", "n", "m", "sim:0", IN_USE), []
    for hour in range(14 * 24):
        start = began + hour * HOUR
        assert file.add([Hour(start, key, 5.0, 1.0)], start + HOUR)
        if hour in (7 * 24 - 1, 14 * 24 - 1):
            now = start + HOUR + 1.3
            reports += file.between(now - 7 * DAY, now)
            by_time = file.between(now - 7 * DAY, now, HOUR)
            assert sum(row.seconds for row in by_time) == reports[-1].seconds, "the same, by time"
    assert [row.seconds for row in reports] == [7 * 24, 7 * 24]


def test_what_was_written_while_the_clock_was_ahead_counts_for_no_quota(tmp_path):
    """It would have counted until the clock is there, perhaps for years."""
    file, now = Hours(tmp_path / "hours.db"), 20_000.0 * DAY
    used = [
        Hour(int(at), Key("ann", "n", "m", "sim:0", IN_USE), GIB * HOUR, HOUR)
        for at in (now - 60, now + DAY)
    ]
    free = Hour(int(now - 60), Key("", "", "", "sim:0", FREE), 0.0, HOUR)
    assert file.add([*used, free], now)
    assert file.card_hours("ann", now, DAY) == 1.0


def test_a_quota_counts_the_hours_on_cards_that_the_process_does_not_see(tmp_path):
    """A process with CUDA_VISIBLE_DEVICES counted those on its own cards. What a card has is in the account too."""
    file, now = Hours(tmp_path / "hours.db"), 20_000.0 * DAY
    rows = [
        Hour(int(now - HOUR), Key(user, "", "", card, state), part * gib * GIB * HOUR, HOUR)
        for card, gib in (("cuda:0", 24), ("cuda:7", 80))
        for user, state, part in (("ann", IN_USE, 0.5), ("bob", IN_USE, 0.25), ("", FREE, 0.25))
    ]
    assert file.add(rows, now)
    assert (file.card_hours("ann", now, DAY), file.card_hours("bob", now, DAY)) == (1.0, 0.5)


@given(
    st.lists(st.integers(0, 200 * DAY // 60), min_size=1, max_size=30, unique=True),
    st.integers(0, 200 * DAY),
)
def test_minutes_become_hours_and_days_and_nothing_is_lost(tmp_path_factory, minutes, late):
    file = Hours(tmp_path_factory.mktemp("hours") / "hours.db")
    key, began = Key("ann", "n", "m", "sim:0", IN_USE), 20_000 * DAY
    for minute in minutes:
        assert file.add([Hour(began + 60 * minute, key, 5.0, 1.0)], began + 60 * minute)
    now = began + 60 * max(minutes) + late
    for _ in range(2):  # a second time changes nothing
        assert file.add([], now)
        [row] = file.between(0, 1e12)
        assert (row.byte_seconds, row.seconds) == (5.0 * len(minutes), len(minutes))
    for row in file.between(0, 1e12, 60):
        age = now - row.start
        assert age <= 3 * DAY or row.start % HOUR == 0
        assert age <= 92 * DAY or row.start % DAY == 0


def test_three_years_are_kept_and_a_damaged_file_is_set_aside(tmp_path, caplog):
    file, key = Hours(tmp_path / "hours.db"), Key("ann", "", "m", "sim:0", IN_USE)
    file.add([Hour(0, key, 5.0, 1.0)], 3 * 365 * DAY)
    assert len(file.between(0, 1e12)) == 1
    file.add([], 3 * 365 * DAY + DAY)
    assert file.between(0, 1e12) == []
    file.path.write_bytes(b"no database" * 99)
    assert file.between(0, 1e12) == []
    assert file.add([Hour(60, key, 5.0, 1.0)], 60.0) and len(file.between(0, 1e12)) == 1
    assert "set aside" in caplog.text


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


@pytest.mark.parametrize("made", [
    f"CREATE VIEW hours AS {ENDLESS} SELECT 60 stretch, x start, 'ann' user, '' notebook, '' name, 'sim:0' device, "
    "'idle' state, 1.0 byte_seconds, 1.0 seconds FROM n",
    f"CREATE TRIGGER t AFTER INSERT ON hours BEGIN INSERT INTO kept {ENDLESS} SELECT x FROM n; END",
])  # fmt: skip
def test_no_file_of_another_user_is_read_or_written_without_an_end(tmp_path, monkeypatch, made):
    """Each member of a shared ledger can write it, and each decision under a quota of hours reads it."""
    monkeypatch.setattr(hours, "MOST_STEPS", 10**6)
    file = Hours(tmp_path / "hours.db")
    if "TRIGGER" in made:
        file.add([], 60.0)
    with contextlib.closing(sqlite3.connect(file.path)) as db:
        db.execute("CREATE TABLE kept(x)")
        db.execute(made)
        db.commit()
    assert file.card_hours("ann", 1e9, 1e9) == 0.0
    key = Key("ann", "", "m", "sim:0", IN_USE)
    assert file.add([Hour(60, key, 5.0, 1.0)], 60.0) and len(file.between(0, 1e12)) == 1


def day():
    """A day of two users and one card of 10 GiB, by hand: in hours, and in GiB on a card."""
    row = lambda user, name, state, gib, time, notebook="n": Hour(
        0,
        Key(user, f"/home/{user}/{notebook}.ipynb" if user else "", name, "sim:0", state),
        gib * GIB * time * HOUR,
        time * HOUR,
    )
    return [
        row("ann", "kernel", IN_USE, 5, 6), row("ann", "kernel", IDLE, 5, 2), row("ann", "qwen", BLOCKING, 2, 1, "m"),
        row("bob", "kernel", IN_USE, 8, 10), row("bob", "kernel", WAITED, 8, 0.5),
        Hour(0, Key("bob", "/home/bob/n.ipynb", "ann", "sim:0", WAITED_FOR), 6 * GIB * HOUR * 0.5, HOUR / 2),
        Hour(0, Key("bob", "/home/bob/n.ipynb", "bob", "sim:0", WAITED_FOR), 2 * GIB * HOUR * 0.5, HOUR / 2),
        Hour(0, Key("ann", "/home/ann/n.ipynb", "kernel", HOST, PARKED), 5 * GIB * 10 * HOUR, 10 * HOUR),
        Hour(0, Key("ann", "/home/ann/n.ipynb", "", "", SAVED), 3 * GIB * 10 * HOUR, 10 * HOUR),
        row("", "", FREE, (240 - 30 - 10 - 2 - 80) / 24, 24),
    ]  # fmt: skip


def test_a_day_of_two_users_against_a_table_by_hand():
    ann = {"card_h": 4.2, "in_use_gib_h": 30.0, "idle_gib_h": 10.0, "blocking_gib_h": 2.0}
    ann |= {"parked_gib_h": 50.0, "saved_gib_h": 30.0}
    bob = {"card_h": 8.0, "in_use_gib_h": 80.0, "waited_h": 0.5}
    zero = dict.fromkeys(hours.columns("user"), 0.0)
    assert table(day(), "user") == [zero | {"user": "bob"} | bob, zero | {"user": "ann"} | ann]
    notebooks = table(day(), "notebook")
    assert [(one["user"], one["notebook"], one["card_h"]) for one in notebooks] == [
        ("bob", "n.ipynb", 8.0), ("ann", "n.ipynb", 4.0), ("ann", "m.ipynb", 0.2),
    ]  # fmt: skip
    assert [one["model"] for one in table(day(), "model")][:2] == ["its own code", "its own code"]
    assert table(day(), "card") == [{
        "card": "sim:0", "card_h": 12.2, "in_use_gib_h": 110.0, "idle_gib_h": 10.0, "blocking_gib_h": 2.0,
        "outside_gib_h": 0.0, "free_gib_h": 118.0,
    }]  # fmt: skip
    assert table(day(), "waits") == [
        {"user": "bob", "waited_for": "ann", "waited_h": 0.375},
        {"user": "bob", "waited_for": "bob", "waited_h": 0.125},
    ]
    for by in hours.BY:
        assert all(list(row) == hours.columns(by) for row in table(day(), by))
    assert table([], "user") == table([], "card") == table([], "waits") == []


# Two users and six notebooks on a card of 24 GiB: GiB, and what each notebook does from which hour on.
SIX = {
    ("ann", "train"): (8, {0: "run", 6: "idle", 8: "parked", 12: "idle"}),
    ("ann", "eval"): (4, {2: "run", 3: "idle"}),
    ("ann", "plot"): (2, {9: "run", 10: "idle"}),
    ("bob", "chat"): (16, {7.5: "wait", 8: "run", 12: "parked", 18: "disk"}),
    ("bob", "demo"): (3, {13: "run", 14: "idle"}),
    ("bob", "tune"): (1, {20: "run"}),
}
SIX_BY_HAND = [  # card_h, then in use, idle, blocking, outside, parked, on disk, saved and waited
    ["ann", "train", 6.667, 48.0, 108.0, 4.0, 0.0, 32.0, 0.0, 22.0, 0.0],
    ["ann", "eval", 3.667, 4.0, 82.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ["bob", "chat", 2.667, 64.0, 0.0, 0.0, 0.0, 96.0, 96.0, 7.0, 0.5],
    ["bob", "demo", 1.375, 3.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ["ann", "plot", 1.25, 2.0, 28.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ["bob", "tune", 0.167, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
]


def page_of_six(hour):
    page, tickets = book(), []
    for number, ((user, notebook), (gib, turns)) in enumerate(SIX.items(), 1):
        of = replace(owner(number), user=user, notebook=f"/home/{user}/{notebook}")
        now = [state for since, state in turns.items() if since <= hour]
        section = Section(of, busy_since=NOW if now and now[-1] == "run" else 0.0)
        if now and now[-1] == "wait":
            tickets.append(waits(number, gib))
        elif now:
            place = "host" if now[-1] in ("parked", "disk") else "sim0"
            own = replace(lease("kernel", by=number, **{place: gib}), kind="kernel")
            on_disk = gib * GIB if now[-1] == "disk" else 0
            section = replace(section, leases=(replace(own, disk_bytes=on_disk),))
        page = page.with_section(section)
    return replace(page, tickets=tuple(tickets))


def test_a_day_of_two_users_and_six_notebooks_against_a_table_by_hand(tmp_path):
    """Looks every ten seconds of virtual time. At three o'clock in the afternoon the helper is replaced by another one.

    What is saved: from 8 to 9 train's 8 GiB less 4 free ones, until 12 less 2; then of chat what demo and tune used.
    """
    file, account, there = Hours(tmp_path / "hours.db"), Account(), world(sim0=24, host=64)
    wall, held = 20_000 * DAY, {}
    for second in range(0, DAY + 1, 10):
        if second % 1800 == 0:
            page = page_of_six(second / HOUR)
            held = held_now(page, views(page, there))
        account.look(held, float(second), wall + second)
        if second == 15 * HOUR:
            assert file.add(account.rows(), wall + second)
            account = Account()
            account.look(held, float(second), wall + second)
    assert file.add(account.rows(), wall + DAY)
    rows = file.between(wall, wall + DAY)
    assert [list(one.values()) for one in table(rows, "notebook")] == SIX_BY_HAND
    assert [(one["user"], one["card_h"], one["waited_h"]) for one in table(rows, "user")] == [
        ("ann", 11.583, 0.0), ("bob", 4.208, 0.5),
    ]  # fmt: skip
    assert table(rows, "waits") == [{"user": "bob", "waited_for": "ann", "waited_h": 0.5}]
    [card] = table(rows, "card")
    assert sum(card[hours.COLUMNS[state]] for state in ON_CARD) == pytest.approx(24 * 24, rel=1e-3)


def test_two_notebooks_of_a_user_with_one_file_name_are_two_rows():
    """Their hours were one sum. The notebook of another user has its file name."""
    held = [
        Hour(0, Key(user, f"/home/{path}", "kernel", "sim:0", IN_USE), gib * GIB * HOUR, HOUR)
        for user, path, gib in (
            ("ann", "a/n.ipynb", 2),
            ("ann", "b/n.ipynb", 1),
            ("bob", "n.ipynb", 3),
        )
    ]
    rows = table([*held, Hour(0, Key("", "", "", "sim:0", FREE), 4 * GIB * HOUR, HOUR)], "notebook")
    assert [(one["notebook"], one["in_use_gib_h"]) for one in rows] == [
        ("n.ipynb", 3.0), ("/home/a/n.ipynb", 2.0), ("/home/b/n.ipynb", 1.0),
    ]  # fmt: skip


def test_the_text_says_what_is_missing_and_has_the_parts_of_a_small_card():
    """162 h of a week read `7 d of 7 d`, and the parts were computed from rounded GiB-hours."""
    small = [
        Hour(0, Key(user, "", "m", "sim:0", state), part * GIB * HOUR / 1000, 162 * HOUR)
        for user, state, part in (("ann", IN_USE, 0.4), ("", FREE, 0.6))
    ]
    text = hours.text(small, WALL - 7 * DAY, WALL)
    assert "recorded 162 h of 7 d" in text and "sim:0: 40 % in use, 60 % free" in text


def test_a_script_without_a_lease_has_its_card_hours_and_a_column():
    """Its 20 GiB-hours, on a card of 10 GiB, are two card-hours: in the sum, in the column and in the mail."""
    key = Key("carol", "python train.py", "", "sim:0", hours.OUTSIDE)
    rows = [*day(), Hour(0, key, 20.0 * GIB * HOUR, 10.0 * HOUR)]
    rows[-2] = Hour(
        0, Key("", "", "", "sim:0", FREE), (240 - 30 - 10 - 2 - 80 - 20) * GIB * HOUR, 24 * HOUR
    )
    carol = next(one for one in table(rows, "user") if one["user"] == "carol")
    assert (carol["card_h"], carol["outside_gib_h"], carol["idle_gib_h"]) == (2.0, 20.0, 0.0)
    assert "carol: 2.0 card-hours; 0.0 GiB-hours in use, 0.0 idle, 20.0 outside" in hours.text(
        rows, WALL - DAY, WALL
    )


def test_the_text_of_a_day_is_fit_for_a_mail():
    text = hours.text(day(), WALL - DAY, WALL)
    assert (
        "recorded 24 h of 24 h" in text
        and "46 % in use, 4 % idle, 1 % idle while another waited, 49 % free" in text
    )
    assert (
        "bob: 8.0 card-hours; 80.0 GiB-hours in use, 0.0 idle; waited 30 min, most for ann" in text
    )
    assert "Saved by parking: 30.0 GiB-hours" in text and len(text.splitlines()) == 5
    assert "recorded 0" in hours.text([], WALL - DAY, WALL)


class _Week(_Replay):
    """A replay whose book is looked at every nine virtual seconds. Each model is a notebook of one of 20 users."""

    def __init__(self, *history, file):
        super().__init__(*history)
        self.file, self.account, self.looked, self.wall = file, Account(), 0.0, 20_000 * DAY

    def _advance(self, seconds):
        held = {}
        for key, size in held_now(self.book, views(self.book, self.world)).items():
            if number := key.name.removeprefix("m"):
                user = f"user{int(number) % 20}" if number.isdigit() else ""
                key = key._replace(user=user, notebook=f"/home/{user}/{key.name}.ipynb")
            held[key] = held.get(key, 0) + size
        now = self.looked
        while now < seconds:
            self.account.look(held, now, self.wall + now)
            now = min(now + 9.0, seconds)
            if now // 600 != self.looked // 600:
                rows = self.account.rows()
                assert self.file.add(rows, self.wall + now)
                self.account.forget(rows)
            self.looked = now
        self.account.look(held, seconds, self.wall + seconds)
        super()._advance(seconds)


@pytest.mark.soak
def test_a_week_of_twenty_users_adds_up_and_its_file_is_small(tmp_path):
    """The real scheduler decides about 20,000 uses of 80 models on a card of 160 GB."""
    made = week(7)
    models = {
        name: HistoryModel(
            name, size, made.load_seconds(name), made.restore_seconds(name), size / 20e9
        )
        for name, size in made.sizes.items()
    }
    uses = tuple(
        HistoryRequest(one.seconds, one.model, one.service_seconds, NORMAL) for one in made.uses
    )
    card, file = 160 * 10**9, Hours(tmp_path / "hours.db")
    replay = _Week(UseHistory(models, uses), card, 2 * card, keep_score, FULL, 0, file=file)
    replay.run()
    assert file.add(replay.account.rows(), replay.wall + replay.looked)
    assert replay.looked >= 0.9 * WEEK_SECONDS and file.path.stat().st_size < 50 * 2**20
    rows = file.between(0, 1e12)
    full = sum(row.byte_seconds for row in rows if row.key.state in ON_CARD)
    assert full == pytest.approx(card * replay.looked, rel=1e-3)
    waited = sum(row.seconds for row in rows if row.key.state == WAITED)
    assert len({row.key.user for row in rows if row.key.user}) == 20
    assert 0 < waited <= sum(replay.waits) * 1.001
