"""The table of verbs, from which the `%gpu` magic, the `gpu` command and their help are made.

To add a magic or a command, add a row: a name, its arguments, and the call on the Runtime. A row
without `act` has its code in `kernel_ext` and `cli.py`. `rendering` shows the results.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from . import verb_acts
from .errors import UnknownVerb
from .safe_text import MOST_QUOTED, quoted
from .verb_arguments import (
    BY_DRIVER,
    CATALOG_NAME,
    CLI,
    DESCRIPTION,
    FLEET,
    HELD,
    HISTORY,
    HOST,
    IMPORTANCE_OPTION,
    KEYS,
    LEDGER,
    LOADABLE,
    LOG_LEVEL,
    MAGIC,
    MEANINGS,
    NAME,
    NEW_NAME,
    OF_FLEET,
    PROCESS,
    SOCKET,
    SOURCE,
    TIMEOUT,
    WAITING,
    WHO,
    Verb,
    given,
    option,
    port_number,
    positional,
    rows,
    switch,
)

# -- the table -----------------------------------------------------------------------------------

_TABLE = (
    Verb(
        "status",
        "how full the devices are, which process holds what, and which requests wait",
        verb_acts.status,
        (
            switch("--all", "every host that shares the ledger"),
            switch("--watch", "in a terminal: a live view, problems first, until Ctrl-C"),
        ),
    ),
    Verb(
        "models",
        "models: where each one is, its size, and how long it is idle",
        lambda rt, args: rt.models(),
    ),
    Verb("leases", "which process holds how much on which device", lambda rt, args: rt.leases()),
    Verb(
        "evictions",
        "models that left their device, when, and why",
        verb_acts.evictions,
        (
            switch("--all", "also loads, restores and refusals"),
            option("--limit", "N", "only the last N", type=rows),
        ),
    ),
    Verb(
        "fragmentation",
        "memory that the allocators reserve and cannot use",
        lambda rt, args: rt.allocator_maps() if args.map else rt.fragmentation(),
        (switch("--map", "drawn: every segment, and its blocks"),),
    ),
    Verb("health", "one line about the fullest device", lambda rt, args: rt.health()),
    Verb(
        "plan",
        "dry run: memory a model needs, and which models would be evicted",
        verb_acts.plan,
        (
            positional(
                "name",
                "NAME|SIZE|PATH",
                "a model, a notebook (FILE.ipynb), a size such as 8GiB, a directory, a .gguf file, or a hub id",
                "held",
            ),
            SOURCE,
            *DESCRIPTION,
            TIMEOUT,
        ),
    ),
    Verb(
        "backtest",
        "replays a history with other policies, cards and RAM",
        verb_acts.backtest,
        HISTORY,
        needs_runtime=False,
    ),
    Verb(
        "why",
        "the last decisions about a model or notebook; without NAME, about this one",
        verb_acts.why,
        (HELD, switch("--replay", "decides its recorded decisions again; NAME may be a number")),
    ),
    Verb(
        "load",
        "registers a model and loads it",
        verb_acts.load,
        (NEW_NAME, SOURCE, *DESCRIPTION, TIMEOUT),
        places=(MAGIC,),
    ),
    Verb(
        "register",
        "makes a model known by a name; nothing is loaded",
        verb_acts.register,
        (NEW_NAME, SOURCE, *DESCRIPTION),
        places=(MAGIC,),
    ),
    Verb(
        "forget",
        "frees a model of this notebook, and its name",
        verb_acts.forget,
        (NAME,),
        places=(MAGIC,),
    ),
    Verb(
        "preload",
        "loads a model onto its device before it is needed",
        verb_acts.preload,
        (LOADABLE, TIMEOUT),
    ),
    Verb(
        "evict",
        "moves an idle model off its device, to RAM if there is space",
        verb_acts.evict,
        (
            HELD,
            TIMEOUT,
            switch("--drop", "out of RAM too, if its source has the same weights"),
            switch("--all-idle", "every idle model, instead of NAME"),
            switch(
                "--lost", "NAME is the pid of a process that may have ended: show what it holds"
            ),
            switch("--force", "with --lost: it has ended, so end its leases"),
        ),
    ),
    Verb(
        "cancel",
        "ends a request's wait for memory: its cell gets an error that names you",
        lambda rt, args: rt.cancel(args.name, **given(args, "timeout")),
        (WAITING, TIMEOUT),
    ),
    Verb(
        "restore",
        "moves a model, or a notebook's own memory, from RAM back to its device",
        verb_acts.restore,
        (LOADABLE,),
    ),
    Verb(
        "move",
        "moves an idle, loaded model to another card, or over several",
        lambda rt, args: rt.move(args.name, args.device, **given(args, "timeout")),
        (
            NAME,
            positional(
                "device", "DEVICE", "where to, such as cuda:1, or cuda:0,1 for both", "devices"
            ),
            TIMEOUT,
        ),
    ),
    Verb(
        "pin",
        "keeps a model on its device until it is unpinned",
        lambda rt, args: rt.pin(args.name),
        (NAME,),
    ),
    Verb(
        "unpin",
        "allows a pinned model to be evicted again",
        lambda rt, args: rt.unpin(args.name),
        (NAME,),
    ),
    Verb(
        "park",
        "moves what a notebook's own code holds to RAM, until a cell needs it",
        lambda rt, args: rt.park(args.who or "", **given(args, "checkpoint", "yes")),
        (WHO, BY_DRIVER, switch("--yes", "with --checkpoint: its hazards are known to you")),
    ),
    Verb(
        "unpark",
        "brings a parked notebook's memory back to its device",
        lambda rt, args: rt.unpark(args.who or "", **given(args, "checkpoint")),
        (WHO, BY_DRIVER),
    ),
    Verb(
        "drain",
        "stops new leases on a card, and moves its idle models away",
        lambda rt, args: rt.drain(args.device, **given(args, "undo", "timeout")),
        (
            positional("device", "DEVICE", "a card, such as cuda:1", "devices"),
            switch("--undo", "allow leases on it again"),
            TIMEOUT,
        ),
    ),
    Verb(
        "defrag",
        "releases cached, unused device memory: of all processes, or of one",
        lambda rt, args: rt.defrag(args.process or "", **given(args, "timeout")),
        (PROCESS, TIMEOUT),
    ),
    Verb(
        "next",
        "the waiting cells' models: where each one is, and what is loaded ahead",
        lambda rt, args: rt.schedule(),
        places=(MAGIC,),
    ),
    Verb(
        "who",
        "which variable, output or error of a notebook holds device memory",
        lambda rt, args: rt.who(args.who or ""),
        (WHO,),
    ),
    Verb(
        "free",
        "releases outputs, the last error and caches; or deletes a variable",
        lambda rt, args: rt.free(args.name),
        (positional("name", "NAME", "only this variable", "variables", nargs="?"),),
        places=(MAGIC,),
    ),
    Verb(
        "apply",
        "adds the models of files to the catalogue: all of them, or none",
        lambda rt, args: verb_acts.apply(rt, args.file),
        (
            option(
                *(
                    "--file -f",
                    "FILE",
                    "YAML or JSON; - for standard input; may be repeated",
                    "files",
                ),
                required=True,
                action="append",
            ),
        ),
        needs_runtime=False,
    ),
    Verb("catalog", "the models of the catalogue", verb_acts.list_catalogue, needs_runtime=False),
    Verb(
        "inspect",
        "a model's entry in the catalogue, in a form that apply accepts",
        verb_acts.inspect,
        (
            CATALOG_NAME,
            option(
                "--format",
                "F",
                "yaml or json",
                "formats",
                choices=["yaml", "json"],
                default="yaml",
            ),
        ),
        needs_runtime=False,
    ),
    Verb(
        "delete",
        "removes a model from the catalogue; if it is loaded, it stays loaded",
        lambda rt, args: rt.delete(args.name),
        (CATALOG_NAME,),
    ),
    Verb(
        "doctor",
        "one report to paste: versions, drivers, devices, settings",
        verb_acts.doctor,
        needs_runtime=False,
    ),
    Verb(
        "config",
        "every setting, its value and its source",
        verb_acts.config,
        (
            option(
                "--preset",
                "SIZE",
                "the settings advised for a card: 24GB or more, 16GB, 8GB, 4GB",
                "presets",
            ),
        ),
        needs_runtime=False,
    ),
    Verb(
        "console",
        "the operator's console: live in a notebook, served from a terminal",
        arguments=(
            HOST,
            option("--port", "N", "the port; else the first free one from 8211", type=port_number),
            SOCKET,
            switch("--read-only", "nobody may act"),
            switch("--no-browser", "open no browser"),
            OF_FLEET,
        ),
        needs_runtime=False,
        plain_in_notebook=True,
    ),
    Verb(
        "serve",
        "models over HTTP: the console, /v1/*, /memory/* and /metrics on one port",
        arguments=(
            HOST,
            option("--port", "N", "the port; 8210 unless given", type=port_number),
            SOCKET,
            switch("--read-only", "nobody may act, and no model is called"),
            LOG_LEVEL,
            OF_FLEET,
        ),
        places=(CLI,),
        needs_runtime=False,
    ),
    Verb(
        "keys",
        "keys for programs that call `gpu serve`: models, importance, limits",
        verb_acts.keys,
        KEYS,
        places=(CLI,),
        needs_runtime=False,
    ),
    Verb(
        "autoload",
        "lets every new kernel of this environment load gpu by itself",
        verb_acts.autoload,
        (switch("--remove", "new kernels no longer load it"),),
        places=(CLI,),
        needs_runtime=False,
    ),
    Verb(
        "ledger",
        "sets up a ledger that a group of users shares; for the operator, as root",
        verb_acts.ledger,
        LEDGER,
        places=(CLI,),
        needs_runtime=False,
    ),
    Verb("fleet", "many hosts: one bar for each", verb_acts.fleet, FLEET, needs_runtime=False),
    Verb(
        "help",
        "this help, or the help of one verb or error",
        lambda rt, args: args.verb,
        (positional("verb", "VERB", "a verb, or an error's name", "verbs", nargs="?"),),
        needs_runtime=False,
    ),
)
VERBS: dict[str, Verb] = {verb.name: verb for verb in _TABLE}

CELL = (  # the arguments of `%%gpu`
    positional("size", "SIZE", "memory that the cell needs, such as 8GiB", nargs="?"),
    option("--model", "M", "hold this model while the cell runs, under the name `model`", "models"),
    IMPORTANCE_OPTION,
    TIMEOUT,
    switch("--retry", "run the cell once more after an out-of-memory error, if room was made"),
)

# -- reading and explaining the table ------------------------------------------------------------


def verbs(place: str) -> Iterator[Verb]:
    """The verbs that can be typed in `place`, which is MAGIC or CLI."""
    return (verb for verb in VERBS.values() if place in verb.places)


def find(name: str, place: str) -> Verb:
    """The verb called `name` that works in `place`.

    Raises UnknownVerb, which suggests verbs with the meaning of `name`, or the most similar name.
    """
    verb = VERBS.get(name)
    if verb is not None and place in verb.places:
        return verb
    if verb is not None:
        where, prompt = ("a notebook", MAGIC) if MAGIC in verb.places else ("a terminal", CLI)
        raise UnknownVerb(
            f"{name} works in {where} only:  {verb.synopsis(prompt)}", verb=name, nearest=""
        )
    found = _suggested(name, place)
    hint = f"Did you mean {' or '.join(found)}? " if found else ""
    lines = [f"\n  {place} {one:10}{VERBS[one].doc}" for one in found] if len(found) > 1 else []
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


def overview(place: str) -> str:
    """All verbs of `place`, each in one line, and the options that work with every verb."""
    lines = [(verb.synopsis(place, short=True), verb.doc) for verb in verbs(place)]
    lines[0] = (f"{place} [status]", lines[0][1])
    everywhere = "--json gives JSON"
    if place == MAGIC:
        lines.append(
            (
                "%%gpu [SIZE] [--model M] [--importance I]",
                "runs the cell under a lease; reports peak and delta",
            )
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
    for argument in verb.takes(place):
        word = ", ".join(argument.flags) if argument.is_option else argument.usage
        lines.append(f"    {word:12}  {argument.options.get('help', '')}")
    return "\n".join(lines)
