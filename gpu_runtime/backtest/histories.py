"""The history that is replayed: which models were used when, and for how long.

A history is read from two CSV files or from the journal. `docs/guides/backtest.md` describes the
files and the journal. The journal does not record how long a use took, so every use is assumed to
last `USE_SECONDS`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..errors import BadSetting
from ..facts import NORMAL, Event, Lease, decode_uses, parse_importance

GB = 10**9
USE_SECONDS = 1.0  # assumed for each use in the journal, which records only when the use began
DISK_BYTES_PER_SECOND = 1 * GB  # assumed for a load whose duration the journal does not have
HOST_BYTES_PER_SECOND = 10 * GB  # assumed for an offload, and for a restore without a duration
# The actions of the events from which uses, bytes and durations are read.
USED = ("loaded", "restored", "offloaded", "unloaded", "lost", "reaped", "released")
REQUEST_FIELDS = ("t_s", "model", "service_s", "importance")
MODEL_FIELDS = ("model", "size_gb", "load_s", "restore_s", "offload_s")
T = TypeVar("T")


class HistoryModel(NamedTuple):
    """A model with its bytes, and the seconds that loading, restoring and offloading take."""

    name: str
    bytes: int
    load_seconds: float  # from disk to the card
    restore_seconds: float  # from host memory to the card
    offload_seconds: float  # from the card to host memory


class HistoryRequest(NamedTuple):
    """One use of a model."""

    seconds: float  # since the history began
    model: str
    service_seconds: float  # how long the model is in use
    importance: int


class UseHistory(NamedTuple):
    """All models of a history, and their uses in chronological order."""

    models: dict[str, HistoryModel]
    requests: tuple[HistoryRequest, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all models together."""
        return sum(model.bytes for model in self.models.values())

    @property
    def largest(self) -> int:
        """The bytes of the largest model."""
        return max((model.bytes for model in self.models.values()), default=0)


def read_history(requests: str | Path, models: str | Path) -> UseHistory:
    """The history in two CSV files.

    `requests` is the file with the columns t_s, model, service_s, importance. `models` is the file
    with the columns model, size_gb (10⁹ bytes), load_s, restore_s, offload_s. Raises BadSetting
    with the file and the line of a mistake.
    """
    known: dict[str, HistoryModel] = {}
    for model in _rows(models, MODEL_FIELDS, _model):
        if model.name in known:
            raise BadSetting(str(models), model.name, "described once, and it is there twice")
        known[model.name] = model
    found = list(_rows(requests, REQUEST_FIELDS, _request))
    for line, request in enumerate(found, 2):
        if request.model not in known:
            raise BadSetting(
                f"{requests}, line {line}", request.model, f"a model that {models} describes"
            )
    found.sort(key=lambda request: request.seconds)
    return UseHistory(known, tuple(found))


def journal_history(events: Iterable[Event], leases: Iterable[Lease], wall: float) -> UseHistory:
    """The history up to the time `wall`, from the journal's `events` and the present `leases`.

    `wall` is in epoch seconds. If several processes loaded models from the same source, the history
    counts these models as one.
    """
    models: dict[str, _SeenModel] = {}
    for event in events:
        if event.action in USED:
            models.setdefault(event.source or event.model, _SeenModel(event.model)).saw(event)
    for lease in leases:
        if lease.kind == "model" and lease.bytes:
            seen = models.setdefault(lease.source or lease.name, _SeenModel(lease.name))
            seen.bytes = max(seen.bytes, lease.own_bytes)
            seen.uses |= set(decode_uses(lease.recent_uses, wall))
    known = {}
    requests = []
    for seen in models.values():
        if seen.bytes:
            model = seen.model(seen.name if seen.name not in known else f"{seen.name}#{len(known)}")
            known[model.name] = model
            requests += [
                HistoryRequest(float(at), model.name, USE_SECONDS, NORMAL) for at in seen.uses
            ]
    first = min((request.seconds for request in requests), default=0.0)
    moved = [request._replace(seconds=request.seconds - first) for request in requests]
    return UseHistory(known, tuple(sorted(moved)))


class _SeenModel:
    """The uses, bytes and durations of one model, as read from the journal."""

    def __init__(self, name: str) -> None:
        self.name, self.bytes = name, 0
        self.uses: set[int] = set()  # epoch seconds
        self.seconds: dict[str, float] = {}  # "loaded" or "restored" -> the newest duration

    def saw(self, event: Event) -> None:
        """Updates the model's uses, bytes and durations from `event`."""
        if event.action in ("loaded", "restored"):
            self.bytes = max(self.bytes, event.bytes)
            self.uses.add(int(event.wall))
            if event.seconds:
                self.seconds[event.action] = event.seconds
        self.uses |= set(decode_uses(event.uses, event.wall))

    def model(self, name: str) -> HistoryModel:
        """The model under the name `name`.

        A load or a restore that was never measured is estimated from the model's size. The
        duration of an offload is always estimated.
        """
        by_host = self.bytes / HOST_BYTES_PER_SECOND
        return HistoryModel(
            name,
            self.bytes,
            self.seconds.get("loaded") or self.bytes / DISK_BYTES_PER_SECOND,
            self.seconds.get("restored") or by_host,
            by_host,
        )


def _rows(
    path: str | Path, fields: tuple[str, ...], parsed: Callable[[dict[str, str]], T]
) -> Iterator[T]:
    try:
        file = open(path, newline="", encoding="utf-8-sig")  # a spreadsheet may write a BOM
    except OSError as error:
        raise BadSetting("the history", str(path), f"a file that can be read ({error})") from None
    with file:
        try:
            yield from _parsed(path, csv.DictReader(file), fields, parsed)
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadSetting("the history", str(path), f"a CSV file in UTF-8 ({error})") from None


def _parsed(
    path: str | Path,
    reader: csv.DictReader[str],
    fields: tuple[str, ...],
    parsed: Callable[[dict[str, str]], T],
) -> Iterator[T]:
    missing = [field for field in fields if field not in (reader.fieldnames or ())]
    if missing:
        raise BadSetting(
            f"the first line of {path}",
            ",".join(reader.fieldnames or ()),
            f"the columns {', '.join(fields)}",
        )
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        if None in row.values():
            raise BadSetting(place, dict(row), f"{len(fields)} values")
        try:
            yield parsed(row)
        except BadSetting as error:
            raise BadSetting(f"{place}, {error.setting}", error.value, error.expected) from None
        except (ValueError, TypeError) as error:
            raise BadSetting(place, dict(row), str(error)) from None


def _model(row: dict[str, str]) -> HistoryModel:
    size = int(_number(row["size_gb"]) * GB)
    if size <= 0:
        raise ValueError("a size_gb above 0")
    return HistoryModel(
        row["model"],
        size,
        _number(row["load_s"]),
        _number(row["restore_s"]),
        _number(row["offload_s"]),
    )


def _request(row: dict[str, str]) -> HistoryRequest:
    return HistoryRequest(
        _number(row["t_s"]),
        row["model"],
        _number(row["service_s"]),
        parse_importance(row["importance"]),
    )


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:  # refused below
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"a number from 0, not {text or 'empty'}")
    return number
