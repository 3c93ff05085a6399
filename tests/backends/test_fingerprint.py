"""The fingerprint proves, before a model is dropped, that no weight was changed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.backends.pytorch import host_copies
from gpu_runtime.backends.pytorch.host_copies import WORDS, digest

ROW = 4 * WORDS


def content(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("size", [0, 1, 3, 4, ROW - 1, ROW, ROW + 1, 3 * ROW + 5])
def test_equal_bytes_have_equal_fingerprints_at_any_address(size):
    """Each row has two sums, also an incomplete row. The alignment of the bytes makes no difference."""
    one = content(size)
    other = torch.empty(size + 8, dtype=torch.uint8)[4 : 4 + size].copy_(one).clone()
    assert digest(one).shape == (-(-size // ROW), 2)
    assert torch.equal(digest(one), digest(other))


@given(size=st.sampled_from([5, 1000, ROW + 77]), at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_a_change_of_one_bit_is_detected(size, at, bit):
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
def test_changes_that_plain_sums_miss_are_detected(edit):
    """A swap keeps every plain sum, a flipped sign changes it by a multiple of 2^31, and rows are exchanged."""
    weights = torch.randn(3 * WORDS, generator=torch.Generator().manual_seed(0))
    weights[0] = 0.0
    before = digest(weights.view(torch.uint8))
    edit(weights)
    assert not torch.equal(digest(weights.view(torch.uint8)), before)


def test_both_ways_to_compute_the_sums_agree():
    """A card adds up products, while the CPU multiplies matrices. So a model keeps its fingerprint when it moves."""
    rows = content(4 * ROW).view(torch.int32).view(-1, WORDS)
    keys = host_copies._keys(torch.device("cpu"))
    products = torch.stack([(rows.long() * key).sum(1) for key in keys], dim=1)
    assert torch.equal(products, digest(content(4 * ROW)))
