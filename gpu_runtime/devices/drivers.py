"""The cards that the vendors' drivers report, and the cards that this process may use.

Each source has a module (`nvml`, `amd`, `apple`) and an entry in SOURCES. All modules return the
same facts: every card of the machine, the cards that this process sees, and the current figures of
a card. A call into a driver may hang for ever. So a process that must not hang uses
`with_time_limit`.
"""

from __future__ import annotations

import importlib
import os
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

from .. import threads
from ..errors import ProbeFailed
from ..facts import Device, Sample

SOURCES = ("nvml", "amd", "apple")
ANSWER_SECONDS = 5.0
T = TypeVar("T")


class NoAnswer(Exception):
    """A driver or a card does not answer. The text is the driver's own error message."""


class Card(NamedTuple):
    """A card, or an instance of a partitioned one. Its index and id have the driver's number, the same everywhere."""

    device: Device
    handle: Any  # the object by which the vendor's library identifies the card
    whole: str = ""  # UUID of the physical card that an instance is a part of
    torch: str = ""  # torch's name in this process, such as cuda:0; empty if it is not visible

    @property
    def is_part(self) -> bool:
        """Whether this is an instance of a partitioned card."""
        return bool(self.whole) and self.whole != self.device.uuid


class Listing(NamedTuple):
    """The cards that a source found."""

    source: ModuleType
    cards: tuple[Card, ...] = ()
    failed: dict[str, str] = {}  # number of a card that cannot be listed -> why
    absent: str = ""  # why this driver is not available; empty if it is

    @property
    def kind(self) -> str:
        """`cuda`, `rocm` or `metal`."""
        return self.source.KIND


class Source(Protocol):
    """The functions that each vendor's module has: a guide for adding a vendor."""

    KIND: str  # the first part of its cards' names: `cuda` for cuda:0
    NAME: str  # the name of the library or tool, such as NVML

    @staticmethod
    def list_cards() -> Listing:
        """All cards of the machine, or the instances of partitioned ones. May hang. Raises NoAnswer."""

    @staticmethod
    def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
        """The cards that a process with this `environment` sees, in torch's order, with its names."""

    @staticmethod
    def measure(card: Card, now: float) -> Sample:
        """The driver's figures of the `card`, stamped with `now`. May hang. Raises NoAnswer."""

    @staticmethod
    def versions() -> dict[str, str]:
        """The versions of driver and library, for a report. May hang. Raises NoAnswer."""


def source(name: str) -> ModuleType:
    """The vendor's module with this `name`, such as `nvml`."""
    threads.import_whole(f"{__package__}.{name}")
    return importlib.import_module(f".{name}", __package__)


def listings(kinds: Iterable[str] = ()) -> tuple[Listing, ...]:
    """The cards of this machine: one listing for each kind of card, or only for these `kinds`.

    May hang. Raises ProbeFailed if the driver of a kind fails: the result must not look as if there
    were no card.
    """
    found: list[Listing] = []
    for module in map(source, SOURCES):
        if kinds and module.KIND not in kinds:
            continue
        try:
            found.append(module.list_cards())
        except NoAnswer as error:
            raise ProbeFailed(
                f"the driver of the {module.KIND} cards does not answer {module.NAME}: {error}.\n"
                f"  Look at it with:  gpu doctor",
                device=module.KIND,
            ) from error
    return tuple(found)


def visible_cards(environment: Mapping[str, str], kind: str = "") -> Listing | None:
    """The cards that this process may use, in torch's order; None if the machine has no card.

    The cards are of the given `kind`; if it is empty, of the first kind that has cards.
    `environment` holds variables such as CUDA_VISIBLE_DEVICES.

    Raises ProbeFailed if a driver fails, or if the machine has cards but none can be listed.
    """

    def look() -> Listing | None:
        for listing in listings((kind,) if kind else ()):
            if listing.cards:
                try:
                    return listing._replace(cards=listing.source.visible(listing, environment))
                except NoAnswer as error:
                    text = f"the {listing.kind} cards cannot be told apart: {error}."
                    raise ProbeFailed(text, device=listing.kind) from error
            if listing.failed:
                reasons = "; ".join(
                    f"card {number}: {why}" for number, why in listing.failed.items()
                )
                text = f"no {listing.kind} card can be used ({reasons}).\n  Look at it with:  gpu doctor"
                raise ProbeFailed(text, device=listing.kind)
        return None

    return with_time_limit(kind or "the driver", look)


def sample(card: Card, source: ModuleType, now: float) -> Sample:
    """The figures of the `card`, stamped with `now`, from the module `source`. Raises ProbeFailed."""
    try:
        return with_time_limit(card.device.id, lambda: source.measure(card, now))
    except NoAnswer as error:
        raise ProbeFailed(
            f"{card.device.id} ({card.device.name}) does not answer: {error}.\n"
            f"  Look at it with:  gpu doctor",
            device=card.device.id,
        ) from error


# -- the cards that this process sees --------------------------------------------------------------


def named_by(variable: str | None, cards: tuple[Card, ...], torch: str) -> tuple[Card, ...]:
    """The `cards` that a variable such as CUDA_VISIBLE_DEVICES selects, by the rules of CUDA and HIP.

    `variable` is the value of the variable; None if the variable is not set, which selects every
    card. Each entry of the value is the index of a card, a UUID, or the unique beginning of a UUID.
    The rules are:

    - An instance of a partitioned card has a UUID. The index of such a card selects its first
      instance.
    - The first wrong entry ends the list. If a card is named twice, no card is selected.
    - If instances are selected, only the first of them is visible, and no other card.

    The cards in the result are named `TORCH:0`, `TORCH:1`, …, where TORCH is the argument `torch`.

    Source: CUDA C++ Programming Guide, CUDA Environment Variables; MIG User Guide, Device
    Enumeration.
    """
    groups: dict[str, list[Card]] = {}
    for card in cards:
        groups.setdefault(card.whole or card.device.uuid, []).append(card)
    if variable is None:
        chosen = [group[0] for group in groups.values()]
    else:
        chosen = _listed(variable, groups)
    parts = [card for card in chosen if card.is_part]
    if parts:
        chosen = parts[:1]
    return tuple(card._replace(torch=f"{torch}:{index}") for index, card in enumerate(chosen))


def _listed(variable: str, groups: Mapping[str, list[Card]]) -> list[Card]:
    """The cards that `variable` names, up to a wrong entry; none if a card is named twice."""
    chosen: list[Card] = []
    for entry in variable.split(","):
        card = _named(entry.strip(), groups)
        if card is None:
            break
        chosen.append(card)
    uuids = {card.device.uuid for card in chosen}
    return chosen if len(uuids) == len(chosen) else []


def _named(entry: str, groups: Mapping[str, list[Card]]) -> Card | None:
    """The one card that an entry names: by index, an instance's UUID, or a UUID's beginning."""
    if not entry:
        return None
    if entry.isdecimal():
        wholes = list(groups.values())
        index = int(entry)
        return wholes[index][0] if index < len(wholes) else None
    for group in groups.values():
        for card in group:
            if card.is_part and card.device.uuid == entry:
                return card
    start = entry.lower()
    matches = [group[0] for uuid, group in groups.items() if uuid.lower().startswith(start)]
    return matches[0] if len(matches) == 1 else None


# -- drivers that may hang -------------------------------------------------------------------------


class _DriverThread:
    """One daemon thread that calls the driver, so that a call that hangs blocks no caller."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.since: float | None = None  # when the call in progress began
        threads.start(self._work)

    def _work(self) -> None:
        while True:
            call = self.calls.get()
            self.since = time.monotonic()
            call()
            self.since = None

    @property
    def hangs(self) -> bool:
        """Whether a call has taken longer than ANSWER_SECONDS."""
        since = self.since
        return since is not None and time.monotonic() - since > ANSWER_SECONDS


_driver_thread: _DriverThread | None = None


def with_time_limit(device: str, ask: Callable[[], T]) -> T:
    """The result of `ask()`, run in the driver's thread, within ANSWER_SECONDS.

    Raises ProbeFailed, which names the `device`, if the driver hangs. While an earlier call still
    hangs, ProbeFailed is raised at once. An error that `ask` raises is raised here too.
    """
    global _driver_thread
    if _driver_thread is None or _driver_thread.pid != os.getpid():
        _driver_thread = _DriverThread()  # a thread does not survive a fork
    if _driver_thread.hangs:
        raise ProbeFailed(
            f"{device} does not answer: an earlier question to the driver still hangs.",
            device=device,
        )
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    _driver_thread.calls.put(call)
    try:
        answer, error = answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        raise ProbeFailed(
            f"{device} did not answer within {ANSWER_SECONDS:.0f} s; the driver may hang.\n"
            f"  Look at it with:  nvidia-smi",
            device=device,
        ) from None
    if error is not None:
        raise error
    return answer
