"""Cards as their vendors' drivers tell of them, and which of them this process may use.

One module a vendor (`nvml`, `nvidia_smi`, `amd`, `apple`), a line in SOURCES for each, and all give the same facts:
every card of the machine, those that this process sees, and what the driver says of one now. A call into a driver may
hang for good, so a process on which others depend asks `with_time_limit`.
"""

from __future__ import annotations

import importlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import ProbeFailed
from ..facts import Device, Sample

SOURCES = (
    "nvml",
    "nvidia_smi",
    "amd",
    "apple",
)  # of one kind the first that finds its driver speaks
ANSWER_SECONDS = 5.0
T = TypeVar("T")


class NoAnswer(Exception):
    """Why a driver, or one of its cards, does not answer: in the driver's words."""


class Card(NamedTuple):
    """A card, or an instance of a partitioned one. `device.index` and the number in `device.id` are the driver's own,
    the same for every process of the host, whatever it sees."""

    device: Device
    handle: Any  # the vendor's
    whole: str = ""  # UUID of the physical card that an instance is a part of
    torch: str = ""  # what torch calls it in this process, such as cuda:0; empty: this process does not see it

    @property
    def is_part(self) -> bool:
        return bool(self.whole) and self.whole != self.device.uuid


class Listing(NamedTuple):
    """What a source found."""

    source: ModuleType
    cards: tuple[Card, ...] = ()
    failed: dict[str, str] = {}  # number of a card that cannot even be listed -> why
    absent: str = ""  # why there is no such driver here; empty: there is one

    @property
    def kind(self) -> str:
        return self.source.KIND


class Source(Protocol):
    """What a vendor's module defines. Written down here for whoever adds one; modules are not instances."""

    KIND: str  # how its cards are called: `cuda` for cuda:0
    NAME: str  # whom we ask, such as NVML

    @staticmethod
    def list_cards() -> Listing:
        """All cards of the machine, of a partitioned one its instances. May hang. Raises NoAnswer where there is a driver
        and it fails as a whole."""
        ...

    @staticmethod
    def visible(listing: Listing, environment: Mapping[str, str]) -> tuple[Card, ...]:
        """Those that this process sees, in torch's order and with torch's names."""
        ...

    @staticmethod
    def measure(card: Card, now: float) -> Sample:
        """What the driver says of the card now. May hang. Raises NoAnswer."""
        ...

    @staticmethod
    def versions() -> dict[str, str]:
        """Of driver and library, for a report. May hang. Raises NoAnswer."""
        ...


def source(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def listings(kinds: Iterable[str] = ()) -> tuple[Listing, ...]:
    """What there is on this machine, one listing for each kind of card; those of these kinds, where any are named.

    May hang. Where a driver of a kind fails and no other source of that kind answers, raises ProbeFailed.
    """
    found: dict[str, Listing] = {}
    broken: dict[str, tuple[str, str]] = {}
    for name in SOURCES:
        module = source(name)
        if (
            (kinds and module.KIND not in kinds)
            or module.KIND in found
            and not found[module.KIND].absent
        ):
            continue
        try:
            listing = module.list_cards()
        except NoAnswer as error:
            broken.setdefault(module.KIND, (module.NAME, str(error)))
            continue
        if not listing.absent or module.KIND not in found:
            found[module.KIND] = listing
    for kind, (name, why) in broken.items():
        if (
            kind not in found or found[kind].absent
        ):  # a broken card is no reason to pretend that there is none
            raise ProbeFailed(
                f"the driver of the {kind} cards does not answer {name}: {why}.\n  Look at it with:  gpu doctor",
                device=kind,
            )
    return tuple(found.values())


def visible_cards(environment: Mapping[str, str] = os.environ, kind: str = "") -> Listing | None:
    """The cards that this process may use, in torch's order: of that kind, or else of the first kind that has any.

    None where there is no driver at all. Raises ProbeFailed where there is one and it fails, or no card can be listed.
    """

    def look() -> Listing | None:
        for listing in listings((kind,) if kind else ()):
            if listing.cards:
                try:
                    return listing._replace(cards=listing.source.visible(listing, environment))
                except NoAnswer as error:
                    raise ProbeFailed(
                        f"the {listing.kind} cards cannot be told apart: {error}.",
                        device=listing.kind,
                    ) from error
            if listing.failed:
                whats = "; ".join(f"card {number}: {why}" for number, why in listing.failed.items())
                raise ProbeFailed(
                    f"no {listing.kind} card can be used ({whats}).\n  Look at it with:  gpu doctor",
                    device=listing.kind,
                )
        return None

    return with_time_limit(kind or "the driver", look)


def sample(card: Card, asked: ModuleType, now: float) -> Sample:
    """What the driver says of the card now. Raises ProbeFailed, naming the card."""
    try:
        return with_time_limit(card.device.id, lambda: asked.measure(card, now))
    except NoAnswer as error:
        raise ProbeFailed(
            f"{card.device.id} ({card.device.name}) does not answer: {error}.\n"
            f"  Look at it with:  gpu doctor",
            device=card.device.id,
        ) from error


# -- which of them this process sees -----------------------------------------------------------------------------


def named_by(variable: str | None, cards: tuple[Card, ...], torch: str) -> tuple[Card, ...]:
    """The cards that a variable such as CUDA_VISIBLE_DEVICES names, as CUDA and HIP read it.

    Indices into `cards`, UUIDs or their unique beginnings, instances by their UUID. The first wrong entry ends the
    list, a card named twice leaves none. Of a partitioned card the first instance stands for it; and where one instance
    is seen, nothing else is. Source: CUDA C++ Programming Guide, CUDA Environment Variables; MIG User Guide, Device
    Enumeration.
    """
    groups: dict[str, list[Card]] = {}
    for card in cards:
        groups.setdefault(card.whole or card.device.uuid, []).append(card)
    chosen: list[Card] = []
    if variable is None:
        chosen = [group[0] for group in groups.values()]
    else:
        for entry in (entry.strip() for entry in variable.split(",")):
            card = _named(entry, groups)
            if card is None:
                break
            chosen.append(card)
        if len({card.device.uuid for card in chosen}) < len(chosen):
            chosen = []
    chosen = [card for card in chosen if card.is_part][:1] or chosen
    return tuple(card._replace(torch=f"{torch}:{index}") for index, card in enumerate(chosen))


def _named(entry: str, groups: Mapping[str, list[Card]]) -> Card | None:
    if entry.isdigit():
        wholes = list(groups.values())
        return wholes[int(entry)][0] if int(entry) < len(wholes) else None
    parts = [
        card
        for group in groups.values()
        for card in group
        if card.is_part and card.device.uuid == entry
    ]
    if parts or not entry:
        return parts[0] if parts else None
    matches = [group[0] for uuid, group in groups.items() if uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def chosen(wanted: str, cards: tuple[Card, ...]) -> tuple[Card, ...] | str:
    """Those of these cards that somebody names explicitly: `0,2`, or UUIDs or their unique beginnings; or the entry
    that names none of them. Numbers are the driver's own, as in `cuda:2` and nvidia-smi."""
    found: list[Card] = []
    for entry in (entry.strip() for entry in wanted.split(",")):
        matches = [
            card
            for card in cards
            if entry
            and (
                card.device.id.partition(":")[2] == entry
                or card.device.uuid.lower().startswith(entry.lower())
            )
        ]
        if len(matches) != 1:
            return entry or "nothing"
        found += [card for card in matches if card not in found]
    return tuple(found)


# -- drivers that may hang -----------------------------------------------------------------------------------------


class _Clerk:
    """One daemon thread that talks to the driver, so that a call that never returns holds up nobody else."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.since: float | None = None  # when the question that is being asked was put
        threading.Thread(target=self._work, name="gpu-driver", daemon=True).start()

    def _work(self) -> None:
        while True:
            errand = self.errands.get()
            self.since = time.monotonic()
            errand()
            self.since = None

    @property
    def hangs(self) -> bool:
        since = self.since
        return since is not None and time.monotonic() - since > ANSWER_SECONDS


_clerk: _Clerk | None = None


def with_time_limit(device: str, ask: Callable[[], T]) -> T:
    """The answer, within ANSWER_SECONDS. Raises ProbeFailed where the driver hangs, at once while it still does."""
    global _clerk
    if _clerk is None or _clerk.pid != os.getpid():  # a thread does not survive a fork
        _clerk = _Clerk()
    if _clerk.hangs:
        raise ProbeFailed(
            f"{device} does not answer: an earlier question to the driver still hangs.",
            device=device,
        )
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def errand() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    _clerk.errands.put(errand)
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
