"""What is recorded of each call: its line in the request log, durations, its client's habits, figures, and usage.

The request log has one line of JSON for each call, with the durations of the call's parts and its outcome. The lines go
to the logger `gpu_runtime.requests`. `open_log` writes them to a file. They have no text of a prompt or of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime, timedelta, timezone
from logging.handlers import WatchedFileHandler
from statistics import median, median_low
from typing import Any

from msgspec.structs import replace
from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric

from .. import files
from ..errors import BadSetting
from ..facts import Value
from .breaker import BreakerState
from .requests import Call, Json, Refused, characters, given_tokens
from .store import Store, UsageRow
from .thread_stream import in_thread

# -- the request log

STDERR = "-"
request_id: ContextVar[str] = ContextVar("request_id", default="")
# The header of that name of the request, if the client traces it (W3C Trace Context); empty if not.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
log = logging.getLogger("gpu_runtime.requests")
log.propagate = False  # otherwise other handlers would mix these lines with messages for people
log.addHandler(logging.NullHandler())
log.setLevel(logging.WARNING)  # so that no line is written before `open_log` is called
# The names of OpenTelemetry's conventions for generative AI, where these have one.
GENAI = {
    "kind": "gen_ai.operation.name",
    "asked": "gen_ai.request.model",
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "code": "error.type",
    "status": "http.response.status_code",
}
_NAMES: dict[str, dict[str, str]] = {"own": {}, "genai": GENAI}
_names: dict[str, str] = {}  # of the fields in the lines, where they differ from those of the facts


class CallRecord:
    """The facts of one call, which are written once, when the call has ended."""

    def __init__(self, clock: Callable[[], float], kind: str, client: str) -> None:
        """The record of a call of this `kind` by the visitor `client`. The call begins now, by the `clock`."""
        self._clock = clock
        self._began = clock()
        self._written = False
        # What the call waits for now, in words for its caller.
        self.state: Callable[[], str] = lambda: "waiting"
        self.loads = asyncio.Event()  # set once a model is brought to its device for the call
        self.streams = False  # whether the call ends only at the end of its stream
        self.facts: dict[str, Any] = {
            "time": round(time.time(), 3),
            "id": request_id.get(),
            **({"traceparent": traced} if (traced := traceparent.get()) else {}),
            "kind": kind,
            "client": client,
            "outcome": "cancelled",
        }

    def note(self, **facts: Any) -> None:
        """Adds `facts` to the line of this call. Seconds are rounded to milliseconds there."""
        self.facts |= facts

    def note_end(self) -> None:
        """Adds the seconds since the call arrived."""
        self.note(seconds=self._clock() - self._began)

    def write(self) -> None:
        """Writes the line of this call. A second call of this method does nothing."""
        if self._written or not log.isEnabledFor(logging.INFO):
            return
        self._written = True
        self.note_end()
        line = {
            _names.get(name, name): round(value, 3) if isinstance(value, float) else value
            for name, value in self.facts.items()
        }
        if _names is GENAI:
            line["gen_ai.provider.name"] = "gpu-console"
            if line["gen_ai.operation.name"] == "completions":
                line["gen_ai.operation.name"] = "text_completion"
        log.info(json.dumps(line, ensure_ascii=False))

    @contextlib.contextmanager
    def until_answered(self) -> Iterator[None]:
        """The answer is made in this block. At its end the line is written; for a stream, its sender does it."""
        token = _current.set(self)
        try:
            yield
        except Refused as refused:
            self.note(outcome="refused", status=refused.status, code=refused.code)
            raise
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.note(outcome="failed", code=type(error).__name__)
            raise
        else:
            if self.streams:
                return
            self.note(outcome="answered")
        finally:
            _current.reset(token)
            if not self.streams:
                self.write()


_current: ContextVar[CallRecord] = ContextVar("call_record")
current = _current.get  # the record of the call that this task answers


def open_log(target: str | None, names: str = "own") -> None:
    """Writes the log's lines to the file `target`; to standard error if that is "-"; nowhere if it is None.

    With the `names` "genai", fields have the names of GENAI.
    Raises BadSetting if the file cannot be opened, or if it is a pipe or a device.
    """
    global _names
    _names = _NAMES[names]
    if target is None:
        return
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if target != STDERR:
        try:
            files.open_regular(target, to_append=True).close()
            handler = WatchedFileHandler(target)  # follows a program that rotates the file
        except OSError as error:
            expected = f"a file that can be written ({error.strerror or error}), or -"
            raise BadSetting("GPU_SERVE_LOG", target, expected) from None
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def reopen_log() -> None:
    """Opens the log's file again if it was renamed or removed, before the next call needs it. An error is logged."""
    for handler in log.handlers:
        if isinstance(handler, WatchedFileHandler):
            try:
                handler.reopenIfNeeded()
            except OSError as error:
                logging.getLogger("gpu_runtime").warning(
                    "the request log cannot be opened: %s", error
                )


# -- measured durations of loads and answers; a call is refused at once if its time budget is shorter
#
# The time for the prompt and the time for the text of an answer are estimated separately, because the whole time of a
# long answer is no estimate for a short one. Prompts are counted in characters, because nothing else is known of a
# prompt before its model runs.

LOADS_KEPT = 5  # of each model; their median counts, so that one slow load does not refuse calls
REFUSALS_BEFORE_TRIAL = 3  # a refusal must not prevent the measurement that would lift it
ANSWERS_KEPT = 20  # of each model and kind of call; also by their median
CHARACTERS_PER_TOKEN = 4
SHORTEST_PROMPT = 64  # in tokens; a shorter prompt takes the same time as one of this length
# The time for a token of a prompt, as a fraction of the time for a token of an answer. This guess is used until an
# answer of the model was streamed: only a stream shows how long the prompt takes.
PROMPT_PART = 0.1


class Answered(Value):
    """One answer: the name that the caller asked for, the lengths in tokens, and the seconds."""

    seconds: float
    asked: str = ""
    prompt: int = 0
    answer: int = 0
    first: float | None = None  # seconds until the first piece; None: it was not streamed


class Costs:
    """Durations in seconds by model, as measured in this process."""

    def __init__(self, in_ram: Callable[[str], object] = lambda model: False) -> None:
        """`in_ram(model)` is whether the model's next load is a return from host memory."""
        self._in_ram = in_ram
        self._loads: dict[tuple[str, bool], deque[float]] = {}  # by model, and whether from there
        self._answers: dict[tuple[str, str], deque[Answered]] = {}
        self._refusals: Counter[str] = Counter()  # of too short budgets, by requested name

    def add_load(self, model: str, seconds: float, from_ram: bool = False) -> None:
        """Records that a load of `model` took so many `seconds`, or its return from host memory."""
        key = model, from_ram
        self._loads.setdefault(key, deque(maxlen=LOADS_KEPT)).append(seconds)

    def load_seconds(self, model: str) -> float | None:
        """The seconds that a usual load of `model` takes, the median; None if no load was measured.

        If the model is in host memory, its returns from there count, if one was measured. Of two that were measured,
        the shorter one counts: a slow load must not refuse the calls that measure more.
        """
        loads = self._loads.get((model, False))
        if self._in_ram(model):
            loads = self._loads.get((model, True), loads)
        return median_low(loads) if loads else None

    def add_answer(self, model: str, kind: str, seconds: float, **known: Any) -> None:
        """Records that an answer of `model` to a call of this `kind` took `seconds`; `known` as in `Answered`."""
        answer = Answered(seconds, **known)
        answer = replace(answer, prompt=_counted(kind, answer.prompt))
        self._answers.setdefault((model, kind), deque(maxlen=ANSWERS_KEPT)).append(answer)

    def expect(self, model: str, call: Call) -> Cost:
        """The expected seconds of a load of `model`, and of its answer to `call`; None for a part that was never
        measured.

        The expected length of the answer is the call's limit, but at most the length of the longest recent answer. If
        recent answers were requested by the same name as `call`, only these count.
        """
        answers = self._answers.get((model, call.kind), ())
        seconds = None
        if answers:
            prompt_rate, answer_rate = _rates(answers)
            prompt = _counted(call.kind, prompt_tokens(call))
            seconds = prompt * prompt_rate + _answer_tokens(call, answers) * answer_rate
        return Cost(self.load_seconds(model), seconds)

    def is_trial(self, asked: str) -> bool:
        """Whether a call of `asked` is tried, and measured, despite its budget: one after REFUSALS_BEFORE_TRIAL."""
        self._refusals[asked] += 1
        return self._refusals[asked] % (REFUSALS_BEFORE_TRIAL + 1) == 0


class Timing:
    """Measures one answer while it is made."""

    def __init__(self, costs: Costs, clock: Callable[[], float], model: str, call: Call) -> None:
        """Starts measuring the answer of `model` to `call`, by the `clock`. The results are added to `costs`."""
        self._costs = costs
        self._clock = clock
        self._model = model
        self._call = call
        self._began = clock()
        self._first: float | None = None
        self._seconds: float | None = None
        self._pieces = 0
        self._prompt = self._expected_prompt = prompt_tokens(call)

    def note(self, event: Json) -> None:
        """Counts an `event` of a stream as one token if it has choices. The counts of a `usage` replace this count."""
        if self._first is None:
            self._first = self._clock() - self._began
        self._pieces += bool(event.get("choices"))
        if event.get("usage"):
            self._count(event)

    def facts(self) -> Json:
        """The figures so far, for the request log: tokens, and seconds until the first piece and until the end."""
        seconds = {"first_seconds": self._first, "answer_seconds": self._seconds}
        known = {name: value for name, value in seconds.items() if value is not None}
        return {"prompt_tokens": self._prompt, "completion_tokens": self._pieces, **known}

    def succeeded(self, answer: Json | None = None) -> None:
        """Records the duration. `answer` is the whole answer, or None for a stream."""
        if answer is not None:
            self._count(answer)
        self._seconds = self._clock() - self._began
        self._costs.add_answer(
            self._model,
            self._call.kind,
            self._seconds,
            asked=self._call.model,
            prompt=self._expected_prompt,
            answer=self._pieces,
            first=self._first,
        )

    def _count(self, answer: Json) -> None:
        """Takes the counts of tokens in the `usage` of an answer, or of the last event of a stream."""
        self._pieces = _tokens_of(self._call, answer)
        usage = answer.get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        self._prompt = counted if isinstance(counted, int) else self._prompt


def prompt_tokens(call: Call) -> int:
    """About how many tokens the prompt of `call` has."""
    return characters(call.body) // CHARACTERS_PER_TOKEN + given_tokens(call.body)


def _counted(kind: str, prompt: int) -> int:
    """The tokens that count for the time of a `prompt`: at least SHORTEST_PROMPT, but none if an image is made."""
    return 0 if kind == "images" else max(SHORTEST_PROMPT, prompt)


def _tokens_of(call: Call, answer: Json) -> int:
    """The tokens of a whole `answer`. An image counts as one."""
    if call.kind == "images":
        return len(answer.get("data") or ())
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def _answer_tokens(call: Call, answers: Iterable[Answered]) -> int:
    """The number of tokens that the answer to `call` probably has, from recent `answers`."""
    if call.kind == "images":
        return call.body.get("n") or 1
    same = [answered.answer for answered in answers if answered.asked == call.model]
    longest = max(same or [answered.answer for answered in answers])
    asked = call.body.get("max_completion_tokens") or call.body.get("max_tokens")
    return min(asked, longest) if asked else longest


def _rates(answers: Iterable[Answered]) -> tuple[float, float]:
    """The seconds per token of a prompt, and the seconds per token of an answer, measured in recent `answers`."""
    written = [run for run in answers if run.answer]
    streamed = [run.first / run.prompt for run in answers if run.first is not None]
    if streamed:
        prompt_rate = median(streamed)
        rests = [max(0.0, run.seconds - run.prompt * prompt_rate) / run.answer for run in written]
        return prompt_rate, median(rests or [0.0])
    if not written:  # embeddings
        return median(run.seconds / run.prompt for run in answers), 0.0
    rate = median(run.seconds / (run.answer + PROMPT_PART * run.prompt) for run in written)
    return PROMPT_PART * rate, rate


class Cost(Value):
    """The measured seconds of a model's load and answer. None means that a part was not measured yet."""

    load: float | None = None
    answer: float | None = None


# -- how often each client calls which models, and which clients are in cooldown
#
# A client is a visitor together with the name that the calling program gives itself (`x_client_id`). A cooldown is set
# by the client itself or by its profile, and applies to that client only.

# Beyond this number, the client whose last call is the oldest is forgotten, unless one of its calls still runs.
MAX_CLIENTS = 1000
MAX_MODELS = 20  # remembered for each client
_NEWEST_WEIGHT = 0.2  # the weight of the newest interval in the moving average


class Pattern(Value):
    """How one client calls."""

    calls: int = 0
    refused: int = 0  # calls during a cooldown
    running: int = 0
    last_at: float = 0.0
    # The weighted average of the seconds between calls. The newest interval has the most weight. None before the
    # second call.
    every_seconds: float | None = None
    models: dict[str, int] = {}  # calls of each model
    cooldown_until: float = 0.0


class Clients:
    """The known clients; the client with the most recent call is last. The caller passes the times."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Pattern] = OrderedDict()

    def enter(self, client: str, model: str, now: float) -> None:
        """Records a call of `model` by `client` at the time `now`. Raises Refused (429) during a cooldown."""
        known = self._known.pop(client, Pattern())
        if now < known.cooldown_until:
            self._keep(client, known, refused=known.refused + 1)
            seconds, who = known.cooldown_until - now, client or "this client"
            text = f"{who} is in cooldown for another {seconds:.1f} s, as it requested."
            raise Refused(429, "cooldown", text, seconds, client=client)
        self._keep(
            client,
            known,
            calls=known.calls + 1,
            running=known.running + 1,
            last_at=now,
            every_seconds=_average_interval(known, now),
            models=_count_model(known.models, model),
        )

    def leave(self, client: str, cooldown: float, now: float) -> None:
        """Records the end of a call of `client` at `now`, when its `cooldown` (seconds) begins."""
        known = self._known.get(client)
        if known is None:
            return
        until = max(known.cooldown_until, now + cooldown if cooldown > 0 else 0.0)
        self._keep(client, known, running=max(0, known.running - 1), cooldown_until=until)

    def patterns(self) -> dict[str, Pattern]:
        """The pattern of each client, by its name."""
        return dict(self._known)

    def _keep(self, client: str, known: Pattern, **changes: Any) -> None:
        self._known[client] = replace(known, **changes)
        while len(self._known) > MAX_CLIENTS:
            idle = (name for name, pattern in self._known.items() if not pattern.running)
            oldest = next(idle, None)
            if oldest is None:
                return
            del self._known[oldest]


def _average_interval(known: Pattern, now: float) -> float | None:
    if not known.calls:
        return known.every_seconds
    interval = now - known.last_at
    if known.every_seconds is None:
        return interval
    return known.every_seconds + _NEWEST_WEIGHT * (interval - known.every_seconds)


def _count_model(counts: dict[str, int], model: str) -> dict[str, int]:
    """Returns `counts` with one more call of `model`. Of too many models, the one with the fewest calls is left out."""
    counts = {**counts, model: counts.get(model, 0) + 1}
    if len(counts) > MAX_MODELS:
        others = [name for name in counts if name != model]
        del counts[min(others, key=lambda name: counts[name])]
    return counts


# -- histograms for Prometheus, and figures for a console's page

_PREFIX = "gpuconsole_call_"


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
# The number of models that have figures. Callers can invent any number of names of clouds' models.
MOST_MODELS = 500
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "seconds": ("Seconds from the arrival of a call to the end of its answer", SECONDS),
    "queue_seconds": ("Seconds that an answered call waited for its model", SECONDS),
    "first_token_seconds": ("Seconds from the call to the first piece of its stream", SECONDS),
    "token_seconds": ("Seconds for each further token of a stream, after the first", TOKEN_SECONDS),
    "prompt_tokens": ("Tokens of the prompt", TOKENS),
    "answer_tokens": ("Tokens of the answer", TOKENS),
}


class CallFigures:
    """The histograms of one gateway."""

    def __init__(self) -> None:
        # Finding a label takes longer than a dict.
        self._models: dict[str, dict[str, Histogram]] = {}
        self._histograms = {
            name: Histogram(_PREFIX + name, text, ["model"], buckets=buckets, registry=None)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def add(self, model: str, facts: Mapping[str, Any]) -> None:
        """Adds an answered call of `model`. `facts` are the facts of the call in the request log."""
        own = self._models.get(model)
        if own is None:
            if len(self._models) >= MOST_MODELS:
                return
            own = self._models[model] = {}
        for name, value in _values(facts).items():
            if name not in own:
                own[name] = self._histograms[name].labels(model)
            own[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yields the histograms."""
        for histogram in self._histograms.values():
            yield from histogram.collect()


def _values(facts: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one call by the names of the histograms. Unknown figures are left out.

    >>> _values({"queue_seconds": 1.0, "first_seconds": 0.5, "answer_seconds": 2.5, "completion_tokens": 5})
    {'queue_seconds': 1.0, 'answer_tokens': 5, 'first_token_seconds': 1.5, 'token_seconds': 0.5}
    """
    same = ("seconds", "queue_seconds", "prompt_tokens")
    found = {name: facts[name] for name in same if name in facts}
    if "completion_tokens" in facts:
        found["answer_tokens"] = facts["completion_tokens"]
    first, tokens = facts.get("first_seconds"), facts.get("completion_tokens", 0)
    if first is not None:
        found["first_token_seconds"] = facts.get("queue_seconds", 0.0) + first
        if tokens > 1 and "answer_seconds" in facts:
            found["token_seconds"] = (facts["answer_seconds"] - first) / (tokens - 1)
    return found


class GatewayState(Value):
    """Figures of a gateway, for metrics."""

    waiting: dict[str, int]  # calls, by model
    running: dict[str, int]  # calls, by model
    breakers: dict[str, BreakerState]
    # Keys: answered, streamed, refused_STATUS, stood_in, cancelled, reloads.
    counts: dict[str, int]
    loads: int  # loads begun, for calls whose model was not on its device
    clients: dict[str, Pattern]
    allow_cloud: bool


class ModelCalls(Value):
    """The answered calls of one model since the server began. A mean that is not known is None."""

    calls: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None  # from the call to the first piece of its stream
    tokens_per_second: float | None = None  # of a stream, after the first token
    prompt_tokens: int = 0
    answer_tokens: int = 0


class ServerFigures(Value):
    """All figures of one server."""

    state: GatewayState
    models: dict[str, ModelCalls]
    jobs: tuple[Any, ...]  # of `openai.Job`, the newest first
    now: float  # by the gateway's clock, as are the times in `state.clients`
    usage: tuple[dict[str, Any], ...] = ()  # of the last 30 days; the rows of `Usage.of`


def served(gateway: Any, jobs: Any, now: float) -> ServerFigures:
    """The figures of the `gateway` and its `jobs` at `now` of its clock. Call this in the gateway's event loop."""
    newest = tuple(sorted(jobs.all(), key=lambda job: -job.created))
    usage = tuple(gateway.usage.recent())
    return ServerFigures(gateway.state(), _models(gateway), newest, now, usage)


def _models(gateway: Any) -> dict[str, ModelCalls]:
    """The calls of each model, from the histograms of `/metrics`."""
    sums: dict[str, dict[str, float]] = defaultdict(dict)
    for metric in gateway.figures.collect():
        for sample in metric.samples:
            name = sample.name.removeprefix(_PREFIX)
            if name.endswith(("_sum", "_count")):
                sums[sample.labels["model"]][name] = sample.value
    return {model: _calls(known) for model, known in sums.items()}


def _calls(known: dict[str, float]) -> ModelCalls:
    def mean(name: str) -> float | None:
        count = known.get(f"{name}_count", 0.0)
        return known[f"{name}_sum"] / count if count else None

    token_seconds = mean("token_seconds")
    return ModelCalls(
        int(known.get("queue_seconds_count", 0)),
        mean("queue_seconds"),
        mean("first_token_seconds"),
        1 / token_seconds if token_seconds else None,
        int(known.get("prompt_tokens_sum", 0)),
        int(known.get("answer_tokens_sum", 0)),
    )


# -- the calls and tokens of each visitor

WRITE_SECONDS = 1.0  # the longest time for which calls are in memory only
MOST_DAYS = 400
RECENT_DAYS = 30
RECENT_SECONDS = 5.0  # how long `recent` returns the same rows
_Place = tuple[str, str, str]  # day, client, model


class Usage:
    """The calls of one gateway, and their tokens, by visitor, model and day, in its event loop."""

    def __init__(self, store: Store | None = None, wall: Callable[[], float] = time.time) -> None:
        """The counts go to `store`; without a store they stay in memory. `wall` returns epoch seconds."""
        self._store = store
        self._wall = wall
        self._new: dict[_Place, list[int]] = {}  # calls, tokens read and written
        self._writing: asyncio.Task[None] | None = None
        self._recent: list[Json] = []
        self._recent_until = 0.0  # epoch seconds

    def add(self, client: str, facts: Json) -> None:
        """Counts one call of the visitor `client`. `facts` are the facts of the call in the request log."""
        place = (self._day(0), client, facts["model"])
        self._count(place, 1, facts["prompt_tokens"], facts["completion_tokens"])
        if self._store is not None and self._writing is None:
            self._writing = asyncio.ensure_future(self._write_soon())

    def of(self, days: int, client: str | None = None) -> list[Json]:
        """Rows with the calls and tokens of each client and model in the last `days`; of `client` alone, if given."""
        since = self._day(days - 1)
        rows = self._store.usage(since) if self._store is not None else []
        sums: dict[tuple[str, str], list[int]] = {}
        for day, who, model, *counts in (*rows, *self._rows()):
            if day >= since and client in (None, who):
                known = sums.setdefault((who, model), [0, 0, 0])
                sums[who, model] = [a + b for a, b in zip(known, counts, strict=True)]
        return [
            {
                "client": who,
                "model": model,
                "calls": calls,
                "prompt_tokens": read,
                "answer_tokens": made,
            }
            for (who, model), (calls, read, made) in sorted(sums.items())
        ]

    def recent(self) -> list[Json]:
        """The rows of the last RECENT_DAYS for all clients. They may be RECENT_SECONDS old."""
        if self._wall() >= self._recent_until:
            self._recent, self._recent_until = self.of(RECENT_DAYS), self._wall() + RECENT_SECONDS
        return self._recent

    async def close(self) -> None:
        """Writes the counts that are not in the store yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._write()  # also what an earlier write has failed to write

    async def _write_soon(self) -> None:
        await asyncio.sleep(WRITE_SECONDS)
        self._writing = None
        await self._write()

    async def _write(self) -> None:
        rows, store = self._rows(), self._store
        self._new.clear()
        if rows and store is not None and not await in_thread(lambda: store.add_usage(rows)):
            # Such as a full disk: these calls are written with the next one.
            for day, client, model, *counts in rows:
                self._count((day, client, model), *counts)

    def _count(self, place: _Place, *counts: int) -> None:
        known = self._new.get(place, [0, 0, 0])
        self._new[place] = [a + b for a, b in zip(known, counts, strict=True)]

    def _rows(self) -> list[UsageRow]:
        return [(*place, *counts) for place, counts in list(self._new.items())]  # type: ignore[misc]

    def _day(self, ago: int) -> str:
        now = datetime.fromtimestamp(self._wall(), timezone.utc)
        return (now - timedelta(days=ago)).date().isoformat()
