"""Devices, samples (measurements of a device by its driver), and shares of a device's bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ..units import show_bytes
from .base import HOST, Value


class Device(Value):
    """One memory.

    Examples: a card (`cuda:0`), an instance of a partitioned card (`cuda:0.1`), a simulated card
    (`sim:0`), or the machine's RAM (`host`). An id names the same physical card for every process
    that shares the book. The UUID identifies the physical card.
    """

    id: str
    total_bytes: int
    name: str = ""
    uuid: str = ""
    # The number in the id. For an instance of a partitioned card, this is the number of the card.
    # torch's own number for the card may differ from process to process.
    index: int = 0
    simulated: bool = False
    unified: bool = False  # the card uses the machine's RAM, so card and host share one budget

    def __str__(self) -> str:
        return f"{self.id}: {show_bytes(self.total_bytes)}" + (
            f", {self.name}" if self.name else ""
        )

    @property
    def is_host(self) -> bool:
        """Whether this is the machine's RAM."""
        return self.id == HOST

    @property
    def key(self) -> str:
        """The UUID, or the id of a device without UUID. A UUID stays when cards are renumbered."""
        return self.uuid or self.id


class Sample(Value):
    """The last measurement of a device by its driver (or by the machine, for `host`)."""

    device: str
    taken_at: float
    free_bytes: int | None  # None: the driver gave no number, which means neither 0 nor all bytes
    processes: dict[int, int | None] = {}  # pid -> bytes; None where the driver reports N/A
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Share(Value):
    """Bytes on a device."""

    device: str
    bytes: int


Shares = tuple[Share, ...]


def beside(shares: Shares, size: int) -> Shares:
    """The `shares` with `size` more bytes, which are divided in proportion to the old sizes.

    >>> beside((Share("sim:0", 2), Share("sim:1", 1)), 4)
    (Share(device='sim:0', bytes=4), Share(device='sim:1', bytes=3))
    """
    total = sum(share.bytes for share in shares)
    grown = []
    passed = 0  # bytes of the shares so far
    given = 0  # bytes of `size` that these shares have received
    for share in shares:
        passed += share.bytes
        due = size * passed // total if total else 0
        grown.append(Share(share.device, share.bytes + due - given))
        given = due
    return tuple(grown)


def where(shares: Shares) -> str:
    """The devices of `shares` as text; empty without shares.

    >>> where((Share("cuda:0", 1), Share("cuda:1", 1)))
    'cuda:0,1'
    >>> where((Share("cuda:0", 1), Share("host", 1)))
    'cuda:0 + host'
    """
    ids = list(dict.fromkeys(share.device for share in shares))
    kinds = {id.split(":")[0] for id in ids}
    if len(ids) < 2 or len(kinds) > 1:
        return " + ".join(ids)
    numbers = ",".join(id.split(":")[1] for id in ids)
    return f"{kinds.pop()}:{numbers}"


def one_memory(devices: Iterable[Device]) -> frozenset[str]:
    """The ids of `host` and the cards that share the machine's RAM; empty if every card has its own memory."""
    cards = frozenset(device.id for device in devices if device.unified)
    return cards | {HOST} if cards else cards
