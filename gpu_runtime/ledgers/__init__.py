"""The hands that keep the book, and the one door to them: `open_ledger(url)`.

A ledger keeps one page with a revision. It is *given* what to decide; it does not know what a planner is. Before it
writes it checks that the laws of the book hold, whatever the decision was (`refuse_unlawful`).
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import BadSetting, LedgerUnavailable
from .base import Ledger


def open_ledger(url: str, *, notebook: str = "", user: str = "") -> Ledger:
    """A new owner's door to the book that the URL names.

    `memory:` is a book of its own, `memory:NAME` one for all who say that name in this process, and
    `sqlite:///DIRECTORY` one for all processes of this host that name the directory (`…/NAME.db` means `…/NAME`).
    `redis://…`, `rediss://…` and `unix://…` name a Redis, which keeps a page for each host.
    Raises BadSetting for another URL, LedgerUnavailable where the place cannot keep a book.
    """
    scheme, colon, rest = url.partition(":")
    if scheme == "memory":
        from .memory import MemoryLedger

        return MemoryLedger(rest, notebook=notebook, user=user)
    if scheme == "sqlite" and rest.startswith("///"):
        from .sqlite.ledger import SqliteLedger

        return SqliteLedger(_directory(url, rest), notebook=notebook, user=user)
    if scheme in ("redis", "rediss", "unix") and rest.startswith("//"):
        try:
            from .redis.ledger import RedisLedger
        except ModuleNotFoundError as error:
            raise LedgerUnavailable(
                "a ledger in Redis needs the package redis, which is not installed here.\n"
                "  Install it:  pip install 'gpu-console[redis]'",
                path=scheme,
            ) from error
        return RedisLedger(url, notebook=notebook, user=user)
    from ..settings import masked

    path = rest.lstrip("/") if scheme == "sqlite" else "" if colon else url
    here = f"; here it would be sqlite://{Path(path).expanduser().absolute()}" if path else ""
    raise BadSetting(
        "GPU_LEDGER",
        masked(url),
        f"memory:, memory:NAME, sqlite:///ABSOLUTE/DIRECTORY or redis://HOST:PORT/DB{here}",
    )


def _directory(url: str, rest: str) -> Path:
    """The directory that `sqlite:///…` names; four slashes, as other tools write it, mean the same. Raises BadSetting
    where a relative path was meant."""
    directory = Path("/" + rest.lstrip("/"))
    if directory.suffix == ".db":
        directory = directory.with_suffix("")
    meant = Path(*directory.parts[1:])
    if meant.parts and meant.parts[0] in ("~", ".", ".."):
        raise BadSetting(
            "GPU_LEDGER",
            url,
            f"an absolute path, such as sqlite://{os.path.abspath(meant.expanduser())}",
        )
    if len(meant.parts) < 2 and not directory.exists():
        raise BadSetting(
            "GPU_LEDGER",
            url,
            f"a directory that is not in the root of the file system; relative to here it is "
            f"sqlite://{meant.absolute()}",
        )
    return directory


def default_url(devices_slug: str = "") -> str:
    """Where this user's own book lies when nobody says: under the state directory, or in /var/tmp where that is on
    a network file system (a home directory often is, and locks do not hold there).

    The slug keeps apart books of different worlds, such as simulated and real devices.
    """
    from .sqlite.files import file_system_of, is_network

    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    directory = Path(home) / "gpu-console" / "ledger"
    if is_network(file_system_of(directory)):
        directory = Path(f"/var/tmp/gpu-console-{os.geteuid()}/ledger")
    return f"sqlite://{directory / devices_slug}"
