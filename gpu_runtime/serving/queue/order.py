"""Decides which of the waiting calls starts next.

This module is pure. It takes the waiting calls, the state of each engine and the time, and returns the calls to start
and the models to load. Calls are sorted by their class of importance. In a class, calls of warm models are first,
until a call of another model has waited for its `most_wait`; then the clients take turns, then the arrival decides.
The client whose last call started longest ago has the next turn. For every 30 s that a call waits, it moves up by one
class.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ...facts import IMPORTANCE, NORMAL, Value

AGEING_SECONDS = 30.0
MAX_LOADS = 16  # loads at once; each waits for its memory in its own thread
_CLASSES = sorted(IMPORTANCE.values())
_NO_TURNS: Mapping[str, int] = {}


class Waiting(Value):
    """A call that has not started yet."""

    key: int  # unique; larger for a later arrival
    model: str
    importance: int = NORMAL
    arrived: float = 0.0
    client: str = ""


class ModelState(enum.Enum):
    """Where a model is. WARM: on its device. LOADING: on its way to its device. COLD: neither."""

    COLD = "cold"
    LOADING = "loading"
    WARM = "warm"


class ModelActivity(Value):
    """What one model is doing now."""

    state: ModelState = ModelState.COLD
    active: int = 0  # calls that the model runs
    concurrency: int = 1  # calls that the model can run at once
    # The models that must be evicted before this model can be loaded. Their calls must end first.
    waits_for: frozenset[str] = frozenset()
    away_since: float = 0.0  # when it left its device; of no meaning for a warm model
    # Seconds for which warm models may keep it waiting. Counted while it is away, so that two models with long queues
    # change places once in this time, and not at every call.
    most_wait: float = AGEING_SECONDS


class NextSteps(Value):
    """The decision of `next_steps`: the keys of the calls to start, and the models to load."""

    start: tuple[int, ...] = ()
    load: tuple[str, ...] = ()


def aged_class(importance: int, waited_seconds: float) -> int:
    """The class of a call of this `importance`, from 0 (urgent) to 4 (batch), less 1 for every 30 s of waiting.

    It can be negative, so a call that has waited long enough starts before any new call, however important.

    >>> aged_class(10, 0.0), aged_class(10, 65.0), aged_class(1, 95.0)
    (2, 0, -3)
    """
    return bisect_left(_CLASSES, importance) - int(max(0.0, waited_seconds) // AGEING_SECONDS)


def order(
    waiting: Iterable[Waiting],
    engines: Mapping[str, ModelActivity],
    now: float,
    turns: Mapping[str, int] = _NO_TURNS,
) -> list[Waiting]:
    """The `waiting` calls in the order in which they are considered. A later rule decides between equals of the
    earlier:

    1. the smaller `aged_class` at the time `now`;
    2. calls of models that have waited for their `most_wait`, then calls of warm models, then other calls;
    3. the first call of each client before the second call of any client, and so on;
    4. the client with the smaller number in `turns`, whose last call started longer ago;
    5. the earlier arrival.

    By rule 3, a client with many calls delays another client's call by only one call. `engines` has the state of each
    model, by name.
    """

    def rank(call: Waiting) -> tuple[int, int, int]:
        aged = aged_class(call.importance, now - call.arrived)
        engine = engines.get(call.model, _UNKNOWN)
        if engine.state is ModelState.WARM:
            return aged, 1, call.key
        waited = now - max(call.arrived, engine.away_since)
        return aged, 0 if waited >= engine.most_wait else 2, call.key

    calls_before: Counter[tuple[Any, ...]] = Counter()
    keyed = []
    ranked = [(rank(call), call) for call in waiting]
    for (aged, warmth, key), call in sorted(ranked, key=lambda pair: pair[0]):
        place = aged, warmth, call.client
        turn = turns.get(call.client, 0)
        keyed.append(((aged, warmth, calls_before[place], turn, key), call))
        calls_before[place] += 1
    return [call for _, call in sorted(keyed, key=lambda pair: pair[0])]


def call_to_refuse(waiting: Iterable[Waiting], new: Waiting) -> Waiting:
    """The call to refuse if the `new` call does not fit into the queue beside the `waiting` calls.

    Only the least important calls are considered. The newest call of the client with most of these calls is refused;
    with as many of several clients, the `new` call, if it is one. So a client with many calls causes a refusal only of
    its own.
    """
    everyone = [*waiting, new]
    lowest = aged_class(max(call.importance for call in everyone), 0.0)
    least = [call for call in everyone if aged_class(call.importance, 0.0) == lowest]
    counts = Counter(call.client for call in least)
    most = max(counts.values())
    if new in least and counts[new.client] == most:
        return new
    return max((call for call in least if counts[call.client] == most), key=lambda call: call.key)


def next_steps(
    waiting: Iterable[Waiting],
    engines: Mapping[str, ModelActivity],
    now: float,
    turns: Mapping[str, int] = _NO_TURNS,
) -> NextSteps:
    """The `waiting` calls that start now, and the models to load now. The calls are considered in their `order`:

    1. If the model is warm and can run another call, the call starts.
    2. If the model is cold, the model is loaded. The call starts when the load is done.
    3. If the model is being loaded or is busy, the call waits. Later calls of other models may start.
    4. But if a load waits until another model is evicted, later calls of that other model do not start.

    Without rule 4, a steady stream of calls of a warm model would delay a cold model for ever. With it, calls of the
    warm model still start first while they are in the same class as the call of the cold model, until this call has
    waited for its `most_wait`, or is in a higher class. So models are exchanged seldom.

    If rule 3 applies to every call, as usual under overload, nothing can start, so the calls are not sorted.
    """
    calls = list(waiting)
    if all(_must_wait(engines.get(model, _UNKNOWN)) for model in {call.model for call in calls}):
        return NextSteps()
    start: list[int] = []
    load: list[str] = []
    blocked = _blocked_by_started_calls(engines.values())
    running = {name: engine.active for name, engine in engines.items()}
    loading = sum(engine.state is ModelState.LOADING for engine in engines.values())
    for call in order(calls, engines, now, turns):
        engine = engines.get(call.model, _UNKNOWN)
        if engine.state is ModelState.WARM:
            if call.model not in blocked and running[call.model] < engine.concurrency:  # 1
                running[call.model] += 1
                start.append(call.key)
        elif engine.state is ModelState.LOADING:  # 3, 4
            blocked |= engine.waits_for
        elif call.model not in load and loading + len(load) < MAX_LOADS:  # 2
            load.append(call.model)
    return NextSteps(tuple(start), tuple(load))


def _must_wait(engine: ModelActivity) -> bool:
    """Whether every call of the model waits, because it is being loaded or is busy."""
    if engine.state is ModelState.WARM:
        return engine.active >= engine.concurrency
    return engine.state is ModelState.LOADING


def _blocked_by_started_calls(engines: Iterable[ModelActivity]) -> set[str]:
    """The models of which no call may start now, because calls that have started wait for their eviction.

    A call starts when its model is on its device. The model can be evicted before it is pinned for the call. Then it is
    loaded again, although its call counts as running.
    """
    blocked: set[str] = set()
    for engine in engines:
        if engine.state is ModelState.LOADING and engine.active:
            blocked |= engine.waits_for
    return blocked


_UNKNOWN = ModelActivity()
