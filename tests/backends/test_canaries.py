"""Each private part of torch does what gpu-console uses it for. `CANARIES` has what to do when one changes."""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.ao.nn.quantized.modules import conv  # search.packed_classes looks for it
from torch.distributed import rpc
from torch.utils import _python_dispatch as dispatch

from gpu_runtime.backends.pytorch import old_torch, search, swap
from gpu_runtime.fault_texts import WRITE_REFUSED
from gpu_runtime.threads import outside_modes, with_own_modes
from gpu_runtime.version import TORCH_WITH_EXCHANGE

ROOT = Path(__file__).parents[2]
C: Any = torch._C
CUDA = pytest.mark.skipif(not torch.version.cuda, reason="only builds for CUDA have it")


def swaps() -> None:
    one, other = torch.zeros(4), torch.ones(4)
    view = one[1:]
    # not the one of the simulated accelerator, which UntypedStorage itself may have
    exchange = getattr(C.StorageBase, "_swap_data_ptr_", old_torch.exchange)
    exchange(one.untyped_storage(), other.untyped_storage())
    assert view.tolist() == [1, 1, 1] and other.tolist() == [0, 0, 0, 0]
    assert (exchange is not old_torch.exchange) == (torch.__version__ >= TORCH_WITH_EXCHANGE)


def guards() -> None:
    assert (swap._mark() is None) == (torch.__version__ < "2.6")
    if swap._mark() is None:
        return
    guard = C._construct_storage_from_data_pointer(0, torch.device("cpu"), 16)
    tensor = torch.empty(0).set_(guard)
    C._set_storage_data_ptr_access_error_msg(guard._cdata, "the bytes have left")
    for access in (guard.data_ptr, tensor.data_ptr, tensor.sum, tensor.tolist, tensor.zero_):
        with pytest.raises(RuntimeError, match="the bytes have left"):
            access()


def refuses() -> None:
    ones, tensor = torch.ones(4), torch.ones(4)
    start, before = C._data_address(tensor), tensor.data_ptr()
    C._set_throw_on_mutable_data_ptr(tensor)
    for write in (
        tensor.zero_,
        tensor.data_ptr,
        tensor.numpy,
        lambda: torch.add(ones, 1, out=tensor),
    ):
        with pytest.raises(RuntimeError, match=f"^{WRITE_REFUSED}"):
            write()
    assert tensor.sum() == 4 and C._data_address(tensor) == start == before


def finds_lazy_copies() -> None:
    tensor = torch.ones(4)
    copy = tensor._lazy_clone()
    assert C._is_cow_tensor(copy) and not C._is_cow_tensor(torch.ones(4))
    C._data_address(copy)
    assert C._is_cow_tensor(copy)


def counts() -> None:
    tensor = torch.ones(4)
    assert tensor._use_count() == 1
    storage, view = tensor.untyped_storage(), tensor[1:]
    assert view._is_view() and view._base is tensor
    assert storage._cdata == view.untyped_storage()._cdata
    assert tensor._use_count() == 2 and C._storage_Use_Count(storage._cdata) == 3
    version = tensor._version
    view.add_(1)
    assert tensor._version == version + 1


def makes_views_again() -> None:
    other = torch.zeros(2, dtype=torch.complex64)
    view: Any = torch.ones(2, dtype=torch.complex64).real
    view._view_func_unsafe(other).add_(1)
    assert other.tolist() == [1, 1]


def saved() -> None:
    weight = torch.ones(4, requires_grad=True)
    (result,) = search.saved_by((weight.exp()).grad_fn)
    assert result.tolist() == weight.exp().tolist()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: [one], lambda one: 1 / 0):
        assert all(type(one) is list for one in search.saved_by(weight.exp().grad_fn))


def rebinds() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    assert torch._has_compatible_shallow_copy_type(one, other)
    C._swap_tensor_impl(one, other)
    assert one.tolist() == [1, 1] and torch._neg_view(one).tolist() == [-1, -1]
    torch._foreach_copy_([one], [other], non_blocking=True)
    assert one.tolist() == [0, 0]


class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 2 * function(*args, **(kwargs or {}))


class Refuses(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, *_: Any) -> Any:
        raise AssertionError("a mode of the user's")


def leaves_modes() -> None:
    @with_own_modes()
    def within_ours() -> Tensor:
        with torch.device("meta"):
            return torch.ones(2)

    @outside_modes
    def made() -> tuple[Tensor, Tensor]:
        plain = torch.ones(2)
        assert not plain.is_inference() and not torch.is_autocast_enabled("cpu")
        return plain, within_ours()

    modes: list[Any] = [Doubles(), Refuses(), torch.inference_mode(), torch.device("meta")]
    for mode in [*modes, torch.autocast("cpu")]:
        with mode:
            plain, ours = made()
        assert (plain.tolist(), ours.is_meta) == ([1, 1], True)
    torch.func.vmap(lambda one: (made(), one)[1])(torch.ones(3))


def reads_layouts() -> None:
    sparse = torch.eye(2).to_sparse()  # not coalesced: `indices()` raises
    assert C._has_storage(torch.ones(2)) and not C._has_storage(sparse)
    assert sparse._indices().tolist() == [[0, 1], [0, 1]] and sparse._values().tolist() == [1, 1]
    if torch.backends.mkldnn.is_available():
        assert torch.ones(2).to_mkldnn().layout is torch._mkldnn
    assert any(kind.__name__ == "_ConvNd" for kind in search.packed_classes())


def governs_modules() -> None:
    calls = []

    class Net(nn.Linear):
        def _apply(self, *args: Any, **named: Any) -> Any:
            calls.append("_apply")
            return super()._apply(*args, **named)

        def _named_members(self, *args: Any, **named: Any) -> Any:
            calls.append("_named_members")
            return super()._named_members(*args, **named)

    net = Net(2, 2).half()
    assert len(list(net.parameters())) == 2 and calls == ["_apply", "_named_members"]
    assert "_compiled_call_impl" in nn.Module.compile.__code__.co_names


def saves_states() -> None:
    """`state_dict` calls of each module what `quiet_cells` looks at, and nothing else that could be a user's."""
    calls: list[str] = []

    class Net(nn.Linear):
        def _save_to_state_dict(self, *args: Any) -> Any:
            calls.append("_save_to_state_dict")
            return super()._save_to_state_dict(*args)

    net, optimizer = Net(2, 2), torch.optim.SGD([torch.ones(1)], lr=1.0)
    net.state_dict()
    assert calls == ["_save_to_state_dict"]
    hooks = (net._state_dict_hooks, net._state_dict_pre_hooks)
    of_optimizer = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    assert not any((*hooks, *(getattr(optimizer, name) for name in of_optimizer)))


def knows_groups() -> None:
    assert c10d._world.pg_map == {} and rpc.api._is_current_rpc_agent_set() is False


def has_calls_of_cards() -> None:
    for name in ("isHistoryEnabled", "hasPrimaryContext", "clearCublasWorkspaces"):
        assert callable(getattr(C, f"_cuda_{name}"))
    assert callable(torch.cuda.memory._snapshot)
    named = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"stacks", "max_entries"} <= set(named)


Canary = tuple[Callable[[], None], str, str]
# What is tried, the names it is tried for, and what to do when it fails.
CANARIES: list[Canary] = [
    (swaps, "_swap_data_ptr_", "let swap._native return None for this torch: our own exchange then proves itself, or "
        "nothing moves; tests/backends/test_old_torch.py, and the table of docs/guides/environments.md"),
    (guards, "_construct_storage_from_data_pointer _set_storage_data_ptr_access_error_msg", "let swap._mark return "
        "None for this torch: no bytes leave a card then; look for another guard that refuses each read"),
    (refuses, "_set_throw_on_mutable_data_ptr _data_address", "swap.refuse_writes and its text: without a "
        "refusal nothing leaves a simulated card; `_data_address` must neither raise nor copy"),
    (finds_lazy_copies, "_is_cow_tensor", "swap.has_lazy_copy: a lazy copy must stay, or `data_ptr` makes it whole"),
    (counts, "_use_count _storage_Use_Count _is_view _base _cdata _version", "search.hidden_references, "
        "holders._references, storages.referenced_elsewhere: where the counts are unknown, the tensor must stay"),
    (makes_views_again, "_view_func_unsafe", "storages.behind: where a complex view cannot be made again, its "
        "references are unknown, and the notebook's memory must stay"),
    (saved, "_autograd", "search.saved_by and old_torch.saved_in: without the `_raw_saved_` names what a graph saved "
        "is not found, so a process with a live graph must not be parked"),
    (rebinds, "_has_compatible_shallow_copy_type _swap_tensor_impl _neg_view _foreach_copy_", "storages._rebinding, "
        "storages.view and the copies of storages.py; `torch.utils.swap_tensors` does what `_swap_tensor_impl` does"),
    (leaves_modes, "_DisableFuncTorch _InferenceMode _DisableAutocast _EnableTorchFunction _len_torch_function_stack "
        "_pop_torch_function_stack _push_on_torch_function_stack _dispatch_tls_is_dispatch_key_included "
        "_disable_current_modes", "gpu_runtime/threads.py: find the call that leaves this kind of mode"),
    (reads_layouts, "_indices _values _mkldnn _ConvNd _has_storage", "search._PARTS_OF_LAYOUT, search._PACKED, "
        "quiet_cells._Statements._is_tensor"),
    (governs_modules, "_apply _named_members _compiled_call_impl", "pins._WHOLE, pins._governed_class and "
        "torch_backend._of_part: the way from `half` and `parameters` to our class has changed"),
    (saves_states, "_save_to_state_dict _state_dict_hooks _state_dict_pre_hooks _optimizer_state_dict_pre_hooks "
        "_optimizer_state_dict_post_hooks", "quiet_cells._Statements._is_state_dict: no state is saved from RAM"),
    (knows_groups, "_world _is_current_rpc_agent_set", "obstacles._why_not_groups: without it a process with a group "
        "must not be parked"),
    (has_calls_of_cards, "_cuda_isHistoryEnabled _cuda_hasPrimaryContext _cuda_clearCublasWorkspaces _snapshot "
        "_record_memory_history", "streams.release_cached, process_memory._used_card"),
]  # fmt: skip
OF_CUDA = (guards, has_calls_of_cards)


@pytest.mark.parametrize(
    "canary",
    [pytest.param(one, id=one[0].__name__, marks=[CUDA] * (one[0] in OF_CUDA)) for one in CANARIES],
)
def test_a_private_part_of_torch_does_what_it_is_used_for(canary: Canary) -> None:
    tried, names, remedy = canary
    try:
        tried()
    except BaseException as error:
        pytest.fail(f"torch {torch.__version__} has changed {names}: {error!r}.\nLook at {remedy}")


# What has the names. Our own objects have some of them too, such as `_snapshot`.
HOMES: tuple[Any, ...] = (
    torch, C, C._autograd, Tensor, torch.UntypedStorage, nn.Module, dispatch, torch.cuda.memory, c10d, rpc.api, conv,
)  # fmt: skip


@pytest.mark.thorough
def test_each_private_part_of_torch_in_the_code_has_a_canary() -> None:
    """A name that the code no longer reads is left out of the table too."""
    read, ours = set(), {"_C", "_"}
    for path in [*ROOT.glob("gpu_runtime/**/*.py"), *ROOT.glob("kernel_ext/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                (ours if isinstance(node.ctx, ast.Store) else read).add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Name):
                ours.add(node.id)
            elif isinstance(node, ast.alias):
                read.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    theirs = {name for home in HOMES for name in dir(home) if re.match("_[^_]", name)}
    tried = {name for _, names, _ in CANARIES for name in names.split()}
    assert (read & theirs) - ours - tried == set() and tried - read == set()
