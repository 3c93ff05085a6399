"""Setting up a ledger that a group of users shares: `gpu ledger init --group G DIR`, run by the operator as root.

It makes the directory, and tells every user's runtime of it in the machine-wide configuration. Run again it mends modes
and changes nothing else; run at every boot it also makes that boot's directory root's own, so that no member can take
another's files away.
"""

from __future__ import annotations

import grp
import os
import secrets
import stat
from pathlib import Path

from msgspec.structs import replace

from ..errors import BadSetting, GpuError, NotAllowed
from ..facts import Outcome
from . import host_config
from .access import MARK, Access
from .liveness import boot_id
from .sqlite import files

TEMPLATE = """\
# gpu-console on this machine. Every user's runtime reads this when it opens.
ledger = "{url}"

# [operators]                    # may pin, load and defragment in other users' processes
# users = []
# groups = []

# [users.NAME]                   # or [groups.NAME], for each of its members
# bytes_per_device = "20 GiB"    # on each card, all processes of the user together
# importance = "normal"          # the highest that may be asked for
# keep = false                   # nothing is pinned
# longest_lease = "4h"           # of rt.lease and %%gpu
"""


def init(directory: str, group: str, config_file: str) -> Outcome:
    """Makes a ledger in that directory for the members of the group, and names it in the configuration.

    Raises NotAllowed, BadSetting, GpuError; then nothing was made.
    """
    place = Path(directory)
    if os.geteuid() != 0:
        raise NotAllowed(
            f"a shared ledger is the operator's to set up.\n  As root:  gpu ledger init --group {group} {place}",
            name=str(place),
            user=str(os.geteuid()),
            because="not root",
        )
    gid = _gid(group)
    _require_a_good_place(place, gid, group)
    url = f"sqlite://{place}"
    known = host_config.read(config_file)
    if known.ledger not in ("", url):
        raise GpuError(
            f"{config_file} names another ledger already: {known.ledger}.\n"
            f"  Change the line  ledger = …  there first, once nobody uses it.",
            path=config_file,
        )
    new = not (place / MARK).exists()
    access = Access(gid)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        access.make_file(place / MARK)
        access.open_directory(place, sticky=True)
        here = place / boot_id()
        for made in (place / "journal", here, here / "owners"):
            access.make_directory(made, sticky=made.name == "owners")
            _take(made, gid, sticky=made.name == "owners")
        access.make(here)
        files.fill_ballast(here)
        _write_configuration(Path(config_file), url, known)
    except OSError as error:
        raise files.cannot_write(place, error) from error
    told = "is shared by" if new else "is shared already by"
    return Outcome(
        "ledger",
        str(place),
        True,
        f"the ledger {place} {told} the group {group}; {config_file} names it",
    )


def _take(directory: Path, gid: int, *, sticky: bool) -> None:
    """Makes a directory root's own that a member may have made."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(fd, 0, gid)
        os.fchmod(fd, 0o3770 if sticky else 0o2770)
    finally:
        os.close(fd)


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise BadSetting(
            "--group", group, f"a group of this machine; make it with:  groupadd {group}"
        ) from None


def _require_a_good_place(place: Path, gid: int, group: str) -> None:
    """Raises where the ledger would lie badly: out of the members' reach, open to others, on a network, among
    strangers."""

    def bad(expected: str) -> BadSetting:
        return BadSetting("DIR", str(place), expected)

    if not place.is_absolute() or ".." in place.parts or len(place.parts) < 3:
        raise bad("an absolute path, such as /var/lib/gpu-console/ledger")
    if files.is_network(kind := files.file_system_of(place)):
        raise bad(
            f"on a local disk; this is a network file system ({kind}), where locks do not prove who lives"
        )
    if not place.parent.is_dir():
        raise bad(f"in a directory that exists; make it with:  mkdir -p -m 755 {place.parent}")
    for parent in place.parents:
        mode = parent.stat()
        if not (
            mode.st_mode & stat.S_IXOTH or (mode.st_gid == gid and mode.st_mode & stat.S_IXGRP)
        ):
            raise bad(f"where the group {group} can reach it; {parent} is closed to them")
        if mode.st_mode & stat.S_IWOTH and not mode.st_mode & stat.S_ISVTX:
            raise bad(f"where only root can replace it; everybody may write {parent}")
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise bad("a directory, or a name that is free")
    if not place.exists():
        return
    mark = place / MARK
    if mark.exists():
        if mark.stat().st_gid != gid:
            raise bad(f"shared by {group}; it is shared by {_name(mark.stat().st_gid)} already")
    elif any(place.iterdir()):
        raise bad(
            "an empty directory, a shared ledger, or a name that is free; there is something else in it"
        )


def _name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"group {gid}"


def _write_configuration(file: Path, url: str, known: host_config.Machine) -> None:
    """Names the ledger in the configuration; what is written there already stays."""
    if known.ledger == url:
        return
    text = TEMPLATE.format(url=url)
    if file.exists():
        text = f'ledger = "{url}"\n\n{file.read_text()}'  # at the top: below a table it would belong to it
        if host_config.parse(text, str(file)) != replace(known, ledger=url):
            raise GpuError(
                f'{file} could not be changed without changing its meaning.\n  Add at its top:  ledger = "{url}"'
            )
    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    draft.write_text(text)
    draft.chmod(0o644)
    draft.rename(file)
