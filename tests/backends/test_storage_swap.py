"""The stand-in for torch's exchange of storages does what torch's own method does."""

import pytest
import torch

from gpu_runtime.backends.pytorch import swap
from tests import storage_swap


@pytest.fixture(params=["own", "stand-in"])
def exchange(request, monkeypatch):
    """Both ways to exchange the bytes of storages. Skips the way that this machine lacks."""
    if request.param == "own":
        if not swap.can_swap():
            pytest.skip("torch is older than 2.12")
        return
    monkeypatch.setattr(torch._C, "_is_cow_tensor", torch._C._is_cow_tensor)
    method = "_swap_data_ptr_"
    monkeypatch.setattr(torch.UntypedStorage, method, None, raising=False)
    monkeypatch.setattr(storage_swap, "can_swap", lambda: False)
    try:
        assert storage_swap.install()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_a_view_sees_the_bytes_that_its_storage_got(exchange):
    one, other = torch.zeros(4), torch.ones(4)
    view = one[1:]
    done = swap.Exchange()
    done.put(one.untyped_storage(), other.untyped_storage())
    swap.at_once(done.calls)
    assert view.tolist() == [1, 1, 1] and other.tolist() == [0, 0, 0, 0]
    done.undo()
    assert view.tolist() == [0, 0, 0] and other.tolist() == [1, 1, 1, 1]


def test_a_mark_moves_with_the_bytes(exchange, mark):
    """After the return every access works again, and the storage can be resized."""
    tensor = torch.arange(4.0)
    storage = tensor.untyped_storage()
    guard = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), 16)
    mark(guard._cdata, "away")
    storage._swap_data_ptr_(guard)
    with pytest.raises(RuntimeError):
        tensor.sum()
    storage._swap_data_ptr_(guard)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert storage.resizable() and storage.resize_(32).nbytes() == 32
