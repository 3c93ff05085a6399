"""Devices, their samples, and shares of their bytes."""

from __future__ import annotations

from collections.abc import Iterable

from .base import HOST, Value


class Device(Value):
    """One memory: a card (`cuda:0`), an instance of a partitioned one (`cuda:0.1`), a simulated card (`sim:0`), or the
    machine's RAM (`host`). The id names one physical card for everybody who shares the book; the UUID says which.
    """

    id: str
    total_bytes: int
    name: str = ""
    uuid: str = ""
    index: int = 0  # the number in its id, of an instance its card's; what torch calls the card is each process's own
    simulated: bool = False
    unified: bool = False  # its memory is the machine's: it and the host draw on one budget

    @property
    def is_host(self) -> bool:
        return self.id == HOST

    @property
    def key(self) -> str:
        """What outlives its name: the UUID, where it has one."""
        return self.uuid or self.id


class Sample(Value):
    """What a device's driver (or the machine, for `host`) last said."""

    device: str
    taken_at: float
    free_bytes: int | None  # None: the driver would not say; that is neither zero nor all
    processes: dict[int, int | None] = {}  # pid -> bytes; None where the driver says N/A
    utilisation_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class Share(Value):
    """Bytes on a device."""

    device: str
    bytes: int


Shares = tuple[Share, ...]


def beside(shares: Shares, size: int) -> Shares:
    """The shares with that many bytes more, spread over them in proportion.

    >>> beside((Share("sim:0", 2), Share("sim:1", 1)), 4)
    (Share(device='sim:0', bytes=4), Share(device='sim:1', bytes=3))
    """
    total, given, done = sum(share.bytes for share in shares), 0, 0
    grown = []
    for share in shares:
        done += share.bytes
        end = size * done // total if total else 0
        grown.append(Share(share.device, share.bytes + end - given))
        given = end
    return tuple(grown)


def where(shares: Shares) -> str:
    """`cuda:0` for one device, `cuda:0,1` for several of a kind, empty for none.

    >>> where((Share("cuda:0", 1), Share("cuda:1", 1)))
    'cuda:0,1'
    """
    ids = list(dict.fromkeys(share.device for share in shares))
    if len(ids) < 2 or len({id.split(":")[0] for id in ids}) > 1:
        return " + ".join(ids)
    return f"{ids[0].split(':')[0]}:" + ",".join(id.split(":")[1] for id in ids)


def one_memory(devices: Iterable[Device]) -> frozenset[str]:
    """The host and the cards whose memory it is: whatever lies on any of them, it takes of the same bytes. Empty where
    every card has memory of its own."""
    cards = frozenset(device.id for device in devices if device.unified)
    return cards | {HOST} if cards else cards
