"""The gateway: a request's body goes in, an answer comes out, and which model gave it and why.

Here all of serving meets over one Runtime, in one event loop. What is decided is decided in the pure modules; what
touches the ledger or an engine runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import httpx
from msgspec.structs import replace

from ..errors import GpuError, StillInUse, UnknownModel
from ..facts import ModelSpec, Value
from .engines import openai_http
from .engines.base import EngineFailed, Speaker, require
from .engines.registry import speaker_for
from .health.blame import DECODE_FAILURES, Blame, blame, could_not, first_line, is_decode_failure
from .health.breaker import Breakers, BreakerState, Open, Pass
from .health.clients import Clients, Pattern
from .health.costs import Costs
from .queue.keep_warm import Warmth, wished
from .queue.model_hold import Holds
from .queue.queue import Queue
from .queue.thread_stream import in_thread
from .replies import Streamed, because, counted, ending, signed
from .requests import Call, Refused, Reply, read_call
from .routing.fallback import Choice, CloudGuard, chain, cloud_of, is_cloud
from .routing.profiles import profiled, thinking
from .routing.tasks import Serving, candidates, fits, read_serving, too_short

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ..settings import Settings

CONCURRENCY = {
    "vllm": 256,
    "fake": 256,
}  # calls at once, where the model's `sequences` does not say; else one
ONE_AT_A_TIME = (
    "llama_cpp",
)  # whatever it says: the library computes one sequence after the other
CLOSING_SECONDS = 5.0  # for calls to let go of what they hold
log = logging.getLogger("gpu_runtime")
Speak = Callable[[Any, ModelSpec, Any], Speaker]


def tasks_file() -> Path:
    """Where `tasks.yaml` lies where GPU_TASKS does not say."""
    return (
        Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
        / "gpu-console"
        / "tasks.yaml"
    )


def guard_file() -> Path:
    """Where it is kept whether clouds may stand in: in the state directory, which survives restarts."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "gpu-console" / "serving.json"


class GatewayState(Value):
    """How things stand, for a page of metrics."""

    waiting: dict[str, int]  # calls, by model
    running: dict[str, int]
    breakers: dict[str, BreakerState]
    counts: dict[str, int]  # answered, streamed, failed, refused_STATUS, stood_in, cancelled
    loads: int  # begun, for calls whose model was not on its device
    queue_limit: int
    clients: dict[str, Pattern]
    allow_cloud: bool


class Gateway:
    """Answers calls with the models of a Runtime. Close it with its loop still running.

    `clock` tells seconds that only ever grow; `environment` holds the clouds' addresses and keys.
    """

    def __init__(
        self,
        rt: Runtime,
        settings: Settings | None = None,
        *,
        serving: Serving | None = None,
        guard: CloudGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] | None = None,
        speak: Speak = speaker_for,
    ) -> None:
        self._rt, self._clock, self._speak = rt, clock, speak
        settings = settings or rt.settings
        self.serving = (
            serving if serving is not None else read_serving(settings.gpu_tasks or tasks_file())
        )
        self.guard = guard or CloudGuard(guard_file(), settings.model_boss_allow_cloud_fallback)
        self._environment = os.environ if environment is None else environment
        self.breakers = Breakers(clock)
        self.clients = Clients()
        self.costs = Costs()
        self._holds = Holds(rt, lambda: self.queue.look(), self.costs.loaded, clock)
        self.warmth = Warmth(clock, self._put_away)
        self.queue = Queue(
            self._holds.take,
            rt.here,
            self._concurrency,
            clock=clock,
            limit=settings.gpu_serve_queue,
        )
        self._counts: Counter[str] = Counter()
        self._decodes: Counter[str] = Counter()
        self._http: httpx.AsyncClient | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._streams: WeakSet[Streamed] = WeakSet()
        self._closed = False
        self._began = int(time.time())

    # -- answering

    async def answer(self, kind: str, body: Any, client: str = "") -> Reply:
        """The answer to a request. Raises Refused; whoever goes away meanwhile is forgotten, and leaves nothing behind.

        A streamed reply begins with its first event, so that what fails before it is told by a status, or answered by
        another model where `tasks.yaml` names one.
        """
        with counted(self._counts), self._until_closed():
            call = read_call(kind, body, client)
            call = profiled(call, self.serving.clients.get(call.profile))
            choices, call = self._choices(call)
            async with AsyncExitStack() as stack:
                self.clients.enter(call.client, call.model, self._clock())
                stack.callback(lambda: self.clients.left(call.client, call.cooldown, self._clock()))
                return await self._first_that_can(call, choices, stack)

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Refuses the call where the gateway is closed meanwhile, whatever it waits for. Raises Refused, 503."""
        task = asyncio.current_task()
        assert task is not None
        if self._closed:
            raise ending()
        self._calls.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._closed:
                raise
            task.uncancel()
            raise ending() from None
        finally:
            self._calls.discard(task)

    async def _first_that_can(
        self, call: Call, choices: tuple[Choice, ...], outer: AsyncExitStack
    ) -> Reply:
        failed: list[tuple[str, BaseException]] = []
        deadline = None if call.budget is None else asyncio.get_running_loop().time() + call.budget
        for choice in choices:
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    reply = await self._by(choice, call, outer, deadline)
            except TimeoutError as error:
                if not limit.expired():
                    failed.append((choice.model, error))
                    continue
                raise self._out_of_time(call, choice) from None
            except Exception as error:
                found, refused = blame(error, choice.model)
                # What the asked-for model cannot be asked, nobody is asked in its place; what a stand-in cannot, such
                # as a prompt too long for it, the next may be asked.
                if refused is not None and (
                    len(choices) == 1
                    or choice is choices[0]
                    and found is Blame.CALLER
                    or refused.code == "queue_full"
                ):
                    raise refused from error
                failed.append((choice.model, error))
                log.info("%s could not answer: %s", choice.model, first_line(error))
                continue
            if choice.model != call.model:
                reply.because = because(choice, failed)
                self._counts["stood_in"] += bool(failed)
            signed(reply)
            self._counts["answered"] += 1
            return reply
        self._counts["failed"] += 1
        raise could_not(call.model, failed)

    async def _by(
        self, choice: Choice, call: Call, outer: AsyncExitStack, deadline: float | None
    ) -> Reply:
        """The answer of that model. Whatever it takes is given back with the answer's end."""
        async with AsyncExitStack() as stack:
            entered = self.breakers.enter(choice.model)
            stack.callback(entered.withdrawn)
            try:
                speaker, think = await self._reached(choice, call, stack)
                if not entered.probe and self.breakers.state(choice.model).state != "closed":
                    raise Open(
                        choice.model, self.breakers.state(choice.model)
                    )  # it opened while this one waited
                began = self._clock()
                body = {**call.body, "model": choice.model}
                if not call.stream:
                    said = await speaker.answer(call.kind, body, think)
                    self._went_well(choice.model, entered, self._clock() - began)
                    return Reply(choice.model, call.model, "", json=said)
                events = speaker.stream(call.kind, body, think)
                stack.push_async_callback(events.aclose)  # type: ignore[attr-defined]
                first = await anext(events, None)
                if first is None:
                    raise EngineFailed(
                        f"{choice.model} answered with nothing", name=choice.model, why="no event"
                    )
            except Exception as error:
                self._went_wrong(choice.model, entered, error)
                raise
            stack.push_async_exit(outer.pop_all())
            rest = Streamed(
                first,
                events,
                stack.pop_all(),
                deadline,
                lambda error: self._ended(choice.model, entered, began, error),
            )
            self._streams.add(rest)
            self._counts["streamed"] += 1
            return Reply(choice.model, call.model, "", events=rest)

    async def _reached(
        self, choice: Choice, call: Call, stack: AsyncExitStack
    ) -> tuple[Speaker, bool | None]:
        """Who talks to the model, once it is the call's turn and the model is on its device."""
        if self._http is None:
            self._http = openai_http.open_client()
        if choice.cloud:
            cloud = cloud_of(choice.model, self._environment)
            if isinstance(cloud, str):
                raise EngineFailed(
                    f"{choice.model} cannot be reached: {cloud}", name=choice.model, why=cloud
                )
            return openai_http.RemoteSpeaker(choice.model, cloud, self._http), None
        spec = self._rt.spec(choice.model)
        require(call.kind, spec)
        importance = spec.importance if call.importance is None else call.importance
        if not spec.keep:
            stack.callback(lambda: self.warmth.keep(spec.name, self._stay_warm(call, spec)))
        turn = await stack.enter_async_context(self.queue.turn(spec.name, importance))
        return self._speak(turn.value, spec, self._http), thinking(call, spec.options)

    def _stay_warm(self, call: Call, spec: ModelSpec) -> float:
        task = self._task(call.model)
        seconds = (
            task.keep_alive_s if call.stay_warm is None and task is not None else call.stay_warm
        )
        return wished(seconds, spec.model_type)

    # -- who may answer

    def _choices(self, call: Call) -> tuple[tuple[Choice, ...], Call]:
        """Who may answer, in order, and the call with its budget. Raises Refused (404, 504)."""
        task = self._task(call.model)
        warm, cost = self._rt.here, self.costs.of
        if task is not None:
            budget = task.budget_s if call.budget is None else call.budget
            call = replace(call, budget=budget)
            return candidates(
                call.model.removeprefix("task:"),
                task,
                warm=warm,
                known=self._known,
                cost=cost,
                allow_cloud=self.guard.allowed,
                budget=budget,
            ), call
        if not is_cloud(call.model, self._known) and not self._known(call.model):
            raise self._unknown(call.model)
        choices = chain(
            call.model,
            self.serving.stand_ins(call.model),
            self._context,
            self._known,
            self.guard.allowed,
        )
        fitting = tuple(choice for choice in choices if fits(choice, call.budget, warm, cost))
        if not fitting:
            raise too_short(call.model, choices, call.budget, warm, cost)
        return fitting, call

    def _task(self, name: str) -> Any:
        if not name.startswith("task:"):
            return None
        task = self.serving.tasks.get(name.removeprefix("task:"))
        if task is None:
            raise self._unknown(name)
        return task

    def _known(self, name: str) -> bool:
        try:
            self._rt.spec(name)
        except UnknownModel:
            return False
        except (
            GpuError
        ):  # the catalogue cannot be read just now: what is known is said when it is used
            return True
        return True

    def _unknown(self, name: str) -> Refused:
        known = sorted(row["id"] for row in self.models())
        told = UnknownModel(
            name, tuple(known), none="None is registered.", advice="See them:  GET /v1/models"
        )
        return Refused(404, "model_not_found", str(told), param="model")

    def _context(self, name: str) -> int | None:
        with contextlib.suppress(GpuError):
            length = self._rt.spec(name).options.get("context_length")
            return length if isinstance(length, int) else None
        return None

    def _concurrency(self, model: str) -> int:
        with contextlib.suppress(GpuError):
            spec = self._rt.spec(model)
            if spec.backend not in ONE_AT_A_TIME:
                return int(spec.options.get("sequences") or CONCURRENCY.get(spec.backend, 1))
        return 1

    # -- how it ended

    def _ended(self, model: str, entered: Pass, began: float, error: BaseException | None) -> None:
        if error is None:
            self._went_well(model, entered, self._clock() - began)
        else:
            self._went_wrong(model, entered, error)

    def _went_well(self, model: str, entered: Pass, seconds: float) -> None:
        entered.succeeded()
        self.costs.answered(model, seconds)
        self._decodes.pop(model, None)

    def _went_wrong(self, model: str, entered: Pass, error: BaseException) -> None:
        found, _ = blame(error, model)
        if found is not Blame.MODEL:
            return
        entered.failed(error)
        self.queue.renew(model)
        if is_decode_failure(error):
            self._decodes[model] += 1
            if self._decodes[model] == DECODE_FAILURES and not hasattr(error, "reloads"):
                self._counts["reloads"] += 1
                self.warmth.leave(model)
        else:
            self._decodes.pop(model, None)

    def _out_of_time(self, call: Call, choice: Choice) -> Refused:
        cost = self.costs.of(choice.model)
        seen = [
            f"{seconds:.1f} s to {what}"
            for what, seconds in (("load", cost.load), ("answer", cost.answer))
            if seconds is not None
        ]
        return Refused(
            504,
            "budget_spent",
            f"{call.model} did not answer within its budget of {call.budget:g} s"
            + (f"; {choice.model} has taken {' and '.join(seen)} before." if seen else "."),
            None,
            budget_seconds=call.budget,
            load_seconds=cost.load,
            answer_seconds=cost.answer,
        )

    async def _put_away(self, model: str) -> bool:
        """Its time on the device is over: it steps aside, to RAM where there is room. False where it is in use."""
        await self._holds.ended(model)
        try:
            await in_thread(lambda: self._rt.evict(model, timeout=0.0, wait=False))
        except StillInUse:
            return False
        except GpuError as error:
            log.debug("%s stays: %s", model, error)
        return True

    # -- looking

    def models(self) -> list[dict[str, Any]]:
        """What can be asked for, as `/v1/models` lists it: models of this process, the catalogue's, and tasks."""
        specs = {spec.name: spec for spec in self._rt.specs()}
        for name in self._rt.catalog_names():
            with contextlib.suppress(GpuError):
                specs.setdefault(name, self._rt.spec(name))
        rows = [
            {
                "id": spec.name,
                "object": "model",
                "created": self._began,
                "owned_by": "gpu-console",
                "x_gpu": {
                    "model_type": spec.model_type,
                    "backend": spec.backend,
                    "warm": self._rt.here(spec.name),
                },
            }
            for spec in specs.values()
            if spec.enabled
        ]
        return rows + [
            {
                "id": f"task:{name}",
                "object": "model",
                "created": self._began,
                "owned_by": "gpu-console",
                "x_gpu": {"candidates": list(task.candidates)},
            }
            for name, task in self.serving.tasks.items()
        ]

    def state(self) -> GatewayState:
        return GatewayState(
            self.queue.depth(),
            self.queue.active(),
            self.breakers.states(),
            dict(self._counts),
            self.queue.loads,
            self.queue.limit,
            self.clients.patterns(),
            self.guard.allowed,
        )

    async def close(self) -> None:
        """Ends what is under way, and tells the callers why; what comes now is refused. No load begins any more."""
        self._closed = self.queue.closed = True
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        for stream in list(self._streams):
            stream.break_off(ending())
        if calls:
            await asyncio.wait(calls, timeout=CLOSING_SECONDS)
        await self.warmth.close()
        await self._holds.close()
        if self._http is not None:
            await self._http.aclose()
