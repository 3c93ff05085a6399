"""The contents of the tab Fragmentation: bytes that an allocator holds on a card and cannot use. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpu_runtime.facts import AllocatorMap, Snapshot
from gpu_runtime.rendering import allocator_map
from gpu_runtime.rendering.html import esc
from gpu_runtime.safe_text import clean
from gpu_runtime.units import show_bytes

from .cells import UNKNOWN, Button, Cell, Column, Row, bytes_cell, if_awake, owner_cell

COLUMNS = (
    Column("Process"),
    Column("Device"),
    Column("Allocated", True, "Bytes in blocks that are in use"),
    Column("Reserved", True, "Bytes that the allocator took from the card"),
    Column("Inactive", True, "Reserved bytes that are not in use"),
    Column(
        "Releasable",
        True,
        "Inactive bytes that Compact returns to the card: segments without a block in use",
    ),
    Column(
        "Largest free block",
        True,
        "The largest request that the allocator can serve from what it has reserved",
    ),
    Column(
        "Largest that fits",
        True,
        "The largest request of this process that would fit now: in its largest free block, or in "
        "new memory within the card's budget",
    ),
    Column("Retries", True, "How often the allocator emptied its cache to serve a request"),
    Column("OOMs", True, "How often it could not serve a request"),
)
EMPTY = (
    "No process holds memory on a card yet. To load a model in a notebook: `%gpu load NAME PATH`"
)


class ProcessMemory(NamedTuple):
    """The memory of one process on one card. `map` is None if the process publishes no map."""

    owner: str  # the owner's id
    device: str
    map: AllocatorMap | None
    fits_bytes: int | None  # the largest request that fits now

    @property
    def id(self) -> str:
        return f"{self.owner}/{self.device}"

    @property
    def inactive_bytes(self) -> int:
        return (self.map.inactive_bytes or 0) if self.map else 0


def process_memories(maps: Iterable[AllocatorMap], snapshot: Snapshot) -> tuple[ProcessMemory, ...]:
    """Each process of `snapshot` with memory on a card, once for each card, the most inactive bytes first."""
    cards = {view.device.id: view for view in snapshot.cards}
    found: dict[tuple[str, str], AllocatorMap | None] = {}
    for section in snapshot.sections.values():
        for lease in section.leases:
            for share in lease.shares:
                if share.device in cards:
                    found[section.owner.id, share.device] = None
    for map in maps:
        is_here = map.owner in snapshot.sections or map.owner == snapshot.owner.id
        if is_here and map.device in cards:
            found[map.owner, map.device] = map
    memories = [
        ProcessMemory(owner, device, map, map.largest_request_bytes(cards[device]) if map else None)
        for (owner, device), map in found.items()
    ]
    memories.sort(
        key=lambda memory: (memory.map is None, -memory.inactive_bytes, memory.device, memory.owner)
    )
    return tuple(memories)


def rows(
    memories: Iterable[ProcessMemory], snapshot: Snapshot, may_act: bool, chosen: str = ""
) -> tuple[Row, ...]:
    """A row for each of `memories`, with buttons that draw the map and defragment. `chosen` is the row drawn now."""
    return tuple(
        Row(memory.id, _cells(memory, snapshot), _buttons(memory, snapshot, may_act, chosen))
        for memory in memories
    )


def _cells(memory: ProcessMemory, snapshot: Snapshot) -> tuple[Cell, ...]:
    section = snapshot.sections.get(memory.owner)
    process = owner_cell(section.owner if section else snapshot.owner, snapshot)
    device = Cell(memory.device)
    map = memory.map
    if map is None:
        return (process, device, *[UNKNOWN] * (len(COLUMNS) - 2))
    part = ""
    if map.inactive_bytes is not None and map.reserved_bytes:
        percent = 100 * map.inactive_bytes / map.reserved_bytes
        part = f"{percent:.0f} % of what is reserved"
    return (
        process,
        device,
        bytes_cell(map.allocated_bytes, UNKNOWN),
        bytes_cell(map.reserved_bytes, UNKNOWN),
        bytes_cell(map.inactive_bytes, UNKNOWN)._replace(hint=part),
        bytes_cell(map.releasable_bytes, UNKNOWN),
        bytes_cell(map.largest_free_bytes, UNKNOWN),
        bytes_cell(memory.fits_bytes, UNKNOWN),
        Cell(str(map.alloc_retries), map.alloc_retries),
        Cell(str(map.ooms), map.ooms, kind="alarm" if map.ooms else ""),
    )


def _buttons(
    memory: ProcessMemory, snapshot: Snapshot, may_act: bool, chosen: str
) -> tuple[Button, ...]:
    map = memory.map
    why_not_show = ""
    if map is None or not map.segments:
        why_not_show = "This process publishes no map of its memory"
    elif memory.id == chosen:
        why_not_show = "It is shown below"
    show = Button("show", "Map", why_not_show)
    if not may_act or memory.owner not in snapshot.sections:
        return (show,)
    nothing_to_release = map is not None and map.releasable_bytes == 0
    why_not_defrag = (
        "Nothing to release: every segment has a block in use" if nothing_to_release else ""
    )
    compact = if_awake([Button("defrag", "Compact", why_not_defrag)], memory.owner, snapshot)
    return (show, *compact)


def report(memory: ProcessMemory, snapshot: Snapshot) -> str:
    """The text above the map of `memory` as HTML: the name of the process, and the verdict."""
    section = snapshot.sections.get(memory.owner)
    process = (section.owner if section else snapshot.owner).label
    title = f'<div class="title">{esc(f"{clean(process)} on {memory.device}")}</div>'
    map = memory.map
    if map is None:
        return (
            f"{title}<div>This process has published no map of its memory there: it has just "
            "started, or its allocator provides none.</div>"
        )
    fits = "unknown" if memory.fits_bytes is None else show_bytes(memory.fits_bytes)
    sentences = (
        allocator_map.verdict(map),
        f"The largest request that would fit now: {fits}.",
        allocator_map.left_out(map),
    )
    text = " ".join(sentence for sentence in sentences if sentence)
    return f"{title}<div>{esc(text)}</div>"


def drawing(map: AllocatorMap) -> str:
    """The picture and the legend of `map` as HTML; empty for an empty map."""
    svg = allocator_map.as_svg(map, allocator_map.sentences(map), titles=True)
    return f"{svg}<div>{allocator_map.keys(map)}</div>" if svg else ""
