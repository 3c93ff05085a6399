"""Cases of torch's operators and optimizers are parked in the middle: equal to the bit. A sample; all in the soak."""

import contextlib
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpu_runtime.backends.base import NotStill
from gpu_runtime.backends.pytorch import search
from tests import soak
from tests.backends.test_kernel_memory import Kernel

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
SAMPLES = 2  # inputs of each operator and dtype
LEAST_OPERATORS, LEAST_OPTIMIZERS = 1600, 260


@pytest.fixture
def parks(monkeypatch) -> Callable[[], None]:
    """Parks everything and brings it back. Tensors of any size count."""
    pytest.importorskip("expecttest", reason="torch's databases need expecttest and numpy")
    monkeypatch.setattr(search, "SIMULATED_BYTES", 1)
    gc.collect()
    kernel = Kernel("sim")

    def park_and_return() -> None:
        with contextlib.suppress(NotStill):  # such as a real view of a complex tensor: all stays
            kernel.park()  # of an operator with empty tensors, nothing leaves
            kernel.unpark()

    return park_and_return


def operators() -> list[tuple[Any, torch.dtype]]:
    from torch.testing._internal.common_methods_invocations import op_db

    # The memory of an `empty` tensor has whatever was there before.
    filled = [op for op in op_db if "empty" not in op.name]
    cases = [(op, dtype) for op in filled for dtype in DTYPES]
    return [(op, dtype) for op, dtype in cases if dtype in op.supported_dtypes("cpu")]


def tensors_in(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [one for one in leaves if isinstance(one, torch.Tensor)]


def as_bytes(value: Any) -> list[bytes]:
    """The content of each tensor in `value`, so that NaN equals NaN."""
    found = []
    for one in tensors_in(value):
        dense = one.detach().to_dense() if one.layout is not torch.strided else one.detach()
        plain = dense.resolve_conj().resolve_neg().contiguous()
        found.append(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found


def run_operator(op: Any, dtype: torch.dtype, between: Callable[[], None]) -> list[Any]:
    """The results and gradients of `op`. `between` is called between forward and backward."""
    torch.manual_seed(0)
    trains = dtype.is_floating_point and op.supports_autograd
    found: list[Any] = []
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=trains), SAMPLES):
        torch.manual_seed(1)
        result = op(sample.input, *sample.args, **sample.kwargs)
        between()
        found.append(as_bytes(result))
        outs = [one for one in tensors_in(result) if one.requires_grad]
        leaves = [one for one in tensors_in((sample.input, sample.args)) if one.requires_grad]
        if outs and leaves:
            starts = [torch.ones_like(one) for one in outs]
            grads = torch.autograd.grad(outs, leaves, starts, allow_unused=True)
            found.append(as_bytes([one for one in grads if one is not None]))
    return found


def outcome(run: Callable[..., list[Any]], *args: Any) -> list[Any] | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(*args)
    except Exception as error:
        return type(error).__name__


def compare(cases: list[Any], run: Callable[..., list[Any]], park: Callable[[], None]) -> int:
    """The number of `cases` equal with and without parks; others fail, but for those never equal (`empty`)."""
    equal, different = 0, []
    for case in cases:
        first = outcome(run, *case, lambda: None)
        second = outcome(run, *case, lambda: None)
        if first != second or isinstance(first, str):
            continue
        parked = outcome(run, *case, park)
        if parked == first:
            equal += 1
        else:
            name = getattr(case[0], "full_name", case[0])
            different.append((name, *case[1:], parked if isinstance(parked, str) else "values"))
    assert different == []
    return equal


def optimizers() -> Iterator[tuple[Any, dict[str, Any]]]:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            for variant in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
                if not variant or next(iter(variant)) in info.supported_impls:
                    yield info.optim_cls, {**given.kwargs, **variant}


def run_optimizer(
    kind: Any, options: dict[str, Any], between: Callable[[], None]
) -> list[list[bytes]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    x, y = torch.randn(16, 8), torch.randn(16, 3)
    optimizer = kind([p for p in net.parameters() if p.dim() == 2], **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        between()
        loss.backward()
        return loss

    for _ in range(3):
        if kind.__name__ == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            between()
            optimizer.step()
    return [as_bytes(list(net.parameters())), as_bytes(optimizer.state_dict())]


@pytest.mark.thorough
def test_a_sample_of_operators_and_optimizers_is_equal_with_parks(parks):
    """Each 120th operator with its dtypes, and each 60th optimizer."""
    sample = operators()[::120]
    assert compare(sample, run_operator, parks) >= len(sample) // 2
    chosen = list(optimizers())[::60]
    assert compare(chosen, run_optimizer, parks) == len(chosen)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_operator_of_torch_is_equal_with_parks(parks):
    equal = compare(operators(), run_operator, parks)
    soak.add("none", operators_equal_with_parks=equal)
    assert equal >= LEAST_OPERATORS


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_optimizer_of_torch_is_equal_with_parks(parks):
    equal = compare(list(optimizers()), run_optimizer, parks)
    soak.add("none", optimizers_equal_with_parks=equal)
    assert equal >= LEAST_OPTIMIZERS
