"""How a model is divided among several cards."""

import itertools
from itertools import accumulate
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import Footprint, PlacementRules, Wait
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.placement import divide, divisions, parts_in_proportion, place
from gpu_runtime.scheduler.policies import lru
from tests.worlds import GIB, book, lease, request, world


def shares(found: Any) -> dict[str, int]:
    return {share.device: share.bytes for share in found.shares}


def footprint(size: int, *, heads: int = 0, pieces: tuple[int, ...] = ()) -> Footprint:
    return replace(Footprint.of(size), heads=heads, pieces=pieces)


def rules(layout: str, **fields: Any) -> PlacementRules:
    return PlacementRules(layout=layout, **{"margin_bytes": 0, **fields})


# -- balanced --------------------------------------------------------------------------------------
def test_the_number_of_cards_divides_the_attention_heads_or_is_a_power_of_two():
    """vLLM refuses three cards for almost every model. A number that the user names is tried."""
    room = dict.fromkeys("abcde", 60)
    model = footprint(140)
    assert [len(one.shares) for one in divisions(model, room, rules("balanced"), room)] == [4]
    three = rules("balanced", least_cards=3, most_cards=3)
    assert [shares(one) for one in divisions(model, room, three, room)] == [
        {"a": 47, "b": 47, "c": 46}
    ]
    # Three cards cannot share 32 attention heads equally. Four cards can.
    room = dict.fromkeys("abcd", 50)
    found = tuple(divisions(footprint(140, heads=32), room, rules("balanced"), room))
    assert [len(one.shares) for one in found] == [4]
    found = tuple(divisions(footprint(140, heads=12), room, rules("balanced"), room))
    assert [len(one.shares) for one in found] == [3, 4]


def test_most_free_takes_those_with_the_most_room():
    room = {"a": 70, "b": 80, "c": 90}
    for policy, cards in (("most-free", "bc"), ("best-fit", "ab")):
        found = next(divisions(footprint(140), room, rules("balanced", policy=policy), room))
        assert shares(found) == dict.fromkeys(cards, 70)


def test_pieces_are_kept_whole_and_in_proportion():
    """The shares are as equal as the layers allow. The model is cut between layers, never inside one."""
    pieces = (5, 10, 10, 10, 10, 15)
    found = divide(footprint(60, pieces=pieces), {"a": 99, "b": 99}, rules("balanced"), {})
    assert shares(found) == {"a": 25, "b": 35}
    # A model in host memory has a measured size, but the sizes of its pieces were only estimated.
    for layout in ("proportional", "balanced"):
        found = divide(footprint(40, pieces=(10, 10)), {"a": 30, "b": 30}, rules(layout), {})
        assert shares(found) == {"a": 20, "b": 20}


# -- proportional ----------------------------------------------------------------------------------
def test_the_fewest_cards_are_used_as_far_as_each_is_allowed():
    room = {"a": 40, "b": 0, "c": 30, "d": 30}
    found = tuple(divisions(footprint(60), room, rules("proportional"), room))
    assert [tuple(shares(one)) for one in found] == [("a", "c"), ("a", "c", "d")]
    assert not any(divisions(footprint(75), room, rules("proportional", most_cards=2), room))
    # 20 bytes of one card and 10 of another. A card that the setting does not name is not used.
    room = {"a": 80, "b": 80, "c": 80}
    found = tuple(
        divisions(footprint(30), room, rules("proportional", card_bytes={"a": 20, "b": 10}), room)
    )
    assert [shares(one) for one in found] == [{"a": 20, "b": 10}]
    room = {"a": 50, "b": 80}
    for size, least, cards in ((70, 1, [1, 1]), (90, 1, [2, 1, 1]), (70, 2, [2])):
        found = place(footprint(size), room, rules("balanced", least_cards=least))
        assert [len(one.shares) for one in found] == cards


# -- whole cards, overheads, bounds ----------------------------------------------------------------
def test_whole_cards_and_overheads_are_claimed_beside_the_bytes():
    limits = {"a": 80, "b": 80, "c": 80}
    found = next(divisions(footprint(100), {**limits, "a": 79}, rules("whole"), limits))
    assert shares(found) == {"b": 80, "c": 80}
    assert {share.device: share.bytes for share in found.filled} == {"b": 50, "c": 50}
    # The overhead of ten percent is the figure of the scheduler Helix.
    room = {"a": 77, "b": 77}
    found = divide(footprint(140), room, rules("balanced", overhead=0.1), {})
    assert shares(found) == {"a": 77, "b": 77}
    assert [share.bytes for share in found.filled] == [70, 70]
    assert divide(footprint(140), {"a": 77, "b": 76}, rules("balanced", overhead=0.1), {}) is None


# -- whatever the numbers --------------------------------------------------------------------------

LAYOUTS = st.sampled_from(["balanced", "proportional", "whole"])
ROOMS = st.lists(st.integers(-3, 30), min_size=1, max_size=5)
PIECES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


MARGINS, OVERHEADS = st.sampled_from([0, 0, 2]), st.sampled_from([0.0, 0.0, 0.1])
HEADS, MOST = st.sampled_from([0, 8, 12]), st.sampled_from([0, 2, 3])


ALLOWED = st.just({}) | st.fixed_dictionaries({"sim:0": st.integers(1, 20), "sim:1": MOST})


@given(LAYOUTS, ROOMS, PIECES, st.booleans(), MARGINS, OVERHEADS, HEADS, MOST, ALLOWED)
@example("proportional", [3, 3], [2, 2, 2], False, 0, 0.0, 0, 0, {})
@example(
    "balanced", [30, 30, 30], [9, 9], False, 0, 0.0, 0, 0, {"sim:0": 9, "sim:1": 8, "sim:2": 9}
)
def test_a_division_places_every_byte_and_overfills_no_card(
    layout, free, pieces, cut, margin, overhead, heads, most, allowed
):
    room = {f"sim:{n}": size for n, size in enumerate(free)}
    limits = {card: max(size, 0) + (n % 2) for n, (card, size) in enumerate(room.items())}
    size = sum(pieces)
    bounds = {"margin_bytes": margin, "overhead": overhead, "most_cards": most}
    asked = rules(layout, card_bytes=allowed, **bounds)
    model = footprint(size, heads=heads, pieces=tuple(pieces) if cut else ())
    for found in divisions(model, room, asked, limits):
        claimed = shares(found)
        own = {share.device: share.bytes for share in found.filled or found.shares}
        assert list(claimed) == sorted(claimed), "in the order of the cards"
        assert 2 <= len(claimed) <= (most or len(room))
        assert sum(own.values()) == size and min(own.values()) > 0
        assert all(own[card] <= claimed[card] <= room[card] for card in claimed)
        if allowed and layout != "whole":
            assert all(claimed[card] <= allowed.get(card, 0) + 1 for card in claimed)
        if cut:
            assert set(accumulate(own.values())) <= set(accumulate(pieces))
        if layout == "balanced":
            assert len(claimed) in (2, 4) if not heads else heads % len(claimed) == 0
            assert cut or max(own.values()) - min(own.values()) <= 1
        if layout == "proportional":
            assert all(claimed[card] <= room[card] - margin + 1 for card in claimed)
        if layout == "whole":
            assert all(claimed[card] == limits[card] for card in claimed)


def could_be_cut(pieces: tuple[int, ...], room: list[int]) -> bool:
    """Whether any division works: consecutive pieces on consecutive cards, and no card without a piece."""
    return filled_in_order(list(pieces), room) is not None


@given(ROOMS, PIECES, st.booleans())
def test_every_model_that_could_be_divided_is(free, pieces, cut):
    """The test compares the division with every set of cards and every cut."""
    room = {f"sim:{n}": size for n, size in enumerate(free)}
    size, cut_ = sum(pieces), tuple(pieces) if cut else ()
    some = [card for card in room if room[card] > 0]
    counts = range(2, len(some) + 1)
    sets = [chosen for count in counts for chosen in itertools.combinations(some, count)]
    if cut:
        possible = any(could_be_cut(cut_, [room[card] for card in chosen]) for chosen in sets)
    else:  # each card at least a byte
        possible = any(sum(room[card] for card in chosen) >= size >= len(chosen) for chosen in sets)
    found = tuple(divisions(footprint(size, pieces=cut_), room, rules("proportional"), {}))
    assert bool(found) == possible


def nearest_cuts(sums: list[int], ideal: list[float], room: list[int]) -> tuple[int, ...] | None:
    """Bytes by card if each cut is the boundary nearest to its ideal with room for the rest, or None. Tries all."""
    parts: list[int] = []
    start = 0
    for index, most in enumerate(room):
        taken = sums[start - 1] if start else 0
        ends = []
        for end in range(start + 1, len(sums) - (len(room) - 1 - index) + 1):
            rest = end
            for free in room[index + 1 :]:
                held = sums[rest - 1] + free
                rest = max([rest, *[n for n, until in enumerate(sums, 1) if until <= held]])
            if sums[end - 1] - taken <= most and rest == len(sums):
                ends.append(end)
        if not ends:
            return None
        start = min(ends, key=lambda end: (abs(sums[end - 1] - ideal[index]), end))
        parts.append(sums[start - 1] - taken)
    return tuple(parts)


def filled_in_order(pieces: list[int], room: list[int]) -> tuple[int, ...] | None:
    """The division with the most bytes on the first card, then the second, …, or None. Tries all."""
    lawful = []
    for cut in itertools.combinations(range(1, len(pieces)), len(room) - 1):
        bounds = itertools.pairwise((0, *cut, len(pieces)))
        parts = tuple(sum(pieces[start:end]) for start, end in bounds)
        if all(part <= most for part, most in zip(parts, room, strict=True)):
            lawful.append(parts)
    return max(lawful, default=None)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), PIECES)
@example([8, 8, 6], [4, 4, 5, 1, 1])  # the second cut leaves room for the rest
@example([10, 1, 10], [1, 1, 1, 5, 5])  # a small card between larger ones: the first stops earlier
def test_each_cut_is_the_nearest_that_leaves_enough_room(free, pieces):
    """The nearest boundary is found by bisection. The test compares it with all boundaries."""
    sums, until = list(accumulate(pieces)), list(accumulate(free))
    ideal = [sums[-1] * end / until[-1] for end in until]
    expected = nearest_cuts(sums, ideal, free) or filled_in_order(pieces, free)
    assert parts_in_proportion(footprint(sums[-1], pieces=tuple(pieces)), free) == expected


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 9)), min_size=20),
    st.sampled_from(["balanced", "proportional"]),
    st.integers(60, 300),
    st.booleans(),
)
def test_of_the_models_that_leave_eight_cards_none_can_be_spared(placed, layout, gib, cut):
    """It may fit only after many have left. Each shown plan makes room, and without any one of them not."""
    models = [
        lease(f"m{n}", last_used=n, **{f"sim{card}": size for card in {one, other}})
        for n, (one, other, size) in enumerate(placed)
    ]
    there = world(**{f"sim{n}": 40 for n in range(8)}, host=900)
    pieces = (gib * GIB // 30,) * 30 if cut else ()
    model = footprint(sum(pieces) or gib * GIB, heads=64, pieces=pieces)
    wanted = replace(request("new"), footprint=model, placement=rules(layout))
    _, verdict = admit(book(*models, limits={}), wanted, there, lru)
    if not isinstance(verdict, Wait):
        return
    victims = {lease.id: lease for lease in models}

    def fits(cards: list[str], gone: set[str]) -> bool:
        stay = [one for id, one in victims.items() if id not in gone]
        room = {card: 40 * GIB - sum(one.bytes_on(card) for one in stay) for card in cards}
        return divide(model, room, rules(layout), room) is not None

    ways = [way for way in verdict.considered if way.victims]
    assert ways, "all models are idle"
    for way in ways:
        cards = [share.device for share in way.shares]
        assert fits(cards, set(way.victims))
        assert not any(fits(cards, set(way.victims) - {one}) for one in way.victims)
