"""Which call starts next: calls are ordered by importance, then warm models first, then arrival.

No call waits for ever.
"""

import random
from collections import Counter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.facts import IMPORTANCE
from gpu_runtime.serving import queue as ordering
from gpu_runtime.serving.queue import (
    AGEING_SECONDS,
    MAX_LOADS,
    ModelActivity,
    ModelState,
    NextSteps,
    Waiting,
    aged_class,
    call_to_refuse,
    next_steps,
    order,
)

WARM, COLD = ModelActivity(ModelState.WARM), ModelActivity()
LOADING = ModelActivity(ModelState.LOADING)


def call(
    key: int, model: str = "a", importance: str = "normal", arrived: float = 0.0, client: str = ""
) -> Waiting:
    return Waiting(key, model, IMPORTANCE[importance], arrived, client)


def keys(waiting: list[Waiting], engines: dict[str, ModelActivity], now: float = 0.0) -> list[int]:
    return [waiting.key for waiting in order(waiting, engines, now)]


def test_importance_counts_before_warmth_and_warmth_before_arrival():
    """Calls are ordered as in the Model Boss queue, by (priority, warm_bump, submitted_at)."""
    waiting = [call(1, "cold"), call(2, "warm"), call(3, "cold", "high"), call(4, "warm", "batch")]
    assert keys(waiting, {"warm": WARM, "cold": COLD}) == [3, 2, 1, 4]
    cold, warm = call(1, "b", "urgent", arrived=0.0), call(2, "a", "urgent", arrived=30.0)
    assert keys([cold, warm], {"a": WARM, "b": COLD}, now=29.0) == [2, 1]
    assert keys([cold, warm], {"a": WARM, "b": COLD}, now=30.0) == [1, 2]


def test_clients_have_equal_parts_of_a_full_queue_whatever_they_send():
    """A client that refills its places faster used to get a quarter more, since its calls were older."""
    waiting: list[Waiting] = []
    turns: dict[str, int] = {}
    served: Counter[str] = Counter()
    chance = random.Random(1)
    for now in range(400):
        for client in chance.choices(["a", "b", "c", "greedy"], weights=[1, 1, 1, 2], k=2):
            waiting.append(call(len(waiting) + 1000 * now, client=client))
            if len(waiting) > 64:
                waiting.remove(call_to_refuse(waiting[:-1], waiting[-1]))
        first = order(waiting, {"a": WARM}, 0.0, turns)[0]
        waiting.remove(first)
        turns[first.client] = now
        served[first.client] += 1
    assert min(served.values()) > 0.95 * max(served.values()), served


def test_every_thirty_seconds_raise_a_call_by_one_class():
    """A call of a warm model that arrives shortly before the bound still starts first."""
    old, new = call(1, "a", "batch", arrived=0.0), call(2, "a", "normal", arrived=60.0)
    assert keys([new, old], {"a": WARM}, now=59.9) == [2, 1]
    assert keys([new, old], {"a": WARM}, now=60.0) == [1, 2]
    cold, warm = Waiting(1, "a", 10, 0.0), Waiting(2, "b", 10, AGEING_SECONDS - 0.5)
    assert keys([cold, warm], {"b": WARM}, now=AGEING_SECONDS - 0.1) == [2, 1]


def test_calls_of_which_none_can_start_are_not_sorted():
    """Under overload most decisions are of this kind. To sort 256 waiting calls took 0.33 ms at each arrival."""
    waiting = [call(1, "busy"), call(2, "loading")]
    engines = {"busy": ModelActivity(ModelState.WARM, 2, 2), "loading": LOADING, "idle": WARM}
    with mock.patch.object(ordering, "order", wraps=order) as sorts:
        assert next_steps(waiting, engines, 0.0) == NextSteps()
        assert sorts.call_count == 0
        assert next_steps([*waiting, call(3, "idle")], engines, 0.0) == NextSteps(start=(3,))
        assert next_steps([*waiting, call(3, "new")], engines, 0.0) == NextSteps(load=("new",))
        assert sorts.call_count == 2


def test_a_cold_model_is_loaded_once_and_its_load_blocks_no_other():
    waiting = [call(1, "a"), call(2, "a"), call(3, "b")]
    assert next_steps(waiting, {}, 0.0) == NextSteps(load=("a", "b"))
    busy = {f"busy{n}": LOADING for n in range(MAX_LOADS - 1)}
    assert next_steps([call(1, "a"), call(2, "b")], busy, 0.0) == NextSteps(load=("a",))
    waiting = [call(1, "big", "urgent"), call(2, "a", "batch")]
    assert next_steps(waiting, {"big": LOADING, "a": WARM}, 0.0) == NextSteps(start=(2,))


def test_a_warm_model_starts_calls_before_a_cold_one_unless_it_blocks_a_more_important_call():
    """A steady stream of normal calls would delay the urgent call for ever."""
    engines = {
        "a": ModelActivity(ModelState.WARM, active=1, concurrency=4),
        "b": ModelActivity(ModelState.LOADING, waits_for=frozenset("a")),
        "c": WARM,
    }
    assert next_steps([call(1, "b"), call(2, "a")], engines, 0.0) == NextSteps(start=(2,))
    waiting = [call(1, "b", "urgent"), call(2, "a"), call(3, "c")]
    assert next_steps(waiting, engines, 0.0) == NextSteps(start=(3,))


MODELS = "abc"
CALL = st.tuples(
    st.sampled_from(MODELS), st.sampled_from(sorted(IMPORTANCE.values())), st.floats(0, 500)
)
calls = st.lists(CALL, max_size=12).map(
    lambda made: [Waiting(n, *one) for n, one in enumerate(sorted(made, key=lambda c: c[2]))]
)
engine = st.builds(
    ModelActivity,
    st.sampled_from(ModelState),
    st.integers(0, 3),
    st.integers(1, 3),
    st.frozensets(st.sampled_from(MODELS), max_size=2),
)
engines = st.fixed_dictionaries({}, optional=dict.fromkeys(MODELS, engine))


@given(calls, engines, st.floats(500, 1000))
def test_no_engine_runs_more_than_it_can_and_only_warm_ones_run(waiting, engines, now):
    out = next_steps(waiting, engines, now)
    model = {call.key: call.model for call in waiting}
    for name in MODELS:
        started = sum(model[key] == name for key in out.start)
        engine = engines.get(name, COLD)
        assert not started or engine.state is ModelState.WARM
        assert not started or engine.active + started <= engine.concurrency
    assert all(engines.get(name, COLD).state is ModelState.COLD for name in out.load)
    assert len(set(out.start)) == len(out.start) and len(set(out.load)) == len(out.load)


@given(calls, engines, st.floats(500, 1000))
def test_a_free_place_of_a_model_that_blocks_no_load_is_taken(waiting, engines, now):
    out = next_steps(waiting, engines, now)
    loading = [engine for engine in engines.values() if engine.state is ModelState.LOADING]
    in_the_way = {name for engine in loading for name in engine.waits_for}
    for call in waiting:
        engine = engines.get(call.model, COLD)
        started = sum(other.model == call.model for other in waiting if other.key in out.start)
        could_start = engine.state is ModelState.WARM and call.model not in in_the_way
        if could_start and call.key not in out.start:
            assert engine.active + started >= engine.concurrency


def test_a_cold_model_that_has_waited_for_its_bound_goes_first():
    """No call of b waits GPU_MOST_WAIT for calls of a that came later."""
    waiting = [call(1, "b", arrived=0.0), call(2, "a", arrived=1.0)]
    engines = {
        "a": ModelActivity(ModelState.WARM, active=1, concurrency=4),
        "b": ModelActivity(ModelState.LOADING, waits_for=frozenset("a"), most_wait=5.0),
    }
    assert next_steps(waiting, engines, 4.9) == NextSteps(start=(2,))
    assert next_steps(waiting, engines, 5.0) == NextSteps()
    urgent = [*waiting, call(3, "a", "urgent", arrived=4.0)]
    assert next_steps(urgent, engines, 5.0) == NextSteps(start=(3,))


@given(st.floats(1.0, 20.0), st.floats(0.1, 4.0), st.integers(1, 4))
def test_two_models_with_long_queues_change_places_once_in_the_bound(bound, swap, service):
    """The bound counts while a model is away: else they would change places at every call."""
    now, warm, since = 0.0, "a", {"a": 0.0, "b": 0.0}
    waiting = [call(n, "ab"[n % 2]) for n in range(200)]
    changes: list[float] = []
    while waiting and now < 25.0:
        cold = "ab".replace(warm, "")
        away = ModelActivity(
            ModelState.LOADING, waits_for=frozenset(warm), away_since=since[cold], most_wait=bound
        )
        steps = next_steps(waiting, {warm: WARM, cold: away}, now)
        if steps.start:
            waiting = [one for one in waiting if one.key not in steps.start]
            now += service
        else:
            changes.append(now)
            since[warm], warm, now = now, cold, now + swap
    assert all(later - sooner >= bound for sooner, later in zip(changes, changes[1:], strict=False))
    assert changes or now <= bound + service


def overtaken_for_seconds(importance: int, by: int) -> float:
    """The seconds after the arrival of a call of this `importance` in which one of importance `by` can overtake it."""
    classes = aged_class(importance, 0.0) - aged_class(by, 0.0) + 1
    return AGEING_SECONDS * max(0, classes)


eighths = st.integers(0, 8000).map(lambda n: n / 8)  # of a second: exact, like the bound


CLASSES, STATES = st.sampled_from(sorted(IMPORTANCE.values())), st.sampled_from(ModelState)


@given(CLASSES, CLASSES, eighths, eighths, STATES, STATES)
def test_a_call_after_the_ageing_bound_never_starts_first(mine, theirs, after, later, place, other):
    first = Waiting(1, "a", mine, 0.0)
    second = Waiting(2, "b", theirs, overtaken_for_seconds(mine, theirs) + after)
    now = second.arrived + later
    engines = {"a": ModelActivity(place), "b": ModelActivity(other)}
    assert keys([first, second], engines, now) == [1, 2]


def test_clients_take_turns():
    greedy = [call(key, client="greedy") for key in (1, 2, 3, 4)]
    others = [call(5, client="ann"), call(6, client="bob"), call(7, client="ann")]
    assert keys(greedy + others, {"a": WARM}) == [1, 5, 6, 2, 7, 3, 4]
    old = call(8, arrived=-AGEING_SECONDS, client="greedy")
    assert keys([*greedy, *others, old], {"a": WARM})[0] == 8


def test_a_full_queue_refuses_the_least_important_call_then_the_client_with_most():
    batch, normal = call(1, importance="batch"), call(2)
    assert call_to_refuse([batch, normal], call(3, importance="high")) is batch
    new = call(3, importance="batch", client="ann")
    assert call_to_refuse([normal], new) is new
    greedy = [call(key, client="greedy") for key in (1, 2, 3)]
    assert call_to_refuse(greedy, call(4, client="ann")) is greedy[2]
    again = call(4, client="greedy")
    assert call_to_refuse(greedy, again) is again
    equal = [call(1, client="ann"), call(2, client="bob")]
    new = call(3, client="carl")
    assert call_to_refuse(equal, new) is new, "nobody has more than the new client"


CLIENTS = st.sampled_from(["ann", "bob", "greedy"])
ARRIVALS = st.lists(st.tuples(CLIENTS, st.sampled_from(sorted(IMPORTANCE))), max_size=60)


@given(ARRIVALS, st.integers(1, 6))
def test_no_client_is_refused_while_another_one_has_more_calls_of_its_class(arrivals, limit):
    waiting: list[Waiting] = []
    for key, (client, importance) in enumerate(arrivals):
        new = call(key, importance=importance, client=client)
        waiting.append(new)
        if len(waiting) <= limit:
            continue
        refused = call_to_refuse(waiting[:-1], new)
        waiting.remove(refused)
        assert all(refused.importance >= other.importance for other in waiting)
        same = [other.client for other in waiting if other.importance == refused.importance]
        assert all(same.count(refused.client) + 1 >= same.count(other) for other in same)
    assert len(waiting) <= limit
