"""Histograms for Prometheus of each model's calls: how long they waited, how fast they were, and their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
# The number of models that have figures. Callers can invent any number of names of clouds' models.
MOST_MODELS = 500
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "gpu_call_seconds": ("Seconds from the arrival of a call to the end of its answer", SECONDS),
    "gpu_call_queue_seconds": ("Seconds that an answered call waited for its model", SECONDS),
    "gpu_call_first_token_seconds": (
        "Seconds from the call to the first piece of its stream",
        SECONDS,
    ),
    "gpu_call_token_seconds": (
        "Seconds for each further token of a stream, after the first",
        TOKEN_SECONDS,
    ),
    "gpu_call_prompt_tokens": ("Tokens of the prompt", TOKENS),
    "gpu_call_answer_tokens": ("Tokens of the answer", TOKENS),
}


class CallFigures:
    """The histograms of one gateway."""

    def __init__(self) -> None:
        self._models: dict[
            str, dict[str, Histogram]
        ] = {}  # finding a label takes longer than a dict
        self._histograms = {
            name: Histogram(name, text, ["model"], buckets=buckets, registry=None)
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
                own[name] = self._histograms[f"gpu_call_{name}"].labels(model)
            own[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yields the histograms."""
        for histogram in self._histograms.values():
            yield from histogram.collect()


def _values(facts: Mapping[str, Any]) -> dict[str, float]:
    """The figures of one call, by the names of the histograms without `gpu_call_`. Unknown figures are left out.

    >>> _values({"queue_seconds": 1.0, "first_seconds": 0.5, "answer_seconds": 2.5, "completion_tokens": 5})
    {'queue_seconds': 1.0, 'answer_tokens': 5, 'first_token_seconds': 1.5, 'token_seconds': 0.5}
    """
    names = {
        "seconds": "seconds",
        "queue_seconds": "queue_seconds",
        "prompt_tokens": "prompt_tokens",
        "completion_tokens": "answer_tokens",
    }
    found = {own: facts[name] for name, own in names.items() if name in facts}
    first, tokens = facts.get("first_seconds"), facts.get("completion_tokens", 0)
    if first is not None:
        found["first_token_seconds"] = facts.get("queue_seconds", 0.0) + first
        if tokens > 1 and "answer_seconds" in facts:
            found["token_seconds"] = (facts["answer_seconds"] - first) / (tokens - 1)
    return found
