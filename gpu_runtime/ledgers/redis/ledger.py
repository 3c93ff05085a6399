"""The book in a Redis, for hosts and containers that share no file system: a page for each host, on one server.

A host is a kernel: its page goes by the boot id, which all its containers share, as they share its cards. What proves
that an owner lives is still the lock on a file of its own, in a directory of this host, so a host reaps only its
own. Containers of one host that share no directory share the page, yet cannot prove each other's deaths: then the
bytes of the dead stay claimed until one of theirs looks. Give them one: `?owners=/a/directory/mounted/in/all`. By
default it lies in the user's state directory, under the server's name; so name the server alike everywhere.

Whoever may write to the database may write anything in it: its password is the fence, not the users of a host.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from msgspec.structs import replace

from ...errors import LedgerUnavailable
from .. import default_url
from ..access import access_to
from ..allocator_files import MapFiles
from ..liveness import OwnerFile, boot_id, describe_self
from ..notify import Doorbell
from ..sqlite import files
from ..sqlite.backoff import Pace
from ..sqlite.ledger import SqliteLedger, _doors, _owner_ids
from ..sqlite.writer_queue import turnstile_in
from .connection import Wire
from .page import RedisBook
from .scripts import HostPage


class RedisLedger(SqliteLedger):
    """A door as SqliteLedger's; only the page lies elsewhere. Owners, doorbells and maps are local files here too."""

    def __init__(
        self, url: str, *, notebook: str = "", user: str = "", patience_seconds: float = 10.0
    ) -> None:
        address, owners = _split(url)
        wire = Wire(address)
        self.url = wire.url
        self.patience_seconds = patience_seconds
        boot = boot_id()
        self.directory = (
            owners
            / re.sub(r"[^\w.]+", "-", wire.address.replace("localhost:", "127.0.0.1:"))
            / boot
        )
        self._pace = Pace()
        files.prepare(self.directory)
        group = access_to(self.directory).group
        self._shared = group is not None
        # Containers number their processes each for itself; by their names their sections would be one.
        me = replace(describe_self(notebook=notebook, user=user), serial=secrets.randbelow(2**31))
        try:
            file = OwnerFile(self.directory / "owners", me, group)
        except OSError as error:
            raise files.cannot_write(self.directory, error) from error
        try:
            self._bell = Doorbell(self.directory / "owners", file.owner.id, group)
        except OSError as error:
            file.release(remove=True)
            raise files.cannot_write(self.directory, error) from error
        self._file = self._book = RedisBook(
            wire, self.directory, boot, file, moved=self._bell.move_to
        )
        self._turnstile = turnstile_in(self.directory)
        self._maps = MapFiles(self.directory / "owners", group)
        self._closed = False
        _doors.add(self)
        try:
            self.read()
        except BaseException:
            self._shut(remove=True)
            raise
        files.sweep_owners(self.directory, lambda: _owner_ids(self.read()))
        files.sweep_drafts(self.directory)
        files.sweep_boots(self.directory)
        files.fill_ballast(self.directory)

    @property
    def path(self) -> str:
        return self.url

    def read_all(self) -> tuple[HostPage, ...]:
        """The pages of all hosts on this Redis, our own among them. Raises LedgerUnavailable."""
        self._require_open()
        return self._book.read_all()

    def _too_long(self) -> LedgerUnavailable:
        return LedgerUnavailable(
            f"the ledger {self.url} could not be had for {self.patience_seconds:.0f} s: too many "
            f"write at once.\n  Try again, or see:  gpu leases",
            path=self.url,
        )


def _split(url: str) -> tuple[str, Path]:
    """The server's URL, and the directory for the owners' files: where `owners=` says, else in the state directory."""
    server, _, query = url.partition("?")
    options = parse_qsl(query)
    named = [value for name, value in options if name == "owners"]
    rest = urlencode([(name, value) for name, value in options if name != "owners"])
    home = (
        Path(named[-1]) if named else Path(default_url().removeprefix("sqlite://")).parent / "redis"
    )
    return f"{server}?{rest}" if rest else server, home
