"""For models that can leave a card in parts: the size of a part, and the time of a return.

This module also has the least bytes of a stage; `scheduler.admission` explains stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backends.base import Backend
from ..facts import Lease, ModelSpec
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


class Returned(NamedTuple):
    """The parts of a model that one request has restored so far, before the last part."""

    bytes: int = 0
    seconds: float = 0.0  # of the copies alone, without the waits between them

    def and_then(self, size: int, seconds: float) -> Returned:
        """These parts and a further part of `size` bytes, whose copy took `seconds`."""
        return Returned(self.bytes + size, self.seconds + seconds)


NOTHING = Returned()


def restore_seconds(before: Lease, returned: Returned) -> float:
    """Seconds that a restore of the whole lease takes, if the last request restored `returned`.

    `before` is the lease before the last move. A part takes less time than the whole. So if that
    request restored only a part, the result is the time that `before` already has. If it has none,
    the result is computed from the bytes of the part and of the whole.
    """
    if returned.bytes >= before.own_bytes:
        return returned.seconds
    return before.restore_seconds or returned.seconds * before.own_bytes / max(1, returned.bytes)


def shared_part(handle: Any) -> dict[str, Any]:
    """The fields of a lease whose model shares pages of host memory with other processes."""
    part = getattr(handle, "part", None)
    return part.claim if part is not None else {"copy": "", "copy_bytes": 0, "copied_bytes": 0}
