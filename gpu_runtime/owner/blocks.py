"""A leased block of code: the cap on torch while it runs, and what it really took.

Only torch can measure that, and only on a real card that it has started. Elsewhere the figures are
unknown, never zero.
"""

from __future__ import annotations

import sys
from typing import Any

from ..facts import Device, Lease
from ..units import show_bytes


class LeasedBlock:
    """What `rt.lease` yields: the lease, its device, and after the block its peak and delta.

    `peak_bytes` and `delta_bytes` are None while the block runs, and where they are unknown.
    """

    def __init__(self, lease: Lease, device: Device, torch: str = "") -> None:
        """`torch` is torch's name of the device in this process, such as cuda:0."""
        self.lease, self.device, self._torch = lease, device, torch
        self.bytes = lease.bytes
        self.peak_bytes: int | None = None
        self.delta_bytes: int | None = None
        self._before = 0
        self._cuda = _started_cuda(torch)
        if self._cuda:
            self._before = self._cuda.memory_allocated(self._torch)
            self._cuda.reset_peak_memory_stats(self._torch)
            if self.bytes:  # a lease of nothing only measures
                self._cap()

    def _cap(self) -> None:
        """Limits torch to what it has reserved plus the leased bytes."""
        reserved = self._cuda.memory_reserved(self._torch)
        fraction = (reserved + self.bytes) / self.device.total_bytes
        fraction = min(max(fraction, 0.01), 1.0)
        self._cuda.set_per_process_memory_fraction(fraction, self._torch)

    def end(self) -> None:
        """Takes the last reading and lifts the cap."""
        if self._cuda:
            self.peak_bytes = self._cuda.max_memory_allocated(self._torch) - self._before
            self.delta_bytes = self._cuda.memory_allocated(self._torch) - self._before
            self._cuda.set_per_process_memory_fraction(1.0, self._torch)

    def __repr__(self) -> str:
        peak = "unknown" if self.peak_bytes is None else show_bytes(self.peak_bytes)
        return f"<{show_bytes(self.bytes)} on {self.device.id}; peak {peak}>"


def _started_cuda(name: str) -> Any:
    """torch.cuda if torch is imported and `name` is a card it can use, else None."""
    torch = sys.modules.get("torch")
    if torch is None or not name.startswith("cuda") or not torch.cuda.is_available():
        return None
    return torch.cuda
