"""What loading and answering have taken so far, to tell a budget that is too short before it is spent."""

from __future__ import annotations

from collections import deque

from ..routing.tasks import Cost

LOADS = 5  # the last of each model; the slowest counts, since a file is not always in the cache
ANSWERS = 100


class Costs:
    """Seconds by model, as measured in this process."""

    def __init__(self) -> None:
        self._loads: dict[str, deque[float]] = {}
        self._answers: dict[str, deque[float]] = {}

    def loaded(self, model: str, seconds: float) -> None:
        self._loads.setdefault(model, deque(maxlen=LOADS)).append(seconds)

    def answered(self, model: str, seconds: float) -> None:
        self._answers.setdefault(model, deque(maxlen=ANSWERS)).append(seconds)

    def of(self, model: str) -> Cost:
        """The slowest of the last loads, and what 99 of 100 answers took at most."""
        loads, answers = self._loads.get(model), sorted(self._answers.get(model, ()))
        return Cost(
            max(loads) if loads else None,
            answers[min(len(answers) - 1, len(answers) * 99 // 100)] if answers else None,
        )
