"""Sets up a ledger that a group of users shares: `gpu ledger init --group G DIR`, run as root.

The command makes the directory and names it in the machine-wide configuration, which every user's
runtime reads. It also makes the directories of the present boot, with root as their owner, so that
no member can move another member's files away. Root's keeper keeps the book: a service of systemd, or
without systemd a process that ends with the boot, so that an operator has to run the command at every
boot. A further run repairs owners and modes of the directories, starts a keeper that does not run, and
removes nothing. `gpu box install` uses the same functions, with a Python and paths of its own.
"""

from __future__ import annotations

import grp
import os
import re
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec.structs import replace

from ..errors import BadSetting, GpuError, NotAllowed
from ..facts import Outcome
from ..files import file_system_of, is_network, make_directory, read_text, replace_file
from . import host_config
from .access import (
    COMMON,
    MARK,
    STICKY,
    Access,
    access_to,
    cannot_write,
    group_name,
    owners_in,
    owners_of_version_0_2,
)
from .keeper.ledger import PATIENCE_SECONDS, answers
from .keeper.wire import SERVER, SOCKET, open_log, spawn
from .liveness import boot_id

TEMPLATE = """\
# gpu-console on this machine. Every user's runtime reads this when it opens.
ledger = "{url}"

# [operators]                    # may pin, load and defragment in other users' processes
# users = []
# groups = []

# [users.NAME]                   # or [groups.NAME], for each of its members
# bytes_per_device = "20 GiB"    # on each card, all processes of the user together
# importance = "normal"          # the highest importance a request may have
# keep = false                   # nothing is pinned
# longest_lease = "4h"           # of rt.lease and %%gpu
# card_hours_per_week = 40       # whole cards, in the last seven days
# after_quota = "lower"          # beyond: "lower" or "refuse"
"""

SYSTEMD, UNITS = Path("/run/systemd/system"), Path("/etc/systemd/system")
CRON = Path("/etc/cron.d")
LONGEST_SOCKET_PATH = 107  # bytes; see unix(7)
# The keeper writes its ledger only. It needs an abstract address of the host's network, sees all processes
# and their memory files, and gives directories with the setgid bit to the group. So PrivateNetwork=,
# ProtectProc= and RestrictSUIDSGID= are not set. The ledger may be below /tmp, so PrivateTmp= is not either.
UNIT = """\
[Unit]
Description=gpu-console: the keeper of the ledger {place}
Wants={socket}

[Service]
Type=notify
ExecStart={python} -m {server} --ledger {place}
Restart=always
WatchdogSec=10
FileDescriptorStoreMax=1
UMask=0077
CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_FSETID CAP_SYS_PTRACE
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={place}
ProtectHome=read-only
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""
# systemd has the socket open while the keeper restarts: who connects then waits, and nobody is refused. The keeper
# starts at boot nevertheless, and makes the boot's directories before a member can.
SOCKET_UNIT = """\
[Unit]
Description=gpu-console: the socket of the ledger {place}

[Socket]
ListenStream={path}
SocketMode=0660
SocketGroup={group}
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""
CRON_LINE = """\
# gpu-console: the keeper of the ledger {place}. This machine has no systemd.
@reboot root {python} -m {server} --service {place} >/dev/null 2>&1
"""


def init(directory: str, group: str, config_file: str) -> Outcome:
    """Makes a ledger in `directory` for the members of `group`, and names it in `config_file`.

    Raises NotAllowed, BadSetting or GpuError if the ledger cannot be set up.
    """
    place = Path(directory)
    if os.geteuid() != 0:
        raise NotAllowed(
            f"only root can set up a shared ledger.\n"
            f"  As root:  gpu ledger init --group {group} {place}",
            name=str(place),
            user=str(os.geteuid()),
            because="not root",
        )
    require_suitable(place, group, config_file)
    is_new = make(place, group, config_file)
    try:
        served = _serve(place)
    except OSError as error:
        raise cannot_write(place, error) from error
    shared = "is shared by" if is_new else "is shared already by"
    return Outcome(
        "ledger",
        str(place),
        True,
        f"the ledger {place} {shared} the group {group}; {config_file} names it; {served}",
    )


def require_suitable(place: Path, group: str, config_file: str) -> None:
    """Raises BadSetting or GpuError if `place` cannot be the ledger of the `group`. Makes nothing."""
    if older := owners_of_version_0_2(place / boot_id()):
        raise GpuError(
            f"gpu-console 0.2 keeps a book in {place}, for pid {', '.join(older)}.\n"
            f"  Restart these notebooks with this version, or end them, and type the command again"
        )
    _require_suitable(place, group_id(group), group)
    known = host_config.read(config_file)
    # the last is the name in version 0.2
    if known.ledger not in ("", f"keeper://{place}", f"sqlite://{place}"):
        raise GpuError(
            f"{config_file} names another ledger already: {known.ledger}.\n"
            f"  First change the line  ledger = …  there, once nobody uses that ledger.",
            path=config_file,
        )


def make(place: Path, group: str, config_file: str) -> bool:
    """Makes a ledger in a suitable `place`, and names it in `config_file`. Returns whether it is new.

    Raises LedgerUnavailable, GpuError.
    """
    is_new = not (place / MARK).exists()
    try:
        _make_ledger(place, group_id(group))
        _write_configuration(Path(config_file), f"keeper://{place}", host_config.read(config_file))
    except OSError as error:
        raise cannot_write(place, error) from error
    return is_new


def _make_ledger(place: Path, gid: int) -> None:
    """Makes the directories and files of a ledger, including the directory of this boot."""
    access = Access(gid)
    place.mkdir(mode=0o700, exist_ok=True)
    access.make_file(place / MARK)
    access.open_directory(place, STICKY)
    of_this_boot = place / boot_id()
    for made, mode in (
        (place / "journal", COMMON),
        (of_this_boot, COMMON),
        (owners_in(of_this_boot), STICKY),
        (place / "journals", STICKY),
    ):
        access.make_directory(made, mode)
        _give_to_root(made, gid, mode)
    access.make(of_this_boot)


def _serve(place: Path) -> str:
    """Starts the process that keeps the book, as root's service. Returns how it runs.

    Raises OSError, or GpuError if systemd refuses the service.
    """
    if answers(place / boot_id()):
        return "its keeper runs"
    if SYSTEMD.is_dir():
        _write_units(place, sys.executable, Path("/"))
        _systemctl(place, "enable", "--now", *(file.name for file in unit_files(place)))
        return f"systemd runs its keeper, as {unit_name(place)}"
    with open_log(place / boot_id()) as log:
        started = spawn(["--service", str(place)], log.fileno())
    _require_answer(place, started)
    return f"its keeper runs as pid {started.pid} until the machine ends, since there is no systemd here"


def serve(place: Path, python: str, root: Path = Path("/")) -> str:
    """Lets `python` run the keeper of the ledger `place`, now and after every boot. Returns how it runs.

    A keeper of another Python, such as that of an older version, is replaced; it leaves its book to
    the next one. Below `root` are the directories of systemd and cron. Raises OSError, GpuError.
    """
    if below(root, SYSTEMD).is_dir():
        is_new = _write_units(place, python, root)
        if is_new or not answers(place / boot_id()):
            _systemctl(place, "enable", *(file.name for file in unit_files(place)))
            _systemctl(place, "restart", unit_name(place))  # systemd keeps the book meanwhile
        return f"systemd runs its keeper, as {unit_name(place)}"
    line = CRON_LINE.format(place=place, python=python, server=SERVER).encode()
    file = cron_file(root)
    at_boot = (
        "cron starts it at every boot" if file.parent.is_dir() else "nothing starts it at boot"
    )
    if file.parent.is_dir() and not (file.exists() and file.read_bytes() == line):
        replace_file(file, line, lambda draft: draft.chmod(0o644))
    command = [python, "-m", SERVER, "--service", str(place)]
    if command not in [run.cmdline() for run in keepers(place)]:
        _end_keepers(place)
        own = {name for name in os.environ if name.startswith("GPU_")}  # the operator's, not of all
        hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", *own}
        with open_log(place / boot_id()) as log:
            started = subprocess.Popen(
                command,
                cwd="/",
                env={name: text for name, text in os.environ.items() if name not in hidden},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _require_answer(place, started)
    return f"its keeper runs; {at_boot}"


def end_service(place: Path, root: Path = Path("/")) -> None:
    """Ends what `serve` started, and removes its files. Raises OSError, GpuError."""
    found = [file for file in unit_files(place, root) if file.exists()]
    if found:
        has_systemd = below(root, SYSTEMD).is_dir()
        if has_systemd:
            _systemctl(place, "disable", "--now", *(file.name for file in found))
        for file in found:
            file.unlink()
        if has_systemd:
            _systemctl(place, "daemon-reload")
    cron_file(root).unlink(missing_ok=True)
    _end_keepers(place)


def below(root: Path, path: Path) -> Path:
    """The absolute `path` below the directory `root`."""
    return root / path.relative_to("/")


def cron_file(root: Path) -> Path:
    """The file below `root` by which cron starts the keeper, where there is no systemd."""
    return below(root, CRON) / "gpu-console"


def unit_name(place: Path) -> str:
    """The name of the service that keeps the book of the ledger `place`."""
    return f"gpu-console{str(place).replace('/', '-')}.service"


def unit_files(place: Path, root: Path = Path("/")) -> list[Path]:
    """The files below `root` of the socket and the service that keep the book of the ledger `place`.

    A socket's path has 107 bytes at most. A ledger with a longer one has no file for the socket.
    """
    service = below(root, UNITS) / unit_name(place)
    fits = len(os.fsencode(place / SOCKET)) <= LONGEST_SOCKET_PATH
    return [*([service.with_suffix(".socket")] if fits else []), service]


def _write_units(place: Path, python: str, root: Path) -> bool:
    """Writes the files of `unit_files`, with a keeper that `python` runs. Returns whether one changed.

    Raises OSError, or GpuError if systemd does not read them.
    """
    facts = {
        "place": place,
        "path": place / SOCKET,
        "group": access_to(place).group,
        "socket": Path(unit_name(place)).with_suffix(".socket"),
        "python": python,
        "server": SERVER,
    }
    is_new = False
    for file in unit_files(place, root):
        template = SOCKET_UNIT if file.suffix == ".socket" else UNIT
        text = template.format(**facts).encode()
        if not file.exists() or file.read_bytes() != text:
            replace_file(file, text, lambda draft: draft.chmod(0o644))
            is_new = True
    if is_new:
        _systemctl(place, "daemon-reload")
    return is_new


def _systemctl(place: Path, *words: str) -> None:
    ran = subprocess.run(["systemctl", *words], capture_output=True, text=True, errors="replace")
    if ran.returncode:
        task = "end" if words[0] == "disable" else "start"
        raise GpuError(
            f"systemd does not {task} the keeper of {place}: {ran.stderr.strip()}.\n"
            f"  See:  journalctl -u {unit_name(place)}"
        )


def keepers(place: Path) -> list[psutil.Process]:
    """Root's processes that keep the book of the ledger `place`, those that start others first."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        of_root = uids is not None and uids.effective == os.geteuid()
        if of_root and SERVER in words and Path(words[-1]).is_relative_to(place):
            found.append(process)
    return sorted(found, key=lambda process: "--service" not in process.info["cmdline"])


def _end_keepers(place: Path) -> None:
    for process in keepers(place):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            process.terminate()
            try:
                process.wait(PATIENCE_SECONDS)
            except psutil.TimeoutExpired:
                process.kill()


def _require_answer(place: Path, started: subprocess.Popen[bytes]) -> None:
    """Waits until the keeper of `place` answers. Raises GpuError if it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not answers(place / boot_id()):
        if started.poll() is not None or time.monotonic() > deadline:
            raise GpuError(
                f"the keeper of {place} does not start.\n"
                f"  What it printed is in {place / boot_id() / 'keeper.log'}"
            )
        time.sleep(0.01)


def _give_to_root(directory: Path, gid: int, mode: int) -> None:
    """Makes root the owner of a directory that a member may have made."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory, flags)
    try:
        os.fchown(fd, 0, gid)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def group_id(group: str) -> int:
    """The number of the `group`. Raises BadSetting."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise BadSetting(
            "--group", group, f"a group of this machine; make it with:  groupadd {group}"
        ) from None


def _require_suitable(place: Path, gid: int, group: str) -> None:
    """Raises BadSetting if `place` is not suitable for a ledger of the `group`.

    The members must be able to reach the place, and no other user must be able to replace it. The
    place must be on a local disk, and must be empty or a ledger.
    """
    if not place.is_absolute() or ".." in place.parts or len(place.parts) < 3:
        raise _bad(place, "an absolute path, such as /var/lib/gpu-ledger")
    require_plain("DIR", place)
    kind = file_system_of(place)
    if is_network(kind):
        raise _bad(
            place,
            f"on a local disk; this is a network file system ({kind}), where locks do not prove "
            f"that an owner lives",
        )
    if not place.parent.is_dir():
        raise _bad(
            place, f"in a directory that exists; make it with:  mkdir -p -m 755 {place.parent}"
        )
    _require_reachable(place, gid, group)
    _require_free(place, gid, group)


def require_plain(setting: str, path: Path) -> None:
    """Raises BadSetting for a `path` that systemd, cron or a shell would not read as it is."""
    if not re.fullmatch(r"[\w./@:+,=~-]+", str(path)):
        raise BadSetting(
            setting, str(path), "a path without blanks, quotes and signs such as % or $"
        )


def _require_reachable(place: Path, gid: int, group: str) -> None:
    """Raises BadSetting if a directory above `place` is closed to the group or writable for all.

    A directory with the sticky bit, such as /tmp, is allowed to be writable for all.
    """
    for parent in place.parents:
        found = parent.stat()
        open_to_others = found.st_mode & stat.S_IXOTH
        open_to_group = found.st_gid == gid and found.st_mode & stat.S_IXGRP
        if not (open_to_others or open_to_group):
            raise _bad(place, f"where the group {group} can reach it; {parent} is closed to them")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise _bad(place, f"where only root can replace it; everybody may write {parent}")


def _require_free(place: Path, gid: int, group: str) -> None:
    """Raises BadSetting unless `place` is free, empty, or a ledger of this group."""
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise _bad(place, "a directory, or a name that is free")
    if not place.exists():
        return
    mark = place / MARK
    if mark.exists():
        if mark.stat().st_gid != gid:
            raise _bad(place, f"shared by {group}; it is shared by {group_name(place)} already")
    elif any(place.iterdir()):
        raise _bad(
            place,
            "an empty directory, a shared ledger, or a name that is free; there is something else in it",
        )


def _bad(place: Path, expected: str) -> BadSetting:
    return BadSetting("DIR", str(place), expected)


def _write_configuration(file: Path, url: str, known: host_config.Machine) -> None:
    """Names the ledger `url` in the configuration `file`. The rest of the file stays as it is.

    `known` is the present configuration.
    """
    if known.ledger in (url, url.replace("keeper:", "sqlite:", 1)):
        return
    text = TEMPLATE.format(url=url)
    if file.exists():
        # The line is written at the top of the file, because a line below the header of a table
        # would belong to the table.
        text = f'ledger = "{url}"\n\n{read_text(file)}'
        if host_config.parse(text, str(file)) != replace(known, ledger=url):
            raise GpuError(
                f"{file} could not be changed without changing its meaning.\n"
                f'  Add at its top:  ledger = "{url}"'
            )
    make_directory(file.parent, 0o755)
    replace_file(file, text.encode(), lambda draft: draft.chmod(0o644))


def forget(place: Path, config_file: str) -> None:
    """Removes the ledger `place` from `config_file`, and the file if it has nothing of the operator's.

    Raises OSError.
    """
    file, url = Path(config_file), f"keeper://{place}"
    text = read_text(file) if file.exists() else ""
    if text == TEMPLATE.format(url=url):
        file.unlink()
        return
    line = f'ledger = "{url}"\n'
    rest = text.replace(f"{line}\n" if text.startswith(f"{line}\n") else line, "", 1)
    if rest != text:
        mode = stat.S_IMODE(file.stat().st_mode)
        replace_file(file, rest.encode(), lambda draft: draft.chmod(mode))
