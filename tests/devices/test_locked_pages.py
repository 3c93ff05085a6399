"""Host memory that a card's driver locks, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
import types
import weakref

import pytest

from gpu_runtime.devices.process_memory import Memory, SharedPages
from gpu_runtime.units import MIB
from tests.page_rights import writable

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class FakeCuda:
    """The part of torch.cuda that locks host memory, and torch's check after the start of a kernel.

    A call that fails leaves its error in the thread. `cudaGetLastError`, which torch calls after it
    starts a kernel, returns and clears this error.

    Source: torch/csrc/cuda/shared/cudart.cpp; c10/cuda/CUDAException.h.
    """

    def __init__(self) -> None:
        self.fails = self.forked = False
        self.started, self.calls = True, 0
        self.locked: dict[int, int] = {}
        self.last_error = 0
        self.current, self.contexts = 0, {0}  # cards

    def is_initialized(self) -> bool:
        return self.started and not self.forked

    def cudart(self) -> FakeCuda:
        if self.forked:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        self.contexts.add(self.current)  # each call needs a context
        return self

    def device_count(self) -> int:
        return 4

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, card: int):
        before, self.current = self.current, card
        yield
        self.current = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        if self.fails or not writable(address):
            self.last_error = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    def ones(self, *size: int, device: str) -> None:
        """torch.ones: starts a kernel."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    internals = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda card: card in fake.contexts)
    torch = types.SimpleNamespace(cuda=fake, ones=fake.ones, _C=internals)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return fake


def host() -> Memory:
    return Memory("host", 1024 * MIB, simulated=False, pinned=True)


def test_pages_are_locked_until_the_last_buffer_is_gone(cuda):
    memory = host()
    buffer = memory.allocate(64 * MIB).buffer()
    assert cuda.locked == {ctypes.addressof(buffer): 64 * MIB}
    del buffer
    memory.empty_cache()
    assert not cuda.locked


@pytest.mark.parametrize("used", [{2}, {0, 2}, {1, 2}])
def test_locking_creates_no_context_on_a_card_that_is_not_used(cuda, used):
    """In a new thread the current card is card 0, whichever card the process uses."""
    cuda.contexts = set(used)
    memory = host()
    memory.allocate(64 * MIB).buffer()
    memory.empty_cache()
    assert (cuda.contexts, cuda.current) == (used, 0)


def test_pages_that_the_driver_cannot_lock_leave_no_error_for_the_users_next_kernel(cuda):
    """The pages are used without the lock, which is not tried again at each copy."""
    cuda.fails = True
    memory = host()
    buffer = memory.allocate(64 * MIB).buffer()
    memory.lock([ctypes.addressof(buffer)])
    assert cuda.calls == 1
    buffer[0] = 7
    assert buffer[0] == 7 and cuda.last_error == 0
    cuda.ones(1, device="cuda")
    del buffer
    memory.empty_cache()  # unlocks nothing


def test_pages_that_are_older_than_the_first_use_of_cuda_are_locked_by_the_first_copy(cuda):
    """The first model of a process is read to host memory, and only then CUDA starts."""
    cuda.started = False
    memory = host()
    older, other = (memory.allocate(64 * MIB).buffer() for _ in range(2))
    older[0] = 7
    memory.lock([ctypes.addressof(older)])
    assert not cuda.locked
    cuda.started = True
    for _ in range(2):
        memory.lock([ctypes.addressof(older) + 5, 0])
    assert cuda.locked == {ctypes.addressof(older): 64 * MIB} and cuda.calls == 1
    assert older[0] == 7
    del older, other
    memory.empty_cache()
    assert not cuda.locked


@pytest.mark.parametrize("late", [False, True])
def test_shared_pages_are_locked_and_then_not_writable(cuda, late):
    """The driver locks only pages that this process may write."""
    cuda.started = not late
    pages = SharedPages.create(2 * MIB)
    if pages is None:
        pytest.skip("/dev/shm has no room")
    memory = host()
    [array] = pages.blocks(memory, [(4096, MIB)])
    address = ctypes.addressof(array)
    cuda.started = True
    memory.lock([address])
    assert cuda.locked == {address - 4096: 2 * MIB} and not writable(address)
    del array
    gc.collect()
    assert not cuda.locked


def in_child(check) -> int:
    """The exit status of a forked child that runs `check`; negative for a signal."""
    pid = os.fork()
    if not pid:
        try:
            check()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="this system copies all pages")
def test_a_forked_child_frees_locked_pages_without_a_call_of_the_driver_or_of_unmap(cuda):
    """The pages are not mapped in a child, whose own memory may now be at these addresses."""
    memory = host()
    buffers = [memory.allocate(64 * MIB).buffer()]
    address = ctypes.addressof(buffers[0])
    unraisable = []

    def check() -> None:
        cuda.forked = True
        sys.unraisablehook = unraisable.append
        _map_at(address, 64 * MIB)
        block = weakref.ref(buffers[0].block)
        buffers.clear()
        memory.empty_cache()
        gc.collect()
        assert block() is None and not unraisable
        assert ctypes.c_ubyte.from_address(address).value == 0  # still mapped

    assert in_child(check) == 0
    assert buffers[0][0] == 0 and cuda.locked == {address: 64 * MIB}


def _map_at(address: int, size: int) -> None:
    """Maps new pages at the `address`, as the system may do for any later request."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    assert call(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
