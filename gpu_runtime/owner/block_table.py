"""The blocks of user code that hold memory in this process, each with the anchor of its `with`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..facts import Lease
from .pins import AnchorRef


class Blocks(dict[str, tuple[Lease, AnchorRef]]):
    """Name of a block -> its lease, and the anchor that lives as long as the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self.leased_bytes = 0  # by all blocks until now, those that have ended included

    def new_number(self) -> int:
        """The number of the next block."""
        return next(self._numbers)

    def running(self, ended: Callable[[str], None]) -> tuple[Lease, ...]:
        """The leases of the blocks that run. Forgets the others, which an interrupt has ended.

        An interrupt at the right instruction skips a block's own tidying. Then `ended(card)` is
        called for each card that such a block had leased.
        """
        leases = []
        for name, (lease, anchor) in list(self.items()):
            if anchor():
                leases.append(lease)
            elif self.pop(name, None):  # None: the block's own end was faster
                for share in lease.shares:
                    ended(share.device)
        return tuple(leases)
