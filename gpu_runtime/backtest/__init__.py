"""Replays a history of uses through the scheduler, with another policy, card size or host memory
size.
"""

# ruff: noqa: F401 - the names of this package are those that it imports

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
