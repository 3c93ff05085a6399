"""Pages of host memory that hold bytes, and their registration with the driver of a card.

The driver locks registered pages in memory, so the card's copy engine can use them directly.
Nothing here counts bytes; `process_memory` and `shared_pages` count them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .. import forks
from ..units import MIB

_TOUCH_BYTES = 64 * MIB  # bytes that one thread touches at a time
_libc = ctypes.CDLL(None)
_locking = forks.freed(threading.Lock())


class Region(mmap.mmap):
    """The pages of one segment or of one shared file, mapped until no buffer in them is left."""

    start = 0  # the region's address
    pinned = False
    lock_tried = False  # a lock that failed once is not tried again
    writable = True
    left_out = False  # whether forked children do not have the pages
    pages: Any = None  # the object whose shared pages are mapped; the region keeps it open

    def __del__(self) -> None:
        torch = sys.modules.get("torch") if self.pinned else None
        # When the process ends, torch may already be gone. Then the driver unlocks the pages.
        if torch is not None:
            with _used_card(torch):
                torch.cuda.cudart().cudaHostUnregister(self.start)

    def contains(self, address: int) -> bool:
        """Whether the `address` is in these pages."""
        return 0 <= address - self.start < len(self)

    def make_writable(self, writable: bool) -> None:
        """Sets whether this process may write the pages. If not, a write ends the process."""
        if writable is self.writable:
            return
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _libc.mprotect(ctypes.c_void_p(self.start), ctypes.c_size_t(len(self)), rights)
        self.writable = writable

    def leave_out_of_forks(self) -> None:
        """Unmaps the pages in each forked child, because a card may write them.

        The Python object also exists in the child, and there it is never freed. If it were freed,
        it would unmap its addresses, and the child may have other memory at these addresses.
        """
        if hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)
            self.left_out = True
            _left_out.add(self)


_left_out: weakref.WeakSet[Region] = weakref.WeakSet()


def _keep_left_out() -> None:
    for region in _left_out:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(region))


os.register_at_fork(after_in_child=_keep_left_out)


def pinned(region: Region, *, touched: bool = False) -> None:
    """Locks the pages of the `region` in memory for the card's copy engine.

    If `touched` is true, the pages were written before and keep their content. If `touched` is
    false, this function may overwrite the pages with zeros.

    Without the lock, copies reach a fifth of the bus speed. This function does nothing if the
    process does not use CUDA yet, or if an earlier call has tried to lock the region. torch's own
    pinned memory is not used, because torch rounds up to powers of two: for a request of 6 GiB it
    locked 10 GiB.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    with _locking:
        if region.lock_tried:
            return
        region.lock_tried = True
    pieces = []
    for at in range(0, 0 if touched else len(region), _TOUCH_BYTES):
        pieces.append((region.start + at, min(_TOUCH_BYTES, len(region) - at)))
    # Locking untouched pages is slow, so they are touched first. ctypes releases the GIL meanwhile.
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda piece: ctypes.memset(piece[0], 0, piece[1]), pieces))
    writable = region.writable
    with _used_card(torch):
        region.make_writable(True)  # the driver refuses other pages
        error = torch.cuda.cudart().cudaHostRegister(region.start, len(region), 0)
        region.make_writable(writable)
        region.pinned = int(error) == 0
        if not region.pinned:
            _clear_error(torch)


def _used_card(torch: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which torch's current card is one that this process uses already.

    Pages that are locked through one card are locked for all cards. In a new thread the current
    card is card 0, and the call would create a CUDA context there, which takes about 400 MB.

    Source: pytorch/pytorch#21081.
    """
    cuda = torch.cuda
    used = [card for card in range(cuda.device_count()) if torch._C._cuda_hasPrimaryContext(card)]
    if not used or cuda.current_device() in used:
        return contextlib.nullcontext()
    return cuda.device(used[0])


def _clear_error(torch: Any) -> None:
    """Clears the error that a failed call of the CUDA runtime leaves in this thread.

    After torch has started a CUDA kernel, it checks for such an error and raises it. So the next
    CUDA kernel of the user's code would fail. torch has no function that clears the error.
    Therefore this function starts a small CUDA kernel, so that torch raises the error here.

    Source: c10/cuda/CUDAException.h, C10_CUDA_ERROR_HANDLED and C10_CUDA_KERNEL_LAUNCH_CHECK.
    """
    with contextlib.suppress(RuntimeError):  # raising the error clears it
        torch.ones(1, device="cuda")
