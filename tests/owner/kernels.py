"""Helpers for tests of kernels: a stand-in in which nothing runs, cells, and the bytes of the kernel's lease."""

from collections.abc import Callable

from gpu_runtime.units import MIB

FLOATS = MIB // 4  # of a storage of 1 MiB


class Quiet:
    """A stand-in for the kernel's activity: nothing runs in it, unless a test sets a reason."""

    def __init__(self) -> None:
        self.reason, self.used = "", 0
        self.while_copying: Callable[[], None] = lambda: None

    def why_not(self) -> str:
        return self.reason

    def mark(self) -> object:
        return self.used

    def change(self, mark: object, act: Callable[[], None]) -> str:
        self.while_copying()
        if self.used != mark:
            return "the kernel was used meanwhile"
        act()
        return ""


def cell(kernel, code=lambda: None, text=""):
    """Runs `code` as a cell with the source `text`. Returns what the kernel showed before the cell."""
    news = kernel.begin(text)
    try:
        code()
    finally:
        kernel.end()
        kernel.catch_up()  # as the monitor does: after a slow count the next one waits
    return news


def keep(kernel, tensor):
    """Runs a cell after which the notebook holds `tensor`, and returns it. It lives as long as `kernel`."""
    kernel.kept_by_the_test = tensor
    cell(kernel)
    return tensor


def own(rt) -> dict[str, int]:
    """The bytes of the kernel's lease on each device."""
    leases = [lease for lease in rt.status().leases() if lease.kind == "kernel"]
    return {share.device: share.bytes for lease in leases for share in lease.claims()}
