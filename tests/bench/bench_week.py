"""Compares our placement with the rules of Helix and NDIF, on a simulated week of requests for eight cards.

The figure is the sum of the seconds that models take to arrive on their cards. All three place the same requests. A
load takes no time in the simulation, so that all have the same requests at the same times. A model in use is never
evicted. A request that finds no room waits until a use ends.

The rules are those of the two projects' documents:

- Helix: the card with the most free memory that fits; else the models that were not used for the longest time are
  evicted until a card has room. An evicted model is loaded from disk again.
- NDIF: a small model reserves three times its size, another model a whole card. Of the cards, in random order, the card
  with the fewest evictions is chosen. An evicted model stays in host memory while there is room, the oldest leaves.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from random import Random
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Book,
    Device,
    Footprint,
    Lease,
    Load,
    Move,
    Owner,
    Refuse,
    Request,
    Rules,
    Section,
    World,
    encode_uses,
    merged_uses,
)
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import POLICIES
from gpu_runtime.scheduler.transitions import after_step
from gpu_runtime.settings import Settings

from .results import Row

CARDS, CARD_GB, HOST_GB = 8, 80, 400
MODELS, WEEK_SECONDS, REQUESTS = 80, 7 * 86_400, 20_000
DISK_GB_A_SECOND, HOST_GB_A_SECOND, START_SECONDS = 1.5, 12.0, 4.0
NDIF_FACTOR, NDIF_LARGEST = 3.0, 0.8
GB = 10**9
OWNER = Owner("week", "week", 1, 1)


class Use(NamedTuple):
    """A request for a model: when it arrives, and how long the model is then in use."""

    seconds: float
    model: str
    service_seconds: float


class Week(NamedTuple):
    """A week of requests, and the bytes of each model."""

    sizes: dict[str, int]
    uses: tuple[Use, ...]

    def load_seconds(self, model: str) -> float:
        return START_SECONDS + self.sizes[model] / GB / DISK_GB_A_SECOND

    def restore_seconds(self, model: str) -> float:
        return self.sizes[model] / GB / HOST_GB_A_SECOND


def week(seed: int) -> Week:
    """Requests of people who work with a model for an hour or two, mostly by day, and of services."""
    random = Random(seed)
    sizes = {
        f"m{n}": int(min(70.0, max(1.5, random.lognormvariate(2.6, 0.9))) * GB)
        for n in range(MODELS)
    }
    popular = list(sizes)
    random.shuffle(popular)
    weights = [1 / (rank + 1) for rank in range(MODELS)]
    uses: list[Use] = []
    while len(uses) < REQUESTS:
        [model] = random.choices(popular, weights)
        start = random.randrange(7) * 86_400 + random.gauss(50_000, 14_000) % 86_400
        end = min(start + random.expovariate(1 / 5_000), WEEK_SECONDS)
        while start < end:
            uses.append(Use(start, model, random.expovariate(1 / 30)))
            start += random.expovariate(1 / 180)
    return Week(sizes, tuple(sorted(uses[:REQUESTS])))


class Rule(Protocol):
    """A way to place models. It knows which models are in use."""

    def place(self, model: str, used: dict[str, int], now: float) -> float | None:
        """The seconds until `model` is on a card: 0 if it is there; None if the request must wait.

        `used` has the number of uses of each model that run.
        """

    def note(self, model: str, used: dict[str, int], now: float) -> None:
        """A use of `model` began or ended."""


def load_seconds(history: Week, rule: Rule) -> float:
    """The seconds of all arrivals."""
    used: dict[str, int] = {}
    ends: list[tuple[float, str]] = []
    waiting: deque[Use] = deque()
    total = 0.0

    def begin(use: Use, now: float) -> bool:
        nonlocal total
        seconds = rule.place(use.model, used, now)
        if seconds is None:
            return False
        total += seconds
        used[use.model] = used.get(use.model, 0) + 1
        rule.note(use.model, used, now)
        heapq.heappush(ends, (now + use.service_seconds, use.model))
        return True

    def end_until(limit: float) -> None:
        while ends and ends[0][0] <= limit:
            now, model = heapq.heappop(ends)
            used[model] -= 1
            rule.note(model, used, now)
            for use in list(waiting):
                if begin(use, now):
                    waiting.remove(use)

    for use in history.uses:
        end_until(use.seconds)
        if not begin(use, use.seconds):
            waiting.append(use)
    end_until(math.inf)
    assert not waiting, "every request is served"
    return total


class Ours:
    """The real scheduler, with the default policy and placement."""

    def __init__(self, history: Week) -> None:
        self._history = history
        self._rank = POLICIES[Settings().gpu_policy]
        limits = {f"sim:{n}": CARD_GB * GB for n in range(CARDS)} | {HOST: HOST_GB * GB}
        devices = tuple(Device(id, size, simulated=True) for id, size in limits.items())
        rules = Rules(refresh_seconds=math.inf, most_wait_seconds=0.0)
        self._world = World(0.0, 0.0, devices, limits, rules=rules)
        self._book = Book(devices=devices, limits=limits).with_section(Section(OWNER))
        self._uses: dict[str, str] = {}

    def place(self, model: str, used: dict[str, int], now: float) -> float | None:
        lease = self._book.lease(OWNER.id, model)
        if lease is not None and lease.all_on_device:
            return 0.0
        self._world = replace(self._world, now=now, wall=now)
        request = self._request(model, now)
        while True:
            self._book, verdict = admit(self._book, request, self._world, self._rank)
            assert not isinstance(verdict, Refuse), verdict
            if not verdict.steps:
                self._book = self._book.without_ticket(request.key)
                return None
            for step in verdict.steps:
                self._book = after_step(self._book, step, self._world)
            first = verdict.steps[0]
            if isinstance(first, Load):
                return self._history.load_seconds(model)
            if isinstance(first, Move) and first.lease.endswith(f"/{model}"):
                return self._history.restore_seconds(model)

    def note(self, model: str, used: dict[str, int], now: float) -> None:
        lease = self._book.lease(OWNER.id, model)
        assert lease is not None
        self._uses[model] = merged_uses((self._uses.get(model, ""), encode_uses([now])), now)
        changed = replace(
            lease,
            pins=used[model],
            last_used=now,
            recent_uses=self._uses[model],
            droppable=True,
            reload_seconds=self._history.load_seconds(model),
            restore_seconds=self._history.restore_seconds(model),
        )
        self._book = self._book.with_lease(changed)

    def _request(self, model: str, now: float) -> Request:
        size = self._history.sizes[model]
        wanted = Lease(
            OWNER.id,
            model,
            recent_uses=self._uses.get(model, ""),
            reload_seconds=self._history.load_seconds(model),
            restore_seconds=self._history.restore_seconds(model),
            droppable=True,
        )
        return Request(model, wanted, Footprint.of(size), now)


class Helix:
    """The rule of Helix's document, see above."""

    def __init__(self, history: Week) -> None:
        self._history = history
        self._free = [CARD_GB * GB] * CARDS
        # model -> card, the last used at the end
        self._cards: OrderedDict[str, int] = OrderedDict()

    def place(self, model: str, used: dict[str, int], now: float) -> float | None:
        if model in self._cards:
            return 0.0
        size = self._history.sizes[model]
        idle = [one for one in self._cards if not used.get(one)]
        freed = list(self._free)
        evicted = []
        while max(freed) < size:
            if not idle:
                return None
            evicted.append(idle.pop(0))
            freed[self._cards[evicted[-1]]] += self._history.sizes[evicted[-1]]
        for one in evicted:
            del self._cards[one]
        self._free = freed
        card = self._free.index(max(self._free))
        self._free[card] -= size
        self._cards[model] = card
        return self._history.load_seconds(model)

    def note(self, model: str, used: dict[str, int], now: float) -> None:
        self._cards.move_to_end(model)


class Ndif:
    """The rule of NDIF's document, see above."""

    def __init__(self, history: Week) -> None:
        self._history, self._random = history, Random(0)
        self._free = [CARD_GB * GB] * CARDS
        self._placed: dict[str, tuple[int, int]] = {}  # model -> card, reserved bytes
        self._cached: OrderedDict[str, int] = OrderedDict()  # model -> bytes in host memory

    def place(self, model: str, used: dict[str, int], now: float) -> float | None:
        if model in self._placed:
            return 0.0
        size = self._history.sizes[model]
        reserved = int(size * NDIF_FACTOR)
        if reserved >= CARD_GB * GB * NDIF_LARGEST:
            reserved = CARD_GB * GB
        cards = list(range(CARDS))
        self._random.shuffle(cards)
        ways = [way for card in cards if (way := self._evictions(card, reserved, used)) is not None]
        if not ways:
            return None
        card, evicted = min(ways, key=lambda way: len(way[1]))
        for one in evicted:
            self._evict(one)
        self._free[card] -= reserved
        self._placed[model] = card, reserved
        if self._cached.pop(model, 0):
            return self._history.restore_seconds(model)
        return self._history.load_seconds(model)

    def _evictions(
        self, card: int, reserved: int, used: dict[str, int]
    ) -> tuple[int, list[str]] | None:
        """The `card`, and the fewest idle models on it that must leave; None if that is not enough."""
        idle = [
            (bytes, one)
            for one, (where, bytes) in self._placed.items()
            if where == card and not used.get(one)
        ]
        free, evicted = self._free[card], []
        for bytes, one in sorted(idle, reverse=True):
            if free >= reserved:
                break
            free += bytes
            evicted.append(one)
        return (card, evicted) if free >= reserved else None

    def _evict(self, model: str) -> None:
        card, reserved = self._placed.pop(model)
        self._free[card] += reserved
        self._cached[model] = self._history.sizes[model]
        while sum(self._cached.values()) > HOST_GB * GB:
            self._cached.popitem(last=False)

    def note(self, model: str, used: dict[str, int], now: float) -> None:
        pass


def rows() -> Iterator[Row]:
    weeks = [week(seed) for seed in (1, 2, 3)]
    ours = [load_seconds(history, Ours(history)) for history in weeks]
    for name, rule in (("Helix", Helix), ("NDIF", Ndif)):
        ratios = [
            one / load_seconds(history, rule(history))
            for one, history in zip(ours, weeks, strict=True)
        ]
        yield Row(
            f"seconds of loads in a simulated week over 8 cards, against {name}'s rules; {len(weeks)} weeks",
            " ".join(f"{ratio:.2f}×" for ratio in ratios), "≤ 0.7×", max(ratios) <= 0.7
        )  # fmt: skip
