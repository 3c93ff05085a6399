"""A fingerprint of a storage's bytes, computed on the device where the bytes are.

A tensor's `_version` does not show every change. Fused optimizers, BatchNorm statistics,
`p.data.add_()`, NumPy views and dlpack change bytes without a change of `_version`. So the present
bytes are compared with the bytes that were loaded from the source, by their fingerprints.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

WORDS = 65536  # 32-bit words in a row
# Words that torch converts at once. For more words torch uses several threads, which wait for one
# another in each row. On two busy cores, a digest then took 30 times as long as with one thread.
_WORDS_OF_ONE_THREAD = 16384
_ROWS_ON_A_CARD = 24  # 6 MiB of words at a time, so the scratch is 24 MiB


def digest(content: Tensor) -> Tensor:
    """The fingerprint of `content`, [n] uint8: two sums for each row of 256 KiB.

    The result is [rows, 2] int64 on the CPU. Only the sums leave the card. Each sum is Σ wordᵢ·keyᵢ
    modulo 2⁶⁴ over the 32-bit words of a row. Every place in a row has two random 64-bit keys, one
    for each sum, which are drawn once per boot and user.

    If two rows differ, their first sums are equal with a probability of at most 2⁻³³, and both sums
    with at most 2⁻⁶⁶. Reason: in at least one word the difference is an odd number times 2ᵏ with
    k ≤ 31. Then at most 2ᵏ of the 2⁶⁴ possible keys of that word make the sums equal. This holds for
    any change made without knowledge of the keys. Code in this process that reads the keys could
    make a change that the digest does not show.

    An exchange of two rows is detected, because each row has its own sums.

    Measured: 1.8 GB/s on a CPU core (blake2b: 1.4 GB/s).

    Source: Carter and Wegman 1979, multilinear hashing; Lemire and Kaser 2014, arXiv:1202.4961.
    """
    row_bytes = 4 * WORDS
    whole = content.numel() // row_bytes * row_bytes
    sums = _sums(content[:whole].view(torch.int32).view(-1, WORDS))
    rest = content[whole:]
    if rest.numel():
        last = torch.zeros(-(-rest.numel() // 4) * 4, dtype=torch.uint8, device=content.device)
        last[: rest.numel()].copy_(rest)
        sums = torch.cat([sums, _sums(last.view(torch.int32).view(1, -1))])
    return sums.cpu()


def _sums(rows: Tensor) -> Tensor:
    keys = _keys(rows.device)[:, : rows.shape[1]]
    sums = torch.empty(len(rows), 2, dtype=torch.int64, device=rows.device)
    if rows.device.type == "cpu":
        words = torch.empty(rows.shape[1], dtype=torch.int64)
        parts = words.split(_WORDS_OF_ONE_THREAD)
        for index in range(len(rows)):  # one row at a time fits into the processor's cache
            for part, content in zip(parts, rows[index].split(_WORDS_OF_ONE_THREAD), strict=True):
                part.copy_(content)
            torch.mv(keys, words, out=sums[index])
    else:
        for start in range(0, len(rows), _ROWS_ON_A_CARD):  # cards have no integer matrix product
            part = rows[start : start + _ROWS_ON_A_CARD]
            for key in (0, 1):  # the words become 64-bit numbers in the product
                sums[start : start + len(part), key] = (part * keys[key]).sum(1)
    return sums


_on_cards: dict[torch.device, Tensor] = {}


def keys_on_cards() -> tuple[Tensor, ...]:
    """The keys that `digest` keeps on cards. They are not offloaded."""
    return tuple(_on_cards.values())


def forget_keys(cards: Iterable[torch.device]) -> None:
    """Frees the keys on these `cards`. A later digest makes them again."""
    for card in cards:
        _on_cards.pop(card, None)


def every_key() -> tuple[Tensor, ...]:
    """The keys that `digest` keeps, on cards and on the CPU."""
    return (*keys_on_cards(), *([_host_keys()] if _host_keys.cache_info().currsize else ()))


def _keys(device: torch.device) -> Tensor:
    """The random keys on `device`, [2, WORDS] int64."""
    if device.type == "cpu":
        return _host_keys()
    if device not in _on_cards:
        _on_cards[device] = _host_keys().to(device)
    return _on_cards[device]


@functools.cache
def _host_keys() -> Tensor:
    """The random keys on the CPU, [2, WORDS] int64.

    The keys are derived from the user and the random id of the boot. So all processes of a user
    have the same keys until a reboot, and can compare their digests.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # the digests of this process are not comparable
        boot = os.urandom(32)
    seed = b"gpu-console digest %d %s" % (os.getuid(), boot)
    keys = bytearray(hashlib.shake_256(seed).digest(2 * WORDS * 8))
    return torch.frombuffer(keys, dtype=torch.int64).view(2, WORDS)
