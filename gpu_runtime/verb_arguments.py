"""A verb and its arguments: their description, their conversion from text, and short constructors.

The table of verbs is in `verbs.py`. Nothing here calls a runtime.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .arguments import FIELDS, MOST_DAYS, SEQUENCES, TOKENS, TRUTH, TYPED
from .arguments import IMPORTANCE as IMPORTANCE_RULE
from .errors import BadSize
from .facts import IMPORTANCE
from .safe_text import printable, quoted
from .units import parse_seconds

LAST_PORT = 65535
MOST_NUMBER = 2**31 - 1
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
        flag = self.flags[-1]
        if not self.takes_value:
            return flag
        return f"{flag} {self.options.get('metavar', flag.lstrip('-').upper())}"


class Verb(NamedTuple):
    """One command to the runtime: a word, its arguments, and the call that carries it out."""

    name: str
    doc: str
    act: Act | None = None  # None: the runtime's method of the verb's name, with its arguments
    arguments: tuple[Argument, ...] = ()
    places: tuple[str, ...] = (MAGIC, CLI)
    needs_runtime: bool = True
    has_own_code: bool = False  # the magic and the command have code of their own
    plain_in_notebook: bool = False  # has arguments in a terminal only

    def answer(self, rt: Any, args: argparse.Namespace) -> Any:
        """Carries the verb out with the parsed `args`, and returns data; prints nothing.

        `rt` is the runtime. It is None if no runtime is open and the verb needs none.
        """
        if self.act is not None:
            return self.act(rt, args)
        positionals = [getattr(args, one.name) for one in self.arguments if not one.is_option]
        options = given(args, *(one.name for one in self.arguments if one.is_option))
        return getattr(rt, self.name)(*positionals, **options)

    def takes(self, place: str) -> tuple[Argument, ...]:
        """The arguments that can be typed in `place`, which is MAGIC or CLI."""
        return () if place == MAGIC and self.plain_in_notebook else self.arguments

    def synopsis(self, place: str, short: bool = False) -> str:
        """The verb as it is typed in `place`, with optional arguments in brackets.

        If `short` is true, more than two options are written as `[options]`.
        """
        arguments = self.takes(place)
        options = [argument for argument in arguments if argument.is_option]
        folded = short and len(options) > 2
        if folded:
            arguments = tuple(argument for argument in arguments if not argument.is_option)
        words = [f"[{one.usage}]" if one.is_optional else one.usage for one in arguments]
        return " ".join([place, self.name, *words, *(["[options]"] if folded else [])])


# -- constructors: one line of the table for each argument ---------------------------------------


def positional(name: str, metavar: str, help: str, completes: str = "", **options: Any) -> Argument:
    """An argument that is recognised by its position.

    `name` is the argument's attribute in the parsed arguments, `metavar` its name in a synopsis,
    and `help` its line in the help. `completes` names the words that the Tab key offers. `options`
    are further keywords of `argparse`.
    """
    return Argument((name,), {"metavar": metavar, "help": help, **options}, completes)


def option(flags: str, metavar: str, help: str, completes: str = "", **options: Any) -> Argument:
    """An option with a value, which the help shows as `metavar`. Spaces separate its `flags`.

    `help` is the option's line in the help. `completes` names the values that the Tab key offers.
    `options` are further keywords of `argparse`.
    """
    return Argument(tuple(flags.split()), {"metavar": metavar, "help": help, **options}, completes)


def switch(flag: str, help: str) -> Argument:
    """An option without a value, True if `flag` is typed. `help` is the option's help line."""
    return Argument((flag,), {"action": "store_true", "help": help})


# -- functions that convert typed text into values ------------------------------------------------


def importance(text: str) -> str | int:
    """The importance in `text`: the name of a class, or a number.

    Raises ArgumentTypeError if `text` is neither a name of IMPORTANCE nor a number above 0.
    """
    try:
        number = IMPORTANCE_RULE.in_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if text in IMPORTANCE else number


def seconds(text: str) -> float:
    """A duration in seconds. Raises ArgumentTypeError if `text` is not a duration."""
    try:
        return parse_seconds(text)
    except BadSize as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rows(text: str) -> int:
    """The number of rows in `text`. Raises ArgumentTypeError if it is not a number above 0."""
    return _whole(text, 1, "a number of rows")


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


def count(text: str) -> int:
    """The number in `text`, such as `8_192`. Raises ArgumentTypeError unless it is above 0."""
    return _whole(text.replace("_", ""), 1, "a number above 0")


def port_number(text: str) -> int:
    """A TCP port. Raises ArgumentTypeError if `text` is not a number up to 65535."""
    return _whole(text, 0, "a port", LAST_PORT)


def _whole(text: str, least: int, what: str, most: int = MOST_NUMBER) -> int:
    """The number in `text`. Raises ArgumentTypeError unless it is from `least` to `most`.

    `what` names the expected kind of number in the error.
    """
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not {what}")
    return int(text)


def usage_error(message: str) -> str:
    """A `message` about words that were not understood, shortened and safe to print."""
    return printable(message, MOST_USAGE_ERROR, keep="\n")


# -- arguments that several verbs share ----------------------------------------------------------

NAME = positional("name", "NAME", "a model; another process's as NAME@PID", "models")
HELD = positional(
    "name",
    "NAME",
    "a model; another process's as NAME@PID; or all of a notebook: FILE.ipynb",
    "held",
    nargs="?",
)
LOADABLE = positional(
    "name",
    "NAME",
    "a model; another process's as NAME@PID; or a notebook's own memory: FILE.ipynb",
    "held",
)
WAITING = positional(
    "name", "NAME", "for what it waits; in another process NAME@PID; or a notebook: FILE.ipynb"
)
CATALOG_NAME = positional("name", "NAME", "a model of the catalogue", "catalog")
WHO = positional(
    "who",
    "NOTEBOOK",
    "its file name or process id; without it, this notebook",
    "kernels",
    nargs="?",
)
PROCESS = positional(
    "process",
    "PROCESS",
    "only this one: its pid, FILE.ipynb, or a model that it holds, as NAME@PID",
    "held",
    nargs="?",
)
BY_DRIVER = switch("--checkpoint", "the driver moves any process: NOTEBOOK is its pid")
TIMEOUT = option("--timeout", "SECONDS", "how long to wait at most", type=seconds)
HISTORY = (  # what `backtest` replays, and with what
    option("--days", "N", "the journal's last N days (7)", type=days),
    option("--requests", "FILE", "instead: uses in a CSV file", "files"),
    option("--models", "FILE", "… and their models in another", "files"),
    option("--policy", "P,P", "lru, cost_aware, keep_score"),
    option("--engine", "E,E", "plain, full or bounded"),
    option("--device", "SIZE,SIZE", "cards, such as 80GB,10% of all models"),
    option("--host", "SIZE,SIZE", "host memory, such as 0GB,256GB,50%"),
)
NEW_NAME = positional("name", "NAME", "the name to give it", "models")
SOURCE = positional("source", "SOURCE", "a directory, a file or a hub id", "files", nargs="?")
_CONVERTERS = {IMPORTANCE_RULE: importance, TOKENS: count, SEQUENCES: count}


def _of_field(name: str) -> Argument:
    """The option for the field `name` of a model."""
    rule, typed = FIELDS[name].rule, TYPED[name]
    if rule is TRUTH:
        return switch(typed[0], typed[2])
    more = {"type": _CONVERTERS[rule]} if rule in _CONVERTERS else {}
    return option(*typed, dest=name, **more)


DESCRIPTION = tuple(map(_of_field, TYPED))  # a model, as `plan`, `load` and `register` take it
IMPORTANCE_OPTION = DESCRIPTION[list(TYPED).index("importance")]
HOST = option(
    "--host", "HOST", "the address to listen on; 127.0.0.1 unless given", default="127.0.0.1"
)
SOCKET = option("--socket", "PATH", "a Unix socket instead, for you alone", "files")
OF_FLEET = option(
    "--fleet",
    "ADDRESS",
    "all hosts of a fleet; its head, such as box1:6379, or auto",
    nargs="?",
    const="auto",
)
LOG_LEVEL = option(
    "--log-level",
    "LEVEL",
    "the messages on standard error: debug, info (unless given), warning, error",
    choices=("debug", "info", "warning", "error"),
    default="info",
)


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
    **dict.fromkeys(("ps", "top", "info", "show", "smi", "list", "ls"), ("status", "models")),
    **dict.fromkeys(("log", "logs", "history", "explain"), ("why", "evictions")),
    **dict.fromkeys(("events", "activity", "journal"), ("evictions", "why")),
    **dict.fromkeys(("processes", "procs", "owners", "holders", "notebooks"), ("leases", "status")),
    **dict.fromkeys(("queue", "waiting", "waits"), ("status", "cancel")),
    **dict.fromkeys(("keep", "lock"), ("pin",)),
    **dict.fromkeys(("unlock", "unkeep"), ("unpin",)),
    **dict.fromkeys(("suspend", "sleep", "hibernate", "pause"), ("park", "evict")),
    **dict.fromkeys(("resume", "unsuspend"), ("unpark", "restore")),
    **dict.fromkeys(("estimate", "fit", "fits", "dryrun"), ("plan",)),
    **dict.fromkeys(("vars", "variables", "memory", "mem"), ("who", "leases")),
    **dict.fromkeys(("settings", "env"), ("config",)),
    **dict.fromkeys(("abort", "interrupt", "kill"), ("cancel", "evict")),
}
FLEET = (
    positional(
        "action",
        "ACTION",
        "status (unless given), join, leave, drain HOST, or slots",
        nargs="?",
        choices=["status", "join", "leave", "drain", "slots"],
        default="status",
    ),
    positional("host", "HOST", "the host to drain", nargs="?"),
    switch("--undo", "with drain: take models again"),
    option("--create", "NAME@HOST", "with slots: load a model there"),
    option("--on", "CARDS", "… on these cards, such as cuda:0,1"),
    option("--delete", "NAME@HOST", "with slots: remove it"),
    option("--name", "NAME", "with join: the name of this host"),
    option("--devices", "D", "with join: its cards, such as sim:2x24GiB"),
    option("--ledger", "URL", "with join: its ledger; the machine's unless given"),
    option("--address", "A", "of Ray's head, such as box1:6379", default="auto"),
)

KEYS = (
    positional("action", "ACTION", "add, list or remove", choices=["add", "list", "remove"]),
    positional("name", "NAME", "of the key, such as the program's", nargs="?"),
    option(
        "--role",
        "R",
        "with add: user (calls models; unless given) or viewer",
        choices=("user", "viewer"),
        default="user",
    ),
    option(
        "--models",
        "NAMES",
        "with add: its models, as in qwen*,task:chat; all unless given",
        type=model_names,
        default=("*",),
    ),
    option("--importance", "I", "with add: the highest that its calls can have", type=importance),
    option("--requests", "N", "with add: requests a minute", type=count),
    option("--tokens", "N", "with add: tokens a minute", type=count),
)
LEDGER = (
    positional("action", "init", "the only action", choices=["init"]),
    option("--group", "G", "the users' group, such as gpu", required=True),
    positional(
        "directory",
        "DIR",
        "the ledger's directory, such as /var/lib/gpu-console/ledger",
        "files",
    ),
)


# -- reading -------------------------------------------------------------------------------------


def fill(parser: Any, arguments: Iterable[Argument]) -> Any:
    """Adds these `arguments` to `parser`, and returns the `parser`."""
    for argument in arguments:
        parser.add_argument(*argument.flags, **argument.options)
    return parser


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values in `args` that have one of the `names`. Names without a value are left out."""
    values = {name: getattr(args, name) for name in names}
    # A test `value in (None, False)` would also be true for 0.0. But a time-out of 0 is a value.
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }
