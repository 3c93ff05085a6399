"""Copies between tensors in RAM: equal to the bit for every size, and never by several threads for a small tensor."""

import pytest
import torch

from gpu_runtime.backends.pytorch.storages import LEG_BYTES, copy_to

SIZES = (
    0,
    1,
    15,
    16,
    17,
    32 * 1024,
    32 * 1024 + 1,
    24_576 * 16,
    24_576 * 16 + 5,
    1 << 20,
    LEG_BYTES,
)


@pytest.mark.parametrize("offset", [0, 3, 16])
def test_each_byte_arrives_and_none_beside_it(offset):
    """Also from a place that the large items do not divide."""
    fresh = [torch.randint(0, 256, (size + offset,), dtype=torch.uint8) for size in SIZES]
    sources = [one[offset:] for one in fresh]
    beside = [torch.full((size + offset + 1,), 7, dtype=torch.uint8) for size in SIZES]
    copy_to([one[offset:-1] for one in beside], sources)
    for target, source in zip(beside, sources, strict=True):
        assert torch.equal(target[offset:-1], source)
        assert (target[:offset] == 7).all() and target[-1] == 7


def test_no_part_of_a_small_tensor_is_large_enough_for_several_threads(monkeypatch):
    """torch takes several threads for more than 32,768 elements."""
    counted = []
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, it, **_: counted.extend(map(len, (*to, *it)))
    )
    sources = [torch.zeros(size, dtype=torch.uint8) for size in SIZES[:-1]]
    copy_to([one.clone() for one in sources], sources)
    assert 0 < max(counted) <= 32_768


def test_what_follows_one_another_in_both_places_is_one_copy(monkeypatch):
    """The blocks of a move are allocated in one row. A gap in either place, or another order, ends a run."""
    page, other = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    calls = []
    copied = torch._foreach_copy_

    def counted(to, of, **options):
        calls.append([len(one) for one in to])
        copied(to, of, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    ends = [(0, 40), (40, 48), (48, 48), (48, 100), (101, 120), (140, 200), (120, 140)]
    copy_to([other[a:b] for a, b in ends], [page[a:b] for a, b in ends])
    assert calls == [[100, 19, 60, 20]]
    assert [n for n in range(200) if other[n] != page[n]] == [100]
    fresh = torch.zeros(48, dtype=torch.uint8)
    copy_to([fresh[:8], fresh[40:]], [page[:8], page[8:16]])
    assert calls[1] == [8, 8] and not fresh[8:40].any() and torch.equal(fresh[40:], page[8:16])
