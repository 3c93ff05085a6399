"""The gateway: takes a request's body, and returns an answer that names its model and why this model was chosen.

The gateway connects all parts of serving, over one Runtime and in one event loop. Pure modules make the decisions.
Work that blocks, on the ledger or with an engine, runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..access_keys import Keys
from ..errors import EngineDied, GpuError, OutOfMemory, StillInUse, first_line
from ..facts import Lease, ModelSpec
from ..fault_texts import MOST_DECODE_FAILURES, decode_failures, recognise
from ..files import state_home
from .access import KeyRules
from .breaker import PLAIN_CALLS, Blame, Breakers, Permit, blame, may_be_of_the_call, no_answer
from .choices import Choice, Choices, CloudGuard, cloud_of, measured_parts
from .engines.base import (
    MOST_AT_ONCE,
    EngineAdapter,
    EngineFailed,
    require,
    require_room,
    require_tokens,
)
from .engines.chat_template import wants_thinking
from .engines.openai_format import asks_usage
from .engines.openai_http import HttpAdapter, HttpClient
from .engines.registry import adapter_for
from .queue import DEFAULT_SECONDS, STAY_WARM_SECONDS, Holds, KeepWarm, Queue, Turn, calls_at_once
from .records import CallFigures, CallRecord, Clients, Costs, GatewayState, Timing, Usage, current
from .requests import LOAD, Call, Json, Refused, Reply, read_call, require_fields
from .store import Store
from .tasks import ServingConfig, TasksFile, apply_profile, default_file, with_alias
from .thread_stream import in_thread

if TYPE_CHECKING:
    from ..runtime import Runtime

DRAIN_POLL_SECONDS = 0.05
PLAIN_CALL_SECONDS = 30.0  # for the answer to a plain call, after a fault
CLOSING_SECONDS = 5.0  # the longest wait until calls have released their models
log = logging.getLogger("gpu_runtime")
MakeAdapter = Callable[[Any, ModelSpec, Any], EngineAdapter]


class Gateway:
    """Answers calls with the models of a Runtime. Close the gateway while its event loop still runs."""

    def __init__(
        self,
        rt: Runtime,
        *,
        guard: CloudGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
        environment: Mapping[str, str] | None = None,
        keys: Callable[[], Keys] = dict,
        store: Store | None = None,
        make_adapter: MakeAdapter = adapter_for,
    ) -> None:
        """The gateway over the runtime `rt`, with its settings.

        `guard` replaces the cloud guard of the settings. `clock` returns monotonic seconds. `environment` has the
        addresses of the clouds and the keys for them. `keys()` returns the keys of programs. `store` keeps the usage.
        `make_adapter` makes the adapter of a pinned model. Raises BadDocument.
        """
        self.rt, settings = rt, rt.settings
        self._clock = clock
        self._make_adapter = make_adapter
        self._environment = os.environ if environment is None else environment
        self.guard = guard or CloudGuard(
            state_home() / "serving.json", settings.model_boss_allow_cloud_fallback
        )
        self.breakers = Breakers(
            clock,
            failures=settings.gpu_serve_breaker_failures,
            open_seconds=settings.gpu_serve_breaker_seconds,
        )
        self.clients = Clients()
        self.usage = Usage(store)
        self._access = KeyRules(keys, clock, self.usage)
        self.costs = Costs(rt._away_word)
        self.figures = CallFigures()
        self._choices = Choices(rt, lambda: self.serving, self.guard, self.costs, self._environment)
        self.facts = self._choices.facts  # what is known of a model or alias, by its name
        path = settings.gpu_tasks or default_file()
        self._tasks = TasksFile(path, clock, self._choices.doubts)
        self._holds = Holds(rt, lambda: self.queue.advance(), self.costs.add_load, clock)
        self.keep_warm = KeepWarm(clock, self._evict)
        rules = settings.rules()
        self.queue = Queue(
            self._holds.take,
            rt.here,
            self._concurrency,
            clock=clock,
            limit=settings.gpu_serve_queue,
            load_seconds=self.costs.load_seconds,
            pauses=rt._pauses,
            most_wait=lambda model: rules.most_wait(self.costs.load_seconds(model) or 0.0),
        )
        self._choices.calls_of = self.queue.calls_of
        self._counts: Counter[str] = Counter()
        self._decode_failures: Counter[str] = Counter()  # model -> failures in a row
        self._counts_at_once = asyncio.Semaphore(MOST_AT_ONCE)  # for counting long prompts
        self._http_clients: dict[bool, HttpClient] = {}  # key: whether proxies are used
        self._calls: set[asyncio.Task[Any]] = set()
        self._streams: WeakSet[Streamed] = WeakSet()
        self._closed = self._draining = False

    def record(self, kind: str, client: str = "") -> CallRecord:
        """A record for a call of this `kind` by the visitor `client`, which arrives now."""
        return CallRecord(self._clock, kind, client)

    async def answer(
        self, kind: str, body: Any, client: str = "", record: CallRecord | None = None
    ) -> Reply:
        """The answer to a call of this `kind` with this `body`, for the visitor `client`. Raises Refused.

        `record` is a result of `self.record`, if the caller wants to know what the call waits for. If the asyncio task
        is cancelled, everything that the call holds is released. A streamed reply is returned after its first event. So
        if an error occurs before, a fallback from `tasks.yaml` can answer, or the caller gets an HTTP status.
        """
        record = record or self.record(kind, client)
        with record.until_answered(), self._accepted():
            call = read_call(kind, body, client)
            call = apply_profile(call, self.serving.clients.get(call.profile))
            record.note(client=call.client, asked=call.model)
            call = with_alias(call, self.serving.aliases)
            async with AsyncExitStack() as stack:
                call = stack.enter_context(self._access.admitted(call, client))
                choices, call = self._choices.of(call, partial(self._may_call, client))
                choices = self._access.allowed(choices, call, client)
                self.clients.enter(call.client, call.model, self._clock())
                stack.callback(
                    lambda: self.clients.leave(call.client, call.cooldown, self._clock())
                )
                reply = await self._first_answer(call, choices, stack)
                reply.facts = record.facts
                return reply

    async def preload(self) -> None:
        """Loads the models under `preload` in `tasks.yaml` one after the other, as calls do. Failures are logged."""
        for name in self.serving.preload:
            try:
                await self.answer(LOAD, {"model": name})
                log.info("%s was loaded at the start", name)
            except Exception as error:  # any error of an engine
                log.warning("%s was not loaded at the start: %s", name, first_line(error))

    def models(self, client: str = "") -> list[Json]:
        """The rows of `/v1/models` with the models, tasks and aliases that `client` may call."""
        return [row for row in self._choices.models() if self._may_call(client, row["id"])]

    def leases(self) -> dict[str, Lease]:
        """The leases of this server's models, by name."""
        return self.rt.status().own_leases

    def warm_seconds(self, model: str) -> float | None:
        """The seconds until `model` is evicted because nobody uses it; None if no time is set."""
        until = self.keep_warm.until(model)
        return None if until is None else max(0.0, until - self._clock())

    def _may_call(self, client: str, name: str) -> bool:
        return self._access.may_call(client, self.serving.aliases.get(name, name))

    @property
    def serving(self) -> ServingConfig:
        """The tasks, clients and fallbacks that apply now."""
        return self._tasks.content()

    def reload_tasks(self) -> None:
        """Reads `tasks.yaml` again. If it has a mistake, the earlier content stays, and the mistake is logged."""
        self._tasks.reload()

    def state(self) -> GatewayState:
        """The current figures of this gateway."""
        queue, counts = self.queue, dict(self._counts)
        waiting, running, breakers = queue.depth(), queue.active(), self.breakers.states()
        clients, clouds = self.clients.patterns(), self.guard.allowed
        return GatewayState(waiting, running, breakers, counts, queue.loads, clients, clouds)

    async def drain(self, seconds: float) -> None:
        """Refuses new calls from now on, and waits up to `seconds` until all accepted calls are answered."""
        self._draining = True
        until = asyncio.get_running_loop().time() + seconds
        while self._calls or any(not stream.over for stream in self._streams):
            if asyncio.get_running_loop().time() >= until:
                return
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def require_open(self) -> None:
        """Raises Refused (503) if no new calls are accepted, because the server ends."""
        if self._closed or self._draining:
            raise server_ending()

    async def close(self) -> None:
        """Ends running calls with an error for their callers. Then no call is accepted and no load begins."""
        self._closed = self.queue.closed = True
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        for stream in list(self._streams):
            stream.abort(server_ending())
        if calls:
            await asyncio.wait(calls, timeout=CLOSING_SECONDS)
        await self.usage.close()
        await self.keep_warm.close()
        await self._holds.close()
        for client in self._http_clients.values():
            await client.aclose()

    # -- answering

    @contextlib.contextmanager
    def _accepted(self) -> Iterator[None]:
        """The call in this block is accepted. Counts its refusal by status, and its cancellation.

        Raises Refused (503) if the gateway drains, or closes during the call.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            self.require_open()
            self._calls.add(task)
            yield
        except Refused as refused:
            self._counts[f"refused_{refused.status}"] += 1
            raise
        except asyncio.CancelledError:
            if not self._closed:
                self._counts["cancelled"] += 1
                raise
            task.uncancel()
            self._counts["refused_503"] += 1
            raise server_ending() from None
        finally:
            self._calls.discard(task)

    async def _first_answer(
        self, call: Call, choices: tuple[Choice, ...], held: AsyncExitStack
    ) -> Reply:
        """The answer of the first of the `choices` that can answer. `held` has all that the call holds."""
        failed: list[tuple[str, BaseException]] = []
        deadline = None if call.budget is None else asyncio.get_running_loop().time() + call.budget
        try:
            for choice in attempts(choices, failed):
                try:
                    async with asyncio.timeout_at(deadline) as limit:
                        reply = await self._answer_with(choice, call, held, deadline)
                except TimeoutError as error:
                    if limit.expired():
                        raise self._out_of_time(call, choice) from None
                    failed.append((choice.model, error))
                except Exception as error:
                    raise_if_final(error, choice, choices)
                    failed.append((choice.model, error))
                    log.info("%s could not answer: %s", choice.model, first_line(error))
                else:
                    self._counts["answered"] += 1
                    if choice.model != reply.asked:
                        self._counts["stood_in"] += bool(failed)
                        errors = [
                            f"{name} could not answer: {first_line(why)}" for name, why in failed
                        ]
                        reply.because = "; ".join(errors) or choice.because
                    add_origin(reply)
                    return reply
            raise no_answer(call.model, failed)
        finally:
            failed.clear()  # else a cycle: error -> traceback -> this frame -> error

    async def _answer_with(
        self, choice: Choice, call: Call, held: AsyncExitStack, deadline: float | None
    ) -> Reply:
        """The answer of `choice`, which pins its model until it ends. The end of a stream releases `held` too."""
        record = current()
        async with AsyncExitStack() as stack:
            client = call.client.partition("/")[0]  # the visitor; a program chooses the rest itself
            permit = self.breakers.enter(choice.model, client)
            stack.callback(permit.withdrawn)
            adapter = None
            try:
                adapter, think = await self._adapter(choice, call, stack)
                if not permit.probe and self.breakers.state(choice.model).state != "closed":
                    permit.withdrawn()  # the breaker has opened while the call waited
                    permit = self.breakers.enter(choice.model, client)
                    stack.callback(permit.withdrawn)
                timing = Timing(self.costs, self._clock, choice.model, call)
                body = {**call.body, "model": choice.model}
                if not call.stream:
                    answer = await adapter.answer(call.kind, body, think)
                    require_ended(call.kind, answer, choice.model)
                    self._record_success(choice.model, permit)
                    timing.succeeded(answer)
                    record.note(model=choice.model, **timing.facts())
                    record.note_end()
                    self.figures.add(choice.model, record.facts)
                    return Reply(choice.model, call.model, "", json=answer)
                hides_usage = adapter.counts_tokens and not asks_usage(body)
                if hides_usage:
                    body["stream_options"] = {"include_usage": True}
                made = adapter.stream(call.kind, body, think)
                events = until_ended(made, choice.model, timing.note, hides_usage)
                stack.push_async_callback(events.aclose)
                first = await anext(events, None)
                if first is None:
                    text = f"{choice.model} answered with nothing"
                    raise EngineFailed(text, name=choice.model, why="no event")
            except Exception as error:
                if await self._is_of_the_call(error, call.kind, choice, adapter):
                    self._record_success(choice.model, permit)
                    if isinstance(error, OutOfMemory):
                        raise
                    why = "It answers other calls, so the cause is in this one"
                    text = f"{choice.model} refused: {first_line(error)}. {why}"
                    raise Refused(400, "engine_refused", text) from error
                self._record_failure(choice.model, permit, error)
                raise
            stack.push_async_exit(held.pop_all())

            async def ended(error: BaseException | None) -> None:
                if error is None:
                    self._record_success(choice.model, permit)
                    timing.succeeded()
                    record.note(outcome="answered")
                    return
                record.note(outcome="broken_off", error=first_line(error))
                if await self._is_of_the_call(error, call.kind, choice, adapter):
                    self._record_success(choice.model, permit)
                else:
                    self._record_failure(choice.model, permit, error)

            def left() -> None:
                record.note(model=choice.model, **timing.facts())
                record.write()
                if record.facts["outcome"] == "answered":
                    record.note_end()
                    self.figures.add(choice.model, record.facts)

            record.streams = True
            stack.callback(left)

            stream = Streamed(first, events, stack.pop_all(), deadline, ended)
            self._streams.add(stream)
            self._counts["streamed"] += 1
            return Reply(choice.model, call.model, "", events=stream)

    async def _is_of_the_call(
        self, error: BaseException, kind: str, choice: Choice, adapter: EngineAdapter | None
    ) -> bool:
        """Whether the call is the cause of `error`, because the model answers a plain call right after it.

        An engine may answer with the status 500 to a mistake of the caller, who could so close the model for everybody.
        """
        model = choice.model
        if adapter is None or choice.cloud or not may_be_of_the_call(error, kind, model):
            return False
        try:
            async with asyncio.timeout(PLAIN_CALL_SECONDS):
                await adapter.answer(kind, {**PLAIN_CALLS[kind], "model": model}, None)
        except Exception as second:  # noqa: BLE001 - the first error is reported
            log.debug("%s fails at a plain call too: %s", model, first_line(second))
            return False
        return True

    async def _adapter(
        self, choice: Choice, call: Call, stack: AsyncExitStack
    ) -> tuple[EngineAdapter, bool | None]:
        """The adapter of the model of `choice`, once it may run, and whether it thinks (None: as its template)."""
        if choice.cloud:
            cloud = cloud_of(choice.model, self._environment)
            if isinstance(cloud, str):
                text = f"{choice.model} cannot be reached: {cloud}"
                raise EngineFailed(text, name=choice.model, why=cloud)
            return HttpAdapter(choice.model, cloud, self._client(proxies=True)), None
        spec = self.rt.spec(choice.model)
        require(call.kind, spec)
        require_fields(call, spec)
        require_room(call, spec)
        await require_tokens(call, spec, self._counts_at_once)
        importance = spec.importance if call.importance is None else call.importance
        importance = max(importance, call.highest)
        if not spec.keep:
            stack.callback(self._keep_warm, call, spec)
        was_here = self.rt.here(spec.name)

        def began_to_wait(turn: Turn) -> None:
            current().state = partial(self.queue.state_of, turn)
            if not was_here:
                current().loads.set()

        turn = await stack.enter_async_context(
            self.queue.turn(spec.name, importance, call.client, began_to_wait)
        )
        current().note(queue_seconds=turn.waited_seconds, loaded=not was_here)
        adapter = self._make_adapter(turn.value, spec, self._client(proxies=False))
        return adapter, wants_thinking(call, spec.options)

    def _client(self, *, proxies: bool) -> HttpClient:
        """The HTTP client, made at its first use. `proxies` is whether it uses the environment's."""
        if proxies not in self._http_clients:
            self._http_clients[proxies] = HttpClient(proxies=proxies)
        return self._http_clients[proxies]

    def _keep_warm(self, call: Call, spec: ModelSpec) -> None:
        usual = spec.keep_alive or STAY_WARM_SECONDS.get(spec.model_type, DEFAULT_SECONDS)
        seconds = usual if call.stay_warm is None else call.stay_warm
        self.keep_warm.keep(spec.name, seconds, wished=call.stay_warm is not None)

    def _concurrency(self, model: str) -> int:
        with contextlib.suppress(GpuError):  # the use of the model reports the error
            return calls_at_once(self.rt.spec(model))
        return 1

    # -- outcomes

    def _record_success(self, model: str, permit: Permit) -> None:
        permit.succeeded()
        self._decode_failures.pop(model, None)

    def _record_failure(self, model: str, permit: Permit, error: BaseException) -> None:
        cause, _ = blame(error, model)
        if cause is not Blame.MODEL:
            return
        permit.failed(error)
        self.queue.renew(model)
        count = decode_failures(self._decode_failures[model], recognise(str(error)))
        self._decode_failures[model] = count
        # An EngineFault has `reloads`. Its backend counts failures and reloads the model by itself.
        if count == MOST_DECODE_FAILURES and not hasattr(error, "reloads"):
            self._counts["reloads"] += 1
            self.keep_warm.evict_soon(model)

    def _out_of_time(self, call: Call, choice: Choice) -> Refused:
        cost = self.costs.expect(choice.model, call)
        measured = measured_parts(cost, " and ")
        end = f"; {choice.model} has taken {measured} before." if measured else "."
        text = f"{call.model} did not answer within its budget of {call.budget:g} s{end}"
        facts = {"load_seconds": cost.load, "answer_seconds": cost.answer}
        return Refused(504, "budget_spent", text, budget_seconds=call.budget, **facts)

    async def _evict(self, model: str) -> bool:
        """Evicts a `model` whose keep-warm time is over, to RAM if there is room. False if it is in use."""
        await self._holds.ended(model)
        try:
            await in_thread(lambda: self.rt.evict(model, timeout=0.0, wait=False))
        except StillInUse:  # the next sweep tries again
            return False
        except GpuError as error:
            log.debug("%s stays: %s", model, error)
        return True


# -- answers: a stream's end, the next choice after an error, the origin, and whether an answer is complete

MAX_HEADER_LENGTH = 400
_NOT_PRINTABLE = re.compile("[^ -~]")  # what a header may not contain
# The limit of the answer, if it is less than the call requests; whether tools were left out.
TOLD = ("max_tokens", "tools")


class Streamed:
    """A streamed answer. An error after the first event becomes the last event, in OpenAI's format of errors."""

    def __init__(
        self,
        first: Json,
        events: AsyncIterator[Json],
        held: AsyncExitStack,
        deadline: float | None,
        ended: Callable[[BaseException | None], Awaitable[None]],
    ) -> None:
        """An answer whose `first` event was read already; `events` are the following events.

        `held` holds the turn of the call, the pin and the engine's stream until the end of the answer or `aclose`,
        which the sender must call even if it sent nothing. `deadline` is a time of the event loop. `ended(error)` is
        called once at the end; an error of None means success.
        """
        self._first: Json | None = first
        self._events = events
        self._held = held
        self._deadline = deadline
        self._ended = ended
        self.over = False  # whether the stream has ended, and has released its model or is about to
        self._reader: asyncio.Task[Any] | None = None  # the task that waits for the next event
        self._aborted_because: Refused | None = None

    def abort(self, reason: Refused) -> None:
        """Ends the stream with `reason` as its last event, even while a task waits for the engine's next event."""
        self._aborted_because = reason
        if self._reader is not None:
            self._reader.cancel()

    @property
    def first(self) -> Json:
        """The first event; fields may still be added to it."""
        assert self._first is not None
        return self._first

    def __aiter__(self) -> Streamed:
        return self

    async def __anext__(self) -> Json:
        if self._first is not None:
            event, self._first = self._first, None
            return event
        if self.over:
            raise StopAsyncIteration
        if self._aborted_because is not None:
            await self._end(self._aborted_because)
            return _error_event(self._aborted_because)
        self._reader = asyncio.current_task()
        try:
            return await self._next()
        except StopAsyncIteration:
            await self._end(None)
            raise
        except Exception as error:
            await self._end(error)
            return _error_event(error)
        except asyncio.CancelledError:
            await self.aclose()
            if self._aborted_because is None or self._reader is None:
                raise
            self._reader.uncancel()
            return _error_event(self._aborted_because)
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._reader = None

    async def _end(self, error: BaseException | None) -> None:
        """Counts the outcome, for which the model may be called once more, and releases the model."""
        self.over = True
        try:
            await self._ended(error)
        finally:
            await self.aclose()

    async def _next(self) -> Json:
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                return await anext(self._events)
        except TimeoutError:
            if limit.expired():
                text = "the answer broke off: its budget is spent"
                raise Refused(504, "budget_spent", text) from None
            raise

    async def aclose(self) -> None:
        """Ends the stream and releases everything that it holds."""
        self.over = True
        self._first = None
        await self._held.aclose()


def server_ending() -> Refused:
    """The refusal (503) of a call while the server ends."""
    return Refused(503, "ending", "the server is ending; retry when it has started again", 5.0)


def attempts(
    choices: Sequence[Choice], failed: Sequence[tuple[str, BaseException]]
) -> Iterator[Choice]:
    """Yields each of `choices`. If none of them answered, yields once more the first choice whose engine died.

    The caller adds the model and the error of each attempt to `failed` before it reads the next choice. An engine may
    have died before the call reached it. A second death ends the call, because the call itself may be the cause.
    """
    yield from choices
    died = {model for model, error in failed if isinstance(error, EngineDied)}
    yield from [choice for choice in choices if choice.model in died][:1]


def raise_if_final(error: Exception, choice: Choice, choices: tuple[Choice, ...]) -> None:
    """Raises Refused if the call ends with this `error` of `choice`. Else the next model is tried.

    A refusal ends the call if the queue is full, if there is only one choice, or if the requested model refuses because
    of a mistake in the call. If a fallback refuses, for example because the prompt is too long, the next one is tried.
    """
    cause, refused = blame(error, choice.model)
    if refused is None:
        return
    is_callers_mistake = choice is choices[0] and cause is Blame.CALLER
    is_final = len(choices) == 1 or is_callers_mistake or refused.code == "queue_full"
    try:
        if is_final:
            raise refused from (error.__cause__ if refused is error else error)
    finally:
        del refused, error  # else a cycle: error -> traceback -> this frame -> error


def add_origin(reply: Reply) -> None:
    """Writes into the body and headers of `reply` which model answered and why, and what its adapter noted (TOLD)."""
    origin = {"asked": reply.asked, "model": reply.model}
    if reply.because:
        origin["because"] = reply.because
    body = reply.json if reply.json is not None else reply.events.first  # type: ignore[union-attr]
    told = body.get("x_gpu") or {}
    origin |= {name: told[name] for name in TOLD if name in told}
    body["x_gpu"] = origin
    for name, value in origin.items():
        plain = str(value).encode("ascii", "replace").decode()
        text = _NOT_PRINTABLE.sub(" ", plain)[:MAX_HEADER_LENGTH]
        reply.headers[f"X-GPU-{name.replace('_', '-').title()}"] = text


def _error_event(error: BaseException) -> Json:
    if isinstance(error, Refused):
        return error.body()
    return Refused(500, "broken_off", f"the answer broke off: {first_line(error)}").body()


# OpenAI's format gives each choice a `finish_reason` when its text is complete. Without one, the engine cut the answer
# off, even if the stream ended with `[DONE]`. llama-cpp-python's server does so when it receives another call.
TEXT_KINDS = ("chat", "completions")


def require_ended(kind: str, answer: Json, model: str) -> None:
    """Raises EngineFailed if the whole `answer` of `model` to a call of this `kind` was cut off."""
    if kind not in TEXT_KINDS:
        return
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise _cut_off(model, "its answer has no choices")
    if not all(_has_ended(choice) for choice in choices):
        raise _cut_off(model, "its answer was cut off: it has no finish_reason")


async def until_ended(
    events: AsyncIterator[Json], model: str, note: Callable[[Json], None], hides_usage: bool
) -> AsyncGenerator[Json]:
    """Yields the `events` of a streamed answer of `model`, after `note` was called with each.

    With `hides_usage`, an event that has only the usage is left out, because the caller did not ask for it. Raises
    EngineFailed after the last event if a choice was cut off, or if there was no choice.
    """
    begun: set[int] = set()
    ended: set[int] = set()
    async with aclosing(events) as source:  # type: ignore[type-var]
        async for event in source:
            note(event)
            for choice in event.get("choices") or ():
                begun.add(choice.get("index", 0))
                if _has_ended(choice):
                    ended.add(choice.get("index", 0))
            if not hides_usage or event.get("choices"):
                yield event
    if not ended or begun - ended:
        raise _cut_off(model, "its answer was cut off: it ended without a finish_reason")


def _has_ended(choice: Any) -> bool:
    return isinstance(choice, dict) and bool(choice.get("finish_reason"))


def _cut_off(model: str, why: str) -> EngineFailed:
    return EngineFailed(f"{model} failed: {why}", name=model, why=why)
