"""The kinds of values that people give, and how each kind is checked and converted.

A kind is a `Rule`. Values come from Python, or from the catalogue's files. After the check, the
runtime and the book that all processes read get only plain values within their bounds. Nothing here
checks whether a name or a device exists.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .errors import BadSetting, GpuError
from .facts import IMPORTANCE as CLASSES
from .facts import LeaseId, parse_importance
from .safe_text import LONGEST_NAME, MOST_QUOTED, printable, quoted
from .units import parse_bytes, parse_room, parse_seconds

LONGEST_TEXT = 4096  # characters of text that is not stored, such as a path
LONGEST_TEMPLATE = 1 << 20  # characters of a chat template
MOST_TOKENS = 2**27
MOST_SEQUENCES = 2**16
MOST_DAYS = 36_500.0  # of a history
MOST_FACTOR = 1000  # the largest multiple of a model's weights that is leased
MOST = 2**31 - 1  # the largest number that is passed to a C library


class Rule(NamedTuple):
    """The allowed values of an argument, and of a field in a file."""

    expected: str  # what to type, as the end of "it must be …"
    read: Callable[[Any], Any]  # the value as the runtime uses it; raises for any other value
    # As `read` for a value in a file, where it differs; raises ValueError with a sentence.
    written: Callable[[Any], Any] | None = None

    def in_file(self, value: Any) -> Any:
        """The `value` in a file, converted. Raises ValueError with a sentence."""
        return (self.written or self.convert)(value)

    def convert(self, value: Any) -> Any:
        """The `value` as `read` converts it. Raises ValueError with a sentence."""
        try:
            return self.read(value)
        except Exception:
            raise _unusable(value, self.expected) from None


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


def _where(
    is_right: Callable[[Any], object], read: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """A function that converts a value by `read`, by default `plain`, and requires that it `is_right`."""

    def reader(value: Any) -> Any:
        found = plain(value) if read is None else read(value)
        if not is_right(found):
            raise ValueError
        return found

    return reader


def _same(value: Any) -> Any:
    return value


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


def _is_text(value: Any, most: int = LONGEST_TEXT) -> bool:
    """Whether `value` is valid UTF-8 of at most `most` characters that the operating system accepts."""
    is_short = isinstance(value, str) and len(value) <= most and "\0" not in value
    return is_short and value.encode() is not None  # raises for a lone surrogate


_text = _where(_is_text)


def _or_empty(value: Any) -> Any:
    return "" if value is None else plain(value)


# One line of text for the book, at most as long as a name. None becomes an empty text.
_word = _where(
    lambda text: isinstance(text, str) and len(text) <= LONGEST_NAME and text.isprintable(),
    _or_empty,
)


def _one_line(value: Any) -> str:
    """Free text for people, as one line. Text longer than the longest allowed name is shortened."""
    text = _where(lambda text: isinstance(text, str), _or_empty)(value)
    return printable(" ".join(text[:LONGEST_TEXT].split()), LONGEST_NAME)


def _path(value: Any) -> str:
    """A path as text, with the home directory for `~`. Bytes that are not UTF-8 become text as by `os.fsdecode`."""
    text = plain(os.fspath(value))
    if not isinstance(text, str) or len(text) > LONGEST_TEXT or "\0" in text:
        raise ValueError
    os.fsencode(text)
    return os.path.expanduser(text)


def _source(value: Any) -> Any:
    """A path or a hub id as text. Any other object but bytes is returned unchanged."""
    if isinstance(value, (str, os.PathLike)):
        return _path(value)
    return _where(lambda one: not isinstance(one, (bytes, bytearray, memoryview)), _same)(value)


def _model(value: Any) -> str | LeaseId:
    """A model's name as people write it, or the exact id of a lease."""
    if isinstance(value, LeaseId):
        return LeaseId(_text(value.owner), _text(value.name))
    return _text(value)


def _size_or_source(value: Any) -> str | int | float:
    return _path(value) if isinstance(value, (str, os.PathLike)) else parse_room(plain(value))


def _devices(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (_word(value),)
    devices = tuple(
        _where(lambda one: isinstance(one, (tuple, list, set, frozenset)), _same)(value)
    )
    if not all(isinstance(device, str) for device in devices):
        raise ValueError
    return tuple(map(_word, devices))


def _cards(value: Any) -> str | tuple[str, ...]:
    return _word(value) if isinstance(value, str) else _devices(value)


def _words(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else _devices(value)
    return tuple(_word(word.strip()) for word in words if word.strip())


def _dtype(value: Any) -> Any:
    """The name of a dtype, or a dtype of torch."""
    return value if type(value).__module__ == "torch" else _word(value)


def _number(value: Any) -> float:
    number = plain(value)
    if type(number) not in (int, float) or not abs(number) <= MOST:  # also for nan
        raise ValueError
    return float(number)


def words(value: Any) -> list[str]:
    """The arguments of a command line."""
    found = list(map(plain, _where(lambda one: isinstance(one, (list, tuple)), _same)(value)))
    if not all(isinstance(word, (str, int, float)) for word in found):
        raise ValueError
    return [_text(str(word)) for word in found]


def whole(least: int, most: int) -> Callable[[Any], int]:
    """A function that reads a whole number from `least` to `most`."""
    return _where(lambda number: type(number) is int and least <= number <= most)


def optional(rule: Rule) -> Rule:
    """A rule that accepts None, and the values that `rule` accepts."""
    return rule._replace(read=lambda value: None if value is None else rule.read(value))


# -- values in a file ----------------------------------------------------------------------------

_TRUTHS = {
    **dict.fromkeys((True, "1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys((False, "0", "off", "f", "false", "n", "no"), False),
}


def _unusable(value: Any, expected: str) -> ValueError:
    return ValueError(f"{quoted(value)} cannot be used: it must be {expected}")


def _text_rule(expected: str, read: Callable[[Any], str]) -> Rule:
    """A rule for text, which must not be empty in a file."""
    rule = Rule(expected, read)

    def written(value: Any) -> str:
        if not isinstance(value, str):
            raise _unusable(value, "text; put it in quotes")
        if not value:
            raise ValueError(f"{quoted(value)} cannot be used: it is empty")
        return rule.convert(value)

    return rule._replace(written=written)


def _written_truth(value: Any) -> bool:
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, (str, int, float)) and word in _TRUTHS:
        return _TRUTHS[word]
    raise _unusable(value, "true or false")


def number_in_file(
    kind: type, *, least: int | None = None, above: int | None = None, most: int | None = None
) -> Callable[[Any], Any]:
    """A function that reads an int or a float (`kind`) within these bounds, also from text."""
    expected = "a whole number" if kind is int else "a number"

    def written(value: Any) -> Any:
        if kind is int and isinstance(value, (bool, float)):
            raise ValueError("it must be a whole number")
        try:
            number = kind(re.sub(r"\.0+$", "", value) if isinstance(value, str) else value)
        except (TypeError, ValueError, OverflowError):
            raise _unusable(value, expected) from None
        if not math.isfinite(number):
            raise _unusable(value, expected)
        if above is not None and number <= above:
            raise _unusable(value, f"greater than {above}")
        if least is not None and number < least:
            raise _unusable(value, f"greater than or equal to {least}")
        if most is not None and number > most:
            raise _unusable(value, f"less than or equal to {most}")
        return number

    return written


def one_of(*choices: str) -> Callable[[Any], str]:
    """A function that reads one of the `choices`."""
    *others, last = map(repr, choices)

    def written(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return plain(value)
        raise _unusable(value, f"{', '.join(others)} or {last}")

    return written


def word_of(
    known: Mapping[str, str], otherwise: Callable[[str], str] | None, what: str
) -> Callable[[Any], str]:
    """Returns a function that replaces a word by its value in the table `known`.

    Any other word becomes the result of `otherwise`. It is a ValueError if `otherwise` is None, or
    if the word looks like a misspelled known word. `what` names the kind of word in errors.
    """

    def written(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{quoted(value)} is not a {what}; it must be text")
        word = value.strip().lower()
        if word in known:
            return known[word]
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
        if close:
            raise ValueError(f"{quoted(value)} is not a known {what}; did you mean {close[0]}?")
        if otherwise is None:
            listed = ", ".join(known)
            raise ValueError(f"{quoted(value)} is not a known {what}: it is one of {listed}")
        return otherwise(value.strip())

    return written


def written_size(value: Any) -> int:
    """The bytes of a size in a file."""
    size = parse_bytes(value)
    if size == 0:
        raise ValueError("a size cannot be 0; leave it out if it is not known")
    return size


def _written_importance(value: Any) -> int:
    try:
        return parse_importance(value, least=1)
    except BadSetting:
        raise ValueError(
            f"{quoted(value)} is none of {', '.join(CLASSES)}, nor a number above 0"
        ) from None


# -- the kinds -----------------------------------------------------------------------------------

DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
NEW_NAME = Rule(
    f"at most {LONGEST_NAME} printable characters, without '@' or spaces around them",
    _where(lambda name: isinstance(name, str) and not bad_name(name)),
)
MODEL = Rule("the name of a model, such as 'qwen' or 'qwen@4121'", _model)
SOURCE = Rule(
    "a directory, a GGUF file, a hub id (org/name), an nn.Module, or a callable that returns one",
    _source,
)
WORD = _text_rule(f"text of at most {LONGEST_NAME} printable characters", _word)
ONE_LINE = Rule("text for people", _one_line)
TEXT = _text_rule(f"text of at most {LONGEST_TEXT} characters", _text)
PATH = _text_rule("the path of a file or directory", _path)
TEMPLATE = _text_rule(
    "a Jinja template, or the path of a file with one",
    _where(lambda text: _is_text(text, LONGEST_TEMPLATE)),
)
TRUTH = Rule(
    "True or False", _where(lambda value: value is True or value is False, _same), _written_truth
)
SECONDS = Rule(
    "seconds, or text such as '30s' or '10m'",
    lambda value: parse_seconds(plain(value)),
    parse_seconds,
)
IMPORTANCE = Rule(
    "urgent, high, normal, low, batch or a number",
    lambda value: parse_importance(plain(value)),
    _written_importance,
)
DTYPE = Rule("auto, bfloat16, float16 or float32", _dtype, word_of(DTYPES, None, "dtype"))
CALLABLE = Rule("a function", _where(callable, _same))
ROWS = Rule("a number of rows, 0 or more", whole(0, MOST))
SIZE = Rule("a size, such as '8 GiB'", lambda value: parse_room(plain(value)), written_size)
COUNT = Rule("a whole number above 0", whole(1, MOST))
TOKENS = Rule(COUNT.expected, whole(1, MOST_TOKENS), number_in_file(int, above=0, most=MOST_TOKENS))
SEQUENCES = Rule(
    COUNT.expected, whole(1, MOST_SEQUENCES), number_in_file(int, above=0, most=MOST_SEQUENCES)
)
NUMBER = Rule("a number", _number)
DAYS = Rule("a number of days above 0", _where(lambda days: 0 < days < MOST_DAYS, _number))
WORDS = Rule("words in a list, or in a text that separates them by commas", _where(bool, _words))
# `isinstance` reads the attribute `__class__`, and a property may raise
OBJECT = Rule("an object", _where(lambda value: value.__class__, _same))
OPTIMIZER = Rule(
    "an optimizer, such as torch.optim.Adam(module.parameters())",
    _where(
        lambda one: isinstance(one.state, Mapping) and isinstance(one.param_groups, list),
        OBJECT.read,
    ),
)
DEVICES = Rule("a device's id such as 'cuda:1', or a list of them", _devices)
CARDS = Rule("a card's id such as 'cuda:1', or a list of them", _cards)
SLOT_CARDS = Rule(
    "cards of the host, such as 'cuda:1' or 'cuda:0,1'",
    _where(
        lambda cards: cards and (isinstance(cards, str) or len(set(cards)) == len(cards)), _cards
    ),
)
SIZE_OR_SOURCE = Rule("a model's name, a path, or a size such as '8 GiB'", _size_or_source)
STILLNESS = Rule(
    "an object with why_not(), mark() and change()",
    _where(
        lambda one: callable(one.why_not) and callable(one.mark) and callable(one.change), _same
    ),
)
PROBE = Rule("a Probe", _where(lambda one: callable(one.samples) and one.devices, _same))
