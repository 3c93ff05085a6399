"""Tensors in the arguments and results of calls on a model in another process."""

import pytest
import torch

from gpu_runtime.backends.processes import remote_calls

TENSORS = {
    "matrix": torch.arange(6).reshape(2, 3),
    "view": torch.arange(6).reshape(2, 3).t(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0),
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "with gradients": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_as_it_was_sent(tensor):
    [(arrived,)] = remote_calls.unpack(remote_calls.pack([(tensor,)]))
    assert type(arrived) is type(tensor) and arrived.dtype == tensor.dtype
    assert arrived.requires_grad == tensor.requires_grad
    assert arrived.resolve_conj().tolist() == tensor.resolve_conj().tolist()


def test_a_tensor_is_sent_once_as_a_buffer_and_arrives_writable():
    """Torch's own pickle contains the bytes, so each process on the way would copy them."""
    large = torch.zeros(2**20)
    data, *buffers = remote_calls.pack({"x": large})
    assert len(data) < 1000 and [buffer.raw().nbytes for buffer in buffers] == [4 << 20]
    shared = torch.zeros(3)
    one, other = remote_calls.unpack(remote_calls.pack([shared, shared]))
    assert one is other
    # Ray's memory is read-only. Torch warns about such an array, and a write would end the process.
    data, *buffers = remote_calls.pack(torch.arange(2**16))
    arrived = remote_calls.unpack((data, *(bytes(buffer.raw()) for buffer in buffers)))
    arrived[0] = 7
    assert arrived[0] == 7
