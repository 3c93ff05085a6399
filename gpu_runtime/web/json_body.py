"""The one reader for JSON that clients send: only what JSON allows, and what can be written again."""

from __future__ import annotations

import json
import math
from typing import Any


def parsed(data: bytes) -> Any:
    """The JSON value in `data`. Raises ValueError with a sentence: for bytes that are not UTF-8, for NaN and numbers
    beyond those of a double, for half a surrogate pair, and for deep nesting.
    """
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_reject, parse_float=_finite)
    except UnicodeDecodeError:
        raise ValueError("the body is no JSON: it is not UTF-8") from None
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:  # also of a number with too many digits
        raise ValueError(f"the body is no JSON: {error}") from None
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the body is no JSON: it has half a surrogate pair") from None
    return value


def _reject(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word[:20]} is too large")
    return number


def whole_number(text: str, most_digits: int = 15) -> int | None:
    """The whole number in a header's `text`; None for anything else, such as `²` or 5,000 digits.

    >>> whole_number("8210"), whole_number("²"), whole_number("9" * 5000)
    (8210, None, None)
    """
    plain = text.isascii() and text.isdigit() and len(text) <= most_digits
    return int(text) if plain else None
