"""The verbs: one table that feeds the magic, the `gpu` command, and the help of both.

A row says what a verb takes and what it calls on the Runtime. How the answer looks is for the faces to decide.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from .errors import AlreadyRegistered, BadSetting, GpuError, LoadFailed, UnknownVerb
from .facts import IMPORTANCE, Outcome, parse_importance
from .units import is_source, parse_seconds

MAGIC, CLI = "%gpu", "gpu"  # where a verb can be typed, as it is typed there


class Argument(NamedTuple):
    """One argument, as `argparse` takes it, and what Tab offers for it."""

    flags: tuple[str, ...]
    options: dict[str, Any]
    completes: str = ""  # "models", "verbs", "presets" or "files"; else its choices, if it has any

    @property
    def is_option(self) -> bool:
        return self.flags[0].startswith("-")

    @property
    def takes_value(self) -> bool:
        return self.options.get("action") != "store_true"


class Verb(NamedTuple):
    """What can be said to the runtime, in one word and its arguments."""

    name: str
    doc: str
    act: Callable[[Any, argparse.Namespace], Any]  # (runtime, arguments) -> the answer
    arguments: tuple[Argument, ...] = ()
    places: tuple[str, ...] = (MAGIC, CLI)
    needs_runtime: bool = True
    loads: bool = False  # may take long: faces show progress through `args.progress`
    in_notebook: Callable[[Any], Any] | None = None  # what it does there instead, without arguments

    def takes(self, place: str) -> tuple[Argument, ...]:
        """The arguments that can be typed in that place."""
        return () if place == MAGIC and self.in_notebook else self.arguments

    def synopsis(self, place: str, short: bool = False) -> str:
        """The verb as it is typed, optional things in brackets; `short` does not spell out many options."""
        words = [place, self.name]
        arguments = self.takes(place)
        short = short and sum(argument.is_option for argument in arguments) > 2
        for argument in arguments:
            if short and argument.is_option:
                continue
            word = argument.flags[-1] if argument.is_option else argument.options["metavar"]
            if argument.is_option and argument.takes_value:
                word += (
                    f" {argument.options.get('metavar', argument.flags[-1].lstrip('-').upper())}"
                )
            optional = (
                argument.is_option and not argument.options.get("required")
            ) or argument.options.get("nargs") == "?"
            words.append(f"[{word}]" if optional else word)
        return " ".join([*words, "[options]"] if short else words)


def fill(parser: Any, arguments: Iterable[Argument]) -> Any:
    """The parser, able to read these arguments."""
    for argument in arguments:
        parser.add_argument(*argument.flags, **argument.options)
    parser.set_defaults(progress=None)
    return parser


def importance(text: str) -> str | int:
    """An importance by its name or its number, as the Runtime takes it."""
    try:
        number = parse_importance(text, least=1)
    except BadSetting:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(IMPORTANCE)}, nor a number above 0"
        ) from None
    return text if text in IMPORTANCE else number


def seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rows(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The arguments that were really typed, so that the Runtime's own defaults hold for the others."""
    return {name: value for name in names if (value := getattr(args, name)) not in (None, False)}


def port_number(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def count(text: str) -> int:
    if not text.replace("_", "").isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _plan(rt: Any, args: argparse.Namespace) -> Any:
    given = _given(args, "sequences", "dtype")
    if args.context:
        given["context_length"] = args.context
    return rt.plan(args.name, **given)


def _load(rt: Any, args: argparse.Namespace) -> Any:
    known = {*(spec.name for spec in rt.specs()), *rt.catalog_names()}
    options = _given(args, "backend", "size", "importance", "keep")
    source = args.source
    if source is None and options and args.name in rt.catalog_names():
        raise AlreadyRegistered(
            args.name,
            f"{args.name} stands in the catalogue, with a word of its own on that.\n"
            f"  Change it there:  %gpu apply -f FILE      or give its SOURCE here too",
        )
    if source is None and args.name not in known and is_source(args.name):
        source = args.name
    if source is not None or options:
        rt.register(args.name, source, **options)
    try:
        return _as("load", rt.preload(args.name, progress=args.progress, **_given(args, "timeout")))
    except LoadFailed:
        if args.name not in known:
            rt.forget(
                args.name
            )  # so that the next try, with the right path, is not told that the name is taken
        raise


def _as(verb: str, outcome: Outcome) -> Outcome:
    """The outcome under the verb that was typed."""
    return replace(outcome, verb=verb)


def _evictions(rt: Any, args: argparse.Namespace) -> Any:
    return (rt.events if args.all else rt.evictions)(**_given(args, "limit"))


def _fragmentation(rt: Any, args: argparse.Namespace) -> Any:
    if not args.map:
        return rt.fragmentation()
    from gpu_runtime.rendering.allocator_map import mapped

    return mapped(rt.allocator_maps(), rt.status())


def _doctor(rt: Any, args: argparse.Namespace) -> Any:
    from .owner import doctor

    return rt.doctor() if rt is not None else doctor.examine()


def _config(rt: Any, args: argparse.Namespace) -> Any:
    from . import settings

    if args.preset:
        return settings.preset(args.preset)
    return (rt.settings if rt is not None else settings.Settings.load()).sources()


def _catalog(rt: Any) -> Any:
    """Whatever answers for the catalogue: the runtime, or, where none is open, the catalogue itself."""
    from . import settings
    from .catalog.store import Catalog

    return rt if rt is not None else Catalog(settings.Settings.load())


def _listed(rt: Any, args: argparse.Namespace) -> Any:
    from .owner import frames

    return rt.catalog() if rt is not None else frames.catalog(_catalog(None).specs())


def _inspect(rt: Any, args: argparse.Namespace) -> Any:
    return _catalog(rt).inspect(args.name, "" if args.json else args.format)


def _console(rt: Any, args: argparse.Namespace) -> Any:
    try:
        from gpu_panels import server
    except ImportError as error:
        raise GpuError(
            f"the console needs {error.name}, which is not installed.\n"
            "  Install it:  pip install 'gpu-console[console]'"
        ) from None
    server.run(
        host=args.host,
        port=args.port,
        socket_path=args.socket,
        read_only=args.read_only,
        browser=not args.no_browser,
    )
    return "The console has ended."


def _serve(rt: Any, args: argparse.Namespace) -> Any:
    try:
        from .serving import server
    except ImportError as error:
        raise GpuError(
            f"serving needs {error.name}, which is not installed.\n"
            "  Install it:  pip install 'gpu-console[serve,console]'"
        ) from None
    from . import runtime

    rt = runtime()
    try:
        server.run(
            rt, host=args.host, port=args.port, socket_path=args.socket, read_only=args.read_only
        )
    finally:
        rt.close()
    return "gpu serve has ended."


def _ledger(rt: Any, args: argparse.Namespace) -> Any:
    from . import settings
    from .ledgers import setup

    return setup.init(args.directory, args.group, settings.Settings.load().gpu_config_file)


NAME = Argument(
    ("name",), {"metavar": "NAME", "help": "a model; another process's as NAME@PID"}, "models"
)
TIMEOUT = Argument(
    ("--timeout",), {"metavar": "SECONDS", "type": seconds, "help": "how long to wait at most"}
)
IMPORTANCES = Argument(
    ("--importance",),
    {"metavar": "I", "type": importance, "help": "urgent, high, normal, low, batch, or a number"},
    "importances",
)
SIZE = {"metavar": "SIZE", "help": "bytes, such as 8GiB"}

VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb(
            "status",
            "how full the devices are, who holds what, who waits",
            lambda rt, args: rt.status_all() if args.all else rt.status(),
            (
                Argument(
                    ("--all",),
                    {"action": "store_true", "help": "every host that shares the ledger"},
                ),
            ),
        ),
        Verb(
            "models",
            "models: where they lie, how large, how long idle",
            lambda rt, args: rt.models(),
        ),
        Verb("leases", "who holds what on which device", lambda rt, args: rt.leases()),
        Verb(
            "evictions",
            "what left its device, when, and why",
            _evictions,
            (
                Argument(
                    ("--all",),
                    {"action": "store_true", "help": "also loads, restores and refusals"},
                ),
                Argument(("--limit",), {"metavar": "N", "type": rows, "help": "only the last N"}),
            ),
        ),
        Verb(
            "fragmentation",
            "what the allocators hold and cannot use",
            _fragmentation,
            (
                Argument(
                    ("--map",),
                    {
                        "action": "store_true",
                        "help": "drawn: every segment, and how it is cut into blocks",
                    },
                ),
            ),
        ),
        Verb("health", "one line on the fullest device", lambda rt, args: rt.health()),
        Verb(
            "plan",
            "what a model needs, and what using it would do; doing nothing",
            _plan,
            (
                Argument(
                    ("name",),
                    {
                        "metavar": "NAME|SIZE|PATH",
                        "help": "a model, a size such as 8GiB, a directory, a .gguf "
                        "file, or a hub id",
                    },
                    "models",
                ),
                Argument(
                    ("--context",),
                    {"metavar": "TOKENS", "type": count, "help": "with room for so long a context"},
                ),
                Argument(
                    ("--sequences",),
                    {"metavar": "N", "type": count, "help": "… and for so many at once"},
                ),
                Argument(("--dtype",), {"metavar": "D", "help": "as converted, such as bfloat16"}),
            ),
        ),
        Verb(
            "why",
            "the last decisions on a model, in sentences",
            lambda rt, args: rt.why(args.name),
            (NAME,),
        ),
        Verb(
            "load",
            "registers a model and loads it",
            _load,
            (
                Argument(("name",), {"metavar": "NAME", "help": "what to call it"}, "models"),
                Argument(
                    ("source",),
                    {"metavar": "SOURCE", "nargs": "?", "help": "a directory, a file or a hub id"},
                    "files",
                ),
                Argument(
                    ("--backend",),
                    {
                        "metavar": "B",
                        "help": "torch, transformers or fake; else found from the source",
                    },
                    "backends",
                ),
                Argument(("--size",), SIZE),
                IMPORTANCES,
                Argument(("--keep",), {"action": "store_true", "help": "never evict it"}),
                TIMEOUT,
            ),
            places=(MAGIC,),
            loads=True,
        ),
        Verb(
            "preload",
            "brings a model onto its device before it is needed",
            lambda rt, args: rt.preload(
                args.name, progress=args.progress, **_given(args, "timeout")
            ),
            (NAME, TIMEOUT),
            loads=True,
        ),
        Verb(
            "evict",
            "moves an idle model off its device, to RAM where there is room",
            lambda rt, args: rt.evict(args.name, **_given(args, "timeout")),
            (NAME, TIMEOUT),
        ),
        Verb(
            "restore",
            "brings a model back from RAM",
            lambda rt, args: _as("restore", rt.restore(args.name)),
            (NAME,),
        ),
        Verb(
            "move",
            "carries an idle model to another card, or over several, while it lives",
            lambda rt, args: rt.move(args.name, args.device, **_given(args, "timeout")),
            (
                NAME,
                Argument(
                    ("device",),
                    {"metavar": "DEVICE", "help": "where to, such as cuda:1, or cuda:0,1 for both"},
                    "devices",
                ),
                TIMEOUT,
            ),
        ),
        Verb(
            "pin",
            "keeps a model on its device whatever comes",
            lambda rt, args: rt.pin(args.name),
            (NAME,),
        ),
        Verb(
            "unpin",
            "lets a pinned model step aside again",
            lambda rt, args: rt.unpin(args.name),
            (NAME,),
        ),
        Verb(
            "drain",
            "takes no new leases on a card, and moves what is idle there away",
            lambda rt, args: rt.drain(args.device, **_given(args, "undo", "timeout")),
            (
                Argument(
                    ("device",), {"metavar": "DEVICE", "help": "a card, such as cuda:1"}, "devices"
                ),
                Argument(("--undo",), {"action": "store_true", "help": "let it take leases again"}),
                TIMEOUT,
            ),
        ),
        Verb(
            "defrag",
            "gives cached, unused device memory back: everybody's, or one process's",
            lambda rt, args: rt.defrag(args.process or "", **_given(args, "timeout")),
            (
                Argument(
                    ("process",),
                    {
                        "metavar": "PROCESS",
                        "nargs": "?",
                        "help": "only this one: its number, or NAME@PID, a model that it has",
                    },
                    "models",
                ),
                TIMEOUT,
            ),
        ),
        Verb(
            "apply",
            "puts the models of a file in the catalogue: all of them, or none",
            lambda rt, args: _catalog(rt).apply(args.file),
            (
                Argument(
                    ("--file", "-f"),
                    {
                        "metavar": "FILE",
                        "required": True,
                        "help": "YAML or JSON; - for standard input",
                    },
                    "files",
                ),
            ),
            needs_runtime=False,
        ),
        Verb("catalog", "the models of the catalogue", _listed, needs_runtime=False),
        Verb(
            "inspect",
            "what the catalogue says of a model, as apply takes it again",
            _inspect,
            (
                Argument(
                    ("name",), {"metavar": "NAME", "help": "a model of the catalogue"}, "catalog"
                ),
                Argument(
                    ("--format",),
                    {
                        "metavar": "F",
                        "choices": ["yaml", "json"],
                        "default": "yaml",
                        "help": "yaml or json",
                    },
                    "formats",
                ),
            ),
            needs_runtime=False,
        ),
        Verb(
            "delete",
            "takes a model out of the catalogue; where it is loaded it stays",
            lambda rt, args: rt.delete(args.name),
            (
                Argument(
                    ("name",), {"metavar": "NAME", "help": "a model of the catalogue"}, "catalog"
                ),
            ),
        ),
        Verb(
            "doctor",
            "one report to paste: versions, drivers, devices, ledger, settings, last refusals",
            _doctor,
            needs_runtime=False,
        ),
        Verb(
            "config",
            "every setting, its value and where it came from",
            _config,
            (
                Argument(
                    ("--preset",),
                    {
                        "metavar": "SIZE",
                        "help": "the settings advised for a card: 24GB, 16GB, 8GB, 4GB",
                    },
                    "presets",
                ),
            ),
            needs_runtime=False,
        ),
        Verb(
            "console",
            "the operator's console: live in a notebook; from a terminal it is served",
            _console,
            (
                Argument(
                    ("--host",),
                    {
                        "metavar": "HOST",
                        "default": "127.0.0.1",
                        "help": "the address to listen on; 127.0.0.1 unless given",
                    },
                ),
                Argument(
                    ("--port",),
                    {
                        "metavar": "N",
                        "type": port_number,
                        "help": "the port; the first free one from 8211 unless given",
                    },
                ),
                Argument(
                    ("--socket",),
                    {"metavar": "PATH", "help": "a Unix socket in their place, for you alone"},
                    "files",
                ),
                Argument(("--read-only",), {"action": "store_true", "help": "nobody may act"}),
                Argument(("--no-browser",), {"action": "store_true", "help": "open no browser"}),
            ),
            needs_runtime=False,
            in_notebook=lambda rt: rt.console(),
        ),
        Verb(
            "serve",
            "models over HTTP: the console, /v1/*, /memory/* and /metrics on one port",
            _serve,
            (
                Argument(
                    ("--host",),
                    {
                        "metavar": "HOST",
                        "default": "127.0.0.1",
                        "help": "the address to listen on; 127.0.0.1 unless given",
                    },
                ),
                Argument(
                    ("--port",),
                    {"metavar": "N", "type": port_number, "help": "the port; 8210 unless given"},
                ),
                Argument(
                    ("--socket",),
                    {"metavar": "PATH", "help": "a Unix socket in their place, for you alone"},
                    "files",
                ),
                Argument(
                    ("--read-only",),
                    {"action": "store_true", "help": "nobody may act, and no model is called"},
                ),
            ),
            places=(CLI,),
            needs_runtime=False,
        ),
        Verb(
            "ledger",
            "sets up a ledger that a group of users shares; for the operator, as root",
            _ledger,
            (
                Argument(
                    ("action",),
                    {"metavar": "init", "choices": ["init"], "help": "the one thing to do with it"},
                ),
                Argument(
                    ("--group",),
                    {"metavar": "G", "required": True, "help": "the users' group, such as gpu"},
                ),
                Argument(
                    ("directory",),
                    {
                        "metavar": "DIR",
                        "help": "where it shall lie, such as /var/lib/gpu-console/ledger",
                    },
                    "files",
                ),
            ),
            places=(CLI,),
            needs_runtime=False,
        ),
        Verb(
            "help",
            "this help, or a verb's own",
            lambda rt, args: args.verb,
            (Argument(("verb",), {"metavar": "VERB", "nargs": "?", "help": "a verb"}, "verbs"),),
            needs_runtime=False,
        ),
    )
}

CELL = (
    Argument(
        ("size",), {**SIZE, "nargs": "?", "help": "the room that the cell needs, such as 8GiB"}
    ),
    Argument(
        ("--model",),
        {"metavar": "M", "help": "hold this model while the cell runs; it is called `model` there"},
        "models",
    ),
    IMPORTANCES,
    TIMEOUT,
)


def verbs(place: str) -> Iterator[Verb]:
    """The verbs that can be typed in that place."""
    return (verb for verb in VERBS.values() if place in verb.places)


def find(name: str, place: str) -> Verb:
    """The verb of that name. Raises UnknownVerb, which suggests the nearest."""
    verb = VERBS.get(name)
    if verb is not None and place in verb.places:
        return verb
    if verb is not None:
        where, there = ("a notebook", MAGIC) if MAGIC in verb.places else ("a terminal", CLI)
        raise UnknownVerb(
            f"{name} works in {where} only:  {verb.synopsis(there)}", verb=name, nearest=""
        )
    close = difflib.get_close_matches(
        name.lower(), [verb.name for verb in verbs(place)], n=1, cutoff=0.5
    )
    nearest = close[0] if close else ""
    hint = f"Did you mean {nearest}? " if nearest else ""
    raise UnknownVerb(
        f"no verb is called {name!r}. {hint}All of them:  {place} help", verb=name, nearest=nearest
    )


def typed_in(place: str, words: str) -> str:
    """The words of an error or a hint, with what they say to type as it is typed in that place.

    >>> typed_in(CLI, "Watch:  %gpu status"), typed_in(CLI, "Load one:  %gpu load NAME")
    ('Watch:  gpu status', 'Load one, in a notebook:  %gpu load NAME')
    """
    if place == MAGIC:
        return words

    def typed(found: re.Match[str]) -> str:
        colon, name = found[1] or "", found[2]
        if name in VERBS and CLI in VERBS[name].places:
            return f"{colon}{CLI} {name}"
        return f"{', in a notebook' if colon.startswith(':') else ''}{colon}{MAGIC} {name}"

    return re.sub(r"((?<!notebook):\s+)?(?<!%)%gpu (\w+)", typed, words)


def overview(place: str) -> str:
    """All verbs of that place, a line each."""
    lines = [(verb.synopsis(place, short=True), verb.doc) for verb in verbs(place)]
    lines[0] = (f"{place} [status]", lines[0][1])
    if place == MAGIC:
        lines.append(
            (
                "%%gpu [SIZE] [--model M] [--importance I]",
                "runs the cell under a lease; reports peak and delta",
            )
        )
    width = max(len(left) for left, _ in lines)
    text = "\n".join(f"  {left:{width}}  {right}" for left, right in lines)
    ways = "--json gives JSON"
    if place == MAGIC:
        ways += ", -o NAME also stores the answer under a name, and a `;` at the end keeps it quiet"
    return f"{text}\n\nEverywhere: {ways}.\nMore on a verb:  {place} help VERB"


def details(verb: Verb, place: str) -> str:
    """One verb's synopsis, what it does, and its arguments."""
    lines = [verb.synopsis(place), f"  {verb.doc}"]
    for argument in verb.takes(place):
        word = ", ".join(argument.flags) if argument.is_option else argument.options["metavar"]
        lines.append(f"    {word:14}{argument.options.get('help', '')}")
    return "\n".join(lines)
