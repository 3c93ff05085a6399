"""Maps of allocators. A map has every reserved byte of a simulated card or of torch's snapshot."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.devices import nvml
from gpu_runtime.devices.allocators import (
    FREE,
    HOLE,
    Run,
    Segment,
    Segments,
    bounded,
    of_segments,
    of_torch,
)
from gpu_runtime.devices.drivers import Card, Listing
from gpu_runtime.devices.probe import Probe, open_probe
from gpu_runtime.devices.process_memory import Memory
from gpu_runtime.facts import (
    AllocatorBlock,
    AllocatorMap,
    BlockState,
    Device,
    DeviceView,
    Level,
    SegmentMap,
    encode,
)
from gpu_runtime.ledgers.keeper.core import MOST_KEPT_BYTES
from gpu_runtime.units import GIB, KIB, MIB

ALLOCATED, PENDING, INACTIVE, *_ = BlockState

sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 12 * MIB), st.sampled_from([MIB, 10 * MIB, 40 * MIB])
)


def torch_block(megabytes: float, state: str = "active_allocated") -> dict:
    size = int(megabytes * MIB)
    return {"size": size, "requested_size": size, "address": 0, "state": state, "frames": []}


def torch_segment(
    *blocks: dict,
    at: int = 0,
    type: str = "large",
    pool: tuple[int, int] = (0, 0),
    device: int = 0,
    expandable: bool = False,
) -> dict:
    """A segment as in torch.cuda.memory_snapshot(). Source: torch/cuda/memory.py, `_snapshot`."""
    return {
        "address": 0x7F00_0000_0000 + at, "total_size": sum(block["size"] for block in blocks),
        "stream": 0, "segment_type": type, "segment_pool_id": pool, "device": device,
        "is_expandable": expandable, "frames": [], "allocated_size": 0, "active_size": 0,
        "requested_size": 0, "blocks": list(blocks),
    }  # fmt: skip


def cut(*segments: tuple[Run, ...]) -> Segments:
    return Segments(
        tuple(Segment(id, False, runs) for id, runs in enumerate(segments, 1)), len(segments) + 1
    )


def states(map: AllocatorMap) -> list[list[tuple[int, str]]]:
    return [
        [(block.bytes // MIB, str(block.state)) for block in segment.blocks]
        for segment in map.segments
    ]


def drawn(*segments: SegmentMap) -> AllocatorMap:
    reserved = sum(segment.bytes for segment in segments)
    return AllocatorMap("1.2.3", "sim:0", 0.0, reserved, reserved, 0, 0, 0, segments=segments)


def test_the_map_shows_a_simulated_cards_segments_as_they_are_cut():
    """Neighbours in use are one block with their count. What was returned is not reserved."""
    map = of_segments(
        "sim:0",
        cut(
            (Run(3 * MIB, 7, 1), Run(5 * MIB, 8, 1), Run(12 * MIB, FREE)),
            (Run(4 * MIB, 9, 1), Run(6 * MIB, HOLE)),
            (Run(20 * MIB, FREE),),
        ),
        ooms=2,
    )
    assert map.segments[0] == SegmentMap(
        0,
        20 * MIB,
        "large",
        (AllocatorBlock(8 * MIB, ALLOCATED, 2), AllocatorBlock(12 * MIB, INACTIVE)),
    )
    assert states(map)[1:] == [[(4, "allocated"), (6, "released")], [(20, "inactive")]]
    assert [segment.address for segment in map.segments] == [0, 20 * MIB, 30 * MIB]
    assert (map.allocated_bytes, map.reserved_bytes) == (12 * MIB, 44 * MIB)
    assert (map.inactive_bytes, map.releasable_bytes, map.largest_free_bytes) == (
        32 * MIB,
        20 * MIB,
        20 * MIB,
    )
    assert (map.alloc_retries, map.ooms) == (0, 2)


@given(rows=st.lists(sizes, max_size=30), freed=st.sets(st.integers(0, 29)))
def test_the_bytes_that_defragmenting_releases_are_known_before(rows, freed):
    """`releasable_bytes` is exactly the bytes that empty_cache releases, and the figures add up to the map."""
    memory = Memory("sim:0", 4 * GIB)
    held = [memory.allocate(size) for size in rows]
    for index in freed & set(range(len(held))):
        held[index].free()
    map = memory.map()
    by_state = dict.fromkeys(BlockState, 0)
    for segment in map.segments:
        assert segment.bytes == sum(block.bytes for block in segment.blocks)
        for block in segment.blocks:
            by_state[block.state] += block.bytes
    expected = {ALLOCATED: map.allocated_bytes, INACTIVE: map.inactive_bytes}
    assert by_state == dict.fromkeys(BlockState, 0) | expected
    assert map.reserved_bytes == map.allocated_bytes + map.inactive_bytes
    assert memory.empty_cache() == map.releasable_bytes
    assert memory.map().inactive_bytes == map.inactive_bytes - map.releasable_bytes


def test_torchs_snapshot_becomes_a_map():
    """In the order of addresses. Freed bytes that a stream still uses are pending."""
    snapshot = [
        torch_segment(
            torch_block(4, "inactive"),
            torch_block(8),
            torch_block(8),
            torch_block(20, "inactive"),
            at=64 * MIB,
        ),
        torch_segment(torch_block(2), type="small", at=0),
        torch_segment(
            torch_block(3, "active_awaiting_free"),
            torch_block(17, "active_pending_free"),
            at=256 * MIB,
        ),
        torch_segment(torch_block(64, "inactive"), at=512 * MIB),
        torch_segment(torch_block(99), device=1),
    ]
    map = of_torch("cuda:3", 0, snapshot, {"num_alloc_retries": 4, "num_ooms": 1})
    assert states(map) == [
        [(2, "allocated")],
        [(4, "inactive"), (16, "allocated"), (20, "inactive")],
        [(20, "pending")],
        [(64, "inactive")],
    ]
    assert [segment.kind for segment in map.segments] == ["small", "large", "large", "large"]
    assert (map.device, map.allocated_bytes, map.reserved_bytes) == ("cuda:3", 18 * MIB, 126 * MIB)
    assert (map.inactive_bytes, map.releasable_bytes, map.largest_free_bytes) == (
        88 * MIB,
        64 * MIB,
        64 * MIB,
    )
    assert (map.alloc_retries, map.ooms) == (4, 1)


FREE_32 = torch_block(32, "inactive")
GROWN = (torch_block(10), torch_block(55, "inactive"), torch_block(15))
SMALL = (torch_block(1), torch_block(4, "inactive"), torch_block(3))


@pytest.mark.parametrize(
    ("segment", "kind", "releasable"),
    [
        (torch_segment(FREE_32), "large", 32),
        # A CUDA graph uses its addresses again, so empty_cache keeps them.
        (torch_segment(FREE_32, pool=(0, 1)), "private", 0),
        # A free page, of 20 MiB or of 2 MiB for small blocks, is releasable between used pages too.
        (torch_segment(*GROWN, expandable=True), "expandable", 40),
        (torch_segment(*SMALL, type="small", expandable=True), "expandable", 2),
    ],
    ids=["large", "private", "expandable", "small"],
)
def test_the_releasable_bytes_depend_on_the_kind_of_a_segment(segment, kind, releasable):
    map = of_torch("cuda:0", 0, [segment], {})
    assert (map.segments[0].kind, map.releasable_bytes) == (kind, releasable * MIB)
    if kind == "large":  # an older torch has no pools
        del segment["segment_pool_id"], segment["is_expandable"]
        assert of_torch("cuda:0", 0, [segment], {}).segments == map.segments


blocks = st.lists(
    st.tuples(st.integers(512, 64 * MIB), st.sampled_from([ALLOCATED, INACTIVE, PENDING])),
    min_size=1,
    max_size=60,
)


@given(segments=st.lists(blocks, max_size=12), most=st.integers(1, 80))
def test_a_map_is_bounded_and_keeps_every_byte(segments, most):
    """The map of a fragmented allocator has a limited size too. Its figures and the size of each segment stay exact."""
    told = tuple(
        SegmentMap(
            index << 30,
            sum(size for size, _ in row),
            "large",
            tuple(AllocatorBlock(size, state) for size, state in row),
        )
        for index, row in enumerate(segments)
    )
    before = drawn(*told)
    (after,) = bounded([before], most)
    assert sum(len(segment.blocks) for segment in after.segments) <= most
    if sum(map(len, segments)) <= most:
        assert after == before
    assert (after.reserved_bytes, after.inactive_bytes) == (
        before.reserved_bytes,
        before.inactive_bytes,
    )
    kept = sum(segment.bytes for segment in after.segments)
    assert kept + after.left_out_bytes == before.reserved_bytes
    assert len(after.segments) + after.left_out == len(told)
    originals = {segment.address: segment for segment in told}
    for segment in after.segments:
        original = originals[segment.address]
        assert sum(block.bytes for block in segment.blocks) == segment.bytes
        assert sum(block.count for block in segment.blocks) == len(original.blocks)
        assert free(segment) == free(original)
    addresses = [segment.address for segment in after.segments]
    assert addresses == sorted(addresses)


def free(segment: SegmentMap) -> int:
    return sum(
        block.bytes if block.state is INACTIVE else block.inactive_bytes for block in segment.blocks
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("segments", "blocks"), [(1, 100_000), (8192 // 8, 1), (100_000, 3)])
def test_the_largest_map_is_of_a_few_hundred_kilobytes(segments, blocks):
    """It is written after each change, and a console accepts at most 1 MiB."""
    cut_up = tuple(
        SegmentMap(
            0x7FFF_0000_0000 + (index << 30),
            blocks * MIB,
            "expandable",
            tuple(AllocatorBlock(MIB, (ALLOCATED, INACTIVE)[index % 2]) for index in range(blocks)),
        )
        for index in range(segments)
    )
    maps = bounded([drawn(*cut_up)] * 8)
    assert sum(len(encode(map)) for map in maps) < MOST_KEPT_BYTES * 0.6


def view(room: float | None, simulated: bool = False) -> DeviceView:
    size = None if room is None else int(room * GIB)
    card = Device("cuda:0", 24 * GIB, simulated=simulated)
    return DeviceView(card, 20 * GIB, 0, None, Level.LOW, 0.0, room_bytes=size)


@pytest.mark.parametrize(
    ("releasable", "largest", "around", "expected"),
    [
        (2, 2, view(7), 9),  # new memory, once releasable memory was released
        (0, 6, view(1), 6),  # a free block that is larger than the room left on the card
        (1, 1, view(-1), 1),  # a card over its budget
        (0, None, view(7), None),
        (2, 2, view(None), None),  # the driver does not report it
        (2, 2, view(8, simulated=True), 8),  # all that is not claimed fits
    ],
)
def test_the_largest_request_that_fits(releasable, largest, around, expected):
    """If the largest free block or the free bytes of the card are unknown, the result is unknown, not 0."""
    map = AllocatorMap(
        "", "cuda:0", 0.0, 0, 0, 8 * GIB, releasable * GIB,
        None if largest is None else largest * GIB,
    )  # fmt: skip
    assert map.largest_request_bytes(around) == (None if expected is None else expected * GIB)


def test_an_unused_card_has_no_map():
    probe = open_probe("sim:2x1GiB,host:1GiB")
    held = probe.place("sim:1").allocate(3 * MIB)
    assert [map.device for map in probe.maps()] == ["sim:1"]
    held.free()
    probe.empty_cache()
    assert probe.maps() == ()


def test_the_pulse_changes_with_the_map_and_only_then():
    """The pulse is a value that is read every second. A new map is made only when the pulse has changed."""
    probe = open_probe("sim:1GiB,host:1GiB")
    first = probe.pulse()
    assert probe.pulse() == first
    held = probe.place("sim:0").allocate(3 * MIB)
    second = probe.pulse()
    assert second != first
    del held
    assert probe.pulse() not in (first, second)


class FakeCuda:
    """The part of torch.cuda that maps need."""

    def __init__(self, *snapshot: dict) -> None:
        self.snapshot, self.stats = list(snapshot), {"num_ooms": 3, "allocation.all.allocated": 1}
        self.reset: list[str] = []
        self.reserved = {"cuda:0": 0, "cuda:1": 0}
        self.current, self.emptied_on = 0, list[int]()

    def memory_snapshot(self, mempool_id=None, include_traces=True):
        assert not include_traces, "somebody may record a hundred thousand of them"
        return self.snapshot

    def memory_stats(self, number):
        return self.stats

    def reset_peak_memory_stats(self, name):
        self.reset.append(name)

    def max_memory_allocated(self, number):
        return {0: 5 * GIB, 1: 9 * GIB}[number]

    def memory_allocated(self, number):
        return {0: 4 * GIB, 1: 2 * GIB}[number]

    def memory_reserved(self, name):
        return self.reserved[name]

    @contextlib.contextmanager
    def device(self, card):
        before, self.current = self.current, card
        yield
        self.current = before

    def empty_cache(self):
        self.emptied_on.append(self.current)
        self.reserved = dict.fromkeys(self.reserved, 0)


@pytest.fixture
def on_cuda(monkeypatch):
    """A probe of three real cards. torch gives the number 0 to the second card, and does not see the third."""

    def make(cuda: FakeCuda) -> Probe:
        monkeypatch.setattr("gpu_runtime.devices.probe._started_cuda", lambda: cuda)
        cards = tuple(
            Card(Device(id, 24 * GIB, uuid=id), None, torch=torch)
            for id, torch in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:2", ""))
        )
        return Probe((*(card.device for card in cards), Device("host", GIB)), Listing(nvml, cards))

    return make


def test_on_real_cards_torch_is_asked_by_its_own_numbers(on_cuda):
    """torch's numbers follow CUDA's order, which can differ from the order in the book. A hidden card has none."""
    cuda = FakeCuda(
        torch_segment(torch_block(20, "inactive"), device=1), torch_segment(torch_block(64))
    )
    probe = on_cuda(cuda)
    assert {map.device: map.reserved_bytes for map in probe.maps()} == {
        "cuda:0": 20 * MIB,
        "cuda:1": 64 * MIB,
    }
    before = probe.pulse()
    cuda.stats = {**cuda.stats, "allocation.all.allocated": 2}
    assert probe.pulse() != before
    probe.watch_peaks()
    assert sorted(cuda.reset) == ["cuda:0", "cuda:1"]
    assert [probe.beyond_now(f"cuda:{n}") for n in range(3)] == [7 * GIB, GIB, None]


def test_the_cache_is_emptied_on_a_card_that_has_memory(on_cuda):
    """A new thread's current card is 0, where a context takes 400 MB. Source: pytorch/pytorch#144025."""
    cuda = FakeCuda()
    probe = on_cuda(cuda)
    assert (probe.empty_cache(), cuda.emptied_on) == (0, [])
    cuda.reserved = {"cuda:0": 0, "cuda:1": 3 * GIB}
    assert probe.empty_cache() == 3 * GIB
    assert (cuda.emptied_on, cuda.current) == (["cuda:1"], 0)
