"""Sample snapshots: a busy one, an empty one, and snapshots with several kinds of trouble."""

import random

from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    AllocatorBlock,
    AllocatorMap,
    BlockState,
    Candidate,
    Device,
    DeviceView,
    Drain,
    Event,
    Footprint,
    Lease,
    Level,
    Load,
    ModelSpec,
    Move,
    Owner,
    Part,
    Phase,
    Plan,
    PlanLevel,
    Sample,
    Section,
    SegmentMap,
    Share,
    Snapshot,
    Stranger,
    Ticket,
)
from gpu_runtime.ledgers.liveness import Sight
from gpu_runtime.owner.requests import presence
from gpu_runtime.scheduler.recall import unanswered

GIB, MIB = 2**30, 2**20
NOW, WALL = 5_000.0, 1_763_640_184.0  # 12:03:04 UTC
ME = Owner("box", "boot", 4000, 10, user="ann", notebook="/home/ann/train.ipynb")
BOB = Owner("box", "boot", 4121, 11, user="bob", notebook="/home/bob/analysis.ipynb")


def lease(name, gib, device="sim:0", owner=ME, **more):
    more.setdefault("last_used", NOW - 12)
    return Lease(owner.id, name, shares=(Share(device, int(gib * GIB)),), **more)


def snapshot(
    *leases, cards=1, gib=24.0, host=64.0, simulated=True, strangers=0.0, processes=None, tickets=(),
    events=(), specs=(), totals=None, measured=True, **more,
):  # fmt: skip
    """A snapshot with these leases: one simulated card of 24 GiB, where no keyword says otherwise."""
    sections = {
        owner.id: Section(owner, tuple(one for one in leases if one.owner == owner.id))
        for owner in (ME, BOB)
    }
    views = []
    ids = [f"{'sim' if simulated else 'cuda'}:{n}" for n in range(cards)]
    for id in (*ids, HOST):
        total = int((host if id == HOST else gib) * GIB)
        limit = int(total * (0.5 if id == HOST else 0.9))
        claimed = sum(share.bytes for one in leases for share in one.claims() if share.device == id)
        unleased = int(strangers * GIB) if id == ids[0] else 0
        used = claimed + unleased if measured or id == HOST else None
        full = max(claimed / limit, (used or 0) / total)
        level = list(Level)[(full >= 0.6) + (full >= 0.8) + (full >= 0.9)]
        sample = (None if simulated else Sample(
            id, NOW, None if used is None else total - used,
            processes or {} if id == ids[0] else {}, 37.0 if id != HOST else None,
        ))  # fmt: skip
        name = "NVIDIA H100" if not simulated and id != HOST else ""
        device = Device(id, total, name, simulated=simulated)
        room = None if used is None else min(limit - claimed, total - used)
        views.append(DeviceView(device, limit, claimed, used, level, full, sample, room_bytes=room))
    others = tuple(
        Stranger(ids[0], pid, size, "carol", "python3")
        for pid, size in (processes or {}).items()
        if pid not in (ME.pid, BOB.pid)
    )
    seen = Snapshot(
        NOW, WALL, ME, tuple(views), sections, tuple(tickets), tuple(events), tuple(specs),
        simulated, ledger="memory:", totals=totals or {}, strangers=others, **more,
    )  # fmt: skip
    silent = unanswered(seen)
    since = {one.owner.id: one.since for one in reversed(silent)}
    seen_as = lambda id: presence(sections[id], Sight.ALIVE, since.get(id))
    return replace(seen, unanswered=silent, presences={id: seen_as(id) for id in sections})


def event(seq, model, action, because, gib=0.0, device="sim:0", **more):
    return Event(
        seq, WALL - 60 + seq, model, action, "request", because, int(gib * GIB), device, ME.id,
        **more,
    )  # fmt: skip


EVENTS = (
    event(1, "llama", "loaded", "llama needs 8.0 GiB; sim:0 has 21.6 GiB free.", 8),
    event(2, "llama", "offloaded", "qwen needs room", 8),
    event(3, "qwen", "granted", "qwen needs 14.0 GiB; sim:0 has 21.6 GiB free.", 14),
    event(4, "qwen", "loaded", "qwen needs 14.0 GiB; sim:0 has 21.6 GiB free.", 14),
)
TOTALS = {"evictions": 3, "offloads": 2, "unloads": 1, "restorations": 2, "loads": 4, "refusals": 0}

empty = snapshot()
registered = snapshot(specs=(ModelSpec("qwen", "fake", size=14 * GIB),))
busy = snapshot(
    lease("qwen", 14, pins=1, pinned_since=NOW - 40, uses=3, keep=True),
    lease("reranker", 4, owner=BOB, importance=5),
    lease("llama", 8, HOST, last_used=NOW - 200),
    events=EVENTS,
    totals=TOTALS,
)
waiting = snapshot(
    lease("qwen", 14, pins=1, pinned_since=NOW - 40),
    lease("reranker", 4, owner=BOB, phase=Phase.LEAVING),
    tickets=(
        Ticket(
            "k1",
            BOB.id,
            "use",
            "llama",
            NOW - 12,
            NOW,
            need=(Share("sim:0", 8 * GIB),),
            because="qwen (14.0 GiB on sim:0) is in use",
        ),  # fmt: skip
        Ticket("k2", ME.id, "evict", f"{BOB.id}/reranker", NOW - 3, NOW),
    ),
    events=EVENTS,
    totals=TOTALS,
)
overdraft = snapshot(
    lease("qwen", 14, "cuda:0"),
    lease("llama", 9, "cuda:0", BOB),
    simulated=False,
    strangers=0.5,
    processes={4000: 14 * GIB, 999: GIB // 2},
    degraded="cuda:0 did not answer 5 times in a row; next try in 30 s",
)
NAMES = (
    "Qwen/Qwen3-Embedding-0.6B", "meta-llama/Llama-3.1-8B-Instruct", "bge", "mistral", "phi", "gemma",
    "whisper", "sdxl",
    "a-very-long-name-that-nobody-would-type-but-some-tool-made-up-for-a-fine-tuned-checkpoint-00017",
)  # fmt: skip
eight = snapshot(
    *(
        lease(
            name, 6 + 7 * (n % 5), f"cuda:{n % 8}", (ME, BOB)[n % 2], pins=int(n % 3 == 0),
            importance=(10, 1, 30)[n % 3],
        )
        for n, name in enumerate(NAMES)
    ),
    Lease(ME.id, "cell#1", shares=(Share("cuda:3", 20 * GIB),), kind="block", pins=1),
    Lease(BOB.id, "arriving-one", target=(Share("cuda:4", 30 * GIB),), phase=Phase.ARRIVING, pins=1),
    cards=8, gib=80, host=1024, simulated=False, strangers=11, processes={777: 11 * GIB}, events=EVENTS,
    totals=TOTALS,
)  # fmt: skip
unmeasured = snapshot(lease("qwen", 14, "cuda:0"), simulated=False, measured=False)
_two = snapshot(
    lease("qwen", 14, "cuda:0"),
    lease("llama", 9, "cuda:1", BOB, pins=1, pinned_since=NOW - 40),
    cards=2,
    simulated=False,
)
_shut = replace(_two.devices[1], drained=Drain("ann", WALL - 600))
drained = replace(_two, devices=(_two.devices[0], _shut, *_two.devices[2:]))
hostile = snapshot(
    lease("<img src=x onerror=alert(1)>\x1b[31m\n", 4),
    events=(event(1, "<b>evil</b>", "refused", "<script>alert(1)</script>", 4),),
)

fits = Plan(
    True,
    (
        Move(f"{ME.id}/qwen", (Share("sim:0", 14 * GIB),), (Share(HOST, 14 * GIB),)),
        Load(f"{ME.id}/gemma", (Share("sim:0", 12 * GIB),)),
    ),
    (Share("sim:0", 12 * GIB),),
    "qwen was used least recently. gemma needs 12.0 GiB; sim:0 has 17.6 GiB free.",
    (
        Candidate((Share("sim:0", 12 * GIB),), False, "3.6 GiB free of 12.0 GiB needed"),
        Candidate((Share("sim:1", 12 * GIB),), False, "2.0 GiB free of 12.0 GiB needed"),
    ),
    (), Footprint((Part("weights", 11 * GIB, "header"), Part("activations", GIB, "declared"))), "gemma",
    command="preload gemma", victims=(f"{ME.id}/qwen",),
)  # fmt: skip
refused = Plan(
    False, (), (), "gemma needs 40.0 GiB on one device; the largest budget is 21.6 GiB (sim:0)",
    footprint=Footprint.of(40 * GIB), name="gemma", level=PlanLevel.NEVER,
)  # fmt: skip


def scattered() -> AllocatorMap:
    """The map of a long training: free blocks between blocks in use, and segments without one in use."""
    chance, segments = random.Random(7), []
    for number in range(30):
        state = BlockState.INACTIVE if number % 4 == 3 else BlockState.ALLOCATED
        sizes = [chance.choice((8, 40, 160)) * MIB for _ in range(chance.randint(1, 5))]
        blocks = [AllocatorBlock(size, state) for size in sizes]
        if number % 5 == 2 and state is BlockState.ALLOCATED:
            blocks.insert(1, AllocatorBlock(24 * MIB, BlockState.INACTIVE))
        segments.append(
            SegmentMap(number << 40, sum(block.bytes for block in blocks), "large", tuple(blocks))
        )
    blocks = [block for segment in segments for block in segment.blocks]
    free = [block.bytes for block in blocks if block.state is BlockState.INACTIVE]
    reserved = sum(block.bytes for block in blocks)
    unused = [one for one in segments if all(b.state is BlockState.INACTIVE for b in one.blocks)]
    return AllocatorMap(
        ME.id, "sim:0", 1.0, allocated_bytes=reserved - sum(free), reserved_bytes=reserved,
        inactive_bytes=sum(free), releasable_bytes=sum(segment.bytes for segment in unused),
        largest_free_bytes=max(free), segments=tuple(segments),
    )  # fmt: skip
