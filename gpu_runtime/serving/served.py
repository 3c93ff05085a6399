"""What a server did and does now, for a console's page: calls of each model, clients, usage, jobs and breakers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..facts import Value
from .gateway import Gateway, GatewayState

_PREFIX = "gpu_call_"


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


def served(gateway: Gateway, jobs: Any, now: float) -> ServerFigures:
    """The figures of the `gateway` and its `jobs` at the time `now` of the gateway's clock.

    Call this function in the gateway's event loop.
    """
    found = [
        JobFigures(job.endpoint, job.client, job.status, job.created, job.ended)
        for job in jobs.all()
    ]
    found.sort(key=lambda job: -job.created)
    usage = tuple(gateway.usage.recent())
    return ServerFigures(gateway.state(), _models(gateway), tuple(found), now, usage)


def _models(gateway: Gateway) -> dict[str, ModelCalls]:
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
