"""Replays a history of uses through the scheduler, with another policy, card size or host memory
size.
"""

# ruff: noqa: F401 - the names of this package are those that it imports

from __future__ import annotations

from .histories import (
    USE_SECONDS,
    HistoryModel,
    HistoryRequest,
    UseHistory,
    journal_history,
    read_history,
)
from .replay import ENGINES, Result, TransferRules, replay
from .table import CLAIRVOYANT, DEVICES, HOSTS, BacktestRow, compare, split_words
