"""When a transaction starts at once, and when it waits before its next attempt."""

from __future__ import annotations

import random

from gpu_runtime.ledgers.sqlite.backoff import CROWDED_SECONDS, FREE_TURNS, IN_A_ROW_SECONDS, Pace


def waits_in_a_row(pace: Pace, count: int, now: float = 10.0) -> list[float]:
    """The waits before each of `count` transactions in a row."""
    waits = []
    for _ in range(count):
        waits.append(pace.before(now))
        pace.note_end(0.0001, now)
    return waits


def test_a_single_process_never_waits():
    assert waits_in_a_row(Pace(), 5 * FREE_TURNS) == [0.0] * 5 * FREE_TURNS


def test_under_contention_each_row_of_free_turns_ends_with_a_wait():
    pace = Pace()
    pace.note_contention(10.0)
    waited = [wait > 0 for wait in waits_in_a_row(pace, 3 * FREE_TURNS)]
    assert [place for place, late in enumerate(waited) if late] == [FREE_TURNS, 2 * FREE_TURNS]


def test_a_wait_draws_nothing_from_the_user_s_generator():
    """`random.seed(0)` in a notebook gives the same numbers with other processes and without."""
    pace, before = Pace(), random.getstate()
    pace.note_contention(10.0)
    assert any(waits_in_a_row(pace, 3 * FREE_TURNS)) and pace.after_loss(3, 10.0) > 0
    assert random.getstate() == before


def test_contention_is_forgotten():
    pace = Pace()
    pace.note_contention(10.0)
    assert not any(waits_in_a_row(pace, 3 * FREE_TURNS, now=10.1 + CROWDED_SECONDS))


def test_an_occasional_writer_never_waits():
    pace = Pace()
    pace.note_contention(10.0)
    assert not any(
        waits_in_a_row(pace, 2, now=10.0 + n * 2 * IN_A_ROW_SECONDS) != [0.0, 0.0]
        for n in range(20)
    )


def test_a_transaction_continues_a_row_until_the_wait():
    """A process takes the turn at once only within a row. Else it could take the turn before a
    process that has waited longer.
    """
    pace = Pace()
    pace.note_contention(10.0)
    continues = []
    for _ in range(2 * FREE_TURNS):
        pace.before(10.0)
        continues.append(pace.continues)
        pace.note_end(0.0001, 10.0)
    assert continues == 2 * [False, *[True] * (FREE_TURNS - 1)]
    pace.before(10.0 + 2 * IN_A_ROW_SECONDS)
    assert not pace.continues


def expectations(pace: Pace, count: int, now: float) -> list[bool]:
    """After each of `count` transactions in a row: whether another one is expected."""
    expects = []
    for _ in range(count):
        pace.before(now)
        expects.append(pace.will_continue)
        pace.note_end(0.0001, now)
    return expects


def test_a_constant_writer_is_expected_to_go_on_until_its_wait():
    pace = Pace()
    pace.note_contention(10.0)
    first = [False, False] + [True] * (FREE_TURNS - 3) + [False]
    next_ones = [True] * (FREE_TURNS - 1) + [False]
    assert expectations(pace, 2 * FREE_TURNS, 10.0) == first + next_ones


def test_a_release_is_expected_after_each_lease_that_follows_a_pair():
    """Both transactions then have one turn. The second one is four times as fast."""
    pace = Pace()
    assert expectations(pace, 2, now=10.0) == [False, False]
    assert expectations(pace, 2, now=20.0) == [True, False]
    assert expectations(pace, 1, now=30.0) == [True]
    assert expectations(pace, 1, now=40.0) == [False], "the last lease was not released at once"


def test_waits_after_losses_are_random_and_grow_within_a_bound():
    pace = Pace()
    pace.note_end(0.0001, 10.0)
    cost = pace.attempt_seconds
    waits = {times: [pace.after_loss(times, 10.0) for _ in range(200)] for times in (1, 3, 30)}
    assert all(cost <= wait <= 51 * cost for some in waits.values() for wait in some)
    assert max(waits[1]) < max(waits[3]) < max(waits[30])
    assert len(set(waits[1])) > 100


def test_one_slow_attempt_does_not_make_all_waits_long():
    """A garbage collection or a cold cache can make one attempt slow. The assumed cost of an
    attempt stays close to the fastest ones.
    """
    pace = Pace()
    for seconds in [0.0001] * 10 + [0.5] + [0.0001] * 3:
        pace.note_end(seconds, 10.0)
    assert pace.attempt_seconds <= 0.00011
