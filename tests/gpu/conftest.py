"""Fixtures of the tests on a real card: a warm card."""

import gc
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def warm() -> None:
    """A card on which a matrix product has run.

    The first product takes memory of the card for good: cuBLAS, and the code of the kernels.
    """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    layer(torch.randn(4, 1024, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()


@pytest.fixture
def settle(warm: None) -> Iterator[Callable[[], None]]:
    """A function that frees all memory of the card that no tensor has.

    After each product, cuBLAS keeps a workspace of 32 MiB, which torch counts as allocated. The
    next test starts with a card that is settled and has no limit.
    """
    import torch

    def settled() -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    settled()
    yield settled
    torch.cuda.set_per_process_memory_fraction(1.0)
    settled()
