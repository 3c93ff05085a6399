"""A fingerprint of a storage's bytes, taken where they lie.

`_version` proves nothing: fused optimizers, BatchNorm statistics, `p.data.add_()`, NumPy views and dlpack leave it as
it was. So the bytes themselves are compared with what the source gave.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

WORDS = 65536  # 32-bit words to a row
_ROWS_ON_A_CARD = 256  # 64 MiB of words at a time


def digest(content: Tensor) -> Tensor:
    """The fingerprint of [n] uint8 bytes: [rows, 2] int64 on the CPU, two sums for each 256 KiB row.

    Only the sums leave the card. Each is Σ wordᵢ·keyᵢ modulo 2⁶⁴ over 32-bit words, with a random 64-bit key for every
    place in the row, drawn once per process. In two rows that differ, some word differs by less than 2³², so by an odd
    multiple of at most 2³¹; for random keys their sums agree with probability 2⁻³³ at most, and both sums with 2⁻⁶⁶.
    That holds for any change made without knowledge of the keys: sign flips, swaps, permutations, a single bit. A
    row's sums stand at its place, so rows cannot be exchanged unseen either. It is no defence against somebody who
    reads the keys in this process.

    Measured: 5 GB/s on two CPU cores (blake2b: 1.4 GB/s a core).
    Source: Carter and Wegman 1979, multilinear hashing; Lemire and Kaser 2014, arXiv:1202.4961.
    """
    whole = content.numel() // (4 * WORDS) * (4 * WORDS)
    sums = _sums(content[:whole].view(torch.int32).view(-1, WORDS))
    rest = content[whole:]
    if rest.numel():
        last = torch.zeros(4 * WORDS, dtype=torch.uint8, device=content.device)
        last[: rest.numel()].copy_(rest)
        sums = torch.cat([sums, _sums(last.view(torch.int32).view(1, WORDS))])
    return sums.cpu()


def _sums(rows: Tensor) -> Tensor:
    keys = _keys(rows.device)
    sums = torch.empty(len(rows), 2, dtype=torch.int64, device=rows.device)
    if rows.device.type == "cpu":
        for index in range(len(rows)):  # row by row stays in the processor's cache
            torch.mv(keys, rows[index].long(), out=sums[index])
    else:
        for start in range(0, len(rows), _ROWS_ON_A_CARD):  # cards have no integer matrix product
            part = rows[start : start + _ROWS_ON_A_CARD].long()
            for key in (0, 1):
                sums[start : start + len(part), key] = (part * keys[key]).sum(1)
    return sums


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """[2, WORDS] random int64, the same for every device of this process."""
    if device.type != "cpu":
        return _keys(torch.device("cpu")).to(device)
    return torch.frombuffer(bytearray(os.urandom(2 * WORDS * 8)), dtype=torch.int64).view(2, WORDS)
