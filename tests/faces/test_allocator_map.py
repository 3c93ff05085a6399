"""The map of an allocator as a picture. Areas are proportional to bytes, and nothing important is
too small to be seen.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.devices.allocators import bounded
from gpu_runtime.devices.process_memory import Memory
from gpu_runtime.facts import AllocatorBlock, AllocatorMap, BlockState, SegmentMap
from gpu_runtime.rendering import allocator_map, render
from gpu_runtime.rendering.allocator_map import (
    ALLOCATED,
    COLOURS,
    KINDS,
    RELEASABLE,
    STUCK,
    Mapped,
    as_text,
    left_out,
    legend,
    picture,
    verdict,
)
from gpu_runtime.units import GIB, KIB, MIB
from tests.devices.test_allocator_stats import drawn

from . import samples
from .sight import SIGHT, distance
from .test_html import tree

USED, WAITING, FREE, *_ = BlockState


def segment(at: int, *blocks: tuple[float, BlockState], kind: str = "large") -> SegmentMap:
    cut = tuple(AllocatorBlock(int(size * MIB), state) for size, state in blocks)
    return SegmentMap(at, sum(block.bytes for block in cut), kind, cut)


adapters = AllocatorMap(
    samples.BOB.id, "sim:0", 1.0, 9 * MIB, 40 * MIB, 31 * MIB, 20 * MIB, 20 * MIB, 1, 0,
    (segment(0, *[(3, FREE), (3, USED)] * 3, (2, FREE)), segment(20 * MIB, (20, FREE))),
)  # fmt: skip
empty = AllocatorMap(samples.ME.id, "sim:0", 1.0, 0, 0, 0, 0, 0, ooms=1)
unknown = AllocatorMap(samples.ME.id, "cuda:0", 1.0, 3 * GIB, 4 * GIB)


def test_a_map_reads_as_text():
    shown = Mapped((adapters,), ("analysis.ipynb (pid 4121) on sim:0",))
    assert as_text(shown).splitlines() == [
        "analysis.ipynb (pid 4121) on sim:0",
        "9.0 MiB of 40.0 MiB reserved are allocated. 31.0 MiB are inactive, 20.0 MiB in one piece at most: defrag "
        "releases 20.0 MiB, 11.0 MiB are in segments in use, and stay.",
        "       0 B ░░░░░░░░░▒█████████▒░░░░░░░░▒█████████▒░░░░░░░░░██████████░░░░░░",
        "  20.0 MiB ································································",
        "  █ allocated 9.0 MiB   ░ inactive, in a segment in use 11.0 MiB   · inactive, released by defrag 20.0 MiB",
    ]


@pytest.mark.parametrize(("map", "said"), [
    (empty, "0 B of 0 B reserved are allocated. Nothing is inactive."),
    (unknown, "3.0 GiB of 4.0 GiB reserved are allocated; how the rest is divided is unknown."),
    (AllocatorMap("", "d", 0.0, 0, MIB, MIB, MIB, MIB), "0 B of 1.0 MiB reserved are allocated. 1.0 MiB are "
     "inactive, 1.0 MiB in one piece at most: defrag releases them."),
])  # fmt: skip
def test_the_verdict_of_a_map(map, said):
    """Figures that the allocator does not report are called unknown, not 0."""
    assert verdict(map) == said


def test_segments_that_are_not_drawn_are_counted():
    (map,) = bounded([drawn(*(segment(n * MIB, (1, USED)) for n in range(40)))], 20)
    assert left_out(map) == "Not drawn: 35 smaller segments, 35.0 MiB in all."
    assert left_out(adapters) == ""


def area(map: AllocatorMap) -> dict[str, float]:
    sums = dict.fromkeys(KINDS, 0.0)
    for piece in picture(map).pieces:
        sums[piece.kind] += (piece.right - piece.left) * (piece.high - piece.low)
    return sums


BLOCKS = st.tuples(st.integers(1, 64), st.sampled_from([USED, FREE, WAITING]))


@given(rows=st.lists(st.lists(BLOCKS, min_size=1, max_size=6), min_size=1, max_size=8))
def test_area_is_bytes(rows):
    """The area is proportional to the bytes if all blocks are wide enough to be seen. No two pieces overlap."""
    map = drawn(*(segment(n << 20, *row) for n, row in enumerate(rows)))
    shown = picture(map)
    areas = {kind: size for kind, size in area(map).items() if size}
    assert areas == pytest.approx(dict(legend(map)))
    assert sum(size for _, size in legend(map)) == map.reserved_bytes
    for row in range(shown.rows):
        spans = sorted((piece.left, piece.right) for piece in shown.pieces if piece.row == row)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
        assert spans[-1][1] <= shown.row_bytes
    assert shown.rows <= allocator_map.MOST_ROWS


def test_a_picture_is_bounded_and_shows_one_small_tensor_in_a_large_segment():
    """The tensor may be all that keeps 10 GiB from being released."""
    map = drawn(segment(0, (5 * KIB, FREE), (1 / 1024, USED), (5 * KIB, FREE)))
    last, cell = picture(map).pieces[-1], picture(map).row_bytes / allocator_map.CELLS
    assert (last.kind, last.right - last.left) == (ALLOCATED, pytest.approx(cell))
    row = [(0.3, USED), (0.7, FREE)] * 4000
    (map,) = bounded([drawn(*(segment(n << 40, *row) for n in range(8)))])
    assert len(picture(map).pieces) < 2 * allocator_map.MOST_ROWS * allocator_map.CELLS
    assert len(allocator_map.as_svg(map, "")) < 400 * KIB


def test_blocks_too_small_to_be_drawn_apart_are_drawn_by_the_part_in_use():
    """A row that is half in use is drawn at half the height, not as a solid block."""
    row = [(0.25, USED), (0.75, FREE)] * 4
    map = drawn(segment(0, *row), segment(1 << 40, (8000, USED)))
    used = [piece for piece in picture(map).pieces if piece.kind == ALLOCATED]
    few = [piece for piece in used if piece.right < 9 * MIB]
    drawn_area = sum((piece.right - piece.left) * (piece.high - piece.low) for piece in few)
    assert drawn_area == pytest.approx(MIB)
    assert max(piece.high for piece in few) < 0.5
    assert "in 3 blocks: 512 KiB allocated; 768 KiB inactive, in a segment in use" in few[0].title


def test_the_kinds_of_a_map_are_those_that_defrag_can_and_cannot_release():
    """Memory in a private pool belongs to a CUDA graph, so defrag does not release it."""
    assert dict(legend(drawn(segment(0, (20, FREE), kind="private")))) == {STUCK: 20 * MIB}
    assert dict(legend(drawn(segment(0, (20, FREE))))) == {RELEASABLE: 20 * MIB}
    memory = Memory("sim:0", GIB)
    held = [memory.allocate(3 * MIB) for _ in range(6)]
    held[0].free()
    assert dict(legend(memory.map())) == {ALLOCATED: 15 * MIB, STUCK: 5 * MIB}


@pytest.mark.parametrize("sight", SIGHT)
def test_colour_blind_people_can_tell_the_kinds_apart(sight):
    """What is allocated stands out from what is inactive."""
    for pair in itertools.combinations([kind for kind in KINDS if COLOURS[kind]], 2):
        least = 25 if set(pair) in ({ALLOCATED, STUCK}, {ALLOCATED, RELEASABLE}) else 10
        assert distance(*map(COLOURS.__getitem__, pair), sight) >= least, pair


def test_all_maps_are_shown_with_their_owner_the_worst_first():
    shown = allocator_map.mapped((empty, adapters), samples.busy)
    assert shown.titles == ("analysis.ipynb (pid 4121) on sim:0", "train.ipynb (pid 4000) on sim:0")
    page = render.shown("fragmentation", shown)
    assert repr(page).count("reserved are allocated") == 2
    assert tree(page._repr_mimebundle_()["text/html"]).tags >= {"svg", "path"}
    page = allocator_map.as_html(Mapped((adapters,), ('<script>alert("1")</script>',)))
    assert "<script>" not in page and "&lt;script&gt;" in page
    nothing = allocator_map.mapped((), samples.empty)
    assert "Load a model" in repr(render.shown("fragmentation", nothing))
