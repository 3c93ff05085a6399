"""The queue of calls: decides which call starts next, and gives it its model.

Calls are sorted by their class of importance. In a class, calls of warm models are first, until a call of another model
has waited for its `most_wait`; then the clients take turns, then the arrival decides. The client whose last call
started longest ago has the next turn. For every 30 s that a call waits, it moves up by one class. Nothing here knows
HTTP, or what a call's body means.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import enum
import functools
import itertools
import os
import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from msgspec.structs import replace

from ..facts import AGEING_SECONDS, ASLEEP, ENGINES, NORMAL, ModelSpec, Value, Wait, aged_class
from ..threads import start_short
from .requests import Refused

if TYPE_CHECKING:
    from ..runtime import Runtime


# -- the decision (pure): waiting calls, models and the time in; calls to start and models to load out

MAX_LOADS = 16  # loads at once; each waits for its memory in its own thread
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
    # A call starts when its model is on its device. The model can be evicted before it is pinned for the call. Then it
    # is loaded again, although its call counts as running, and no call of a model that it waits for may start.
    reloads = [
        model for model in engines.values() if model.state is ModelState.LOADING and model.active
    ]
    blocked = {model for engine in reloads for model in engine.waits_for}
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


_UNKNOWN = ModelActivity()


# -- the waiting calls, in one event loop
#
# A turn is the time during which a call may use its model. `async with queue.turn("qwen", importance=10) as turn:`
# waits until the call may start. The model is pinned until its last turn ends. If a caller stops waiting, its call is
# removed.

ENDS_KEPT = 64  # ends of calls from which the speed of the queue is computed
MOST_CLIENTS = 1024  # the most clients whose last turn is remembered
MAX_RETRY_SECONDS = 60.0
# What a call that waits for its model says, by what the model was called in host memory; others: `restoring`.
_VERBS = {"": "loading", ASLEEP: "waking"}


# The number of calls at once if the model's `sequences` is not set. For all other backends it is 1.
_CALLS_AT_ONCE = {"fake": 256, **{name: engine.calls_at_once for name, engine in ENGINES.items()}}
# These backends run one call at a time, and do not read `sequences`. llama-cpp-python computes one sequence after
# another. Transformers does not batch two `generate` calls. If they ran at once, each would change the random numbers
# that the other one gets from its seed.
SEQUENTIAL_BACKENDS = ("llama_cpp", "transformers")
NATIVE_LLAMA_SERVER = "llama-server"  # the name of the backend, and of its command


def calls_at_once(spec: ModelSpec) -> int:
    """The calls that the model of `spec` runs at once. llama-cpp-python's server, without `llama-server`, runs one."""
    if spec.backend in SEQUENTIAL_BACKENDS:
        return 1
    if spec.backend == NATIVE_LLAMA_SERVER and not _native_server(os.environ.get("PATH", "")):
        return 1
    return int(spec.options.get("sequences") or _CALLS_AT_ONCE.get(spec.backend, 1))


@functools.lru_cache(maxsize=8)
def _native_server(path: str) -> bool:
    return shutil.which(NATIVE_LLAMA_SERVER, path=path) is not None


class Turn:
    """The time during which one call may use its model. `value` is the object that `rt.use` yields."""

    def __init__(self, waiting: Waiting, started: asyncio.Future[Any]) -> None:
        """The future `started` receives the model's Hold when the call `waiting` may start."""
        self.waiting = waiting
        self.started = started
        self.value: Any = None
        self.waited_seconds = 0.0
        self.refused = False  # whether another call took this call's place in the queue


class _Running:
    """The state of one model: the hold that pins the model, and the number of calls that run with the model."""

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.active = 0
        self.engine_failed = False  # the pinned object may be dead

    @property
    def ready(self) -> bool:
        return self.hold is not None and self.hold.ready.done()


class LoadShared(Exception):
    """Raised for the `error` of a load that another call has received already, so that it is counted only once."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Queue:
    """Puts calls in order and gives them their models."""

    def __init__(
        self,
        take: Callable[[str, int], Hold],
        here: Callable[[str], bool],
        concurrency: Callable[[str], int],
        *,
        clock: Callable[[], float],
        limit: int = 256,
        load_seconds: Callable[[str], float | None] = lambda model: None,
        most_wait: Callable[[str], float] = lambda _: AGEING_SECONDS,
        pauses: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """At most `limit` calls wait. If more calls arrive, `call_to_refuse` chooses the refused call.

        `take(model, importance)` begins to pin a model. `here(model)` is whether it is on its device,
        `concurrency(model)` the calls that it can run at once, and `most_wait(model)` the seconds for which warm models
        may keep it waiting. `pauses(model)` is whether it takes no new uses now, because another process has waited for
        its room. `load_seconds(model)` is how long a load takes, if that was measured. `clock` returns seconds.
        """
        self._take = take
        self._here = here
        self._concurrency = concurrency
        self._clock = clock
        self._most_wait, self._pauses = most_wait, pauses
        # Models with waiting calls that are not on their device.
        self._away_since: dict[str, float] = {}
        self.limit = limit
        self._load_seconds = load_seconds
        self._keys = itertools.count(1)
        self._waiting: dict[int, Turn] = {}
        self._models: dict[str, _Running] = {}
        self._turns: dict[str, int] = {}  # client -> number of its last turn; the newest is last
        self._ends: deque[float] = deque(maxlen=ENDS_KEPT)
        self.closed = False  # if true, no call starts and no load begins
        self.loads = 0  # loads begun, of models that were not on their device

    @asynccontextmanager
    async def turn(
        self,
        model: str,
        importance: int = NORMAL,
        client: str = "",
        began_to_wait: Callable[[Turn], None] = lambda turn: None,
    ) -> AsyncIterator[Turn]:
        """A context manager with the turn of a call of `model` with this `importance`, for this `client`.

        `began_to_wait(turn)` is called once the call is in the queue; see `state_of`. Raises Refused (503) if too many
        calls wait, an error of the load, or LoadShared.
        """
        began = self._clock()
        waiting = Waiting(next(self._keys), model, importance, began, client)
        self._make_room(waiting)
        turn = Turn(waiting, asyncio.get_running_loop().create_future())
        self._waiting[waiting.key] = turn
        began_to_wait(turn)
        try:
            self.advance()
            turn.value = await self._value_of(await turn.started)
            turn.waited_seconds = self._clock() - began
            yield turn
        finally:
            turn.value = None
            self._leave(turn)
            del turn  # else a cycle: turn -> future -> error -> traceback -> this frame

    def advance(self) -> None:
        """Starts every call and load that can start now: after each arrival or end of a call, and change of a load."""
        again = True
        while again:  # after the release of a model, calls that wait for it may start
            if self._waiting and not self.closed:
                waiting = [turn.waiting for turn in self._waiting.values()]
                now = self._clock()
                steps = next_steps(waiting, self._engines(), now, self._turns)
                for key in steps.start:
                    turn = self._waiting[key]
                    running = self._pin(turn.waiting.model, turn.waiting.importance)
                    self._start(turn, running, running.hold)
                for model in steps.load:
                    self.loads += 1
                    self._pin(model, self._most_important(model))
            idle = [model for model, running in self._models.items() if not running.active]
            released = [self._release_idle(model) for model in idle]
            again = any(released) and bool(self._waiting) and not self.closed

    def renew(self, model: str) -> None:
        """Records that the engine of `model` has failed: once its running calls have ended, it is pinned again."""
        running = self._models.get(model)
        if running is not None:
            running.engine_failed = True

    def retry_after(self) -> float:
        """The seconds after which a refused caller should try again, from 1 to 60.

        It is the number of waiting calls times the mean time between the ends of recent calls. Before two calls have
        ended, it is the time until the first load ends, if loads were measured.
        """
        if len(self._ends) < 2:
            loading = [self._left_of_load(model) for model in self._models]
            left = min([seconds for seconds in loading if seconds is not None], default=1.0)
            return min(MAX_RETRY_SECONDS, max(1.0, left))
        seconds_per_call = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(MAX_RETRY_SECONDS, max(1.0, seconds_per_call * len(self._waiting)))

    def state_of(self, turn: Turn) -> str:
        """What the call of `turn` waits for, in words for its caller: its place, and what its model does.

        For example `place 2 of 5 in the queue; loading qwen, 12 of 14 s`.
        """
        words = []
        model = turn.waiting.model
        if turn.waiting.key in self._waiting:
            waiting = [queued.waiting for queued in self._waiting.values()]
            ordered = order(waiting, self._engines(), self._clock(), self._turns)
            place = ordered.index(turn.waiting) + 1
            words.append(f"place {place} of {len(ordered)} in the queue")
        running = self._models.get(model)
        hold = running.hold if running else None
        if hold is None or hold.ready.done():
            words.append(f"{model} runs {running.active if running else 0} calls")
        elif hold.waits:
            words.append(f"{model} waits for room: {hold.because}")
        else:
            elapsed, expected = self._clock() - hold.began, self._load_seconds(model)
            of = f", {elapsed:.0f} of {expected:.0f} s" if expected else f" for {elapsed:.0f} s"
            words.append(f"{_VERBS.get(hold.returns_from, 'restoring')} {model}{of}")
        return "; ".join(words)

    def _left_of_load(self, model: str) -> float | None:
        """The seconds until the load of `model` ends; None if it is not being loaded, or no load was measured."""
        hold, expected = self._models[model].hold, self._load_seconds(model)
        if hold is None or hold.ready.done() or hold.waits or expected is None:
            return None
        return max(0.0, expected - (self._clock() - hold.began))

    def depth(self) -> dict[str, int]:
        """Number of calls that wait, by model."""
        turns = list(self._waiting.values())  # in one step: a scrape reads them in another thread
        return dict(Counter(turn.waiting.model for turn in turns))

    def active(self) -> dict[str, int]:
        """Number of calls that run, by model."""
        models = list(self._models.items())
        return {model: running.active for model, running in models if running.active}

    def calls_of(self, model: str) -> int:
        """Number of calls of this `model` that wait or run."""
        running = self._models.get(model)
        return len(self._waiting_for(model)) + (running.active if running else 0)

    # -- one turn

    def _make_room(self, new: Waiting) -> None:
        """If the queue is full, refuses one call: a waiting call, or the `new` call by raising Refused."""
        if len(self._waiting) < self.limit:
            return
        refused = call_to_refuse((turn.waiting for turn in self._waiting.values()), new)
        if refused is new:
            raise self._full()
        turn = self._waiting[refused.key]
        turn.refused = True
        if not turn.started.done():  # the call's task may have been cancelled already
            turn.started.set_exception(self._full())
        del self._waiting[refused.key]

    def _full(self) -> Refused:
        seconds, depth = self.retry_after(), len(self._waiting)
        text = f"{depth} calls wait already, and no more can. Try again in {seconds:.0f} s."
        return Refused(503, "queue_full", text, seconds, depth=depth)

    async def _value_of(self, hold: Hold) -> Any:
        """The object that `hold` pins. If the load failed, the first call raises its error, other calls LoadShared."""
        try:
            if hold.ready.done():
                return hold.ready.result()
            return await asyncio.shield(hold.ready)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if hold.error_reported:
                raise LoadShared(error) from error
            hold.error_reported = True
            raise
        finally:
            del hold  # else a cycle: hold -> future -> error -> traceback -> this frame

    def _leave(self, turn: Turn) -> None:
        still_waiting = self._waiting.pop(turn.waiting.key, None) is not None
        # It was started, even if its task was cancelled then.
        if not still_waiting and not turn.refused:
            self._ends.append(self._clock())
            running = self._models.get(turn.waiting.model)
            if running is not None and running.active:
                running.active -= 1
        self.advance()

    # -- deciding

    def _engines(self) -> dict[str, ModelActivity]:
        names = {*self._models, *(turn.waiting.model for turn in self._waiting.values())}
        engines = {model: self._engine(model) for model in names}
        now = self._clock()
        away = [model for model, engine in engines.items() if engine.state is not ModelState.WARM]
        self._away_since = {model: self._away_since.get(model, now) for model in away}
        for model, since in self._away_since.items():
            engines[model] = replace(
                engines[model], away_since=since, most_wait=self._most_wait(model)
            )
        return engines

    def _engine(self, model: str) -> ModelActivity:
        running = self._models.get(model) or _Running()
        concurrency = self._concurrency(model)
        hold = running.hold
        if hold is None:
            state = ModelState.WARM if self._here(model) else ModelState.COLD
            return ModelActivity(state, running.active, concurrency)
        if running.engine_failed or self._pauses(model):
            # It can run no more than run now: no further call starts until these have ended. Then it is pinned again.
            return ModelActivity(ModelState.WARM, running.active, concurrency=running.active)
        # If calls are active and the hold did not wait, the model is on its device. Only the pin is not confirmed yet.
        if running.ready or (running.active and not hold.waited):
            return ModelActivity(ModelState.WARM, running.active, concurrency)
        return ModelActivity(ModelState.LOADING, running.active, concurrency, hold.waits_for)

    def _start(self, turn: Turn, running: _Running, hold: Hold | None) -> None:
        """Starts the call of `turn`, which gets `hold`. It counts as running until `_leave`, even if cancelled."""
        del self._waiting[turn.waiting.key]
        self._turns.pop(turn.waiting.client, None)  # the newest turn is last
        self._turns[turn.waiting.client] = next(self._keys)
        if len(self._turns) > MOST_CLIENTS:
            del self._turns[next(iter(self._turns))]
        running.active += 1
        if not turn.started.done():
            turn.started.set_result(hold)

    def _waiting_for(self, model: str) -> list[Turn]:
        return [turn for turn in self._waiting.values() if turn.waiting.model == model]

    def _most_important(self, model: str) -> int:
        """The importance of the most important call that waits for the model. A lower number is more."""
        return min(turn.waiting.importance for turn in self._waiting_for(model))

    # -- pins

    def _pin(self, model: str, importance: int) -> _Running:
        running = self._models.setdefault(model, _Running())
        if running.hold is None:
            running.engine_failed = False
            hold = running.hold = self._take(model, importance)
            hold.ready.add_done_callback(lambda ready: self._on_ready(model, hold))
        return running

    def _on_ready(self, model: str, hold: Hold) -> None:
        """Called when the pin of `hold` succeeded or failed. A failure starts all calls that wait, to tell them."""
        running = self._models.get(model)
        if running is None or running.hold is not hold:
            return
        if hold.ready.exception() is not None:
            running.hold = None
            for turn in self._waiting_for(model):
                self._start(turn, running, hold)
        self.advance()

    def _release_idle(self, model: str) -> bool:
        """Releases a `model` that runs no call and is not loaded for a waiting one. Returns whether it did."""
        running = self._models[model]
        is_loading = running.hold is not None and not running.ready
        if is_loading and not self.closed and self._waiting_for(model):
            self._raise_importance(model, running, running.hold)
            return False
        del self._models[model]
        if running.hold is None:
            return False
        running.hold.release()
        return True

    def _raise_importance(self, model: str, running: _Running, hold: Hold) -> None:
        """Requests `model` again if `hold` waits in the ledger and a more important call now waits for it."""
        importance = self._most_important(model)
        if hold.waits and importance < hold.importance:
            hold.release()
            running.hold = None
            self._pin(model, importance)


# -- pins a model exactly as long as its calls last, and evicts it some time after its last call ---
#
# A hold is one pin, or the wait for it. A model on its device is pinned in the event loop, which takes a few
# microseconds. Bringing any other model to its device may take minutes, so its hold has a thread, which stays inside
# `with rt.use(model)` until the hold is released. The event loop never waits for the ledger.


LIBRARIES = ("torch", "transformers", "llama_cpp")  # imported by the first load that needs them
# A load goes on so long after its last call has left. A client whose time-out is shorter than the load finds it
# again, and a client that has ended does not keep the card.
LEFT_SECONDS = 5.0
CLOSING_SECONDS = 10.0  # the longest wait until the threads of released holds have ended


def _imported() -> tuple[bool, ...]:
    return tuple(name in sys.modules for name in LIBRARIES)


class Hold:
    """One pin of a `model` for a call of this `importance`, or the wait for that pin. Its futures belong to `loop`."""

    def __init__(self, model: str, importance: int, loop: asyncio.AbstractEventLoop) -> None:
        self.model = model
        self.importance = importance
        self.error_reported = False  # whether a call has already received the error of `ready`
        # Becomes the object that `rt.use` yields, or the error that it raises.
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()  # done when the pin is gone
        self.began = 0.0  # by the clock; until the memory is granted, set at each wait
        self.waits = False  # whether its request waits in the ledger now
        self.waited = False  # whether its request had to wait
        self.returns_from = ""  # what the model was called in host memory, if it returns from there
        self.because = ""  # why its request waits
        self.waits_for: frozenset[str] = frozenset()  # models of this process that block it
        self._loop = loop
        self.thread = 0  # the thread that brings the model to its device
        self._release = threading.Event()
        self._ending = threading.Lock()
        self._over = False  # whether the thread has ended the pin, or nothing may keep its load
        self._late: asyncio.TimerHandle | None = None  # when the load of a released hold is stopped
        self.stop_load: Callable[[int], None] | None = None  # stops the load of a thread
        self._block: Any = None  # the `with` block of a pin that has no thread

    def pin_if_here(self, block: Any) -> bool:
        """Enters `block`, the result of `rt.use`, in the event loop, if the model is on its device. Returns whether."""
        found = block.enter_if_here()
        if found:
            self._block = block
            self.ready.set_result(*found)
        return bool(found)

    def release(self) -> None:
        """Ends the pin, or the wait for it. A load that has begun goes on for LEFT_SECONDS; see `keep_again`."""
        self._release.set()
        if self.stop_load is not None and not self.ready.done():
            self._late = self._loop.call_later(LEFT_SECONDS, self._stop_unless_kept)
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(None, None, None)
            self.ended.set_result(None)

    def _stop_unless_kept(self) -> None:
        """Stops the load if no call has kept this hold since `release`. From now on none can keep it."""
        with self._ending:
            unwanted = self.released and not self._over and not self.ready.done()
            self._over = self._over or unwanted
            if unwanted and self.stop_load is not None:
                self.stop_load(self.thread)  # the thread cannot leave this hold meanwhile

    def keep_again(self) -> bool:
        """Undoes `release` for a new call, while the load of a call that has left goes on. Returns whether it did."""
        with self._ending:
            if self._over or not self.released or self.waits or self.ready.done():
                return False
            self._release.clear()
        if self._late is not None:
            self._late.cancel()
        return True

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._release.is_set()

    def leave(self) -> None:
        """The thread leaves this hold, and may do other work from now on."""
        with self._ending:
            self._over = True

    def ends_now(self) -> bool:
        """Whether this hold is released. If so, `keep_again` keeps it no more."""
        with self._ending:
            self._over = self._over or self.released
        return self._over

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Runs `function` in the event loop of this hold, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self._loop.call_soon_threadsafe(function)

    def settle(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None = None
    ) -> None:
        """Sets the `result` or the `error` of `future`, from any thread, unless it is done."""

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # marks it as read: the caller may have left in the meantime

        self.call_in_loop(settle)


class Abandoned(Exception):
    """Raised when a hold is released before its model is pinned."""


class _Released(BaseException):
    """Raised in the thread of a hold that was released while the thread waits in the ledger.

    It is no Exception, so that no `except Exception` between the wait and `Holds` catches it.
    """


class Holds:
    """Pins models."""

    def __init__(
        self,
        rt: Runtime,
        waiting: Callable[[], None],
        loaded: Callable[[str, float, bool], None],
        clock: Callable[[], float],
    ) -> None:
        """`rt` is the runtime whose models are pinned; `clock` returns seconds.

        `waiting()` is called in the loop when a hold begins or ends to wait for others. `loaded` is
        called in the hold's thread after a load: with the model, the seconds since its memory was granted, and whether
        it was in host memory.
        """
        self._rt = rt
        self._waiting = waiting
        self._loaded = loaded
        self._clock = clock
        self._own_prefix = f"{rt.status().owner.id}/"  # of our models' names in the ledger
        self._by_thread: dict[int, Hold] = {}
        self._holds: WeakSet[Hold] = WeakSet()
        rt.tell_waits(self._on_wait)

    def take(self, model: str, importance: int) -> Hold:
        """Begins to pin `model` for a call of this `importance`, and returns the hold at once."""
        for hold in list(self._holds):
            if hold.ended.done():
                self._holds.discard(hold)  # else every later call would look at it
            elif hold.model == model and hold.keep_again():
                return hold
        hold = Hold(model, importance, asyncio.get_running_loop())
        hold.stop_load = partial(self._rt._leave_load, why="all its callers have left")
        self._holds.add(hold)
        if self._rt.here(model):
            use = self._rt.use(model, importance=importance)
            if hold.pin_if_here(use):
                return hold
        start_short(lambda: self._run(hold))
        return hold

    async def ended(self, model: str) -> None:
        """Waits up to 10 s until the threads of all released holds of `model` have ended their pins."""
        holds = [hold for hold in self._holds if hold.model == model and hold.released]
        ending = [hold.ended for hold in holds if not hold.ended.done()]
        if ending:
            await asyncio.wait(ending, timeout=CLOSING_SECONDS)

    async def close(self) -> None:
        """Releases all holds, and waits up to 10 s until their threads have ended."""
        holds = [hold for hold in self._holds if not hold.ended.done()]
        for hold in holds:
            hold.release()
        if holds:
            await asyncio.to_thread(self._rt._stop_loads, "the server ends")
            await asyncio.wait([hold.ended for hold in holds], timeout=CLOSING_SECONDS)
        self._rt.tell_waits(None)

    def _run(self, hold: Hold) -> None:
        thread = _thread.get_ident()
        self._by_thread[thread] = hold
        hold.thread = thread
        try:
            was_here = self._rt.here(hold.model)
            hold.returns_from = self._rt._away_word(hold.model)
            imported = _imported()
            hold.began = self._clock()
            with self._rt.use(hold.model, importance=self._importance(hold)) as value:
                if not was_here and _imported() == imported:  # the first import is no load
                    seconds = self._clock() - hold.began
                    self._loaded(hold.model, seconds, bool(hold.returns_from))
                hold.settle(hold.ready, value)
                del value  # this frame must not keep a model that was evicted
                while not hold.ends_now():
                    hold._release.wait()
        except _Released:  # no call waits for the model any more
            hold.settle(hold.ready, None, Abandoned(hold.model))
        except BaseException as error:  # noqa: BLE001 - raised where the call waits
            hold.settle(hold.ready, None, error)
        finally:
            hold.leave()
            self._by_thread.pop(thread, None)
            hold.settle(hold.ended, None)

    def _importance(self, hold: Hold) -> int:
        """The importance of the call of `hold`, which the ledger compares with the requests of all processes.

        If it is more important than its model is by its registration, the operator's caps for this server limit it.
        """
        if hold.importance >= self._rt.spec(hold.model).importance:
            return hold.importance
        cap = self._rt.status().rules.cap
        highest_allowed = (cap.importance if cap else None) or 0
        return max(hold.importance, highest_allowed)

    def _on_wait(self, model: str, wait: Wait | None) -> None:
        """Called in a hold's thread each time the ledger lets its request wait; `wait` is None once it is granted."""
        hold = self._by_thread.get(_thread.get_ident())
        if hold is None:
            return
        if wait is None:
            self._note_wait(hold, False, frozenset())
            return
        if hold.ends_now():
            raise _Released
        hold.began = self._clock()  # the memory is not granted yet, so the load has not begun
        hold.returns_from = self._rt._away_word(hold.model)
        prefix = self._own_prefix
        own = [id for id in wait.blockers if id.startswith(prefix)]
        blockers = frozenset(id.removeprefix(prefix) for id in own)
        hold.waited, hold.because = True, wait.because
        self._note_wait(hold, True, blockers)

    def _note_wait(self, hold: Hold, waits: bool, blockers: frozenset[str]) -> None:
        if (waits, blockers) != (hold.waits, hold.waits_for):
            hold.waits, hold.waits_for = waits, blockers
            hold.call_in_loop(self._waiting)


# -- keep warm: the eviction some time after the last call, to host memory if host memory has room
#
# This reserves no memory. A model is evicted earlier if another model needs the room.
# Source: Model Boss, InferenceQueue, per-category stay_warm.

STAY_WARM_SECONDS = {"diffusion": 900.0, "llm": 300.0, "vision": 60.0}
DEFAULT_SECONDS = 300.0  # for all other types
RETRY_SECONDS = 5.0  # until the next try to evict a model that was in use


class KeepWarm:
    """Evicts each model when its keep-warm time is over."""

    def __init__(self, clock: Callable[[], float], evict: Callable[[str], Awaitable[bool]]) -> None:
        """`clock` returns seconds. `evict(model)` returns False if the model is in use."""
        self._clock = clock
        self._evict = evict
        self._until: dict[str, float] = {}
        self._evict_soon: set[str] = set()  # models to evict as soon as no call holds them
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def keep(self, model: str, seconds: float, *, wished: bool = False) -> None:
        """Sets the time of the eviction of `model` to `seconds` from now, at the end of each call that it has answered.

        If `wished`, the caller has set this time, and it replaces the time that was set before. A default time only
        replaces an earlier one. After `evict_soon`, the eviction is due at once.
        """
        now = self._clock()
        until = now + seconds
        if not wished:
            until = max(self._until.get(model, 0.0), until)
        self._until[model] = now if model in self._evict_soon else until
        self._schedule()

    def evict_soon(self, model: str) -> None:
        """Evicts `model` as soon as no call holds it, before its time. The next call brings it back."""
        self._evict_soon.add(model)
        self._until[model] = self._clock()
        self._schedule()

    def until(self, model: str) -> float | None:
        """The time by the clock at which `model` is evicted, or None if no time is set."""
        return self._until.get(model)

    def evict_due(self) -> None:
        """Evicts the models whose keep-warm time is over."""
        now = self._clock()
        for model in [name for name, until in self._until.items() if until <= now]:
            del self._until[model]
            task = asyncio.ensure_future(self._try_to_evict(model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._schedule()

    async def close(self) -> None:
        """Forgets the keep-warm times of all models, and waits for evictions that have begun."""
        self._closed = True
        self._until.clear()
        self._schedule()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _try_to_evict(self, model: str) -> None:
        soon = model in self._evict_soon
        # A call may load the model again before this task knows that the eviction has ended.
        self._evict_soon.discard(model)
        if await self._evict(model) or self._closed:
            return
        # The model is in use by a call of this server, whose end sets a new time, or by another process.
        again = self._clock() + RETRY_SECONDS
        if soon:
            self._evict_soon.add(model)
            self._until[model] = min(self._until.get(model, again), again)
        else:
            self._until.setdefault(model, again)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._until and not self._closed:
            delay = max(0.0, min(self._until.values()) - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self.evict_due)
