"""The verbs of the `%gpu` magic and of the `gpu` command: their arguments, help and what they do.

To add a verb, add a row to the table: a name, its arguments, and an act unless it is the method of
Runtime with the same name. An act is a function here. `rt` is the runtime; it is None if no runtime is
open and the verb needs none. `args` are the parsed arguments. An act returns data and prints nothing.
`rendering` shows the results.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from . import autoload, error_help
from .arguments import FIELDS, MOST, MOST_DAYS, SECONDS, SEQUENCES, TOKENS, TRUTH, TYPED, Rule
from .arguments import IMPORTANCE as IMPORTANCE_RULE
from .attribution import own_name
from .errors import BadSetting, GpuError, UnknownVerb
from .facts import IMPORTANCE, Outcome, Plan, problems
from .safe_text import MOST_QUOTED, printable, quoted
from .scheduler.policies import POLICIES

LAST_PORT = 65535
MOST_USAGE_ERROR = 1000  # characters


_NUMBER = re.compile(r"\d[\d_]*(\.\d+)?")
_UNIT = re.compile(r"[kmgt]i?b?|b", re.IGNORECASE)

MAGIC, CLI = "%gpu", "gpu"  # the two places where a verb is typed, named by their prompt

Act = Callable[[Any, argparse.Namespace], Any]  # (runtime, arguments) -> the answer


class Argument(NamedTuple):
    """One argument of a verb: what `argparse` needs, and what the Tab key completes."""

    flags: tuple[str, ...]
    options: dict[str, Any]  # keywords of `add_argument`
    completes: str = ""  # the kind of values that Tab offers, such as "models" or "files"

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments that has the value."""
        return self.options.get("dest") or self.flags[0].lstrip("-").replace("-", "_")

    @property
    def is_option(self) -> bool:
        """Whether the argument is typed with a leading dash."""
        return self.flags[0].startswith("-")

    @property
    def takes_value(self) -> bool:
        """Whether a value follows the argument. The result is False for a switch."""
        return self.options.get("action") != "store_true"

    @property
    def is_optional(self) -> bool:
        """Whether the argument may be omitted."""
        if self.is_option:
            return not self.options.get("required", False)
        return self.options.get("nargs") == "?"

    @property
    def usage(self) -> str:
        """The argument as it is typed, without brackets: `NAME`, `--all` or `--limit N`."""
        if not self.is_option:
            return self.options["metavar"]
        value = f" {self.options['metavar']}" if self.takes_value else ""
        return f"{self.flags[-1]}{value}"


class Verb(NamedTuple):
    """One command to the runtime: a word, its arguments, and the call that carries it out."""

    name: str
    doc: str
    # None: the runtime's method of the verb's name, with its arguments. Without one, the faces have code of their own.
    act: Act | None = None
    arguments: tuple[Argument, ...] = ()
    places: tuple[str, ...] = (MAGIC, CLI)
    needs_runtime: bool = True
    plain_in_notebook: bool = False  # has arguments in a terminal only
    # It calls no function of the user's, and binds no name: a parked notebook stays parked. All but `park` only read.
    reads: bool = False

    def answer(self, rt: Any, args: argparse.Namespace) -> Any:
        """Carries the verb out with the parsed `args`, and returns data. `rt` is None if the verb needs no runtime."""
        if self.act is not None:
            return self.act(rt, args)
        positionals = [getattr(args, part.name) for part in self.arguments if not part.is_option]
        options = given(args, *(part.name for part in self.arguments if part.is_option))
        return getattr(rt, self.name)(*positionals, **options)

    def takes(self, place: str) -> tuple[Argument, ...]:
        """The arguments that can be typed in `place`, which is MAGIC or CLI, except hidden ones."""
        if place == MAGIC and self.plain_in_notebook:
            return ()
        return tuple(part for part in self.arguments if part.options["help"] != argparse.SUPPRESS)

    def synopsis(self, place: str, short: bool = False) -> str:
        """The verb as it is typed in `place`. If `short`, more than two options are written as `[options]`."""
        arguments = self.takes(place)
        options = [part for part in arguments if part.is_option]
        folded = short and len(options) > 2
        if folded:
            arguments = tuple(part for part in arguments if not part.is_option)
        return " ".join([place, self.name, *typed(arguments), *(["[options]"] if folded else [])])


def typed(arguments: Iterable[Argument]) -> list[str]:
    """The `arguments` as a synopsis shows them."""
    return [f"[{part.usage}]" if part.is_optional else part.usage for part in arguments]


# -- constructors: one line of the table for each argument ---------------------------------------


def argument(flags: str, metavar: str, help: str, completes: str = "", **options: Any) -> Argument:
    """An option with a value, which the help shows as `metavar`; or without dashes an argument by its position.

    Spaces separate the `flags` of an option. Without dashes it is the attribute of the parsed arguments. `help`
    is its line in the help. `completes` names the values that the Tab key offers. `options` are further
    keywords of `argparse`.
    """
    return Argument(tuple(flags.split()), {"metavar": metavar, "help": help, **options}, completes)


def switch(flag: str, help: str) -> Argument:
    """An option without a value, True if `flag` is typed. `help` is the option's help line."""
    return Argument((flag,), {"action": "store_true", "help": help})


# -- functions that convert typed text into values ------------------------------------------------


def _by(rule: Rule) -> Callable[[str], Any]:
    """A function that reads text by `rule`. It raises ArgumentTypeError for text that the rule refuses."""

    def value(text: str) -> Any:
        try:
            return rule.in_file(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


seconds = _by(SECONDS)


def importance(text: str) -> str | int:
    """The importance in `text`: the name of a class, or a number. Raises ArgumentTypeError."""
    number = _by(IMPORTANCE_RULE)(text)
    return text if text in IMPORTANCE else number


def model_names(text: str) -> tuple[str, ...]:
    """The names in `text`, which are separated by commas. Raises ArgumentTypeError if one is empty."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} has an empty name; for all models leave the option out"
        )
    return names


def days(text: str) -> float:
    """The number of days in `text`. Raises ArgumentTypeError unless it is a number above 0."""
    try:
        number = float(text)
    except ValueError:  # refused below
        number = 0.0
    if not 0 < number < MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of days above 0")
    return number


def _whole(least: int, what: str, most: int = MOST) -> Callable[[str], int]:
    """A function that reads a number from `least` to `most`, which `what` names in the error."""

    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not {what}")
        return int(text)

    return number


rows, port_number = _whole(1, "a number of rows"), _whole(0, "a port", LAST_PORT)


def count(text: str) -> int:
    """The number in `text`, such as `8_192`. Raises ArgumentTypeError unless it is above 0."""
    return _whole(1, "a number above 0")(text.replace("_", ""))


def usage_error(message: str) -> str:
    """A `message` about words that were not understood, shortened and safe to print."""
    return printable(message, MOST_USAGE_ERROR, keep="\n")


# -- arguments that several verbs share ----------------------------------------------------------

# fmt: off
NAME = argument("name", "NAME", "a model; another process's as NAME@PID", "models")
HELD = argument("name", "NAME", "a model; another process's as NAME@PID; or all of a notebook: FILE.ipynb", "held",
    nargs="?")
LOADABLE = argument("name", "NAME",
    "a model; another process's as NAME@PID; or a notebook's own memory: FILE.ipynb", "held")
WAITING = argument("name", "NAME", "for what it waits; in another process NAME@PID; or a notebook: FILE.ipynb")
CATALOG_NAME = argument("name", "NAME", "a model of the catalogue", "catalog")
WHO = argument("who", "NOTEBOOK", "its file name or process id; without it, this notebook", "kernels", nargs="?")
PROCESS = argument("process", "PROCESS",
    "only this one: its pid, FILE.ipynb, or a model that it holds, as NAME@PID", "held", nargs="?")
BY_DRIVER = switch("--checkpoint", "the driver moves any process: NOTEBOOK is its pid")
TIMEOUT = argument("--timeout", "SECONDS", "how long to wait at most", type=seconds)
HISTORY = (  # what `backtest` replays, and with what
    argument("--days", "N", "the journal's last N days (7)", type=days),
    argument("--requests", "FILE", "instead: uses in a CSV file", "files"),
    argument("--models", "FILE", "… and their models in another", "files"),
    argument("--policy", "P,P", ", ".join(POLICIES)),
    argument("--engine", "E,E", "plain, full or bounded"),
    argument("--device", "SIZE,SIZE", "cards, such as 80GB,10% of all models"),
    argument("--host", "SIZE,SIZE", "RAM, such as 0GB,256GB,50%"),
    argument("--disk", "SIZE", "the disk for what RAM has no room for (0GB)"),
)
NEW_NAME = argument("name", "NAME", "the name to give it", "models")
SOURCE = argument("source", "SOURCE", "a directory, a file or a hub id", "files", nargs="?")
_CONVERTERS = {IMPORTANCE_RULE: importance, TOKENS: count, SEQUENCES: count}


def _of_field(name: str) -> Argument:
    """The option for the field `name` of a model."""
    rule, typed = FIELDS[name].rule, TYPED[name]
    if rule is TRUTH:
        return switch(typed[0], typed[2])
    more = {"type": _CONVERTERS[rule]} if rule in _CONVERTERS else {}
    return argument(*typed, dest=name, **more)


DESCRIPTION = tuple(map(_of_field, TYPED))  # a model, as `plan`, `load` and `register` take it
IMPORTANCE_OPTION = DESCRIPTION[list(TYPED).index("importance")]
HOST = argument("--host", "HOST", "the address to listen on; 127.0.0.1 unless given", default="127.0.0.1")
SOCKET = argument("--socket", "PATH", "a Unix socket instead, for you alone", "files", dest="socket_path")
OF_FLEET = argument("--fleet", "ADDRESS", "all hosts of a fleet; its head, such as box1:6379, or auto", nargs="?",
    const="auto")
LOG_LEVEL = argument("--log-level", "LEVEL",
    "the messages on standard error: debug, info (unless given), warning, error",
    choices=("debug", "info", "warning", "error"), default="info")
# fmt: on


def with_sizes_joined(words: Iterable[str]) -> list[str]:
    """The typed `words`, in which each number is joined with its unit to one word.

    >>> with_sizes_joined(["plan", "2", "GiB", "--sequences", "2"])
    ['plan', '2GiB', '--sequences', '2']
    """
    joined: list[str] = []
    for word in words:
        if joined and _UNIT.fullmatch(word) and _NUMBER.fullmatch(joined[-1]):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


# Words that other tools use for a verb -> the verbs with that meaning, the likeliest first.
MEANINGS = {
    **dict.fromkeys(("unload", "release", "offload", "drop", "eject", "stop"), ("evict", "free")),
    **dict.fromkeys(("remove", "rm", "del", "unregister", "unadopt"), ("forget", "evict")),
    **dict.fromkeys(("clear", "clean", "empty", "gc", "flush"), ("free", "defrag")),
    **dict.fromkeys(("add", "adopt", "create"), ("register", "load")),
    **dict.fromkeys(("use", "get", "open", "fetch", "wake"), ("preload", "restore")),
    **dict.fromkeys(("ps", "watch", "info", "show", "smi", "list", "ls"), ("status", "models")),
    **dict.fromkeys(("log", "logs", "history", "explain"), ("why", "evictions")),
    **dict.fromkeys(("events", "activity", "journal"), ("evictions", "why")),
    **dict.fromkeys(("processes", "procs", "owners", "holders", "notebooks"), ("leases", "status")),
    **dict.fromkeys(("queue", "waiting", "waits"), ("status", "cancel")),
    **dict.fromkeys(("keep", "lock"), ("pin",)),
    **dict.fromkeys(("unlock", "unkeep"), ("unpin",)),
    **dict.fromkeys(("suspend", "sleep", "pause"), ("park", "hibernate")),
    **dict.fromkeys(("resume", "unsuspend"), ("unpark", "restore")),
    **dict.fromkeys(("estimate", "fit", "fits", "dryrun"), ("plan",)),
    **dict.fromkeys(("vars", "variables", "memory", "mem"), ("who", "leases")),
    **dict.fromkeys(("settings", "env"), ("config",)),
    **dict.fromkeys(("abort", "interrupt", "kill"), ("cancel", "evict")),
}
FLEET = (
    argument("action", "ACTION", "status (unless given), join, leave, drain HOST, or slots", nargs="?",
        choices=["status", "join", "leave", "drain", "slots"], default="status"),
    argument("host", "HOST", "the host to drain", nargs="?"),
    switch("--undo", "with drain: take models again"),
    argument("--create", "NAME@HOST", "with slots: load a model there"),
    argument("--on", "CARDS", "… on these cards, such as cuda:0,1"),
    argument("--delete", "NAME@HOST", "with slots: remove it"),
    argument("--name", "NAME", "with join: the name of this host"),
    argument("--devices", "D", "with join: its cards, such as sim:2x24GiB"),
    argument("--ledger", "URL", "with join: its ledger; the machine's unless given"),
    argument("--address", "A", "of Ray's head, such as box1:6379", default="auto"),
)  # fmt: skip

KEYS = (
    argument("action", "ACTION", "add, list or remove", choices=["add", "list", "remove"]),
    argument("name", "NAME", "of the key, such as the program's", nargs="?"),
    argument("--role", "R", "with add: user (calls models; unless given) or viewer", choices=("user", "viewer"),
        default="user"),
    argument("--models", "NAMES", "with add: its models, as in qwen*,task:chat; all unless given", type=model_names,
        default=("*",)),
    argument("--importance", "I", "with add: the highest that its calls can have", type=importance),
    argument("--requests", "N", "with add: requests a minute", type=count),
    argument("--tokens", "N", "with add: tokens a minute", type=count),
)  # fmt: skip
ALERTS = (
    argument("action", "ACTION", "list (unless given), ack, silence, end (of a silence), or test", nargs="?",
        choices=["list", "ack", "silence", "end", "test"], default="list"),
    argument("what", "WHAT", "a problem, as the list names it; a kind of problems; or all", nargs="?"),
    argument("--for", "TIME", "with silence: how long, such as 2h; 1h unless given", type=seconds, dest="lasts",
        default=3600.0),
)  # fmt: skip
LEDGER = (
    argument("action", "init", "the only action", choices=["init"]),
    argument("--group", "G", "the users' group, such as gpu", required=True),
    argument("directory", "DIR", "the ledger's directory, such as /var/lib/gpu-ledger", "files"),
)  # fmt: skip
BOX = (
    argument("action", "ACTION", "install, status (unless given), upgrade or remove", nargs="?",
        choices=["install", "status", "upgrade", "remove"], default="status"),
    argument("--prefix", "DIR", "its directory; /opt/gpu-console unless given", "files"),
    argument("--group", "G", "the users' group; gpu unless given"),
    argument("--pythons", "V", "the kernels' Pythons; 3.10-3.14 unless given"),
    argument("--from", "FILE", "a wheel, or a directory of wheels; else pip's index", dest="source"),
    switch("--dry-run", "write nothing, and list every path"),
    argument("--root", "DIR", argparse.SUPPRESS),  # for tests: all paths are below it
)  # fmt: skip


# -- the settings for a card's size ----------------------------------------------------------------


PRESETS: dict[str, dict[str, str]] = {
    "24GB": {"GPU_MEMORY_MAX_PERCENT": "0.90"},
    "16GB": {"GPU_MEMORY_MAX_PERCENT": "0.90", "ENABLE_CPU_OFFLOAD": "true"},
    "8GB": {"GPU_MEMORY_MAX_PERCENT": "0.85", "ENABLE_CPU_OFFLOAD": "true", "EVICTION_IDLE_THRESHOLD_SECONDS": "60"},
    "4GB": {"GPU_MEMORY_MAX_PERCENT": "0.80", "ENABLE_CPU_OFFLOAD": "true", "EVICTION_IDLE_THRESHOLD_SECONDS": "30"},
}  # fmt: skip


_LARGEST_PRESET = 24  # GB
_CARD_SIZE = re.compile(r"\s*([0-9]{1,6})\s*G(?:i?B)?\s*\+?\s*", re.IGNORECASE)


def preset(name: str) -> dict[str, str]:
    """The environment variables recommended for a card of the size `name`, such as 8GB.

    A card larger than 24 GB gets the variables of the preset 24GB. Raises BadSetting for any other
    size without a preset.

    >>> preset("8gb")["GPU_MEMORY_MAX_PERCENT"], preset("80GB") == preset("24GB+")
    ('0.85', True)
    """
    size = _CARD_SIZE.fullmatch(str(name))
    is_large = size is not None and int(size[1]) >= _LARGEST_PRESET
    found = PRESETS.get(f"{_LARGEST_PRESET if is_large else int(size[1])}GB") if size else None
    if found is None:
        raise BadSetting("preset", name, f"one of {', '.join(PRESETS)}; larger cards use 24GB")
    return dict(found)


# -- what the verbs do -----------------------------------------------------------------------------


def register(rt: Any, args: argparse.Namespace) -> Outcome:
    """Registers the model in `args` with `rt`, and returns the outcome."""
    spec = rt.register(args.name, args.source, **given(args, *TYPED))
    because = f"{spec}; load it with  %gpu preload {shlex.quote(spec.name)}"
    return Outcome(verb="register", name=spec.name, done=True, because=because)


def forget(rt: Any, args: argparse.Namespace) -> Outcome:
    """Frees the model in `args` and its name, and returns the outcome."""
    rt.forget(args.name)
    because = f"{args.name} is no longer registered here, and holds no memory"
    return Outcome(verb="forget", name=args.name, done=True, because=because)


def report(rt: Any, args: argparse.Namespace) -> Any:
    """The account of hours that `args` describe, from `rt`: a table, or a text. Raises GpuError."""
    if args.csv and (args.text or args.json):
        raise GpuError("type one of --csv, --text and --json.")
    found = rt.report(**given(args, "since", "by", "text"))
    if not args.csv:
        return found
    from .rendering.text import as_csv

    return as_csv(found.to_dict("records"), list(found.columns)).rstrip("\n")


def why(rt: Any, args: argparse.Namespace) -> Any:
    """The last decisions on what `args` name, or on this notebook. Raises GpuError."""
    if args.replay and not args.name:
        raise GpuError("--replay needs the NAME of a model, or a decision's number.")
    if args.oom and args.name:
        raise GpuError("--oom is about this notebook, and takes no NAME:  %gpu why --oom")
    return rt.why(args.name or "", **given(args, "replay", "oom"))


def evict(rt: Any, args: argparse.Namespace) -> Outcome:
    """Evicts what `args` name, or with `--all-idle` every idle model. Raises GpuError unless it is one of the two."""
    if args.all_idle == bool(args.name):
        raise GpuError("type one of the two: a NAME, or --all-idle.")
    return rt.evict(args.name or "*", **given(args, "timeout", "drop", "lost", "force"))


def evictions(rt: Any, args: argparse.Namespace) -> Any:
    """A DataFrame from `rt` of the evictions, or with `--all` in `args` of all events."""
    read = rt.events if args.all else rt.evictions
    frame = read(**given(args, "limit"))
    frame.attrs["owners"] |= {id: holder.owner.label for id, holder in rt.status().sections.items()}
    return frame


def doctor(rt: Any, args: argparse.Namespace) -> Any:
    """The doctor's report of `rt`, or of this process if `rt` is None. `args` has no options."""
    import gpu_runtime

    from .owner.doctor import report

    if rt is not None:
        return rt.doctor()
    try:
        return gpu_runtime.runtime().doctor()
    except GpuError as error:  # the report has the error too
        return report(None, error)


def config(rt: Any, args: argparse.Namespace) -> Any:
    """Every setting of `rt` with its source; with `--preset` in `args`, the preset's settings."""
    from . import settings

    if args.preset:
        return preset(args.preset)
    current = rt.settings if rt is not None else settings.Settings.load()
    return current.sources()


def apply(rt: Any, files: list[str]) -> Any:
    """Adds the models of all `files` to the catalogue, or none of them. Returns what was changed."""
    return (catalogue(rt) if rt is None else rt._catalogue.catalog).apply(*files)


def catalogue(rt: Any) -> Any:
    """The object with the methods of the catalogue's verbs: `rt`, or a Catalog if `rt` is None."""
    from . import settings
    from .catalog.files import Catalog

    return rt if rt is not None else Catalog(settings.Settings.load())


def list_catalogue(rt: Any, args: argparse.Namespace) -> Any:
    """The catalogue's models as a DataFrame. `args` has no options, and `rt` may be None."""
    from .owner import status

    return rt.catalog() if rt is not None else status.catalog(catalogue(None).specs())


def backtest(rt: Any, args: argparse.Namespace) -> Any:
    """The table of replays of the history, with the policies, cards and RAM in `args`.

    If `args` have no files of a history and `rt` is None, opens the runtime and closes it again.
    """
    from .owner import history

    choices = given(args, "days", "policy", "engine", "device", "host", "disk")
    if args.requests or args.models:
        return history.backtest(None, args.requests, args.models, **choices)
    if rt is not None:
        return rt.backtest(**choices)
    from gpu_runtime import runtime

    with runtime() as opened:
        opened.guest = True
        return opened.backtest(**choices)


def ledger(rt: Any, args: argparse.Namespace) -> Any:
    """Sets up a shared ledger in `args.directory`. Returns the outcome. `rt` is not used."""
    from . import settings
    from .ledgers import setup

    return setup.init(args.directory, args.group, settings.Settings.load().gpu_config_file)


def uninstall(rt: Any, args: argparse.Namespace) -> Any:
    """Lists or removes what was written for this user. Returns the outcome. `rt` is not used."""
    from . import uninstall

    return uninstall.uninstall(args.yes, args.prefix or "")


def box(rt: Any, args: argparse.Namespace) -> Any:
    """Carries out the action in `args` on the installation for every kernel. `rt` is not used."""
    from . import box

    where = given(args, "prefix", "root")
    dry_run = args.dry_run
    if args.action == "status":
        return box.status(**where)
    if args.action == "remove":
        return box.remove(dry_run=dry_run, **where)
    return box.install(
        newest=args.action == "upgrade",
        dry_run=dry_run,
        say=lambda step: print(f"box: {step}", file=sys.stderr, flush=True),
        **where,
        **given(args, "group", "pythons", "source"),
    )


def keys(rt: Any, args: argparse.Namespace) -> str:
    """Adds or removes a key of `gpu serve`, or lists them. Only the returned text has a new key; no file has it."""
    from pathlib import Path

    from . import access_keys, settings

    path = Path(settings.Settings.load().gpu_serve_keys or access_keys.default_file())
    if args.action == "list":
        return access_keys.table(access_keys.read(path))
    if not args.name:
        raise GpuError(f"{args.action} needs a name:  gpu keys {args.action} NAME")
    if args.action == "remove":
        access_keys.remove(path, args.name)
        return f"The key {args.name} is removed. A running gpu serve refuses it within a second."
    key, sha256 = access_keys.new_key()
    access_keys.add(
        path,
        args.name,
        access_keys.AccessKey(
            sha256,
            role=args.role,
            models=args.models,
            importance=args.importance,
            requests_a_minute=args.requests,
            tokens_a_minute=args.tokens,
        ),
    )
    return f"The key of {args.name}, which is not shown again:\n{key}"


def alerts(rt: Any, args: argparse.Namespace) -> str:
    """Lists the problems and the destinations of alerts, or carries out `args.action` on `args.what`."""
    import time

    from . import alerts

    path, wall = alerts.file_of(rt.settings.gpu_alerts), time.time()
    if args.action == "test":
        return alerts.test(path, rt.status().owner.host)
    if args.action != "list" and not args.what:
        raise GpuError(
            f"{args.action} needs a problem, a kind or all:  gpu alerts {args.action} WHAT"
        )
    if args.action == "end":
        return alerts.end_silence(args.what)
    found = problems(rt.status())
    if args.action == "ack":
        return alerts.acknowledge(args.what, own_name(), found, wall)
    if args.action == "silence":
        return alerts.silence(args.what, own_name(), found, wall, args.lasts)
    return alerts.listing(found, path, wall)


def fleet(rt: Any, args: argparse.Namespace) -> Any:
    """The hosts of the fleet, or the outcome of the action in `args`. `rt` is not used."""
    import gpu_runtime

    from .fleet import client

    if args.action == "join":
        options = given(args, "name", "devices", "ledger")
        return client.join(address=args.address, **options)
    if args.action == "leave":
        return client.leave(address=args.address)
    hosts = gpu_runtime.fleet(args.address)
    if args.action == "slots":
        if args.delete:
            return hosts.delete_slot(args.delete)
        if not args.create:
            return hosts.slots()
        model, at, host = args.create.rpartition("@")
        if not (at and args.on):
            raise GpuError(
                "a new slot needs its place:  gpu fleet slots --create NAME@HOST --on cuda:0,1"
            )
        return hosts.create_slot(model, host, args.on)
    if args.action == "drain":
        if not args.host:
            raise GpuError("drain needs the name of a host:  gpu fleet drain HOST")
        return hosts.drain(args.host, undo=args.undo)
    return hosts.status()


# -- the table -----------------------------------------------------------------------------------

_TABLE = (
    Verb("status", "how full the devices are, which process holds what, and which requests wait",
        lambda rt, args: rt.status_all() if args.all else rt.status(),
        (switch("--all", "every host that shares the ledger"),), reads=True),
    Verb("top", "a live list of notebooks, with keys: sort, filter, park, evict, interrupt, end", places=(CLI,)),
    Verb("models", "models: where each one is, its size, and how long it is idle", reads=True),
    Verb("leases", "leases: memory that a process may use, on which device, and what it uses of it", reads=True),
    Verb("evictions", "models that left their device, when, and why", evictions, (
        switch("--all", "also loads, restores and refusals"),
        argument("--limit", "N", "only the last N", type=rows),
    ), reads=True),
    Verb("report", "hours: who used the cards, who held them idle, and who waited", report, (
        argument("--since", "TIME", "how long ago it begins, such as 12h; 7d unless given"),
        argument("--by", "WHAT", "user, notebook, model, card, time, or waits: who waited for whom", "report"),
        switch("--text", "a short text, fit for a mail"),
        switch("--csv", "the table for a spreadsheet"),
    ), reads=True),
    Verb("fragmentation", "memory that the allocators reserve and cannot use",
        lambda rt, args: rt.allocator_maps() if args.map else rt.fragmentation(),
        (switch("--map", "drawn: every segment, and its blocks"),), reads=True),
    Verb("health", "one line about the fullest device", reads=True),
    Verb("alerts", "problems, who knows of them, and whom gpu console, serve and exporter tell", alerts, ALERTS,
        places=(CLI,)),
    Verb("plan", "dry run: memory a model needs, and which models would be evicted", arguments=(
        argument("name", "NAME|SIZE|PATH",
            "a model, a notebook (FILE.ipynb), a size such as 8GiB, a directory, a .gguf file, or a hub id", "held"),
        SOURCE, *DESCRIPTION, TIMEOUT,
    ), reads=True),
    Verb("backtest", "replays a history with other policies, cards and RAM", backtest, HISTORY,
        needs_runtime=False, reads=True),
    Verb("why", "the last decisions about a model or notebook; without NAME, about this one", why,
        (
            HELD,
            switch("--replay", "decides its recorded decisions again; NAME may be a number"),
            switch("--oom", "why this notebook's last cell that ran out of memory did so"),
        ), reads=True),
    Verb("load", "registers a model and loads it", arguments=(NEW_NAME, SOURCE, *DESCRIPTION, TIMEOUT),
        places=(MAGIC,)),
    Verb("register", "makes a model known by a name; nothing is loaded", register, (NEW_NAME, SOURCE, *DESCRIPTION),
        places=(MAGIC,)),
    Verb("forget", "frees a model of this notebook, and its name", forget, (NAME,), places=(MAGIC,)),
    Verb("preload", "loads a model onto its device before it is needed", arguments=(LOADABLE, TIMEOUT)),
    Verb("evict", "moves an idle model off its device, to RAM if there is space", evict, (
        HELD, TIMEOUT,
        switch("--drop", "out of RAM too, if its source has the same weights"),
        switch("--all-idle", "every idle model, instead of NAME"),
        switch("--lost", "NAME is the pid of a process that may have ended: show what it holds"),
        switch("--force", "with --lost: it has ended, so end its leases"),
    )),
    Verb("cancel", "ends a request's wait for memory: its cell gets an error that names you",
        arguments=(WAITING, TIMEOUT)),
    Verb("restore", "moves a model, or a notebook's own memory, from RAM back to its device",
        lambda rt, args: replace(rt.restore(args.name), verb="restore"), (LOADABLE,)),
    Verb("move", "moves an idle, loaded model to another card, or over several", arguments=(
        NAME,
        argument("device", "DEVICE", "where to, such as cuda:1, or cuda:0,1 for both", "devices"), TIMEOUT,
    )),
    Verb("pin", "keeps a model on its device until it is unpinned", arguments=(NAME,)),
    Verb("unpin", "allows a pinned model to be evicted again", arguments=(NAME,)),
    Verb("park", "moves what a notebook's own code holds to RAM, until a cell needs it",
        arguments=(WHO, BY_DRIVER, switch("--yes", "with --checkpoint: its hazards are known to you")), reads=True),
    Verb("hibernate", "moves a notebook's memory to its disk, off device and RAM, until a cell needs it",
        arguments=(WHO,)),
    Verb("unpark", "brings a parked notebook's memory back to its device", arguments=(WHO, BY_DRIVER)),
    Verb("drain", "grants no new lease on a card, and moves its idle models away", arguments=(
        argument("device", "DEVICE", "a card, such as cuda:1", "devices"),
        switch("--undo", "use it again"), TIMEOUT,
    )),
    Verb("defrag", "releases cached, unused device memory: of all processes, or of one",
        arguments=(PROCESS, TIMEOUT)),
    Verb("next", "the waiting cells' models: where each one is, and what is loaded ahead",
        lambda rt, args: rt.schedule(), places=(MAGIC,), reads=True),
    Verb("who", "which variable, output or error of a notebook holds device memory", arguments=(WHO,), reads=True),
    Verb("free", "releases outputs, the last error and caches; or deletes a variable",
        arguments=(argument("name", "NAME", "only this variable", "variables", nargs="?"),), places=(MAGIC,)),
    Verb("apply", "adds the models of files to the catalogue: all of them, or none",
        lambda rt, args: apply(rt, args.file), (
        argument(*("--file -f", "FILE", "YAML or JSON; - for standard input; may be repeated", "files"), required=True,
            action="append"),
    ), needs_runtime=False),
    Verb("catalog", "the models of the catalogue", list_catalogue, needs_runtime=False, reads=True),
    Verb("inspect", "a model's entry in the catalogue, in a form that apply accepts",
        lambda rt, args: catalogue(rt).inspect(args.name, "" if args.json else args.format),
        (CATALOG_NAME, argument("--format", "F", "yaml or json", "formats", choices=["yaml", "json"], default="yaml")),
        needs_runtime=False, reads=True),
    Verb("delete", "removes a model from the catalogue; if it is loaded, it stays loaded", arguments=(CATALOG_NAME,)),
    Verb("doctor", "one report to paste: versions, drivers, devices, settings", doctor,
        needs_runtime=False, reads=True),
    Verb("config", "every setting, its value and its source", config,
        (argument("--preset", "SIZE", "the settings advised for a card: 24GB or more, 16GB, 8GB, 4GB", "presets"),),
        needs_runtime=False, reads=True),
    Verb("console", "the operator's console: live in a notebook, served from a terminal",
        arguments=(
            HOST,
            argument("--port", "N", "the port; else the first free one from 8211", type=port_number), SOCKET,
            switch("--read-only", "nobody may act"),
            switch("--no-browser", "open no browser"), OF_FLEET,
        ), needs_runtime=False, plain_in_notebook=True, reads=True),
    Verb("exporter", "figures of this host for Prometheus at /metrics, as gpu serve and gpu console have them too",

        arguments=(HOST, argument("--port", "N", "the port; 9835 unless given", type=port_number), SOCKET),
        places=(CLI,), needs_runtime=False),
    Verb("serve", "models over HTTP: the console, /v1/*, /memory/* and /metrics on one port",
        arguments=(
            HOST,
            argument("--port", "N", "the port; 8210 unless given", type=port_number), SOCKET,
            switch("--read-only", "nobody may act, and no model is called"), LOG_LEVEL, OF_FLEET,
        ), places=(CLI,), needs_runtime=False),
    Verb("mcp", "what an agent may ask and do, over the Model Context Protocol on standard input and output",
        arguments=(switch("--read-only", "without the tools that act"),), places=(CLI,), needs_runtime=False),
    Verb("keys", "keys for programs that call `gpu serve`: models, importance, limits", keys, KEYS, places=(CLI,),
        needs_runtime=False),
    Verb("autoload", "lets every new kernel of this environment load gpu by itself",
        lambda rt, args: autoload.write_autoload(remove=args.remove),
        (switch("--remove", "new kernels no longer load it"),), places=(CLI,), needs_runtime=False),
    Verb("uninstall", "lists what gpu-console wrote for this user, and removes it; asks first", uninstall,
        (
            argument("--prefix", "DIR", "an environment that has lost the package already", "files"),
            switch("--yes", "removes it without a question"),
        ), places=(CLI,), needs_runtime=False),
    Verb("ledger", "sets up a ledger that a group of users shares; for the operator, as root", ledger, LEDGER,
        places=(CLI,), needs_runtime=False),
    Verb("box", "one installation for every kernel of the machine; for the operator, as root", box, BOX,
        places=(CLI,), needs_runtime=False),
    Verb("fleet", "many hosts: one bar for each", fleet, FLEET, needs_runtime=False),
    Verb("help", "this help, or the help of one verb or error",
        arguments=(argument("verb", "VERB", "a verb, or an error's name", "verbs", nargs="?"),),
        needs_runtime=False, reads=True),
)  # fmt: skip
VERBS: dict[str, Verb] = {verb.name: verb for verb in _TABLE}

CELL = (  # the arguments of `%%gpu`
    argument("size", "SIZE", "memory that the cell needs, such as 8GiB", nargs="?"),
    argument(
        "--model", "M", "hold this model while the cell runs, under the name `model`", "models"
    ),
    IMPORTANCE_OPTION,
    TIMEOUT,
    switch("--retry", "run the cell once more after an out-of-memory error, if room was made"),
)
CELL_SYNOPSIS = " ".join([f"%{MAGIC}", *typed(CELL)])

# -- reading and explaining the table ------------------------------------------------------------


def verbs(place: str) -> Iterator[Verb]:
    """The verbs that can be typed in `place`, which is MAGIC or CLI."""
    return (verb for verb in VERBS.values() if place in verb.places)


HELP = ("-h", "--help")


def typed_verb(words: Sequence[str], place: str) -> tuple[Verb, list[str], bool]:
    """The verb of the typed `words`, the words after it, and whether only its help is wanted. Raises UnknownVerb.

    Without a verb it is `status`, and `help` after one of HELP.
    """
    if words and words[0] in HELP:
        words = ["help", *words[1:]]
    elif not words or words[0].startswith("-"):
        words = ["status", *words]
    return find(words[0], place), list(words[1:]), any(word in HELP for word in words[1:])


def find(name: str, place: str) -> Verb:
    """The verb called `name` that works in `place`. Raises UnknownVerb, which suggests verbs like `name`."""
    verb = VERBS.get(name)
    if verb is not None and place in verb.places:
        return verb
    if verb is not None:
        where, prompt = ("a notebook", MAGIC) if MAGIC in verb.places else ("a terminal", CLI)
        raise UnknownVerb(
            f"{name} ({verb.doc}) works in {where} only:  {verb.synopsis(prompt)}",
            verb=name,
            nearest="",
        )
    found = _suggested(name, place)
    hint = f"Did you mean {' or '.join(found)}? " if found else ""
    lines = [f"\n  {place} {near:10}{VERBS[near].doc}" for near in found] if len(found) > 1 else []
    raise UnknownVerb(
        f"no verb is called {quoted(name)}. {hint}All of them:  {place} help{''.join(lines)}",
        verb=name,
        nearest=found[0] if found else "",
    )


def _suggested(name: str, place: str) -> list[str]:
    """The verbs of `place` that are probably meant by `name`, which is not a verb."""
    known = [verb.name for verb in verbs(place)]
    meant = [verb for verb in MEANINGS.get(name.lower(), ()) if verb in known]
    return meant or difflib.get_close_matches(name[:MOST_QUOTED].lower(), known, n=1, cutoff=0.5)


def typed_in(place: str, text: str) -> str:
    """The `text` of an error or a hint, with each `%gpu VERB` in the form that `place` needs.

    >>> typed_in(CLI, "Watch:  %gpu status"), typed_in(CLI, "Load one:  %gpu load NAME")
    ('Watch:  gpu status', 'Load one, in a notebook:  %gpu load NAME')
    """
    if place == MAGIC:
        return text

    def in_terminal(found: re.Match[str]) -> str:
        """The text that replaces the `%gpu VERB` of the match `found`."""
        colon, name = found[1] or "", found[2]
        if name in VERBS and CLI in VERBS[name].places:
            return f"{colon}{CLI} {name}"
        notebook_only = ", in a notebook" if colon.startswith(":") else ""
        return f"{notebook_only}{colon}{MAGIC} {name}"

    return re.sub(r"(:\s+)?(?<!%)(?<!notebook: )(?<!notebook:  )%gpu (\w+)", in_terminal, text)


def printed(verb: str, value: Any, rt: Any, subject: str = "") -> str:
    """What a terminal shows of the result `value` of a `verb`, after which `subject` was typed.

    An empty table becomes a hint on what to type.
    """
    from .rendering import render

    value = render.with_titles(verb, value, rt)
    if render.is_frame(value) and verb == "who":
        return repr(value)  # with its sums
    if render.is_frame(value):
        return render.frame_text(value) if len(value) else typed_in(CLI, render.nothing(verb, CLI))
    around = rt.status() if isinstance(value, Plan) or verb == "why" else None
    text = str(render.shown(verb, value, subject=subject, around=around, prompt=CLI))
    return typed_in(CLI, text) if isinstance(value, Outcome) else text


def overview(place: str) -> str:
    """All verbs of `place`, each in one line, and the options that work with every verb."""
    lines = [(verb.synopsis(place, short=True), verb.doc) for verb in verbs(place)]
    lines[0] = (f"{place} [status]", lines[0][1])
    everywhere = "--json gives JSON"
    if place == MAGIC:
        lines.append(
            (f"%{MAGIC} [SIZE] [options]", "reserves memory for the cell; reports peak and delta")
        )
        everywhere += (
            ", -o NAME also stores the answer under a name, and a `;` at the end hides the answer"
        )
    width = max(len(left) for left, _ in lines)
    text = "\n".join(f"  {left:{width}}  {right}" for left, right in lines)
    return f"{text}\n\nEverywhere: {everywhere}.\nMore about a verb:  {place} help VERB"


def details(verb: Verb, place: str) -> str:
    """The synopsis of `verb` in `place`, its description, and its arguments."""
    lines = [verb.synopsis(place), f"  {verb.doc}"]
    for part in verb.takes(place):
        word = ", ".join(part.flags) if part.is_option else part.usage
        lines.append(f"    {word:12}  {part.options['help']}")
    return "\n".join(lines)


def help_text(name: str | None, place: str) -> str:
    """The help of the verb or of the error called `name`; without one, of all verbs. Raises UnknownVerb."""
    if not name:
        return overview(place)
    return error_help.page(name, place) or details(find(name, place), place)


def fill(parser: Any, arguments: Iterable[Argument]) -> Any:
    """Adds these `arguments` to `parser`, and returns the `parser`."""
    # Else `-3GiB` is an unknown option, and the error says that the size is missing.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    for part in arguments:
        parser.add_argument(*part.flags, **part.options)
    return parser


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values in `args` that have one of the `names`. Names without a value are left out."""
    values = {name: getattr(args, name) for name in names}
    # A test `value in (None, False)` would also be true for 0.0. But a time-out of 0 is a value.
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }
