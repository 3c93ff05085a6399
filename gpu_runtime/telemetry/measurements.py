"""What models were seen to take, remembered beyond the boot: a small JSON file in the ledger's directory.

It is keyed by what was loaded and how: source, fingerprint of its files, dtype and other options, backend. So a source
that changed on disk is another one, and what was measured of the old one is not believed of it. Nothing stands on this
file: where it is damaged or cannot be written, that is logged once, and estimates go by headers again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..facts import Evidence, Measurement, ModelSpec, Value
from ..ledgers.access import access_to

KEPT = 1000  # models; whoever was measured longest ago goes first
LONGEST = 1 << 20  # bytes of a file that is believed
PATIENCE_SECONDS = 0.2  # a process stopped while it writes must not hold the others up
# Options that say how a model is used, not what is loaded of it.
OF_USE = ("context_length", "sequences", "cache_dtype", "attn_implementation")

log = logging.getLogger("gpu_runtime")


class Page(Value):
    """The file's content."""

    schema: int = 1
    models: dict[str, Measurement] = {}  # in the order in which they were measured
    contexts: dict[str, int] = {}  # bytes of a CUDA context, by the card's name


class Measurements:
    """Remembers and tells. `path=None` keeps everything in this process."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._page = Page()
        self._stamp: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._complained = False

    def of(self, spec: ModelSpec, evidence: Evidence) -> Measurement | None:
        """What was measured of this very source, loaded in this very way; None where it never was."""
        name = key(spec, evidence)
        with self._lock:
            return self._latest().models.get(name) if name else None

    def context_bytes(self, card: str) -> int | None:
        """What a CUDA context took on a card of that name; None where none was measured."""
        with self._lock:
            return self._latest().contexts.get(card)

    def remember(self, spec: ModelSpec, evidence: Evidence, measurement: Measurement) -> None:
        """Keeps what was measured. A source that could not be told from another is not remembered. Never fails."""
        if name := key(spec, evidence):
            self._change(
                lambda page: msgspec.structs.replace(
                    page, models=_newest(page.models, name, measurement)
                )
            )

    def remember_context(self, card: str, size: int) -> None:
        """Keeps what a context took. Never fails."""
        self._change(
            lambda page: msgspec.structs.replace(page, contexts={**page.contexts, card: size})
        )

    def _change(self, change) -> None:
        with self._lock:
            self._page = changed = change(self._latest())
            if self._path is None or self._complained:
                return
            try:
                with self._writing():
                    self._page = changed = change(self._latest())
                    self._write(changed)
            except OSError as error:
                self._complain("written", error)

    def _latest(self) -> Page:
        """The file's content, read again where it has changed."""
        if self._path is None or self._complained:
            return self._page
        try:
            found = self._path.lstat()
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
            if stamp != self._stamp:
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, "it is no regular file")
                if found.st_size > LONGEST:
                    raise OSError(errno.EFBIG, "it is too large to be ours")
                self._page, self._stamp = _decode(self._path.read_bytes()), stamp
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError as error:  # the next write puts a sound one in its place
            log.warning(
                "%s is damaged (%s); what was measured before is forgotten", self._path, error
            )
            self._page, self._stamp = Page(), stamp
        except OSError as error:
            self._complain("read", error)
        return self._page

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The right to write, for a moment. Raises OSError where another process keeps it."""
        assert self._path is not None
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self._path.with_suffix(".lock")
        access_to(self._path.parent).make_file(lock)
        fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            until = time.monotonic() + PATIENCE_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.005)
            yield
        finally:
            os.close(fd)

    def _write(self, page: Page) -> None:
        """In one stroke: whoever reads finds the old file or the new one."""
        assert self._path is not None
        draft = self._path.with_name(f".{self._path.name}-{os.getpid()}-{threading.get_ident()}")
        try:
            with open(
                os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb"
            ) as file:
                file.write(msgspec.json.encode(page))
            access_to(self._path.parent).open_file(draft)
            os.replace(draft, self._path)
        finally:
            draft.unlink(missing_ok=True)

    def _complain(self, what: str, error: OSError) -> None:
        if not isinstance(error, BlockingIOError):
            self._complained = True
        log.warning(
            "%s cannot be %s (%s); what is measured now is remembered in this process only",
            self._path,
            what,
            error.strerror or error,
        )


_decode = msgspec.json.Decoder(Page).decode


def key(spec: ModelSpec, evidence: Evidence) -> str:
    """What was loaded and how, in a few letters; empty where the source could not be told from another."""
    if not evidence.fingerprint:
        return ""
    source = os.path.realpath(spec.source) if os.path.exists(spec.source) else spec.source
    of_use = (
        () if evidence.at_load else OF_USE
    )  # what an engine takes when it loads was measured with the rest
    options = sorted(
        (name, str(value)) for name, value in spec.options.items() if name not in of_use
    )
    told = (spec.backend, source, evidence.fingerprint, spec.quantization, spec.model_type, options)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def _newest(
    models: dict[str, Measurement], name: str, measurement: Measurement
) -> dict[str, Measurement]:
    rest = {other: known for other, known in models.items() if other != name}
    return dict([*list(rest.items())[-KEPT + 1 :], (name, measurement)])


def measurements_in(ledger: Path) -> Path:
    """Where a ledger's measurements lie: beside its journal, since whoever may write the one may write the other."""
    from ..ledgers.access import journal_in

    return journal_in(ledger).with_name("measured.json")
