"""The blocks of user code that hold leased memory in this process, each with its anchor.

An anchor is an object that lives as long as the block's `with` statement runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..facts import Lease
from .pins import AnchorRef


class Blocks(dict[str, tuple[Lease, AnchorRef]]):
    """Maps the name of a block to the block's lease and anchor."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self.leased_bytes = 0  # the sum over all blocks until now, including ended blocks

    def new_number(self) -> int:
        """The number of the next block."""
        return next(self._numbers)

    def running(self, ended: Callable[[str], None]) -> tuple[Lease, ...]:
        """The leases of the running blocks. Removes the blocks that an interrupt has ended.

        An interrupt can skip the code at the end of a block. In this case this method removes the
        block, and calls `ended(card)` for each card on which the block had leased memory.
        """
        leases = []
        for name, (lease, anchor) in list(self.items()):
            if anchor():
                leases.append(lease)
            elif self.pop(name, None):  # None: the block's own end was faster
                for share in lease.shares:
                    ended(share.device)
        return tuple(leases)
