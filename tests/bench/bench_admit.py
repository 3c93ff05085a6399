"""Measures how long one decision of the scheduler takes, in processor seconds.

In the book *Twenty models on four cards* every card is full and every model is idle, so a decision passes all steps and
chooses victims. An exhaustive search over all subsets of these models is measured beside it. The book *A full page*
has 1,024 leases and tickets, the largest number.
"""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

from msgspec.structs import replace

from gpu_runtime.facts import MOST_ENTRIES, Book, Lease, Request, Wait, World
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import lru
from tests.worlds import NOW, book, lease, request, ticket, world

from .results import Row
from .timing import alternately, seconds

Situation = tuple[Book, Request, World]


def idle(random: Random, n: int, owners: int, **more: Any) -> Lease:
    """The lease of an idle model that was used in the last 15 minutes, of one of so many owners."""
    used, reload_seconds = NOW - 10 - random.randrange(900), random.uniform(1, 9)
    more = {"importance": random.choice((10, 20)), "reload_seconds": reload_seconds, **more}
    return lease(f"m{n}", by=1 + n % owners, last_used=used, **more)


def twenty_models(seed: int = 0) -> Situation:
    """A book of five models on each of four 40 GiB cards, with three owners. The request needs several evictions."""
    random = Random(seed)
    models = [idle(random, n, 3, **{f"sim{n % 4}": random.randint(6, 8)}) for n in range(20)]
    there = world(sim0=40, sim1=40, sim2=40, sim3=40, host=200)
    return book(*models, limits={}), request("qwen", 14), there


def twenty_models_in_pieces(seed: int = 0) -> Situation:
    """The same as `twenty_models`, of models that can leave in 32 pieces each."""
    page, wanted, there = twenty_models(seed)
    pieces = [replace(one, piece_bytes=one.bytes // 32) for one in page.leases()]
    return book(*pieces, limits={}), wanted, there


def full_page(seed: int = 0) -> Situation:
    """200 leases of sixteen owners, and as many tickets as the book can hold. The ticket of our request is the last."""
    random = Random(seed)
    models = [
        idle(random, n, 16, pins=int(n % 7 == 0), importance=random.choice([5, 10, 20]), **{f"sim{n % 4}": 1})
        for n in range(200)
    ]  # fmt: skip
    waiting = [
        ticket(f"t{n}", by=1 + n % 16, arrived=NOW - random.randrange(60), **{f"sim{n % 4}": 2})
        for n in range(MOST_ENTRIES - len(models) - 1)
    ]
    ours = ticket("qwen", key="1:qwen", arrived=NOW, sim0=6)
    there = world(sim0=50, sim1=50, sim2=50, sim3=50, host=500)
    return book(*models, tickets=[*waiting, ours]), request("qwen", 6), there


def best_subset(page: Book, wanted: Request, there: World) -> tuple[Lease, ...] | None:
    """The smallest set, then the least recently used, of all subsets whose eviction makes room on some card."""
    idle = list(page.leases())
    claims, need = page.claims(), wanted.footprint.bytes
    best: tuple[Any, tuple[Lease, ...]] | None = None
    for count in range(len(idle) + 1):
        for subset in itertools.combinations(idle, count):
            for card, limit in there.limits.items():
                freed = sum(
                    share.bytes for gone in subset for share in gone.shares if share.device == card
                )
                if limit - claims.get(card, 0) + freed >= need:
                    score = (count, sum(lru(gone, there) for gone in subset))
                    if best is None or score < best[0]:
                        best = score, subset
    return best[1] if best else None


def rows(rounds: int = 2000) -> Iterator[Row]:
    """The decisions for each book, and an exhaustive search. Processor time is independent of the machine's load."""
    p99s = {}
    for make, words, most, unit, digits in (
        (twenty_models, "20 models on 4 devices", 100e-6, "µs", 0),
        (twenty_models_in_pieces, "20 models on 4 devices, in pieces", 150e-6, "µs", 0),
        (full_page, "a full page (1,024 leases and tickets)", 2e-3, "ms", 2),
    ):
        situations = [make(seed) for seed in range(20)]
        assert all(isinstance(admit(*each, lru)[1], Wait) for each in situations)
        decide = partial(lambda each: admit(*next(each), lru), itertools.cycle(situations))
        taken = sorted(alternately(rounds, decide, clock=time.thread_time)[0])
        p50, p99 = taken[rounds // 2], taken[rounds * 99 // 100]
        scale = {"µs": 1e6, "ms": 1e3}[unit]
        yield Row(
            f"one `admit`, {words}", f"p99 {p99 * scale:.{digits}f} {unit} (p50 {p50 * scale:.{digits}f})",
            f"p99 ≤ {most * scale:.0f} {unit}", p99 <= most
        )  # fmt: skip
        p99s[make] = p99
    ratio = seconds(lambda: best_subset(*twenty_models()), time.thread_time) / p99s[twenty_models]
    yield Row(
        "one `admit`, 20 models on 4 devices, against an exhaustive search over all their subsets",
        f"{ratio:,.0f}× faster", "≥ 1,000×", ratio >= 1000
    )  # fmt: skip
