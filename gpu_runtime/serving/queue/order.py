"""Decides which of the waiting calls starts next.

Pure: takes the waiting calls, the state of each engine and the time; returns the calls to start and the models to
load. The order is (importance, warm first, arrival). Every 30 s of waiting count as one class of importance.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from ...facts import IMPORTANCE, NORMAL, Value

AGEING_SECONDS = 30.0
MAX_LOADS = 16  # at once; each waits for its memory in its own thread
_CLASSES = sorted(IMPORTANCE.values())


class Waiting(Value):
    """A call that has not started yet."""

    key: int  # in the order of arrival
    model: str
    importance: int = NORMAL
    arrived: float = 0.0


class ModelState(enum.Enum):
    """Whether a call of the model can start."""

    COLD = "cold"
    LOADING = "loading"
    WARM = "warm"


class Engine(Value):
    """What one model is doing."""

    state: ModelState = ModelState.COLD
    active: int = 0  # calls that it runs
    concurrency: int = 1  # calls that it can run at once
    # Models that its load waits for: their calls must end first.
    waits_for: frozenset[str] = frozenset()


class NextSteps(Value):
    """What to do now: keys of calls to start, and models to load."""

    start: tuple[int, ...] = ()
    load: tuple[str, ...] = ()


def aged_class(importance: int, waited_seconds: float) -> int:
    """The class of a call of this `importance`: 0 for urgent … 4 for batch, one less for each 30 `waited_seconds`.

    It can be negative. So a call that has waited long enough starts before any new one, however important.

    >>> aged_class(10, 0.0), aged_class(10, 65.0), aged_class(1, 95.0)
    (2, 0, -3)
    """
    return bisect_left(_CLASSES, importance) - int(max(0.0, waited_seconds) // AGEING_SECONDS)


def overtaken_for_seconds(importance: int, by: int) -> float:
    """Seconds after the arrival of a call of this `importance` in which one of importance `by` can overtake it.

    >>> overtaken_for_seconds(10, 10), overtaken_for_seconds(30, 1)
    (30.0, 150.0)
    """
    classes = aged_class(importance, 0.0) - aged_class(by, 0.0) + 1
    return AGEING_SECONDS * max(0, classes)


def order(waiting: Iterable[Waiting], engines: Mapping[str, Engine], now: float) -> list[Waiting]:
    """The `waiting` calls, the next one first: by aged class at the time `now`, then warm models, then arrival.

    `engines` has the state of each model, by name.
    """
    warm = {name for name, engine in engines.items() if engine.state is ModelState.WARM}

    def rank(call: Waiting) -> tuple[int, bool, int]:
        aged = aged_class(call.importance, now - call.arrived)
        return aged, call.model not in warm, call.key

    return sorted(waiting, key=rank)


def next_steps(waiting: Iterable[Waiting], engines: Mapping[str, Engine], now: float) -> NextSteps:
    """The `waiting` calls that start now, and the models to load now, the first in `order` first.

    1. The model is warm and can run another call: start the call.
    2. The model is cold: load it. The call starts when that is done.
    3. The model is being loaded, or is busy: wait. Calls of other models may start …
    4. … but calls behind this one do not start on a model that its load waits for.

    Without 4, a steady stream of calls of a warm model would keep a cold model out for ever. Calls of the warm model
    with the same class start first, until the cold model's call has waited 30 s longer. So models change seldom.
    """
    start: list[int] = []
    load: list[str] = []
    blocked = _blocked_by_started_calls(engines.values())
    running = {name: engine.active for name, engine in engines.items()}
    loading = sum(engine.state is ModelState.LOADING for engine in engines.values())
    for call in order(waiting, engines, now):
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


def _blocked_by_started_calls(engines: Iterable[Engine]) -> set[str]:
    """Models that a load waits for whose calls had started when their model was evicted."""
    blocked: set[str] = set()
    for engine in engines:
        if engine.state is ModelState.LOADING and engine.active:
            blocked |= engine.waits_for
    return blocked


_UNKNOWN = Engine()
