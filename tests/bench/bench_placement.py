"""Measures the time of a plan over many cards, and compares plans with the best possible plans.

The first part plans a 70B model over eight cards that are full with 200 idle leases. In the same run,
`accelerate.infer_auto_device_map` is measured on the same model, a Llama without data. The second part uses random
worlds that are so small that every set of leases on every card can be tried. The bytes that our plans free are compared
with the fewest bytes that could be freed.
"""

import itertools
import time
from collections.abc import Iterator
from random import Random

from msgspec.structs import replace

from gpu_runtime.facts import Book, Footprint, Lease, PlacementRules, Request, Wait, World
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.capacity import room
from gpu_runtime.scheduler.plan import plan
from gpu_runtime.scheduler.policies import lru
from tests.worlds import GIB, NOW, book, lease, request, world

from .bench_admit import idle
from .results import Row
from .timing import medians

# figures of Llama 3 70B in bfloat16
LAYERS, LAYER_BYTES, END_BYTES = 80, 1_711_292_416, 2_101_346_304
HEADS = 64


def seventy_billion(layout: str = "balanced") -> Request:
    pieces = (END_BYTES, *[LAYER_BYTES] * LAYERS, END_BYTES)
    footprint = replace(Footprint.of(sum(pieces)), heads=HEADS, pieces=pieces)
    return replace(
        request("llama-70b"), footprint=footprint, placement=PlacementRules(layout=layout)
    )


def eight_full_cards(leases: int = 200, seed: int = 0) -> tuple[Book, World]:
    """Eight cards of 80 GB that are full with idle models of four owners.

    A model has one to five GB, and one model in ten is split over two cards.
    """
    random = Random(seed)
    models = []
    for n in range(leases):
        cards = random.sample(range(8), 2 if n % 10 == 0 else 1)
        sizes = {f"sim{card}": random.uniform(1, 4.5) / len(cards) for card in cards}
        models.append(idle(random, n, 4, **sizes))
    return book(*models), world(**{f"sim{n}": 80 for n in range(8)}, host=900)


def plan_seconds(layout: str, rounds: int = 30) -> float:
    """Median processor seconds of one plan."""
    page, there = eight_full_cards()
    wanted = seventy_billion(layout)

    def one() -> None:
        told = plan(page, wanted, there, lru)
        assert told.granted and len(told.shares) > 1 and len(told.steps) > 1

    return medians(rounds, one, clock=time.thread_time)[0]


def accelerate_seconds(rounds: int = 5) -> float:
    """Median processor seconds of accelerate's map of the same model over the same cards, which are empty."""
    import torch
    from accelerate import infer_auto_device_map, init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=8, vocab_size=128256,
        torch_dtype=torch.bfloat16,
    )  # fmt: skip
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    cards = {n: 80 * GIB for n in range(8)}
    whole = {"dtype": torch.bfloat16, "no_split_module_classes": ["LlamaDecoderLayer"]}
    mapped = lambda: infer_auto_device_map(model, max_memory=dict(cards), **whole)
    return medians(rounds, mapped, clock=time.thread_time)[0]


# -- against an exact optimum -------------------------------------------------------------------------------------


def small_worlds(count: int, seed: int = 0) -> Iterator[tuple[Book, Request, World]]:
    """Yields worlds of one to three cards with up to eight idle leases each.

    One lease in five is split over two cards. Reloading takes a second for each GiB.
    """
    random = Random(seed)
    while count:
        cards = random.randint(1, 3)
        capacity = [random.randint(20, 40) for _ in range(cards)]
        left, models = list(capacity), []
        for n in range(random.randint(2, 8)):
            on = random.sample(range(cards), 2 if cards > 1 and random.random() < 0.2 else 1)
            sizes = {card: random.randint(1, 12) for card in on}
            if all(left[card] >= size for card, size in sizes.items()):
                for card, size in sizes.items():
                    left[card] -= size
                used = NOW - 10 - random.randrange(900)
                places = {f"sim{card}": size for card, size in sizes.items()}
                seconds = sum(sizes.values())
                models.append(lease(f"m{n}", last_used=used, reload_seconds=seconds, **places))
        wanted = request("new", random.randint(4, min(capacity)))
        there = world(**{f"sim{n}": size for n, size in enumerate(capacity)}, host=500)
        page = book(*models)
        if models and isinstance(admit(page, wanted, there, lru)[1], Wait):
            yield page, wanted, there
            count -= 1


def ways_out(page: Book, wanted: Request, there: World) -> Iterator[tuple[Lease, ...]]:
    """Yields every set of leases whose eviction makes enough room on some card."""
    models, free = list(page.leases()), room(page, there)
    cards = [device.id for device in there.cards]
    for count in range(1, len(models) + 1):
        for gone in itertools.combinations(models, count):
            for card in cards:
                freed = sum(lease.bytes_on(card) for lease in gone)
                if freed and free[card] + freed >= wanted.footprint.bytes:
                    yield gone
                    break


def freed_bytes(gone: tuple[Lease, ...]) -> int:
    return sum(lease.bytes for lease in gone)


def lawful(page: Book, wanted: Request, there: World) -> Iterator[tuple[Lease, ...]]:
    """Yields those sets of `ways_out` on one card that keep the order of last use.

    In such a set, the least recently used leases are evicted if they are enough.
    """
    models, free = list(page.leases()), room(page, there)
    for device in there.devices:
        on = [m for m in models if any(s.device == device.id for s in m.shares)]
        on.sort(key=lambda m: m.last_used)
        need, prefix = wanted.footprint.bytes - free[device.id], 0
        freed = [m.bytes_on(device.id) for m in on]
        while prefix < len(on) and sum(freed[:prefix]) < need:
            prefix += 1
        if device.is_host or sum(freed[:prefix]) < need:
            continue
        for chosen in itertools.product((False, True), repeat=prefix):
            if sum(size for size, taken in zip(freed, chosen, strict=False) if taken) >= need:
                yield tuple(m for m, taken in zip(on, chosen, strict=False) if taken)


def excess(policy: str, worlds: int, seed: int = 0) -> dict[str, float]:
    """The bytes that our plans free in all these worlds, divided by an exact optimum, and the same for `leases`.

    For `fewest-evictions`, it is the fewest bytes of all sets with the fewest members; for the other policies, of all
    sets that keep the order of last use. `unbound` compares with the fewest bytes of any set: the cost of that order.
    """
    ours = best = unbound = count = fewest = 0
    for page, wanted, there in small_worlds(worlds, seed):
        wanted = replace(wanted, placement=PlacementRules(policy=policy))
        _, verdict = admit(page, wanted, there, lru)
        gone = tuple(page.find(id) for id in verdict.considered[0].victims)
        every = list(ways_out(page, wanted, there))
        unbound += min(map(freed_bytes, every))
        least = min(map(len, every))
        ours, count, fewest = ours + freed_bytes(gone), count + len(gone), fewest + least
        few = [way for way in every if len(way) == least]
        ways = few if policy == "fewest-evictions" else lawful(page, wanted, there)
        best += min(map(freed_bytes, ways))
    return {"bytes": ours / best, "leases": count / fewest, "unbound": ours / unbound}


def rows() -> Iterator[Row]:
    theirs = accelerate_seconds()
    for layout in ("balanced", "proportional"):
        ours = plan_seconds(layout)
        yield Row(
            f"`plan`, a 70B model over 8 cards with 200 leases, {layout}, against "
            "`accelerate.infer_auto_device_map`",
            f"{ours * 1e3:.1f} of {theirs * 1e3:.1f} ms = {ours / theirs:.2f}×", "≤ 5 ms, ≤ 1×",
            ours <= min(5e-3, theirs)
        )  # fmt: skip
    for policy in ("best-fit", "fewest-evictions"):
        found = excess(policy, 1000)
        yield Row(
            f"`{policy}`: bytes freed in 1,000 small random worlds, against an exact optimum",
            f"{found['bytes']:.3f}× ({found['unbound']:.3f}× without regard to the last use)", "≤ 1.05×",
            found["bytes"] <= 1.05
        )  # fmt: skip
