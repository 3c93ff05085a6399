"""Measured durations of loads and answers.

With them, a call whose time budget is too short is refused at once, before it spends the budget.
"""

from __future__ import annotations

from collections import deque

from ..routing.tasks import Cost

LOADS_KEPT = 5  # of each model; the slowest counts, since a file is not always in the page cache
ANSWERS_KEPT = 100


class Costs:
    """Durations in seconds by model, as measured in this process."""

    def __init__(self) -> None:
        self._loads: dict[str, deque[float]] = {}
        self._answers: dict[str, deque[float]] = {}

    def add_load(self, model: str, seconds: float) -> None:
        """Records that a load of `model` took so many `seconds`."""
        self._loads.setdefault(model, deque(maxlen=LOADS_KEPT)).append(seconds)

    def add_answer(self, model: str, seconds: float) -> None:
        """Records that an answer of `model` took so many `seconds`."""
        self._answers.setdefault(model, deque(maxlen=ANSWERS_KEPT)).append(seconds)

    def of(self, model: str) -> Cost:
        """The slowest of the last loads of `model`, and the 99th percentile of the durations of its answers.

        A part is None if it was never measured.
        """
        loads = self._loads.get(model)
        answers = sorted(self._answers.get(model, ()))
        p99 = None
        if answers:
            p99 = answers[min(len(answers) - 1, len(answers) * 99 // 100)]
        return Cost(max(loads) if loads else None, p99)
