"""The book of one host in an SQLite file that all its processes share: no daemon, no server.

A write has three steps: read, decide, and one autocommit `UPDATE … WHERE host=? AND rev=?`
(page.py). A process that loses the race decides again. A book that is damaged, deleted or replaced
is set aside, and rebuilt from the rosters (each owner's copy of its part) of the living owners
(recovery.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import LedgerUnavailable
from ..common import SharedLedger
from ..liveness import OwnerFile, boot_id, describe_self
from ..process_state import Sight, sight_of_process
from . import after_fork, files
from .page import SqliteBook


class SqliteLedger(SharedLedger):
    """One owner's access to the book in a directory of this host."""

    def __init__(
        self,
        directory: Path,
        *,
        notebook: str = "",
        user: str = "",
        patience_seconds: float = 10.0,
    ) -> None:
        """Opens the book in `directory` as a new owner, which `notebook` and `user` describe.

        A read or write fails after `patience_seconds`. Raises LedgerUnavailable.
        """
        after_fork.require_usable(f"sqlite://{directory}")
        super().__init__(
            f"sqlite://{directory}",
            Path(directory) / boot_id(),
            describe_self(notebook=notebook, user=user),
            patience_seconds,
        )

    @property
    def path(self) -> str:
        """The file that holds the book now."""
        return str(self._store.path)

    def _make_store(self, owner_file: OwnerFile) -> SqliteBook:
        return SqliteBook(self.directory, self.directory.name, owner_file, moved=self._bell.move_to)

    def _timed_out(self) -> LedgerUnavailable:
        holders = [pid for pid in files.writers(Path(self.path)) if pid != os.getpid()]
        stopped = [pid for pid in holders if sight_of_process(pid) is Sight.STOPPED]
        if stopped:
            why = f"pid {stopped[0]} holds its lock and is stopped"
            hint = f"Let it go on:  kill -CONT {stopped[0]}"
        else:
            why = "too many processes write at once"
            if holders:
                why += f", and pid {holders[0]} holds its lock now"
            hint = "Try again, or see:  gpu leases"
        return LedgerUnavailable(
            f"the ledger {self.path} could not be read or written for {self.patience_seconds:.0f} s: "
            f"{why}.\n  {hint}",
            path=self.path,
            holders=tuple(holders),
        )
