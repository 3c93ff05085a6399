"""The directories that ledger URLs name, and the default URL.

Nothing here opens a ledger or creates a file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from ..errors import BadSetting, LedgerUnavailable
from ..facts import Device
from ..private_paths import make_directory, state_home, weak_step
from ..units import show_bytes
from . import files
from .access import access_to

FILE_SCHEMES = ("keeper:", "sqlite:")  # version 0.2 kept the book in an SQLite file
FALLBACK = Path("/var/tmp")  # a local disk on every machine; its files survive a logout


def directory_of(url: str, rest: str) -> Path:
    """The directory that `url` names. `rest` is the part of `url` after its scheme.

    Four slashes in a URL, as other tools write them, mean the same as three slashes. A name that
    ends in `.db` means the directory without this ending. Raises BadSetting for a relative path, and
    for a directory in the root of the file system that does not exist.
    """
    directory = Path("/" + rest.lstrip("/"))
    if directory.suffix == ".db":
        directory = directory.with_suffix("")
    as_relative = Path(*directory.parts[1:])
    if as_relative.parts and as_relative.parts[0] in ("~", ".", ".."):
        raise BadSetting(
            "GPU_LEDGER",
            url,
            f"an absolute path, such as keeper://{os.path.abspath(as_relative.expanduser())}",
        )
    if len(as_relative.parts) < 2 and not directory.exists():
        raise BadSetting(
            "GPU_LEDGER",
            url,
            f"a directory that is not in the root of the file system. Relative to the current "
            f"directory it is keeper://{as_relative.absolute()}",
        )
    return directory


def split_redis_url(url: str) -> tuple[str, Path]:
    """Splits `url` into the server's URL and the local directory for the owners' files.

    The option `owners=` in `url` names the directory. Without this option, the directory is `redis`
    in `local_state()`. The returned URL keeps all other options.
    """
    server, _, query = url.partition("?")
    options = parse_qsl(query)
    named = [value for name, value in options if name == "owners"]
    if named:
        directory = Path(named[-1])
    else:
        directory = Path(default_url().removeprefix("keeper://")).parent / "redis"
    other_options = urlencode([(name, value) for name, value in options if name != "owners"])
    if other_options:
        server = f"{server}?{other_options}"
    return server, directory


def default_url(devices_slug: str = "") -> str:
    """The URL of this user's private ledger, which is used if no setting names a ledger.

    The ledger is under the state directory. If the state directory is on a network file system,
    where locks do not hold, the ledger is in /var/tmp. `devices_slug` separates the books of
    different sets of devices, such as simulated and real cards.
    """
    return f"keeper://{local_state() / 'ledger' / devices_slug}"


def local_state() -> Path:
    """The directory on a local disk for this user's files with locks. It may not exist yet.

    The result is the state directory, or a directory in /var/tmp if the state directory is on a
    network file system. Another user could make the directory in /var/tmp first. So
    `private_paths.weak_step` must check the directory before its first use.
    """
    directory = state_home()
    if files.is_network(files.file_system_of(directory)):
        return FALLBACK / f"gpu-console-{os.geteuid()}"
    return directory


def shared_url(ledger: str, slug: str) -> str:
    """The URL of the machine's shared `ledger`, or of its part `slug` for simulated devices."""
    return f"{ledger}/{slug}" if slug and ledger.startswith(FILE_SCHEMES) else ledger


def slug_of(simulated: Iterable[Device]) -> str:
    """A name made from the sizes of these `simulated` devices; empty without devices.

    The name selects the book. So each combination of sizes has a separate book.
    """
    devices = list(simulated)
    cards = [_compact(device.total_bytes) for device in devices if not device.is_host]
    if not cards:
        return ""
    groups = [f"{len(list(same))}x{size}" for size, same in itertools.groupby(cards)]
    host = next((one for one in devices if one.is_host and one.simulated), None)
    return f"sim-{'-'.join(groups)}" + (f"-host{_compact(host.total_bytes)}" if host else "")


def _compact(size: int) -> str:
    return show_bytes(size).replace(" ", "")


def require_private(directory: Path) -> None:
    """Raises LedgerUnavailable if another user could put files into the private ledger `directory`.

    If `directory` is below `local_state()`, no other user may be able to write to a directory on
    its path. `local_state()` is made here with mode 0700. If a setting names another directory,
    every directory on its path must belong to this user or to root, but may be writable for others,
    as in many containers. In two cases this other directory is not checked: the user is root, or
    the directory is in a shared ledger.
    """
    base = local_state()
    is_default = directory.is_relative_to(base)
    if not is_default and (os.geteuid() == 0 or access_to(directory).group is not None):
        return
    try:
        if is_default:
            make_directory(base)
        weak = weak_step(directory, may_be_writable=not is_default)
    except OSError as error:
        if not is_default:  # such as another group's ledger: opening it raises the right error
            return
        raise files.cannot_write(directory, error) from error
    if weak:
        raise LedgerUnavailable(
            f"the ledger {directory} could be read or replaced by another user: {weak}.\n"
            f"  Name a directory of your own on a local disk:  GPU_LEDGER=keeper:///DIRECTORY",
            path=str(directory),
            why=weak,
        )
