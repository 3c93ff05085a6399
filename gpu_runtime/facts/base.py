"""The base class of all facts, constants of the book, the classes of importance, and devices.

A sample is a measurement of a device by its driver, and a share is bytes on a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from ..compat import dataclass_transform
from ..errors import BadSetting
from ..safe_text import lines
from ..units import show_bytes

HOST = "host"
# The place of a lease whose bytes are in a file; in a request to evict: drop the bytes.
DISK = "disk"
KERNEL = "kernel"  # the name and the kind of the lease of what a notebook's own code holds
USER = "user"  # the kind of a lease that stands for all memory of a user, for viewers who see only its sum
SCHEMA = 3
MOST_ENTRIES = 1024  # leases and tickets in one page
MOST_EVENTS = 16  # events in one page; every reader decodes them, so older ones are in the journal

# The value of a time or duration that means "this never happened" or "not measured". It is the
# default of such fields, because a field that equals its default is not written into the book.
NEVER = 0.0


@dataclass_transform(frozen_default=True)
class Value(Struct, frozen=True, omit_defaults=True, gc=False):
    """The base class of all facts: frozen, compared by value, small as JSON.

    Values cannot form reference cycles, so the garbage collector need not track the thousands of
    values in a book (`gc=False`).
    """

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the value in IPython as `print` does. `repr` has every field."""
        printer.text(lines(str(self)))


def encode(value: Value) -> bytes:
    """`value` as JSON."""
    return _encoder.encode(value)


_encoder = msgspec.json.Encoder()


# A lower number is more important.
IMPORTANCE = {"urgent": 1, "high": 5, "normal": 10, "low": 20, "batch": 30}
NORMAL = IMPORTANCE["normal"]
_NUMBER = re.compile("-?[0-9]{1,9}")
_MOST = 999_999_999
# In the book: the importance of leases of a user who holds more than the cap. Nobody can type it.
OVER_CAP = _MOST + 1
_NAMES = {**{number: name for name, number in IMPORTANCE.items()}, OVER_CAP: "above the cap"}


def parse_importance(value: str | int, *, least: int | None = None, most: int | None = None) -> int:
    """The number that an importance stands for; lower is more important.

    `value` is the name of a class, a whole number, or a whole number as text. The number must be
    from `least` to `most`. A limit that is None does not apply.

    >>> parse_importance("high"), parse_importance(3), parse_importance("20")
    (5, 3, 20)

    Raises BadSetting for any other `value`.
    """
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST:
        number = value
    elif isinstance(value, str) and _NUMBER.fullmatch(value):
        number = int(value)
    elif isinstance(value, str):
        number = IMPORTANCE.get(value)
    too_low = number is not None and least is not None and number < least
    too_high = number is not None and most is not None and number > most
    if number is None or too_low or too_high:
        raise BadSetting("importance", value, f"a number or one of {', '.join(IMPORTANCE)}")
    return number


def importance_name(number: int) -> str:
    """The name of the class with this `number`; `importance 7` for a number that is no class.

    >>> importance_name(5), importance_name(7)
    ('high', 'importance 7')
    """
    return _NAMES.get(number, f"importance {number}")


# -- devices ---------------------------------------------------------------------------------------


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
    # Bytes a second over PCIe to the card, and from it; None: not counted
    pcie: tuple[int, int] | None = None


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
