"""The simulated accelerator for tests with several cards: it must behave as CUDA does where code
relies on it.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests import simgpu
from tests.simgpu import MIB


def test_bytes_are_counted_from_the_first_tensor_of_a_storage_to_the_last():
    """Views share their storage; it is freed once no view is left."""
    before = simgpu.used_bytes(1)
    x = torch.ones(8, 8, device="simgpu:1")
    part = x[2:4].t()
    assert (
        simgpu.used_bytes(1) - before == 256
        and part.untyped_storage()._cdata == x.untyped_storage()._cdata
    )
    del x
    gc.collect()
    assert simgpu.used_bytes(1) - before == 256
    del part
    gc.collect()
    assert simgpu.used_bytes(1) == before


def test_a_full_card_raises_its_own_out_of_memory_error():
    gc.collect()
    before = simgpu.used_bytes(2)
    with (
        simgpu.limited(card2=before + MIB),
        pytest.raises(simgpu.SimOutOfMemory, match="simgpu:2 out of memory") as error,
    ):
        torch.empty(MIB + 1, dtype=torch.uint8, device="simgpu:2")
    assert isinstance(error.value, torch.OutOfMemoryError)
    assert simgpu.used_bytes(2) == before


@pytest.mark.parametrize("other", ["cpu", "simgpu:0"])
def test_operands_on_two_devices_raise_cudas_error(other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(4, device="simgpu:1") + torch.ones(4, device=other)


def test_forward_and_backward_run_on_the_first_card():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))
    x = torch.randn(3, 8)
    expected = module(x)
    module.to("simgpu:0")
    answer = module(x.to("simgpu:0"))
    assert answer.device == torch.device("simgpu:0")
    torch.testing.assert_close(answer.cpu(), expected)
    answer.sum().backward()
    assert module[0].weight.grad.device == torch.device("simgpu:0")
