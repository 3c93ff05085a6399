"""The arguments of the public methods: a table of the allowed values, and the advice in errors.

`checked` applies the table before a method runs. So the runtime, and the book that all processes
read, get only plain values within their bounds. This module does not check whether a name or a
device exists.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .errors import BadSetting, GpuError, reword
from .facts import LeaseId, parse_importance
from .safe_text import LONGEST_NAME, MOST_QUOTED, printable
from .torch_modes import outside_modes
from .units import parse_room, parse_seconds

P = ParamSpec("P")
T = TypeVar("T")

LONGEST_TEXT = 4096  # characters of text that is not stored, such as a path
LONGEST_TEMPLATE = 1 << 20  # characters of a chat template
MOST_TOKENS = 2**27
MOST_SEQUENCES = 2**16
MOST_DAYS = 36_500.0  # of a history
MOST_FACTOR = 1000  # the largest multiple of a model's weights that is leased
_MOST = 2**31 - 1  # the largest number that is passed to a C library


class Rule(NamedTuple):
    """The allowed values of an argument."""

    expected: str  # what to type, as the end of "it must be …"
    read: Callable[[Any], Any]  # the value as the runtime uses it; raises for any other value


def read(name: str, value: Any, rule: Rule) -> Any:
    """The `value` of the argument `name`, converted by `rule`.

    Raises BadSetting, or the GpuError of the rule. BadSetting is also raised if code of the value's
    class raises an exception.
    """
    try:
        return rule.read(value)
    except GpuError:
        raise
    except Exception:
        raise BadSetting(name, value, rule.expected) from None


def unknown_option(name: str, value: Any, known: Iterable[str], taker: str) -> BadSetting:
    """The error for an option that `taker` does not take. The error suggests a `known` name."""
    nearest = difflib.get_close_matches(name[:MOST_QUOTED].lower(), list(known), n=1, cutoff=0.0)
    return BadSetting(name, value, f"an option that {taker} takes; the nearest is {nearest[0]}")


# -- kinds of values -----------------------------------------------------------------------------


class _Refused(Exception):
    """The rule does not accept the value."""


def _require(condition: object) -> None:
    if not condition:
        raise _Refused


def plain(value: Any) -> Any:
    """Converts an object of a subclass of str, int or float, or a NumPy integer, to the plain type.

    Subclasses are converted because a subclass may define its own comparison and its own text. Any
    other value is returned unchanged.

    >>> import enum
    >>> plain(enum.IntEnum("Size", {"ONE": 1}).ONE), plain(True), plain(None)
    (1, True, None)
    """
    kind = type(value)
    if kind in (str, int, float, bool):
        return value
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        return int.__int__(value)
    if issubclass(kind, float):
        return float.__float__(value)
    return operator.index(value) if hasattr(kind, "__index__") else value


def bad_name(name: Any) -> str:
    """Why `name` cannot be the name of a model. Empty if the name is valid.

    >>> bad_name("Qwen/Qwen3:8b"), bad_name("a@b")
    ('', "'a@b' cannot be a name: '@' separates a name from a process")
    """
    if not isinstance(name, str):
        return f"{name!r} is not text; put it in quotes"
    if not name.strip() or name != name.strip():
        return f"{name[:40]!r} cannot be a name: it is empty, or has spaces around it"
    if "@" in name:
        return f"{name[:40]!r} cannot be a name: '@' separates a name from a process"
    if len(name) > LONGEST_NAME or not name.isprintable():
        return f"{name[:40]!r} cannot be a name: it must be at most {LONGEST_NAME} printable characters"
    return ""


def _new_name(value: Any) -> str:
    name = plain(value)
    _require(isinstance(name, str) and not bad_name(name))
    return name


def _text(value: Any) -> str:
    """Returns `value` if it is text that is valid UTF-8 and that the operating system accepts."""
    text = plain(value)
    _require(isinstance(text, str) and len(text) <= LONGEST_TEXT and "\0" not in text)
    text.encode()  # raises for a lone surrogate
    return text


def _word(value: Any) -> str:
    """One line of text for the book, at most as long as a name. None becomes an empty text."""
    text = "" if value is None else plain(value)
    _require(isinstance(text, str) and len(text) <= LONGEST_NAME and text.isprintable())
    return text


def _one_line(value: Any) -> str:
    """Free text for people, as one line. Text longer than the longest allowed name is shortened."""
    text = "" if value is None else plain(value)
    _require(isinstance(text, str))
    return printable(" ".join(text[:LONGEST_TEXT].split()), LONGEST_NAME)


def _template(value: Any) -> str:
    """A chat template, or the path of a file with a chat template."""
    text = plain(value)
    _require(isinstance(text, str) and len(text) <= LONGEST_TEMPLATE and "\0" not in text)
    text.encode()
    return text


def _path(value: Any) -> str:
    """A path as text, with the home directory for `~`. Bytes that are not UTF-8 become text as by `os.fsdecode`."""
    text = plain(os.fspath(value))
    _require(isinstance(text, str) and len(text) <= LONGEST_TEXT and "\0" not in text)
    os.fsencode(text)
    return os.path.expanduser(text)


def _source(value: Any) -> Any:
    """A path or a hub id as text. Any other object is returned unchanged."""
    if isinstance(value, (str, os.PathLike)):
        return _path(value)
    _require(not isinstance(value, (bytes, bytearray, memoryview)))
    return value


def _model(value: Any) -> str | LeaseId:
    """A model's name as people write it, or the exact id of a lease."""
    if isinstance(value, LeaseId):
        return LeaseId(_text(value.owner), _text(value.name))
    return _text(value)


def _size_or_source(value: Any) -> str | int | float:
    if isinstance(value, (str, os.PathLike)):
        return _path(value)
    return parse_room(plain(value))


def _devices(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (_word(value),)
    _require(isinstance(value, (tuple, list, set, frozenset)))
    return tuple(_word(device) for device in value if _is_text(device))


def _is_text(value: Any) -> bool:
    _require(isinstance(value, str))
    return True


def _cards(value: Any) -> str | tuple[str, ...]:
    return _word(value) if isinstance(value, str) else _devices(value)


def _slot_cards(value: Any) -> str | tuple[str, ...]:
    cards = _cards(value)
    _require(cards and (isinstance(cards, str) or len(set(cards)) == len(cards)))
    return cards


def _truth(value: Any) -> bool:
    _require(value is True or value is False)
    return value


def _object(value: Any) -> Any:
    _require(value.__class__)  # `isinstance` reads this attribute, and a property may raise
    return value


def _optimizer(value: Any) -> Any:
    _require(isinstance(_object(value).state, Mapping))
    _require(isinstance(value.param_groups, list))
    return value


def _callable(value: Any) -> Any:
    _require(callable(value))
    return value


def _importance(value: Any) -> int:
    return parse_importance(plain(value))


def _words(value: Any) -> tuple[str, ...]:
    """Words from a list, or from a text that separates them by commas."""
    words = value.split(",") if isinstance(value, str) else _devices(value)
    found = tuple(_word(word.strip()) for word in words if word.strip())
    _require(found)
    return found


def _days(value: Any) -> float:
    days = _number(value)
    _require(0 < days < MOST_DAYS)
    return float(days)


def _seconds(value: Any) -> float:
    return parse_seconds(plain(value))


def _room(value: Any) -> int:
    return parse_room(plain(value))


def _dtype(value: Any) -> Any:
    """The name of a dtype, or a dtype of torch."""
    return value if type(value).__module__ == "torch" else _word(value)


def _number(value: Any) -> float:
    number = plain(value)
    _require(isinstance(number, (int, float)) and not isinstance(number, bool))
    _require(abs(number) <= _MOST)  # False for nan
    return number


def words(value: Any) -> list[str]:
    """The arguments of a command line."""
    _require(isinstance(value, (list, tuple)))
    found = [plain(word) for word in value]
    _require(all(isinstance(word, (str, int, float)) for word in found))
    return [_text(str(word)) for word in found]


def _probe(value: Any) -> Any:
    _require(callable(value.samples) and value.devices)
    return value


def whole(least: int, most: int) -> Callable[[Any], int]:
    """A function that reads a whole number from `least` to `most`."""

    def read_whole(value: Any) -> int:
        number = plain(value)
        _require(type(number) is int and least <= number <= most)
        return number

    return read_whole


def optional(rule: Rule) -> Rule:
    """A rule that accepts None, and the values that `rule` accepts."""
    return Rule(rule.expected, lambda value: None if value is None else rule.read(value))


# -- the table -----------------------------------------------------------------------------------

NEW_NAME = Rule(
    f"at most {LONGEST_NAME} printable characters, without '@' or spaces around them", _new_name
)
MODEL = Rule("the name of a model, such as 'qwen' or 'qwen@4121'", _model)
WORD = Rule(f"text of at most {LONGEST_NAME} printable characters", _word)
TEXT = Rule(f"text of at most {LONGEST_TEXT} characters", _text)
PATH = Rule("the path of a file or directory", _path)
TEMPLATE = Rule("a Jinja template, or the path of a file with one", _template)
TRUTH = Rule("True or False", _truth)
SECONDS = Rule("seconds, or text such as '30s' or '10m'", _seconds)
IMPORTANCE = Rule("urgent, high, normal, low, batch or a number", _importance)
DTYPE = Rule("auto, bfloat16, float16 or float32", _dtype)
CALLABLE = Rule("a function", _callable)
ROWS = optional(Rule("a number of rows, 0 or more", whole(0, _MOST)))
SIZE = Rule("a size, such as '8 GiB'", _room)
TOKENS = Rule("a whole number above 0", whole(1, MOST_TOKENS))
SEQUENCES = Rule("a whole number above 0", whole(1, MOST_SEQUENCES))
NUMBER = Rule("a number", _number)
WORDS = Rule("words in a list, or in a text that separates them by commas", _words)
OBJECT = Rule("an object", _object)
LAYERS = Rule("-1 (all), 0 (CPU only) or a number of layers", whole(-1, _MOST))


def _stillness(value: Any) -> Any:
    _require(all(callable(getattr(value, name)) for name in ("why_not", "mark", "change")))
    return value


# The keys are names of parameters. A key `METHOD.PARAMETER` is the rule for this method only.
RULES: dict[str, Rule] = {
    "name": MODEL,
    "register.name": NEW_NAME,
    "adopt.name": NEW_NAME,
    "on_behalf_of.name": Rule("a person's name", _one_line),
    "source": Rule(
        "a directory, a GGUF file, a hub id (org/name), an nn.Module, or a callable that returns one",
        _source,
    ),
    "module": OBJECT,
    "optimizer": optional(
        Rule("an optimizer, such as torch.optim.Adam(module.parameters())", _optimizer)
    ),
    "backend": TEXT,
    "size": optional(SIZE),
    "importance": IMPORTANCE,
    "use.importance": optional(IMPORTANCE),
    "keep": TRUTH,
    "keep_alive": SECONDS,
    "use.keep_alive": optional(SECONDS),
    "layout": TEXT,
    "model_type": WORD,
    "quantization": WORD,
    "register.devices": Rule("a device's id such as 'cuda:1', or a list of them", _devices),
    "restore_on_call": TRUTH,
    "timeout": optional(SECONDS),
    "purpose": Rule("text for people", _one_line),
    **dict.fromkeys(("progress", "told", "arrived"), optional(CALLABLE)),
    **dict.fromkeys(("wait", "drop", "lost", "force", "replay", "checkpoint", "yes"), TRUTH),
    "device": Rule("a card's id, such as 'cuda:1'", _word),
    "free.name": optional(Rule("the name of a variable", _word)),
    "move.device": Rule("a card's id such as 'cuda:1', or a list of them", _cards),
    "stillness": Rule("an object with why_not(), mark() and change()", _stillness),
    "who": Rule("a notebook's file name or a process id", _word),
    "process": Rule("a process id, or a model that it holds, such as 'qwen@4121'", _word),
    "undo": TRUTH,
    "limit": ROWS,
    "seconds": SECONDS,
    "points": Rule("a number of moments, 1 to 1,000,000", whole(1, 1_000_000)),
    "name_or_size": Rule("a model's name, a path, or a size such as '8 GiB'", _size_or_source),
    "requests": optional(PATH),
    "models": optional(PATH),
    "days": optional(Rule("a number of days above 0", _days)),
    "backtest.policy": WORDS,
    "engine": WORDS,
    "backtest.device": WORDS,
    "host": WORDS,
    "file": PATH,
    "format": Rule("yaml, json, or nothing for a dict", _word),
    # the arguments of the fleet
    "copies": Rule("a number of copies, 0 to 10,000", whole(0, 10_000)),
    **dict.fromkeys(("dedicated", "retry"), TRUTH),
    **dict.fromkeys(("drain.host", "create_slot.host"), Rule("the name of a host", _word)),
    "model": MODEL,
    "create_slot.devices": Rule("cards of the host, such as 'cuda:1' or 'cuda:0,1'", _slot_cards),
    "slot": Rule("the name of a slot, such as 'qwen@box2'", _word),
    "status.timeout": SECONDS,
    # the arguments of Runtime itself; its other keywords are settings
    "devices": optional(TEXT),
    "ledger": optional(TEXT),
    "catalog": optional(PATH),
    "policy": optional(TEXT),
    "clock": optional(CALLABLE),
    "wall": CALLABLE,
    "probe": optional(Rule("a Probe", _probe)),
    "monitor": TRUTH,
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
