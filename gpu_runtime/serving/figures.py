"""What a server did and does now: histograms for Prometheus, and figures for a console's page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric

from ..facts import Value
from .health.breaker import BreakerState
from .health.clients import Pattern

_PREFIX = "gpu_call_"


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
    # Keys: answered, streamed, failed, refused_STATUS, stood_in, cancelled, reloads.
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


class JobFigures(Value):
    """One job. Its id is left out, since a visitor who knows the id may fetch the result."""

    endpoint: str
    client: str
    status: str  # running, succeeded, failed or cancelled
    created: float  # epoch seconds
    ended: float = 0.0  # 0: it still runs


class ServerFigures(Value):
    """All figures of one server."""

    state: GatewayState
    models: dict[str, ModelCalls]
    jobs: tuple[JobFigures, ...]  # the newest first
    now: float  # by the gateway's clock, as are the times in `state.clients`
    usage: tuple[dict[str, Any], ...] = ()  # of the last 30 days; the rows of `Usage.of`


def served(gateway: Any, jobs: Any, now: float) -> ServerFigures:
    """The figures of the `gateway` and its `jobs` at `now` of its clock. Call this in the gateway's event loop."""
    found = tuple(
        JobFigures(job.endpoint, job.client, job.status, job.created, job.ended)
        for job in sorted(jobs.all(), key=lambda job: -job.created)
    )
    usage = tuple(gateway.usage.recent())
    return ServerFigures(gateway.state(), _models(gateway), found, now, usage)


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
