"""The book in a Redis, for hosts and containers that share no file system: one page per host.

A host is one running Linux kernel. The host's page (its stored book) is named by the boot id. All
containers of the host share the boot id and the cards. As with SQLite, the proof that an owner
lives is the lock on the owner's file, in a directory of this host. So a host removes only its own
dead owners.

Containers of one host that share no directory share the page, but their owners cannot prove each
other's deaths. The bytes of a dead owner stay claimed until an owner of the same container checks.
Such containers should have one common directory: `?owners=/a/directory/mounted/in/all`. By default,
the directory is in the user's state directory. Below it, the owners' files are in a directory that
is named after the server. So every process should use the same name for the server.

A client that may write to the database may write anything in it. A Redis cannot tell the users of a
host apart, so only the password of the database protects the book.
"""

from __future__ import annotations

import re
import secrets

from msgspec.structs import replace

from ...errors import LedgerUnavailable
from ..common import SharedLedger
from ..liveness import OwnerFile, boot_id, describe_self
from ..location import split_redis_url
from .connection import RedisConnection
from .page import RedisBook
from .scripts import HostPage


class RedisLedger(SharedLedger):
    """One owner's access to the page of its host in a Redis.

    Lock files, doorbells (the sockets that wake owners) and allocator maps are local files.
    """

    _store: RedisBook

    def __init__(
        self,
        url: str,
        *,
        notebook: str = "",
        user: str = "",
        patience_seconds: float = 10.0,
    ) -> None:
        """Opens this host's page at `url` as a new owner, which `notebook` and `user` describe.

        A read or write fails after `patience_seconds`. Raises BadSetting, LedgerUnavailable.
        """
        address, owners = split_redis_url(url)
        self._connection = RedisConnection(address)
        server = self._connection.address.replace("localhost:", "127.0.0.1:")
        directory = owners / re.sub(r"[^\w.]+", "-", server) / boot_id()
        # Each container numbers its own processes. Without a random serial, owners in two
        # containers could have the same id, and thus the same section.
        me = describe_self(notebook=notebook, user=user)
        me = replace(me, serial=secrets.randbelow(2**31))
        super().__init__(self._connection.url, directory, me, patience_seconds)

    @property
    def path(self) -> str:
        """The server's URL, without its password."""
        return self.url

    def read_all(self) -> tuple[HostPage, ...]:
        """The pages of all hosts on this Redis, including this host. Raises LedgerUnavailable."""
        self._require_open()
        return self._store.read_all()

    def _make_store(self, owner_file: OwnerFile) -> RedisBook:
        return RedisBook(
            self._connection,
            self.directory,
            self.directory.name,
            owner_file,
            moved=self._bell.move_to,
        )

    def _timed_out(self) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"the ledger {self.url} could not be read or written for {self.patience_seconds:.0f} s: "
            f"too many processes write at once.\n  Try again, or see:  gpu leases",
            path=self.url,
        )
