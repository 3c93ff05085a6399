"""Residue: memory that this process holds on real cards beyond what it has leased."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..facts import HOST, Lease

IN_TORCH = ("torch", "transformers")  # backends whose bytes torch's allocator holds


def residue(
    leases: Iterable[Lease], used: Mapping[str, int], contexts: Mapping[str, int]
) -> dict[str, int]:
    """Maps each device to the bytes beyond the leases: context, reserved cache, the user's tensors.

    `used` maps devices to the bytes that the driver counts for this process. `contexts` maps
    devices to the bytes outside torch's allocator. A leased block of code adds no residue: the
    lease of the block already covers the memory that the code allocates.
    """
    leased: dict[str, int] = {}
    outside_torch = dict(contexts)  # a CUDA context is never part of a lease
    for lease in leases:
        own_allocator = lease.kind == "model" and lease.backend not in IN_TORCH
        for share in lease.shares:
            leased[share.device] = leased.get(share.device, 0) + share.bytes
            if own_allocator and share.device in outside_torch:
                outside_torch[share.device] -= share.bytes
    found = {}
    for device, bytes_used in used.items():
        beyond = max(bytes_used - leased.get(device, 0), outside_torch.get(device, 0))
        if device != HOST and beyond > 0:
            found[device] = beyond
    return found
