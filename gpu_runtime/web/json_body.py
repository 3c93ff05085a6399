"""The JSON of bodies: the one reader for what clients send, and the writer for what a model has written."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def parsed(data: bytes) -> Any:
    """The JSON value in `data`. Raises ValueError with a sentence: for bytes that are not UTF-8, for NaN and numbers
    beyond those of a double, for half a surrogate pair, and for deep nesting.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"the body is no JSON: {error}") from None


def written(value: Any) -> bytes:
    r"""The JSON of an answer. Half of a surrogate pair, which a model that is cut off may write, stays an escape.

    >>> written({"content": "ü\ud83d"})
    b'{"content": "\\u00fc\\ud83d"}'
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def whole_number(text: str, most_digits: int = 15) -> int | None:
    """The whole number in a header's `text`; None for anything else, such as `²` or 5,000 digits.

    >>> whole_number("8210"), whole_number("²"), whole_number("9" * 5000)
    (8210, None, None)
    """
    plain = text.isascii() and text.isdigit() and len(text) <= most_digits
    return int(text) if plain else None
