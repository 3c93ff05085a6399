"""The replay decides as the scheduler does, and its clock and bytes add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.backtest import (
    ENGINE,
    LEAST_PIECE_BYTES,
    MODEL,
    NOTEBOOK,
    TRANSFERS,
    HistoryModel,
    HistoryRequest,
    Result,
    UseHistory,
    replay,
)
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import IMPORTANCE, decode_uses
from gpu_runtime.scheduler.policies import POLICIES, keep_score, lru

GB = 10**9
NORMAL = IMPORTANCE["normal"]


def history(*uses, **sizes):
    """`history((0, "a"), (20, "b", 5), a=10, b=4)`: seconds, model and seconds of service; GB."""
    models = {name: HistoryModel(name, gb * GB, gb, gb / 10, gb / 20) for name, gb in sizes.items()}
    requests = [HistoryRequest(at, model, *(more or (1,)), NORMAL) for at, model, *more in uses]
    return UseHistory(models, tuple(requests))


def run(past, card, host=0, rank=lru, engine="plain", disk=0):
    return replay(past, card * GB, host * GB, rank, TRANSFERS[engine], disk * GB)


def of_kinds(past, **kinds):
    """The history `past` with these kinds of its models."""
    models = {name: one._replace(kind=kinds.get(name, MODEL)) for name, one in past.models.items()}
    return past._replace(models=models)


def test_a_model_is_loaded_once_and_then_it_is_there():
    result = run(history((0, "a"), (5, "a"), (20, "a"), a=10), 10)
    assert (result.waits, result.loads, result.restores) == ((0.0, 5.0, 10.0), 1, 0)


def test_ten_requests_whose_optimum_is_known():
    """Two models are used alternately on a card that holds one. Without host memory, each use is a
    load of 10 s.
    """
    turns = history(*((30 * n, "ab"[n % 2]) for n in range(10)), a=10, b=10)
    bare = run(turns, 10)
    assert (bare.wait_seconds, bare.loads, bare.moved_bytes) == (100.0, 10, 100 * GB)
    # Then a use is a restore of 1 s behind an offload of 0.5 s, but for the first load of each.
    roomy = run(turns, 10, host=20)
    assert (roomy.loads, roomy.restores) == (2, 8)
    assert roomy.wait_seconds == pytest.approx(10 + 10.5 + 8 * 1.5)


def test_a_notebook_is_never_loaded_and_a_full_ram_drops_the_model_for_it():
    """Its values are its own. The model b is loaded in 10 s, once a has left in 0.5 s; a returns in 1 s."""
    turns = history((0, "a"), (20, "b"), (40, "a"), (60, "b"), a=10, b=10)
    result = run(of_kinds(turns, a=NOTEBOOK), 10, host=10)
    assert result.waits == pytest.approx((0.0, 1.0, 10.5, 10.5))
    assert (result.loads, result.restores) == (2, 1)


@pytest.mark.parametrize("engine", TRANSFERS)
def test_a_notebook_goes_on_to_the_disk_for_another_one_and_returns_from_there(engine):
    """For c, a is written and compared in 20 s, and b leaves the card in 0.5. Later a is read in 10 s more."""
    turns = history((0, "a"), (20, "b"), (40, "c"), (90, "a"), a=10, b=10, c=10)
    past = of_kinds(turns, a=NOTEBOOK, b=NOTEBOOK, c=NOTEBOOK)
    result = run(past, 10, host=10, disk=20, engine=engine)
    back = 20 + 0.5 + 1 + 10  # c leaves the card, for which b goes to the disk
    assert result.waits == pytest.approx((0.0, 0.5, 20.5, back)) and not result.loads
    with pytest.raises(GpuError, match="after 40 s.*(?s:.)*--disk SIZE"):
        run(past, 10, host=10, disk=9, engine=engine)


def test_no_notebook_goes_to_the_disk_so_that_an_engine_may_sleep_in_ram():
    """The engine is ended, and started again in 10 s. The disk would take 20 s from the request that waits now."""
    turns = history((0, "a"), (20, "b"), (40, "c"), a=10, b=10, c=10)
    result = run(of_kinds(turns, a=NOTEBOOK, b=ENGINE), 10, host=10, disk=20)
    assert result.waits == pytest.approx((0.0, 10.0, 10.5))


@pytest.mark.parametrize("disk, loads, last", [(0, 4, 100.5), (39, 3, 11.5), (40, 3, 31.5)])
def test_a_model_whose_load_is_slower_goes_to_the_disk_and_is_read_from_there(disk, loads, last):
    """For c, a is written and compared in 20 s. Later b is too, if half of the disk holds both; else it is unloaded."""
    turns = history((0, "a"), (200, "b"), (400, "c"), (600, "a"), a=10, b=10, c=10)
    slow = {name: model._replace(load_seconds=100.0) for name, model in turns.models.items()}
    result = run(turns._replace(models=slow), 10, host=10, disk=disk)
    third = 100.5 if loads == 4 else 20 + 100.5
    assert result.loads == loads
    assert result.waits == pytest.approx(sorted((100.0, 100.5, third, last)))


def test_a_model_in_use_does_not_leave():
    """The model b waits for the end of a's use, at 10 + 60 s, and then for its own load."""
    result = run(history((0, "a", 60), (5, "b"), a=10, b=10), 10)
    assert result.waits == (10.0, 75.0)


def test_requests_of_one_model_run_together():
    result = run(history((0, "a", 60), (1, "a", 60), (2, "a", 60), a=10), 10)
    assert result.waits == (8.0, 9.0, 10.0) and result.loads == 1


def test_a_busy_neighbour_starves_nobody_in_the_bounded_engine():
    """Overlapping uses of a keep it on the card for 300 s. The bounded engine, as the queue of `gpu
    serve`, holds them back once b has waited for five times its load; the price is one more load.
    """
    uses = sorted([*((n, "a", 2) for n in range(300)), (50.5, "b", 1)])
    past = history(*uses, a=10, b=10)
    full, bounded = (run(past, 10, engine=engine) for engine in ("full", "bounded"))
    assert max(full.waits) > 250
    assert 5 * 10 <= max(bounded.waits) < 5 * 10 + 10 + 4
    assert bounded.loads == full.loads + 1 and bounded.wait_seconds > full.wait_seconds


def test_a_restore_does_not_wait_for_a_load_in_the_full_engine():
    """The load of c occupies the disk from 40 s to 70 s. The model a is in host memory, so it is
    restored meanwhile.
    """
    uses = ((0, "a"), (20, "b"), (40, "c"), (41, "a"))
    past = history(*uses, a=10, b=10, c=30)
    waits = {engine: max(replay_of(past, engine)) for engine in TRANSFERS}
    assert waits["plain"] > 30 and waits["full"] <= 31


def replay_of(past, engine):
    return run(past, 40, host=60, engine=engine).waits


def test_only_a_part_moves_in_the_full_engine():
    """The model b needs 2 GB of a's 10 GB. They leave in pieces of 0.3 GB and come back: 7 pieces
    each way.
    """
    past = history((0, "a"), (20, "b"), (40, "a"), a=10, b=2)
    full = run(past, 10, host=6, engine="full")  # without room for a copy of a
    moved = 7 * LEAST_PIECE_BYTES
    assert full.moved_bytes == 12 * GB + moved + moved  # b leaves with its copy
    assert run(past, 10, host=20).moved_bytes == 12 * GB + 10 * GB + 10 * GB + 2 * GB
    assert full.wait_seconds < run(past, 10, host=20).wait_seconds


def test_a_model_with_a_copy_in_host_memory_leaves_at_once():
    """Without a copy, b waits until a has left. With and without a copy, the second use of a waits
    equally long.
    """
    past = history((0, "a"), (20, "b"), (40, "a"), a=10, b=10)
    full = run(past, 10, host=20, engine="full")
    assert full.moved_bytes == 20 * GB + 10 * GB  # two loads and a restore
    plain = run(past, 10, host=20)
    copies = plain.moved_bytes - full.moved_bytes
    assert copies == 20 * GB and full.wait_seconds < plain.wait_seconds


def test_the_load_with_most_users_is_first_in_the_full_engine():
    """While a is loaded, one user waits for b and three for c."""
    uses = ((0, "a"), (1, "b"), (2, "c"), (3, "c"), (4, "c"))
    past = history(*uses, a=10, b=10, c=10)
    assert run(past, 30).wait_seconds > run(past, 30, engine="full").wait_seconds


@pytest.mark.parametrize("engine", TRANSFERS)
def test_the_most_important_request_is_served_first(engine):
    """Both wait while a is in use until 20 s. A model counts as its most important user."""
    past = history((0, "a", 10), (1, "b"), (2, "c"), (3, "c"), a=10, b=10, c=10)
    for urgent, order in ((1, "bc"), (3, "cb")):
        requests = list(past.requests)
        requests[urgent] = requests[urgent]._replace(importance=IMPORTANCE["urgent"])
        result = run(past._replace(requests=tuple(requests)), 10, engine=engine)
        b, c = 29.0, 28.0  # the first one waits for the end of a and for its load
        late = 11.0  # and the other one for this use and another load
        waits = (10, b, c + late, c + late - 1) if order == "bc" else (10, b + late, c, c - 1)
        assert result.waits == tuple(sorted(map(float, waits)))


def test_a_percentile_is_the_wait_that_so_many_requests_do_not_exceed():
    result = Result(tuple(float(n) for n in range(1, 101)), 0, 0, 0)
    assert [result.percentile(part) for part in (0, 0.5, 0.99, 1)] == [1, 51, 100, 100]
    assert Result((), 0, 0, 0).percentile(0.5) == 0.0


def test_the_seconds_are_from_the_first_request_to_the_end_of_the_last():
    assert run(history((100, "a", 5), (200, "a", 50), a=10), 10).seconds == 150.0


def test_a_card_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="largest model"):
        run(history((0, "a"), a=10), 9)


uses = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from("abcd"), st.integers(0, 30)),
    min_size=1,
    max_size=25,
)


@given(
    uses,
    st.integers(10, 40),
    st.integers(0, 40),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(TRANSFERS)),
)
def test_every_request_is_served_and_what_moved_is_counted(past, card, host, name, engine):
    """Every request starts once, never before it arrived; each load and restore moves its bytes."""
    sizes = dict(a=10, b=7, c=4, d=1)
    told = history(*sorted(past), **sizes)
    result = run(told, card, host, POLICIES[name], engine)
    assert len(result.waits) == len(past) and result.waits[0] >= 0
    assert result.loads >= len({model for _, model, _ in past})
    least = LEAST_PIECE_BYTES if TRANSFERS[engine].parts else GB  # of a restore
    assert result.moved_bytes >= GB * result.loads + least * result.restores
    assert run(told, card, host, POLICIES[name], engine) == result, "a replay is deterministic"


def test_a_card_for_all_models_loads_each_once():
    past = history(*((n, "abcd"[n % 4]) for n in range(40)), a=10, b=7, c=4, d=1)
    for rank in (lru, keep_score):
        assert run(past, 22, rank=rank).loads == 4


def test_uses_that_wait_for_one_load_count_apart():
    """Three requests wait for the load of a, which ends at 10 s. Each counts from its request."""
    seen = set()

    def watched(lease, world):
        seen.add((lease.name, decode_uses(lease.recent_uses, world.wall)))
        return lru(lease, world)

    run(history((0, "a"), (3, "a"), (6, "a"), (40, "b"), a=10, b=10), 10, rank=watched)
    assert seen == {("a", (0, 3, 6))}
