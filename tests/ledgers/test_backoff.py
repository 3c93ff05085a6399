"""Who may come back to the book at once, and who waits."""

from __future__ import annotations

from gpu_runtime.ledgers.sqlite.backoff import CROWDED_SECONDS, FREE_TURNS, IN_A_ROW_SECONDS, Pace


def turns(pace: Pace, count: int, now: float = 10.0) -> list[float]:
    """The waits before so many transactions in a row."""
    waits = []
    for _ in range(count):
        waits.append(pace.before(now))
        pace.note_end(0.0001, now)
    return waits


def test_alone_nobody_waits():
    assert turns(Pace(), 5 * FREE_TURNS) == [0.0] * 5 * FREE_TURNS


def test_among_others_every_ninth_turn_in_a_row_waits_a_moment():
    pace = Pace()
    pace.note_contention(10.0)
    waited = [wait > 0 for wait in turns(pace, 3 * FREE_TURNS)]
    assert [place for place, late in enumerate(waited) if late] == [FREE_TURNS, 2 * FREE_TURNS]


def test_a_crowd_is_forgotten():
    pace = Pace()
    pace.note_contention(10.0)
    assert not any(turns(pace, 3 * FREE_TURNS, now=10.1 + CROWDED_SECONDS))


def test_whoever_comes_now_and_then_never_waits():
    pace = Pace()
    pace.note_contention(10.0)
    assert not any(
        turns(pace, 2, now=10.0 + n * 2 * IN_A_ROW_SECONDS) != [0.0, 0.0] for n in range(20)
    )


def test_only_who_writes_without_pause_among_others_lines_up_before_its_first_try():
    """Whoever tries first and lines up afterwards mostly finds nobody; but in a crowd it would try in vain."""
    alone, among = Pace(), Pace()
    among.note_contention(10.0)
    lined_up = {
        pace: [
            (pace.before(10.0), pace.should_queue, pace.note_end(0.0001, 10.0))[1]
            for _ in range(FREE_TURNS + 4)
        ]
        for pace in (alone, among)
    }
    assert not any(lined_up[alone])
    assert lined_up[among] == [False, False] + [True] * (FREE_TURNS + 2)
    among.before(10.0 + 2 * IN_A_ROW_SECONDS)
    assert not among.should_queue


def test_losers_wait_at_random_and_ever_longer_within_a_bound():
    pace = Pace()
    pace.note_end(0.0001, 10.0)
    cost = pace.attempt_seconds
    waits = {times: [pace.after_loss(times, 10.0) for _ in range(200)] for times in (1, 3, 30)}
    assert all(cost <= wait <= 51 * cost for some in waits.values() for wait in some)
    assert max(waits[1]) < max(waits[3]) < max(waits[30])
    assert len(set(waits[1])) > 100


def test_one_slow_attempt_does_not_make_all_waits_long():
    """A collection of garbage, a cold cache: the cost of an attempt is near the least that it took."""
    pace = Pace()
    for seconds in [0.0001] * 10 + [0.5] + [0.0001] * 3:
        pace.note_end(seconds, 10.0)
    assert pace.attempt_seconds <= 0.00011
