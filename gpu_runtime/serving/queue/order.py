"""Who starts next among the calls that wait.

Pure: the waiting calls, what each engine is doing and the time go in; what to start and what to load come out. The
order is (importance, warm first, arrival), and every 30 s of waiting are worth one class of importance.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping

from ...facts import IMPORTANCE, NORMAL, Value

AGEING_SECONDS = 30.0
MOST_LOADS = 16  # begun at once; each waits for its room in a thread of its own
_CLASSES = sorted(IMPORTANCE.values())


class Waiting(Value):
    """A call that has not started yet."""

    key: int  # in the order of arrival
    model: str
    importance: int = NORMAL
    arrived: float = 0.0


class Place(enum.Enum):
    """Where a model is, as far as starting a call of it is concerned."""

    COLD = "cold"
    LOADING = "loading"
    WARM = "warm"


class Engine(Value):
    """What one model is doing."""

    place: Place = Place.COLD
    active: int = 0  # calls of it that run
    concurrency: int = 1  # how many it can run at once
    in_use: frozenset[str] = (
        frozenset()
    )  # models that its load waits for: their calls must end first


class Next(Value):
    """What to do now: calls to start, and models to begin loading."""

    start: tuple[int, ...] = ()
    load: tuple[str, ...] = ()


def standing(importance: int, waited_seconds: float) -> int:
    """The class that a call stands in by now: 0 for urgent … 4 for batch, one less for each 30 s waited.

    It goes below 0: so whoever has waited long enough comes before any newcomer, however important.

    >>> standing(10, 0.0), standing(10, 65.0), standing(1, 95.0)
    (2, 0, -3)
    """
    return bisect_left(_CLASSES, importance) - int(max(0.0, waited_seconds) // AGEING_SECONDS)


def overtaken_for_seconds(importance: int, by: int) -> float:
    """How long after a call's arrival one of importance `by` may still arrive and come before it; then never again.

    >>> overtaken_for_seconds(10, 10), overtaken_for_seconds(30, 1)
    (30.0, 150.0)
    """
    return AGEING_SECONDS * max(0, standing(importance, 0.0) - standing(by, 0.0) + 1)


def order(waiting: Iterable[Waiting], engines: Mapping[str, Engine], now: float) -> list[Waiting]:
    """The waiting calls, the first to be served first: by class as aged, then warm models, then arrival."""
    warm = {name for name, engine in engines.items() if engine.place is Place.WARM}
    return sorted(
        waiting,
        key=lambda call: (
            standing(call.importance, now - call.arrived),
            call.model not in warm,
            call.key,
        ),
    )


def next_out(waiting: Iterable[Waiting], engines: Mapping[str, Engine], now: float) -> Next:
    """What can begin now, the best first.

    1. its model is warm and has a free place → start
    2. its model is cold → begin to load it; it starts once that is done
    3. it is being loaded, or busy → wait, and nobody else is held up …
    4. … but those behind it do not start what its load waits for

    Without 4 a steady stream of calls of a warm model would keep a cold one out for ever. Those of the same class are
    before it, since warm goes first, until it has waited 30 s longer than they: so models are changed seldom.
    """
    start: list[int] = []
    load: list[str] = []
    held = {
        name
        for engine in engines.values()
        if engine.place is Place.LOADING and engine.active
        for name in engine.in_use
    }  # calls that had started, when their model left under them
    running = {name: engine.active for name, engine in engines.items()}
    loading = sum(engine.place is Place.LOADING for engine in engines.values())
    for call in order(waiting, engines, now):
        engine = engines.get(call.model, _UNKNOWN)
        if engine.place is Place.WARM:
            if call.model not in held and running[call.model] < engine.concurrency:  # 1
                running[call.model] += 1
                start.append(call.key)
        elif engine.place is Place.LOADING:  # 3, 4
            held |= engine.in_use
        elif call.model not in load and loading + len(load) < MOST_LOADS:  # 2
            load.append(call.model)
    return Next(tuple(start), tuple(load))


_UNKNOWN = Engine()
