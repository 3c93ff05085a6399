"""Makes text from outside safe to show and to store: valid UTF-8, printable, of a bounded length.

Arguments, paths, environment variables and the messages of other libraries may be any text, and
their `repr` may fail. Errors and owner records contain only what these functions return.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any

LONGEST_NAME = 200  # characters of a name that is stored: of a model, or of a user
LONGEST_PATH = 1024  # of a notebook's path in an owner record
MOST_QUOTED = 120  # characters of one quoted value
MOST_MESSAGE = 6000  # characters of one error; an out-of-memory report is the longest
MOST_NAMES = 12  # names in one sentence
_CUT = "…"

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = MOST_QUOTED
_repr.maxlong = 40
_repr.maxlevel = 2


def quoted(value: Any) -> str:
    """The `repr` of `value` in at most MOST_QUOTED printable characters. Never raises.

    >>> quoted("8 GiBs"), quoted([1, 2]), len(quoted("x" * 10**6))
    ("'8 GiBs'", '[1, 2]', 120)
    """
    try:
        text = _repr.repr(value)
    except Exception:  # the value's own code may raise anything
        text = _without_repr(value)
    return printable(text, MOST_QUOTED)


def _without_repr(value: Any) -> str:
    if type(value) is int:
        return f"a number of {value.bit_length()} bits"
    try:
        return f"<{type(value).__name__} object>"
    except Exception:  # a metaclass may define __name__
        return "<object>"


def printable(text: str, most: int, *, keep: str = "") -> str:
    """`text` with unprintable characters as escapes, in at most `most` characters.

    Lone surrogates and control characters are unprintable. The characters in `keep` stay. A longer
    text is cut in the middle, so that its end (such as a file's name) is still visible.

    >>> printable("a\\x1b[31m\\udcff", 40), printable("0123456789", 5)
    ('a\\\\x1b[31m\\\\udcff', '01…89')
    """
    text = _cut(text, most)
    if text.isprintable():
        return text
    letters = [_escaped(letter, keep) for letter in text]
    return _cut("".join(letters), most)


def _escaped(letter: str, keep: str) -> str:
    if letter.isprintable() or letter in keep:
        return letter
    return letter.encode("unicode_escape").decode("ascii")


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    start = most // 2
    end = most - start - len(_CUT)
    return f"{text[:start]}{_CUT}{text[len(text) - end :]}"


def lines(text: str) -> str:
    """`text` with each unprintable character replaced, so that it cannot control a terminal.

    Newlines stay.

    >>> lines("a\\x1b[31m\\nb\\x9b")
    'a�[31m\\nb�'
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text
    )


def clean(text: object) -> str:
    """The `text` in one line, with each unprintable character replaced as in `lines`."""
    return lines(str(text).replace("\n", "\N{REPLACEMENT CHARACTER}"))


def nearest(name: str, known: Collection[str]) -> str:
    """`Did you mean qwen? `, or an empty text if no name is similar."""
    import difflib

    names = {}
    for word in known:  # of `qwen@4121` and `train.ipynb`, people type the first part
        names |= dict.fromkeys((word, word.partition("@")[0].removesuffix(".ipynb")), word)
    typed = name[:MOST_QUOTED].removesuffix(".ipynb")
    close = difflib.get_close_matches(typed, names, n=1)
    return f"Did you mean {names[close[0]]}? " if close else ""


def listed(names: Collection[str]) -> str:
    """The names in order. Of many names, only the first names, and how many more there are."""
    text = ", ".join(sorted(names)[:MOST_NAMES])
    more = len(names) - MOST_NAMES
    return f"{text} and {more} more" if more > 0 else text
