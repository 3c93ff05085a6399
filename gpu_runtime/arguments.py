"""The arguments of the public methods: a table of the allowed values, and the advice in errors.

`checked` applies the table before a method runs. This module does not check whether a name or a
device exists. The keywords that describe a model are in the table `model_fields`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from . import kinds
from .errors import reword
from .kinds import Rule, optional, read, unknown_option, whole
from .model_fields import FIELDS, KEYWORDS
from .torch_modes import outside_modes

P = ParamSpec("P")
T = TypeVar("T")

# The keys are names of parameters. A key `METHOD.PARAMETER` is the rule for this method only.
RULES: dict[str, Rule] = {
    "name": kinds.MODEL,
    "register.name": kinds.NEW_NAME,
    "adopt.name": kinds.NEW_NAME,
    "on_behalf_of.name": kinds.ONE_LINE._replace(expected="a person's name"),
    "source": kinds.SOURCE,
    "module": kinds.OBJECT,
    "optimizer": optional(kinds.OPTIMIZER),
    **{name: FIELDS[name].rule for name in KEYWORDS if name != "devices"},
    "register.devices": FIELDS["devices"].rule,
    "use.importance": optional(kinds.IMPORTANCE),
    "use.keep_alive": optional(kinds.SECONDS),
    "restore_on_call": kinds.TRUTH,
    "timeout": optional(kinds.SECONDS),
    "purpose": kinds.ONE_LINE,
    **dict.fromkeys(("progress", "told", "arrived"), optional(kinds.CALLABLE)),
    **dict.fromkeys(("wait", "drop", "lost", "force", "replay", "checkpoint", "yes"), kinds.TRUTH),
    "device": kinds.WORD._replace(expected="a card's id, such as 'cuda:1'"),
    "free.name": optional(kinds.WORD._replace(expected="the name of a variable")),
    "move.device": kinds.CARDS,
    "stillness": kinds.STILLNESS,
    "who": kinds.WORD._replace(expected="a notebook's file name or a process id"),
    "process": kinds.WORD._replace(
        expected="a process id, or a model that it holds, such as 'qwen@4121'"
    ),
    "undo": kinds.TRUTH,
    "limit": optional(kinds.ROWS),
    "seconds": kinds.SECONDS,
    "points": Rule("a number of moments, 1 to 1,000,000", whole(1, 1_000_000)),
    "name_or_size": kinds.SIZE_OR_SOURCE,
    "requests": optional(kinds.PATH),
    "models": optional(kinds.PATH),
    "days": optional(kinds.DAYS),
    "backtest.policy": kinds.WORDS,
    "engine": kinds.WORDS,
    "backtest.device": kinds.WORDS,
    "host": kinds.WORDS,
    "file": kinds.PATH,
    "format": kinds.WORD._replace(expected="yaml, json, or nothing for a dict"),
    # the arguments of the fleet
    "copies": Rule("a number of copies, 0 to 10,000", whole(0, 10_000)),
    **dict.fromkeys(("dedicated", "retry"), kinds.TRUTH),
    **dict.fromkeys(
        ("drain.host", "create_slot.host"), kinds.WORD._replace(expected="the name of a host")
    ),
    "model": kinds.MODEL,
    "create_slot.devices": kinds.SLOT_CARDS,
    "slot": kinds.WORD._replace(expected="the name of a slot, such as 'qwen@box2'"),
    "status.timeout": kinds.SECONDS,
    # the arguments of Runtime itself; its other keywords are settings
    "devices": optional(kinds.TEXT),
    "ledger": optional(kinds.TEXT),
    "catalog": optional(kinds.PATH),
    "policy": optional(kinds.TEXT),
    "clock": optional(kinds.CALLABLE),
    "wall": kinds.CALLABLE,
    "probe": optional(kinds.PROBE),
    "monitor": kinds.TRUTH,
}


def rules_of(method: Callable[..., Any]) -> dict[str, Rule]:
    """The rule of each parameter of `method`. Raises KeyError if the table lacks a parameter."""
    code = method.__code__
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return {name: _rule(method.__name__, name) for name in names}


def read_all(method: str, unknown: Mapping[str, Any], **given: Any) -> tuple[Any, ...]:
    """The arguments `given` to the method with the name `method`, converted by their rules.

    Raises BadSetting for an `unknown` keyword.
    """
    for name, value in unknown.items():
        raise unknown_option(name, value, given, f"{method}()")
    return tuple(read(name, value, _rule(method, name)) for name, value in given.items())


def _rule(method: str, parameter: str) -> Rule:
    return RULES.get(f"{method}.{parameter}") or RULES[parameter]


def checked(method: Callable[P, T]) -> Callable[P, T]:
    """Wraps `method`, so that it gets only arguments that the table allows.

    `method` runs outside the user's modes of torch; see `outside_modes`.

    If `method` has `**options`, keywords that its signature does not name are passed on unchanged.
    If `method` has no `**options`, such keywords raise BadSetting, which names the nearest keyword.
    An error of the system or of another package is raised as `errors.in_one_sentence` words it.
    """
    rules = rules_of(method)
    takes_more = bool(method.__code__.co_flags & inspect.CO_VARKEYWORDS)
    by_position = tuple(rules.items())
    run = outside_modes(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **given: Any) -> T:
        """Calls `method` with the checked arguments."""
        if args:
            read_args = [read(*item) for item in _paired(by_position, args)]
            args = (*read_args, *args[len(read_args) :])
        for name, value in given.items():
            rule = rules.get(name)
            if rule is not None:
                given[name] = read(name, value, rule)
            elif not takes_more:
                raise unknown_option(name, value, rules, f"{method.__name__}()")
        try:
            return run(self, *args, **given)  # type: ignore[call-arg]
        except Exception as error:
            reword(error)
            raise

    call.rules = rules  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _paired(
    rules: tuple[tuple[str, Rule], ...], args: tuple[Any, ...]
) -> Iterable[tuple[str, Any, Rule]]:
    for (name, rule), value in zip(rules, args, strict=False):
        yield name, value, rule
