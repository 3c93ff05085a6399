"""The times of a model's last uses, as short text that is stored in the model's lease.

Each time is a whole epoch second, which has the same meaning after a restart. Several uses in one
second count once. So two lists can be merged repeatedly without counting a use twice.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import lru_cache

MOST_USES = 32  # uses that are kept; with 3 bytes each, the text has at most 128 characters
_BYTES = 3
_SPAN = 1 << (8 * _BYTES)  # seconds, about 194 days: times are known within 97 days of now


def encode_uses(seconds: Iterable[float]) -> str:
    """The text for uses at these epoch `seconds`. Only the newest 32 uses are kept.

    >>> decode_uses(encode_uses([7.9, 3.0, 7.2]), 10.0)
    (3, 7)
    """
    newest = sorted({int(second) for second in seconds})[-MOST_USES:]
    packed = b"".join([(second % _SPAN).to_bytes(_BYTES, "big") for second in newest])
    return base64.b64encode(packed).decode()


def decode_uses(text: str, now: float) -> tuple[int, ...]:
    """The epoch seconds of the uses in `text`, the oldest first. `now` is in epoch seconds."""
    now, half = int(now), _SPAN // 2
    return tuple([now + half - (now + half - second) % _SPAN for second in _unpacked(text)])


@lru_cache(maxsize=4096)
def expected_use(text: str, now: int, youngest: float) -> float:
    """The sum of 1 / (age + `youngest`) over the uses in `text`; 0 if `text` is empty.

    The age of a use is the time from the use to `now`, in seconds. `youngest` is in seconds, and
    `now` in epoch seconds. The result is cached, because a decision needs it several times.
    """
    total = 0.0
    for second in _unpacked(text):
        age = (now - second) % _SPAN
        total += 1.0 / ((age if age < _SPAN // 2 else 0) + youngest)
    return total


@lru_cache(maxsize=4096)
def _unpacked(text: str) -> tuple[int, ...]:
    packed = base64.b64decode(text)
    return tuple(
        int.from_bytes(packed[i : i + _BYTES], "big") for i in range(0, len(packed), _BYTES)
    )


def merged_uses(texts: Iterable[str], now: float) -> str:
    """The newest uses of all `texts` together. `now` is in epoch seconds.

    >>> merged_uses([encode_uses([1, 5]), encode_uses([5, 9])], 10.0) == encode_uses([1, 5, 9])
    True
    """
    different = {text for text in texts if text}
    if len(different) <= 1:
        return next(iter(different), "")
    return encode_uses([second for text in different for second in decode_uses(text, now)])
