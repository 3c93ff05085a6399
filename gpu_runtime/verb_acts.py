"""The functions that carry out verbs of the magics and of the command. They are called acts.

`rt` is the runtime. `rt` is None if no runtime is open and the verb needs no runtime. `args` are
the parsed arguments. An act returns data and prints nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

from msgspec.structs import replace

from .errors import GpuError
from .facts import Outcome
from .model_fields import TYPED
from .verb_arguments import given


def status(rt: Any, args: argparse.Namespace) -> Any:
    """A snapshot of this host, or with `--all` in `args` of every host of the ledger."""
    if args.watch:  # the command has drawn it already
        raise GpuError("--watch works in a terminal:  gpu status --watch")
    return rt.status_all() if args.all else rt.status()


def plan(rt: Any, args: argparse.Namespace) -> Any:
    """`rt.plan` for the name, the source and the options in `args`."""
    return rt.plan(args.name, args.source, **given(args, *TYPED, "timeout"))


def load(rt: Any, args: argparse.Namespace) -> Outcome:
    """Loads the model in `args` and returns the outcome. A new model is registered with `rt` first."""
    return rt.load(args.name, args.source, **given(args, *TYPED, "timeout"))


def register(rt: Any, args: argparse.Namespace) -> Outcome:
    """Registers the model in `args` with `rt`, and returns the outcome."""
    spec = rt.register(args.name, args.source, **given(args, *TYPED))
    because = f"{spec}; load it with  %gpu preload {spec.name}"
    return Outcome(verb="register", name=spec.name, done=True, because=because)


def forget(rt: Any, args: argparse.Namespace) -> Outcome:
    """Frees the model in `args` and its name, and returns the outcome."""
    rt.forget(args.name)
    because = f"{args.name} is no longer registered here, and holds no memory"
    return Outcome(verb="forget", name=args.name, done=True, because=because)


def why(rt: Any, args: argparse.Namespace) -> Any:
    """The last decisions on what `args` name, or on this notebook. Raises GpuError."""
    if args.replay and not args.name:
        raise GpuError("--replay needs the NAME of a model, or a decision's number.")
    return rt.why(args.name or "", **given(args, "replay"))


def evict(rt: Any, args: argparse.Namespace) -> Outcome:
    """Evicts what `args` names, or with `--all-idle` every idle model.

    Raises GpuError if `args` have neither a name nor `--all-idle`, or both.
    """
    if args.all_idle == bool(args.name):
        raise GpuError("type one of the two: a NAME, or --all-idle.")
    return rt.evict(args.name or "*", **given(args, "timeout", "drop", "lost", "force"))


def restore(rt: Any, args: argparse.Namespace) -> Outcome:
    """The outcome of `rt.restore` for the name in `args`, under the verb that was typed."""
    return replace(rt.restore(args.name), verb="restore")


def preload(rt: Any, args: argparse.Namespace) -> Outcome:
    """The outcome of `rt.preload` for the name in `args`."""
    return rt.preload(args.name, **given(args, "timeout"))


def evictions(rt: Any, args: argparse.Namespace) -> Any:
    """A DataFrame from `rt` of the evictions, or with `--all` in `args` of all events."""
    read = rt.events if args.all else rt.evictions
    frame = read(**given(args, "limit"))
    frame.attrs["owners"] |= {id: one.owner.label for id, one in rt.status().sections.items()}
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
    from . import presets, settings

    if args.preset:
        return presets.preset(args.preset)
    current = rt.settings if rt is not None else settings.Settings.load()
    return current.sources()


def apply(rt: Any, files: list[str]) -> Any:
    """Adds the models of all `files` to the catalogue, or none of them. Returns what was changed."""
    return (catalogue(rt) if rt is None else rt._catalogue.catalog).apply(*files)


def catalogue(rt: Any) -> Any:
    """The object with the methods of the catalogue's verbs: `rt`, or a Catalog if `rt` is None."""
    from . import settings
    from .catalog.store import Catalog

    return rt if rt is not None else Catalog(settings.Settings.load())


def list_catalogue(rt: Any, args: argparse.Namespace) -> Any:
    """The catalogue's models as a DataFrame. `args` has no options, and `rt` may be None."""
    from .owner import dataframes

    return rt.catalog() if rt is not None else dataframes.catalog(catalogue(None).specs())


def inspect(rt: Any, args: argparse.Namespace) -> Any:
    """The catalogue's entry of the model in `args`, as text, or as a dict for `--json`.

    `rt` may be None.
    """
    return catalogue(rt).inspect(args.name, "" if args.json else args.format)


def autoload(rt: Any, args: argparse.Namespace) -> Outcome:
    """Writes, or removes, the environment's IPython configuration. Returns the outcome.

    `rt` is not used.
    """
    from . import autoload

    return autoload.autoload(remove=args.remove)


def backtest(rt: Any, args: argparse.Namespace) -> Any:
    """The table of replays of the history, with the policies, cards and RAM in `args`.

    If `args` have no files of a history and `rt` is None, opens the runtime and closes it again.
    """
    from .owner import history

    choices = given(args, "days", "policy", "engine", "device", "host")
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


def keys(rt: Any, args: argparse.Namespace) -> str:
    """Adds or removes a key of `gpu serve`, or lists the keys: `args.action`. `rt` is not used.

    A new key is only in the returned text. No file contains the key itself.
    """
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


def fleet(rt: Any, args: argparse.Namespace) -> Any:
    """The hosts of the fleet, or the outcome of the action in `args`. `rt` is not used."""
    import gpu_runtime

    from .fleet import joining

    if args.action == "join":
        options = given(args, "name", "devices", "ledger")
        return joining.join(address=args.address, **options)
    if args.action == "leave":
        return joining.leave(address=args.address)
    hosts = gpu_runtime.fleet(args.address)
    if args.action == "slots":
        return _slots(hosts, args)
    if args.action == "drain":
        if not args.host:
            raise GpuError("drain needs the name of a host:  gpu fleet drain HOST")
        return hosts.drain(args.host, undo=args.undo)
    return hosts.status()


def _slots(hosts: Any, args: argparse.Namespace) -> Any:
    """The table of the fleet's slots, or the outcome of creating or deleting a slot."""
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
