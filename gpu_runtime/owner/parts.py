"""For models that can leave a card in parts: the size of a part, and the time of a return.

This module also has the least bytes of a stage; `scheduler.duplex` explains stages.
"""

from __future__ import annotations

from typing import Any

from ..backends.base import Backend
from ..facts import HOST, Lease, ModelSpec
from ..units import MIB

# The least bytes that one stage of a move copies. The copy takes 10 ms at 25 GB/s, and the rest of
# the stage 3 ms.
STAGE_BYTES = 256 * MIB


def piece_bytes(backend: Backend, spec: ModelSpec, handle: Any, lease: Lease) -> int:
    """Bytes of the largest piece of the model, for a model that can leave its card in parts.

    The result is 0 if the model cannot leave in parts.

    A model that claims more than its own bytes and its working memory (a whole card, for example)
    leaves as a whole. Some backends do not know the pieces of a model in parts. In this case the
    result is the size that the `lease` already has.
    """
    claims_more = lease.bytes > lease.own_bytes + lease.working_bytes
    if not backend.can_move or claims_more or spec.layout == "whole":
        return 0
    return backend.piece_bytes(handle) or (lease.piece_bytes if lease.in_parts else 0)


def restore_seconds(before: Lease, seconds: float) -> float:
    """Seconds that a restore of the whole lease takes, if its last restore took `seconds`.

    `before` is the lease before the last restore. If that restore returned only a part of the
    model, it was shorter than a restore of the whole. The result is then the time in `before`, or
    if there is none, `seconds` scaled up to the bytes of the whole lease.
    """
    if not before.in_parts:
        return seconds
    return before.restore_seconds or seconds * before.bytes / max(1, before.bytes_on(HOST))


def shared_part(handle: Any) -> dict[str, Any]:
    """The fields of a lease whose model shares pages of host memory with other processes."""
    part = getattr(handle, "part", None)
    return part.claim if part is not None else {"copy": "", "copy_bytes": 0, "copied_bytes": 0}
