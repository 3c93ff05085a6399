"""The measured sizes of models and cells, in small JSON files that survive a reboot.

The key of a measurement consists of the source, the fingerprint of its files, the options (such as
the dtype) and the backend. If the files change on disk, the fingerprint changes, and the old
measurement is no longer used. If the file of the measurements is damaged, this is logged, and
estimates use file headers again. If the file cannot be read or written, this is logged too, and new
measurements stay in this process.

A file of the user has the memory that each notebook cell took in its last run. If it is missing, no
room is requested before a cell runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from .. import threads
from ..arguments import FIELDS
from ..facts import Evidence, Measurement, ModelSpec, Value
from ..files import local_state, lock_within, make_directory, read_plain, replace_file, stamp
from ..ledgers.access import access_to, state_in
from ..notebook import FILE, LONGEST

KEPT = 1000  # models, and as many cells; the oldest measurement is dropped first
OF_USE = {name for name, field in FIELDS.items() if field.of_use}
PATIENCE_SECONDS = 0.2  # longest wait for the lock, which a stopped process may hold

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")


class MeasurementFile(Value):
    """The content of the file."""

    schema: int = 1
    models: dict[str, Measurement] = {}  # in the order of their measurement
    contexts: dict[str, int] = {}  # bytes of a CUDA context, by the card's name
    # The bytes that a notebook's cell took beyond those that the notebook held before, by the key of
    # the cell, then by card; see `notebook.cell_key`. Earlier versions stored whole peaks as `cells`, which
    # are not read.
    cell_bytes: dict[str, dict[str, int]] = {}


class Measurements:
    """Stores measurements of models, CUDA contexts and cells, and returns them later."""

    def __init__(self, path: Path | None = None) -> None:
        """Uses the file `path`; if `path` is None, all measurements stay in this process."""
        self._path = path
        self._content = MeasurementFile()
        self._stamp: tuple[int, ...] | None = ()  # of the file that was read last
        self._lock = threads.awaited(threading.RLock())
        self._gave_up = False  # whether the file was found to be unusable
        self._blocked = False  # whether another process held the lock at the last write

    def of(self, spec: ModelSpec, evidence: Evidence) -> Measurement | None:
        """The measurement of the model `spec`, whose source has this `evidence`; None if there is none."""
        name = key(spec, evidence)
        with self._lock:
            return self._latest().models.get(name) if name else None

    def context_bytes(self, card: str) -> int | None:
        """The bytes of a CUDA context on a card of this name; None if none was measured."""
        with self._lock:
            return self._latest().contexts.get(card)

    def cell_bytes(self, key: str) -> dict[str, int]:
        """The bytes that the cell with this `key` took in its last run, by card. Empty if unknown."""
        with self._lock:
            return dict(self._latest().cell_bytes.get(key, {}))

    def remember_cell(self, key: str, taken: dict[str, int]) -> None:
        """Stores the bytes that a cell took, by card. An empty `taken` removes them. Never fails."""

        def change(content: MeasurementFile) -> MeasurementFile:
            old = content.cell_bytes
            if taken:
                return replace(content, cell_bytes=_with_newest(old, key, taken))
            return replace(content, cell_bytes={k: v for k, v in old.items() if k != key})

        self._change(change)

    def remember(self, spec: ModelSpec, evidence: Evidence, measurement: Measurement) -> None:
        """Stores the `measurement` of the model `spec`, if its `evidence` has a fingerprint. Never fails."""
        name = key(spec, evidence)
        if not name:
            return

        self._change(lambda old: replace(old, models=_with_newest(old.models, name, measurement)))

    def remember_context(self, card: str, size: int) -> None:
        """Stores the `size` in bytes of a CUDA context on a card named `card`. Never fails."""

        self._change(lambda old: replace(old, contexts={**old.contexts, card: size}))

    def _change(self, change: Callable[[MeasurementFile], MeasurementFile]) -> None:
        with self._lock:
            self._content = change(self._latest())
            if self._path is None or self._gave_up:
                return
            try:
                with self._writing():
                    self._content = changed = change(self._latest())
                    data = msgspec.json.encode(changed)
                    replace_file(self._path, data, access_to(self._path.parent).open_file)
                self._blocked = False
            except BlockingIOError as error:
                if not self._blocked:
                    self._warn("written", error)
                self._blocked = True
            except OSError as error:
                self._gave_up = True
                self._warn("written", error)

    def _latest(self) -> MeasurementFile:
        """The content of the file. The file is read again if it has changed."""
        if self._path is None or self._gave_up:
            return self._content
        changed = stamp(self._path)
        if changed == self._stamp:
            return self._content
        try:
            self._content = _decode(read_plain(self._path, LONGEST))
            self._stamp = changed
        except FileNotFoundError:
            pass  # nothing was measured yet
        except msgspec.MsgspecError as error:  # the next write replaces it
            log.warning("%s is damaged (%s); earlier measurements are lost", self._path, error)
            self._content, self._stamp = MeasurementFile(), changed
        except OSError as error:
            self._gave_up = True
            self._warn("read", error)
        return self._content

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the lock of the file. Raises BlockingIOError if another process keeps the lock.

        If the last write met a held lock, this write does not wait for the lock.
        """
        assert self._path is not None
        make_directory(self._path.parent)
        lock = self._path.with_suffix(".lock")
        access_to(self._path.parent).make_file(lock)
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            lock_within(fd, 0.0 if self._blocked else PATIENCE_SECONDS)
            yield
        finally:
            os.close(fd)

    def _warn(self, what: str, error: OSError) -> None:
        log.warning(
            "%s cannot be %s (%s); what is measured now is remembered in this process only",
            self._path,
            what,
            error.strerror or error,
        )


_decode = msgspec.json.Decoder(MeasurementFile).decode


def key(spec: ModelSpec, evidence: Evidence) -> str:
    """A short text for the `evidence` of the source and the `spec`; empty if the source has no fingerprint."""
    if not evidence.fingerprint:
        return ""
    source = os.path.realpath(spec.source) if os.path.exists(spec.source) else spec.source
    # If an engine allocates its cache at load, the options for use change the measured size.
    ignored = () if evidence.at_load else OF_USE
    options = sorted(
        (name, str(value)) for name, value in spec.options.items() if name not in ignored
    )
    identity = (
        spec.backend,
        source,
        evidence.fingerprint,
        spec.quantization,
        spec.model_type,
        options,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def _with_newest(entries: dict[str, T], name: str, newest: T) -> dict[str, T]:
    """The `entries` with `newest` as the last entry. At most KEPT entries remain."""
    others = [(other, known) for other, known in entries.items() if other != name]
    return dict([*others[-KEPT + 1 :], (name, newest)])


def measurements_in(ledger: Path) -> Path:
    """The file with the measurements of the ledger whose directory is `ledger`."""
    return state_in(ledger) / "measured.json"


def cells_of_this_user() -> Measurements:
    """The bytes that this user's cells took. The file is read when they are requested."""
    return Measurements(local_state() / FILE)
