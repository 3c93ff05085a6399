"""gpu-console in a JupyterHub: its lines of `jupyterhub_config.py`, the role of each visitor, and the culler.

    from gpu_runtime import hub
    hub.configure(c)

The console becomes the service `/services/gpu/`. Idle notebooks are parked: their memory moves to RAM, and
returns at the next cell. An idle server is stopped much later, by jupyterhub-idle-culler with its own rules,
and not while values of a notebook exist only in its memory. `python -m gpu_runtime.hub` runs this culler, with
the options of the original.

The hub imports this module, so nothing large is imported here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .errors import BadSetting, GpuError
from .units import parse_seconds, show_bytes

if TYPE_CHECKING:
    from .facts import Section
    from .web.auth import Visitor

MODULE = "gpu_runtime.hub"
IDLE_CULLER = "jupyterhub_idle_culler"
CULL_UNSAVED = "--cull-unsaved"
NAME = "{name}"  # the place of a hub user's name in GPU_CONSOLE_USER_NAMES
HUB_SCOPES = ("list:users", "read:users:activity", "read:servers", "delete:servers")


# -- the configuration of the hub ------------------------------------------------------------------


def configure(
    c: Any,
    *,
    service: str = "gpu",
    port: int = 8210,
    operator_groups: Iterable[str] = (),
    user_names: str = NAME,
    park_after: str | float | None = "30 min",
    park_dir: str | None = None,
    hibernate_after: str | float = "4 h",
    cull_after: str | float | None = "24 h",
    cull_unsaved: bool = False,
    environment: Mapping[str, str] = {},
) -> None:
    """Adds the console, parking and culling to the hub's configuration `c`. Call it at the end of the file.

    The console is the service named `service`, and listens on `port` of 127.0.0.1. Its operators are the hub's admins
    and the members of the hub's `operator_groups`. Every other user sees the own notebooks and the sum of every other
    user. `user_names` says how a user is called on this machine, such as `jupyter-{name}`.

    A notebook that has run no cell for `park_after` is parked, also with an open tab. With `park_dir`, a directory on
    a local disk that every user may write to, its memory moves on to a file there after `hibernate_after`, and takes
    no RAM; the notebook stays, and its memory returns before its next cell. A server that is idle for
    `cull_after` is stopped; None leaves parking or culling as it is. With `cull_unsaved` a server is also stopped if
    the values in the memory of its notebooks are lost with it. A culler that is configured already keeps its options.

    The variables of `environment`, and all of this process that begin with GPU_, are passed on to the services. Raises
    BadSetting.
    """
    if NAME not in user_names:
        raise BadSetting("user_names", user_names, f"a text with {NAME}, such as jupyter-{NAME}")
    given = {name: value for name, value in os.environ.items() if name.startswith("GPU_")}
    given |= environment
    console = {
        "GPU_CONSOLE_OPERATOR_GROUPS": ",".join(operator_groups),
        "GPU_CONSOLE_USER_NAMES": user_names,
    }
    services = [
        {
            "name": service,
            "url": f"http://127.0.0.1:{port}",
            "command": [sys.executable, "-m", "gpu_runtime.cli", "console", "--no-browser"],
            "environment": given | console,
            "oauth_no_confirm": True,
        }
    ]
    roles = [{"name": "user", "scopes": ["self", f"access:services!service={service}"]}]
    parking: dict[str, str] = {}
    if park_after is not None:
        parking = {"GPU_PARK": "idle", "GPU_PARK_IDLE_SECONDS": f"{parse_seconds(park_after):g}"}
    if park_dir is not None:
        parking["GPU_PARK_DIR"] = park_dir
        parking["GPU_HIBERNATE_SECONDS"] = f"{parse_seconds(hibernate_after):g}"
    if parking:
        c.Spawner.environment = _value(c.Spawner, "environment", {}) | parking
    known = _value(c.JupyterHub, "services", [])
    culling = {"environment": given | {"GPU_CONSOLE_USER_NAMES": user_names}}
    cullers = [entry for entry in known if _is_idle_culler(entry.get("command"))]
    for culler in cullers:
        culler["command"] = guarded(culler["command"], cull_unsaved)
        culler["environment"] = culling["environment"] | culler.get("environment", {})
    if cull_after is not None and not cullers:
        seconds = round(parse_seconds(cull_after))
        command = [sys.executable, "-m", IDLE_CULLER, f"--timeout={seconds}"]
        name = f"{service}-culler"
        services.append({"name": name, "command": guarded(command, cull_unsaved), **culling})
        roles.append({"name": name, "services": [name], "scopes": list(HUB_SCOPES)})
    c.JupyterHub.services = [*known, *services]
    c.JupyterHub.load_roles = _with_roles(_value(c.JupyterHub, "load_roles", []), roles)


def guarded(command: Sequence[str], cull_unsaved: bool = False) -> list[str]:
    """The `command` of an idle culler, run by this module, which keeps servers with values that exist nowhere else.

    >>> guarded(["python3", "-m", "jupyterhub_idle_culler", "--timeout=3600"])[1:]
    ['-m', 'gpu_runtime.hub', '--timeout=3600']
    """
    words = list(command)
    at = next(n for n, word in enumerate(words) if _names_idle_culler(word))
    more = [CULL_UNSAVED] if cull_unsaved else []
    return [sys.executable, "-m", MODULE, *more, *words[at + 1 :]]


def _names_idle_culler(word: str) -> bool:
    name = os.path.basename(word).replace("-", "_")
    return name in (IDLE_CULLER, f"{IDLE_CULLER}.py", "cull_idle_servers.py")


def _is_idle_culler(command: Any) -> bool:
    return isinstance(command, (list, tuple)) and any(map(_names_idle_culler, command))


def _with_roles(known: Sequence[dict[str, Any]], more: Iterable[dict[str, Any]]) -> list[Any]:
    """The roles `known` and `more`. If a name is in both, the role has the scopes of both."""
    found = [dict(role) for role in known]
    for role in more:
        same = next((old for old in found if old["name"] == role["name"]), None)
        if same is None:
            found.append(role)
        else:
            scopes = [*same.get("scopes", ()), *role["scopes"]]
            same["scopes"] = list(dict.fromkeys(scopes))
    return found


def _value(section: Any, name: str, otherwise: Any) -> Any:
    """A copy of the value that the configuration has so far, also if the hub has only collected changes to it."""
    if name not in section:
        return otherwise
    value = section[name]
    # traitlets' LazyConfigValue: appended to a default that is not known yet.
    if hasattr(value, "get_value"):
        return value.get_value(otherwise)
    return type(otherwise)(value)


# -- the role of a visitor -------------------------------------------------------------------------


def is_service(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a hub has started this process as a service. A user's own server, and its notebooks, are none.

    >>> token = {"JUPYTERHUB_API_TOKEN": "t", "JUPYTERHUB_SERVICE_URL": "http://127.0.0.1:8210"}
    >>> is_service(token | {"JUPYTERHUB_SERVICE_NAME": "gpu"}), is_service(token | {"JUPYTERHUB_USER": "ann"})
    (True, False)
    """
    needed = ("JUPYTERHUB_SERVICE_NAME", "JUPYTERHUB_SERVICE_URL", "JUPYTERHUB_API_TOKEN")
    is_of_user = bool(environment.get("JUPYTERHUB_USER"))
    return not is_of_user and all(environment.get(name) for name in needed)


ALL_ARE_OPERATORS = (
    "gpu: with --socket, every visitor of this service of JupyterHub may act as the user who runs it. "
    "For the hub's own roles, start the console without --socket, or with  hub.configure(c)"
)


def tile_path(environment: Mapping[str, str] = os.environ) -> str:
    """The path of the console in the user's own server, for a terminal in this server; else empty.

    >>> tile_path({"JUPYTERHUB_USER": "ann", "JUPYTERHUB_SERVICE_PREFIX": "/hubs/one/user/ann/fast/"})
    '/hubs/one/user/ann/fast/gpu-console/'
    """
    prefix = environment.get("JUPYTERHUB_SERVICE_PREFIX", "")
    return f"{prefix}gpu-console/" if prefix and environment.get("JUPYTERHUB_USER") else ""


def visitor(
    model: Mapping[str, Any],
    operator_groups: Collection[str],
    user_names: str = NAME,
    *,
    read_only: bool = False,
) -> Visitor:
    """The visitor whom the hub describes with `model`: an operator, or a member of the own name on this machine.

    >>> visitor({"name": "ops", "admin": True}, ()).member, visitor({"name": "ann", "groups": ["x"]}, ()).member
    ('', 'ann')
    >>> visitor({"name": "eve", "groups": ["gpu-admins"]}, {"gpu-admins"}).member
    ''
    """
    from .web.auth import Visitor

    name = str(model["name"])
    is_operator = model.get("admin") is True
    is_operator = is_operator or not set(operator_groups).isdisjoint(model.get("groups") or ())
    member = "" if is_operator else user_names.replace(NAME, name)
    return Visitor(name, not read_only, member=member)


# -- the culler ------------------------------------------------------------------------------------
#
# jupyterhub-idle-culler reads the servers from the hub, and leaves alone a server with a pending action. So this
# module marks the servers that must stay in what the culler reads. All rules of the culler stay, also that of
# the greatest age, and a user whose server stays is not removed.

# The user on this machine, and the server -> what would be lost; empty: nothing.
Unsaved = Callable[[str, str], str]


def unsaved_in(sections: Iterable[Section]) -> Unsaved:
    """What each server would lose, by the `sections` of a book."""
    found: dict[tuple[str, str], list[str]] = {}
    for section in sections:
        own = [lease for lease in section.leases if lease.kind != "block" and not lease.droppable]
        size = sum(lease.bytes for lease in own)
        if size:
            owner = section.owner
            title = f"{owner.name}, {show_bytes(size)}"
            found.setdefault((owner.user, owner.server), []).append(title)
    return lambda user, server: "; ".join(sorted(found.get((user, server), ())))


def marked(answer: Any, unsaved: Unsaved, user_names: str = NAME) -> Any:
    """The hub's `answer`, in which each server that must stay has a pending action. Other answers are unchanged."""
    items = answer.get("items") if isinstance(answer, dict) else answer
    for user in items if isinstance(items, list) else ():
        name = user_names.replace(NAME, user.get("name", ""))
        for server, facts in (user.get("servers") or {}).items():
            if not facts.get("pending") and (lost := unsaved(name, server)):
                facts["pending"] = f"memory that exists nowhere else ({lost})"
    return answer


class Ledgers:
    """Reads the ledgers of this machine for the culler."""

    def __init__(self) -> None:
        self._rt: Any = None

    def unsaved(self) -> Unsaved:
        """What each server would lose now. If that cannot be known, a server would lose something."""
        try:
            sections, silent = self._look()
        except (GpuError, OSError) as error:
            why = f"not known: {' '.join(str(error).split())}"
            return lambda user, server: why
        known = unsaved_in(sections)
        return lambda user, server: known(user, server) or silent.get(user, "")

    def _look(self) -> tuple[list[Section], dict[str, str]]:
        """The sections of all ledgers, and for each user with a ledger that does not answer, which one."""
        from . import watching
        from .ledgers import reader
        from .ledgers.access import access_to

        rt = self._rt = self._rt or watching.default()
        rt.reap()
        sections, silent = list(rt.status().sections.values()), {}
        own = watching.directory_of(rt)
        if os.geteuid() == 0:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
            for ledger, holders in reader.of_processes(pids).items():
                if ledger.directory == own:
                    continue
                users = users_of(holders)
                book = _book(ledger)
                if book is None:
                    why = f"not known: the ledger in {ledger.directory} does not answer"
                    silent |= dict.fromkeys(users.values(), why)
                else:
                    sections += proven(book.sections.values(), users)
        elif own is None or access_to(own).group is None:
            raise GpuError("this user cannot read the ledgers of other users")
        return sections, silent


def users_of(pids: Iterable[int]) -> dict[int, str]:
    """The user of each of the processes `pids` that still lives."""
    from .attribution import name_of

    found = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            found[pid] = name_of(os.stat(f"/proc/{pid}").st_uid)
    return found


def proven(sections: Iterable[Section], users: Mapping[int, str]) -> list[Section]:
    """The `sections` of processes whose users are known from the system: pid -> user.

    A user's private ledger may claim anything, also that a process is of another user, whose server would then stay.
    """
    return [section for section in sections if users.get(section.owner.pid) == section.owner.user]


def _book(ledger: Any) -> Any:
    from .ledgers.reader import book_of

    # While a book is written, there may be no answer.
    return next(filter(None, (book_of(ledger) for _ in range(3))), None)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs jupyterhub-idle-culler so that servers with unsaved values stay; with `--cull-unsaved` as it is."""
    import jupyterhub_idle_culler as culler

    words = list(sys.argv[1:] if argv is None else argv)
    if CULL_UNSAVED in words:
        words.remove(CULL_UNSAVED)
    else:
        from .settings import Settings

        ledgers, names = Ledgers(), Settings.load().gpu_console_user_names
        # The culler parses each answer of the hub with this function, and has no hook that sees the user's name.
        culler.json = SimpleNamespace(
            loads=lambda text: marked(json.loads(text), ledgers.unsaved(), names), dumps=json.dumps
        )
    culler.IdleCuller.launch_instance(words)


if __name__ == "__main__":
    main()
