"""The fingerprint that stands between a changed weight and its loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.backends.pytorch import fingerprint
from gpu_runtime.backends.pytorch.fingerprint import WORDS, digest

ROW = 4 * WORDS


def content(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("size", [0, 1, 3, 4, ROW - 1, ROW, ROW + 1, 3 * ROW + 5])
def test_equal_bytes_have_equal_fingerprints_wherever_they_lie(size):
    """Two sums for each row, begun rows included; alignment plays no part."""
    one = content(size)
    other = torch.empty(size + 8, dtype=torch.uint8)[4 : 4 + size].copy_(one).clone()
    assert digest(one).shape == (-(-size // ROW), 2)
    assert torch.equal(digest(one), digest(other))


@given(size=st.sampled_from([5, 1000, ROW + 77]), at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_one_bit_anywhere_shows(size, at, bit):
    one, other = content(size), content(size)
    other[at % size] ^= 1 << bit
    assert not torch.equal(digest(one), digest(other))


EDITS = {
    "signs flipped": lambda w: w.neg_(),
    "two signs flipped": lambda w: w.index_copy_(0, torch.tensor([3, 900]), -w[[3, 900]]),
    "two swapped": lambda w: w.index_copy_(0, torch.tensor([5, 70_000]), w[[70_000, 5]]),
    "reversed": lambda w: w.copy_(w.flip(0)),
    "sorted": lambda w: w.copy_(w.sort().values),
    "rows exchanged": lambda w: w.copy_(
        torch.cat([w[WORDS : 2 * WORDS], w[:WORDS], w[2 * WORDS :]])
    ),
    "rolled by a row": lambda w: w.copy_(w.roll(WORDS)),
    "one more, one less": lambda w: w.index_add_(
        0, torch.tensor([1, 2]), torch.tensor([1.0, -1.0])
    ),
    "smallest step": lambda w: w[7:8].copy_(torch.nextafter(w[7:8], torch.tensor([9.0]))),
    "zero to minus zero": lambda w: w[0:1].neg_(),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_accidents_that_fool_plain_sums_show(edit):
    """Sign flips are multiples of 2^31, swaps keep every sum, and rows could change places."""
    weights = torch.randn(3 * WORDS, generator=torch.Generator().manual_seed(0))
    weights[0] = 0.0
    before = digest(weights.view(torch.uint8))
    edit(weights)
    assert not torch.equal(digest(weights.view(torch.uint8)), before)


def test_both_ways_to_sum_agree():
    """A card sums products, the CPU multiplies matrices; the fingerprint of a model moves with it."""
    rows = content(4 * ROW).view(torch.int32).view(-1, WORDS)
    keys = fingerprint._keys(torch.device("cpu"))
    products = torch.stack([(rows.long() * key).sum(1) for key in keys], dim=1)
    assert torch.equal(products, digest(content(4 * ROW)))
