"""Measures how long one decision of the scheduler takes, in processor seconds.

In the book *Twenty models on four cards* every card is full and every model is idle, so a decision passes all steps and
chooses victims. An exhaustive search over all subsets of these models is measured beside it. The book *A full page*
has 1,024 leases and tickets, the largest number.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from msgspec.structs import replace

from gpu_runtime.facts import MOST_ENTRIES, Book, Lease, Request, Wait, World
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.eviction_policy import lru
from tests.worlds import NOW, book, lease, request, ticket, world

Situation = tuple[Book, Request, World]


def twenty_models(seed: int = 0) -> Situation:
    """A book of five models on each of four 40 GiB cards, with three owners. The request needs several evictions."""
    random = Random(seed)
    models = [
        lease(
            f"m{n}",
            by=1 + n % 3,
            last_used=NOW - 10 - random.randrange(900),
            importance=random.choice([10, 20]),
            reload_seconds=random.uniform(1, 30),
            **{f"sim{n % 4}": random.randint(6, 8)},
        )
        for n in range(20)
    ]
    return (
        book(*models, limits={}),
        request("qwen", 14),
        world(sim0=40, sim1=40, sim2=40, sim3=40, host=200),
    )


def twenty_models_in_pieces(seed: int = 0) -> Situation:
    """The same as `twenty_models`, of models that can leave in 32 pieces each."""
    page, wanted, there = twenty_models(seed)
    pieces = [replace(one, piece_bytes=one.bytes // 32) for one in page.leases()]
    return book(*pieces, limits={}), wanted, there


def full_page(seed: int = 0) -> Situation:
    """200 leases of sixteen owners, and as many tickets as the book can hold. The ticket of our request is the last."""
    random = Random(seed)
    models = [
        lease(
            f"m{n}",
            by=1 + n % 16,
            last_used=NOW - 10 - random.randrange(900),
            pins=int(n % 7 == 0),
            importance=random.choice([5, 10, 20]),
            **{f"sim{n % 4}": 1},
        )
        for n in range(200)
    ]
    waiting = [
        ticket(f"t{n}", by=1 + n % 16, arrived=NOW - random.randrange(60), **{f"sim{n % 4}": 2})
        for n in range(MOST_ENTRIES - len(models) - 1)
    ]
    ours = ticket("qwen", key="1:qwen", arrived=NOW, sim0=6)
    return (
        book(*models, tickets=[*waiting, ours]),
        request("qwen", 6),
        world(sim0=50, sim1=50, sim2=50, sim3=50, host=500),
    )


def best_subset(
    page: Book, wanted: Request, there: World, models: int = 20
) -> tuple[Lease, ...] | None:
    """The smallest set, then the least recently used, of all subsets whose eviction makes room on some card."""
    idle = list(page.leases())[:models]
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


def seconds_each(
    situations: Iterable[Situation], decide: Callable[..., Any] = admit
) -> list[float]:
    """The sorted processor seconds of the decisions. Processor time does not depend on the load of the machine."""
    taken = []
    for page, wanted, there in situations:
        began = time.thread_time()
        decide(page, wanted, there, lru)
        taken.append(time.thread_time() - began)
    return sorted(taken)


def figures(rounds: int = 2000, exhaustive_models: int = 20) -> dict[str, float]:
    """The median and the 99th percentile for both books in seconds, and the speed-up over an exhaustive search."""
    found = {}
    books = {"twenty": twenty_models, "pieces": twenty_models_in_pieces, "full": full_page}
    for name, make in books.items():
        situations = [make(seed) for seed in range(20)]
        assert all(isinstance(admit(*each, lru)[1], Wait) for each in situations)
        taken = seconds_each(itertools.islice(itertools.cycle(situations), rounds))
        found[f"{name}_p50"], found[f"{name}_p99"] = (
            taken[len(taken) // 2],
            taken[len(taken) * 99 // 100],
        )
    page, wanted, there = twenty_models()
    began = time.thread_time()
    best_subset(page, wanted, there, exhaustive_models)
    # Each model doubles the number of subsets. A search over fewer models (in tests) is scaled to twenty.
    found["exhaustive"] = (time.thread_time() - began) * 2 ** (20 - exhaustive_models)
    found["exhaustive_ratio"] = found["exhaustive"] / found["twenty_p99"]
    return found
