"""Measured durations of loads and answers. A call is refused at once if its time budget is shorter.

The time for the prompt and the time for the text of an answer are estimated separately, because the whole time of a
long answer is no estimate for a short one. Prompts are counted in characters, because nothing else is known of a
prompt before its model runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from statistics import median, median_low
from typing import Any

from msgspec.structs import replace

from ...facts import Value
from ..prompt_size import characters, given_tokens
from ..requests import Call, Json
from ..routing.tasks import Cost

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

    def __init__(self) -> None:
        self._loads: dict[str, deque[float]] = {}
        self._answers: dict[tuple[str, str], deque[Answered]] = {}
        self._refusals: Counter[str] = Counter()  # of too short budgets, by requested name

    def add_load(self, model: str, seconds: float) -> None:
        """Records that a load of `model` took so many `seconds`."""
        self._loads.setdefault(model, deque(maxlen=LOADS_KEPT)).append(seconds)

    def load_seconds(self, model: str) -> float | None:
        """The seconds that a usual load of `model` takes, the median; None if no load was measured.

        Of two that were measured, the shorter one counts: a slow load must not refuse the calls that measure more.
        """
        loads = self._loads.get(model)
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
    same = [one.answer for one in answers if one.asked == call.model]
    longest = max(same or [one.answer for one in answers])
    asked = call.body.get("max_completion_tokens") or call.body.get("max_tokens")
    return min(asked, longest) if asked else longest


def _rates(answers: Iterable[Answered]) -> tuple[float, float]:
    """The seconds per token of a prompt, and the seconds per token of an answer, measured in recent `answers`."""
    written = [one for one in answers if one.answer]
    streamed = [one.first / one.prompt for one in answers if one.first is not None]
    if streamed:
        prompt_rate = median(streamed)
        rests = [max(0.0, one.seconds - one.prompt * prompt_rate) / one.answer for one in written]
        return prompt_rate, median(rests or [0.0])
    if not written:  # embeddings
        return median(one.seconds / one.prompt for one in answers), 0.0
    rate = median(one.seconds / (one.answer + PROMPT_PART * one.prompt) for one in written)
    return PROMPT_PART * rate, rate
