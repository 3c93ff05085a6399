"""For models that can leave a card in parts: the size of a part, and the time of a return.

The least bytes of a stage are here too; `scheduler.duplex` explains stages.
"""

from __future__ import annotations

from typing import Any

from ..backends.base import Backend
from ..facts import HOST, Lease, ModelSpec
from ..units import MIB

# The least bytes that one stage of a move copies. A stage costs 3 ms beside its copy, which takes
# 10 ms at 25 GB/s.
STAGE_BYTES = 256 * MIB


def piece_bytes(backend: Backend, spec: ModelSpec, handle: Any, lease: Lease) -> int:
    """Bytes of the largest piece of the model `handle` that can leave its card without the rest.

    The result is 0 if the model cannot leave in parts.

    A model that claims more than its own bytes and its working memory (a whole card, for example)
    leaves as a whole. While the `lease` is in parts, the size of its pieces does not change. So the
    size that the lease already has is returned if the backend has none.
    """
    claims_more = lease.bytes > lease.own_bytes + lease.working_bytes
    if not backend.can_move or claims_more or spec.layout == "whole":
        return 0
    return backend.piece_bytes(handle) or (lease.piece_bytes if lease.in_parts else 0)


def restore_seconds(before: Lease, seconds: float) -> float:
    """Seconds that a restore of the whole lease takes, if its last restore took `seconds`.

    `before` is the lease before the last restore. A part takes less time than the whole. So if the
    last restore returned only a part, the result is the time that `before` already has. If it has
    none, the result is computed from the bytes of the part and of the whole.
    """
    if not before.in_parts:
        return seconds
    return before.restore_seconds or seconds * before.bytes / max(1, before.bytes_on(HOST))


def shared_part(handle: Any) -> dict[str, Any]:
    """The lease fields on the pages in host memory that the model shares with other processes."""
    part = getattr(handle, "part", None)
    return part.claim if part is not None else {"copy": "", "copy_bytes": 0, "copied_bytes": 0}
