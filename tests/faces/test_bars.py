"""The stacked bars of the console. Every byte is counted once, and an unknown figure stays unknown."""

import pytest
from gpu_panels.data import devices
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Ghost, Lease, Phase, Share, Snapshot, Staying, Stranger
from gpu_runtime.rendering import answers
from gpu_runtime.rendering import views as plain
from gpu_runtime.scheduler.capacity import views
from gpu_runtime.scheduler.transitions import totals
from gpu_runtime.units import GIB, MIB

from .. import worlds
from . import samples


def bar(snapshot, device=0):
    return devices.bars(snapshot)[device]


def stretches(snapshot):
    return {one.title: one for one in bar(snapshot).segments}


def snapshot_of(book, world):
    return Snapshot(
        world.now, world.wall, worlds.owner(), views(book, world), book.sections, book.tickets,
        book.events, (), True, totals=totals(book),
    )  # fmt: skip


CARDS = ("cuda0", "cuda1", "host")
SIZES, PHASES = st.integers(1, 40 * GIB), st.sampled_from(list(Phase))
PLACES = st.sampled_from(CARDS)
LEASES = st.lists(st.tuples(PLACES, SIZES, PHASES, PLACES, st.integers(1, 3)), max_size=40)


@given(LEASES, st.integers(0, 5 * GIB), st.integers(0, 5 * GIB), st.integers(0, 80 * GIB))
def test_a_bar_is_the_books_claims_to_the_byte(drawn, residue, held_by_the_dead, free):
    """For any leases and moves, and for memory that dead processes still hold."""
    leases = []
    for n, (lies, size, phase, goes, pid) in enumerate(drawn):
        at, to = (device_id(place) for place in (lies, goes))
        shares = () if phase is Phase.ARRIVING else (Share(at, size),)
        target = (Share(to, size),) if phase is not Phase.SETTLED else ()
        shadow = size if pid == 2 and phase is Phase.SETTLED and at != HOST else 0
        fields = {"shares": shares, "target": target, "shadow_bytes": shadow}
        leases.append(Lease(worlds.owner(pid).id, f"m{n}", phase=phase, **fields))
    ghosts = (Ghost("9.1.0", 9, "cuda:0", held_by_the_dead, 0.0, 1.0),)
    rest = {"residue": {1: {"cuda:0": residue}}, "ghosts": ghosts}
    book = worlds.book(*leases, owners=(1, 2, 3), **rest)
    there = worlds.world(cuda0=80, cuda1=80, host=512, free={"cuda0": free / GIB})
    snapshot = snapshot_of(book, there)
    drawn = zip(snapshot.devices, devices.bars(snapshot), plain.bars(snapshot), strict=True)
    for view, one, segments in drawn:
        claimed = book.claims().get(view.device.id, 0)
        assert sum(s.bytes for s in one.segments if s.kind != "strangers") == claimed
        assert one.used_bytes <= one.scale_bytes
        shown = sum(s.bytes for s in segments.segments if s.kind != "strangers")
        assert shown == claimed, "the bars of `%gpu`"


def device_id(word: str) -> str:
    return HOST if word == "host" else f"cuda:{word[-1]}"


def test_a_tooltip_shows_process_use_importance_kernel_and_whole_size():
    qwen = stretches(samples.busy)["qwen"]
    assert qwen.notebook == "train.ipynb"
    assert qwen.tooltip == (
        "14.0 GiB\nheld by train.ipynb (pid 4000), ann\nin use for 40 s by train.ipynb\n"
        "importance normal, pinned: it is never evicted"
    )
    assert stretches(samples.busy)["reranker"].tooltip.endswith("idle 10 s\nimportance high")
    section = samples.busy.sections[samples.ME.id]
    section = replace(section, idle_since=samples.NOW - 300)
    for since, state in ((samples.NOW - 90, "busy for 90 s"), (0.0, "idle for 5 min")):
        sections = {samples.ME.id: replace(section, busy_since=since)}
        shown = stretches(replace(samples.busy, sections=sections))["qwen"].tooltip
        assert f"its kernel has been {state}\n" in shown
    split = Lease(samples.ME.id, "big", shares=(Share("sim:0", 4 * GIB), Share("sim:1", 4 * GIB)))
    tooltip = stretches(samples.snapshot(split, cards=2))["big"].tooltip
    assert tooltip.startswith("4.0 GiB of 8.0 GiB on sim:0,1\n")


def test_a_notebooks_own_memory_is_named_once():
    """Its title is the notebook. "train.ipynb · train.ipynb" was in each bar."""
    code = samples.lease("kernel", 2, kind="kernel")
    drawn = stretches(samples.snapshot(code))["train.ipynb"]
    assert drawn.notebook == ""
    thin = [samples.lease(f"m{n}", 0.01) for n in range(2)]
    few = stretches(samples.snapshot(replace(code, shares=thin[0].shares), *thin))["3 others"]
    assert "train.ipynb 10.2 MiB\n" in f"{few.tooltip}\n"
    assert "m0 10.2 MiB, train.ipynb" in few.tooltip


def test_a_bar_is_described_with_what_arrives_and_leaves():
    leaving = bar(samples.waiting).segments
    assert [one.kind for one in leaving] == ["settled", "leaving"]
    assert "4.0 GiB, leaving" in leaving[1].tooltip
    assert devices.description(bar(samples.busy)) == (
        "sim:0: qwen of train.ipynb 14.0 GiB, reranker of analysis.ipynb 4.0 GiB; budget 21.6 GiB"
    )
    assert devices.description(bar(samples.empty)) == "sim:0: empty; budget 21.6 GiB"
    (one,) = bar(samples.hostile).segments
    assert "\x1b" not in one.title + one.tooltip and one.title.startswith("<img")


def test_small_leases_are_gathered_and_none_is_lost():
    """Two hundred leases on eight cards must stay legible. A single thin lease keeps its name."""
    leases = (samples.lease(f"m{n}", 0.25 + n % 4, f"sim:{n % 8}") for n in range(200))
    crowd = samples.snapshot(*leases, cards=8, gib=80)
    for view, one in zip(crowd.devices, devices.bars(crowd), strict=True):
        assert len(one.segments) <= devices.MOST_STRETCHES + 1
        assert one.used_bytes == view.claimed_bytes
    [others] = bar(crowd).segments
    assert others.title == "25 others" and others.tooltip.splitlines()[-1] == "and 19 more"
    two = samples.snapshot(samples.lease("big", 10), samples.lease("thin", 0.01))
    assert list(stretches(two)) == ["big", "thin"]


def test_unleased_memory_names_its_processes():
    """One program that holds all of it is named in the bar itself."""
    other = stretches(samples.overdraft)["python3"]
    assert other.bytes == GIB // 2
    assert "python3, carol, pid 999" in other.tooltip
    carol = Stranger("cuda:0", 999, None, "carol", "python3")
    held = replace(samples.overdraft, strangers=(carol, Stranger("cuda:1", 5, GIB, "eve", "R")))
    tooltip = stretches(held)["other programs"].tooltip
    assert "size unknown python3, carol, pid 999" in tooltip and "eve" not in tooltip
    section = replace(samples.busy.sections[samples.BOB.id], residue={"sim:0": 300 * MIB})
    view, *others = samples.busy.devices
    fuller = replace(view, claimed_bytes=view.claimed_bytes + 300 * MIB)
    sections = samples.busy.sections | {samples.BOB.id: section}
    with_cache = replace(samples.busy, sections=sections, devices=(fuller, *others))
    tooltip = stretches(with_cache)["context and cache"].tooltip
    assert "300 MiB analysis.ipynb (pid 4121), bob" in tooltip
    stays = (Staying("sim:0", "shared with NumPy", 100 * MIB),)
    sections = samples.busy.sections | {samples.BOB.id: replace(section, staying=stays)}
    found = stretches(replace(with_cache, sections=sections))
    assert found["context and cache"].bytes == 200 * MIB, "as in the bar of `%gpu`"
    assert (
        "100 MiB analysis.ipynb (pid 4121), bob: shared with NumPy"
        in found["cannot be parked"].tooltip
    )


@pytest.mark.parametrize(("room", "blind", "words"), [
    (4 * GIB, "", "4.0 GiB free"), (0, "", "no memory free"),
    (-GIB, "", "over its budget by 1.0 GiB"),
    (None, "cuda:0 has not been measured yet", "free memory unknown: cuda:0 has not been measured yet"),
    (None, "", "free memory unknown"),
])  # fmt: skip
def test_free_memory_in_words(room, blind, words):
    """An unknown number of free bytes is shown as unknown, never as 0."""
    view = replace(samples.busy.devices[0], room_bytes=room, blind=blind)
    assert devices.room_words(view) == words


def test_idle_memory_counts_the_own_code_of_an_idle_notebook():
    """It can leave as a model can. "150 MiB idle" stood beside 300 MiB that nobody used."""
    code = samples.lease("kernel", 2, kind="kernel")

    def idle(*leases):
        world = samples.snapshot(samples.lease("qwen", 4), *leases)
        return [one for one in devices.facts(world, world.devices[0]) if "idle" in one]

    assert idle(code) == ["6.0 GiB idle"]
    for more in ({"pins": 1}, {"movable": False}):
        assert idle(replace(code, **more)) == ["4.0 GiB idle"]


def test_the_console_and_the_status_count_alike_what_has_left_for_ram():
    """The console said "0 warm models" where `%gpu` counted two."""
    parked = samples.lease("kernel", 2, HOST, kind="kernel")
    world = samples.snapshot(samples.lease("qwen", 4, HOST), parked)
    words = "1 model, 1 notebook in RAM"
    assert words in devices.facts(world, world.devices[1])
    assert all(words in face for face in answers.status(world))
    assert "1 model in RAM" in devices.facts(samples.busy, samples.busy.devices[1])
    alone = samples.snapshot(parked)
    assert "1 notebook in RAM" in devices.facts(alone, alone.devices[1])


def test_a_device_says_what_a_person_must_know():
    """Who drained it, whether it is measured, and whether it is simulated."""
    row = devices.device_rows(samples.drained).rows[1]
    assert row.free == "drained by ann" and row.facts.startswith("10 min ago")
    view = samples.unmeasured.devices[0]
    assert "not measured" in devices.facts(samples.unmeasured, view)
    view = samples.busy.devices[0]
    beside_cards = replace(samples.busy, simulated=False)
    assert [devices.device_rows(one).rows[0].notice for one in (beside_cards, samples.busy)] == [
        "simulated",
        "",
    ]
