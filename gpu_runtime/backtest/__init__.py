"""Replays a history of uses through the scheduler, with other policies, cards and host memory."""

from __future__ import annotations

from .histories import (
    USE_SECONDS,
    History,
    HistoryModel,
    HistoryRequest,
    journal_history,
    read_history,
)
from .replay import ENGINES, Engine, Result, replay
from .table import CLAIRVOYANT, DEVICES, HOSTS, Row, compare, split_words

__all__ = [
    "CLAIRVOYANT",
    "DEVICES",
    "ENGINES",
    "Engine",
    "HOSTS",
    "History",
    "HistoryModel",
    "HistoryRequest",
    "Result",
    "Row",
    "USE_SECONDS",
    "compare",
    "journal_history",
    "read_history",
    "replay",
    "split_words",
]
