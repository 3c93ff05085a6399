"""The tab Fragmentation: its table, its report, its picture, and the actions of its buttons."""

import json

import pytest
from gpu_panels.data import fragmentation
from gpu_panels.data.fragmentation import (
    COLUMNS,
    EMPTY,
    drawing,
    process_memories,
    report,
    rows,
)
from gpu_panels.poller import Poller, PollResult
from gpu_panels.tabs import FragmentationTab, MapFetcher
from msgspec.structs import replace

from gpu_runtime.devices.allocators import bounded
from gpu_runtime.facts import AllocatorMap
from gpu_runtime.rendering.allocator_map import picture
from gpu_runtime.units import GIB, MIB

from . import samples
from .test_allocator_map import FREE, USED, adapters, drawn, segment

here = replace(
    samples.busy, devices=tuple(replace(view, room_bytes=3 * GIB) for view in samples.busy.devices)
)
mine = AllocatorMap(
    samples.ME.id, "sim:0", 1.0, 14 * GIB, 15 * GIB, GIB, GIB, 512 * MIB, 2, 1,
    (segment(0, (14 * 1024, USED)), segment(1 << 40, (512, FREE)), segment(1 << 41, (512, FREE))),
)  # fmt: skip


def texts(row) -> list[str]:
    return [cell.text for cell in row.cells]


def table(maps, snapshot=here, acts=True, chosen=""):
    return rows(process_memories(maps, snapshot), snapshot, acts, chosen)


def test_each_process_and_card_is_a_row_the_most_inactive_first():
    first, second = table((adapters, mine))
    assert texts(first) == [
        "this process", "sim:0", "14.0 GiB", "15.0 GiB", "1.0 GiB", "1.0 GiB", "512 MiB", "3.0 GiB",
        "2", "1",
    ]  # fmt: skip
    assert texts(second) == [
        "analysis.ipynb (pid 4121), bob", "sim:0", "9.0 MiB", "40.0 MiB", "31.0 MiB", "20.0 MiB",
        "20.0 MiB", "3.0 GiB", "1", "0",
    ]  # fmt: skip
    assert len(first.cells) == len(COLUMNS)


def test_what_is_unknown_is_shown_as_unknown():
    """A process may have published no map, and an allocator may report only sums."""
    (bob,) = [row for row in table((mine,)) if "bob" in row.cells[0].text]
    assert texts(bob)[1:] == ["sim:0", *["unknown"] * 8]
    assert bob.buttons[0].why_not == "This process publishes no map of its memory"
    assert not any(row.cells[1].text == "host" for row in table((mine,)))
    sums = AllocatorMap(samples.ME.id, "sim:0", 1.0, 3 * GIB, 4 * GIB)
    row = table((sums,))[0]
    assert texts(row)[2:8] == ["3.0 GiB", "4.0 GiB", "unknown", "unknown", "unknown", "unknown"]
    assert row.buttons[1].why_not == "", "there may be something to release"
    assert "is unknown" in report(process_memories((sums,), here)[0], here)
    of_a_stranger = [row.id for row in table((replace(mine, owner="1.2.3"),))]
    assert of_a_stranger == [f"{one.id}/sim:0" for one in (samples.ME, samples.BOB)]


def test_only_an_operator_has_defragment_and_disabled_buttons_show_why():
    found = table((adapters, mine), chosen=f"{samples.BOB.id}/sim:0")
    [bob] = [row for row in found if "bob" in row.cells[0].text]
    buttons = [(button.verb, button.why_not) for button in bob.buttons]
    assert buttons == [("show", "It is shown below"), ("defrag", "")]
    assert [button.verb for button in table((mine,), acts=False)[0].buttons] == ["show"]
    stuck = table((replace(mine, releasable_bytes=0),))[0]
    assert stuck.buttons[1].why_not.startswith("Nothing to release")


def test_the_report_describes_the_map_and_escapes_names():
    text = report(process_memories((mine,), here)[0], here)
    assert "14.0 GiB of 15.0 GiB reserved are allocated" in text
    assert "512 MiB in one piece at most: defrag releases them." in text
    assert "The largest request that would fit now: 3.0 GiB." in text
    owner = replace(samples.BOB, notebook="<script>alert(1)</script>")
    section = replace(here.sections[owner.id], owner=owner)
    hostile = replace(here, sections={**here.sections, owner.id: section})
    memories = process_memories((adapters,), hostile)
    [memory] = [one for one in memories if one.owner == owner.id]
    assert "<script>" not in report(memory, hostile)


def test_each_piece_of_a_drawing_shows_what_it_is_and_the_drawing_is_bounded():
    """The text of a piece is shown when the mouse points at the piece. It is escaped."""
    html = drawing(adapters)
    assert html.count("<title>") == len(picture(adapters, 240).pieces)
    assert "allocated" in html and "inactive, in a segment in use" in html
    odd = replace(adapters, segments=(replace(adapters.segments[0], kind="<b>"),))
    assert "\ufffd" not in html and "<b>" not in drawing(odd)
    fragmented = drawn(*(segment(n << 40, *[(0.3, USED), (0.7, FREE)] * 4000) for n in range(8)))
    [map] = bounded([fragmented])
    assert len(drawing(map)) < 1.5 * MIB


class FakePoller(Poller):
    """A poller that has these maps."""

    def __init__(self, maps, snapshot=here):
        super().__init__(None)
        self.maps, self.result = maps, PollResult(snapshot)

    def latest(self, key, fetch, every):
        return self.maps


class FakeActions:
    """Actions that record what a click proposes."""

    def __init__(self, may_act=True):
        self.may_act, self.proposed = may_act, []

    def propose(self, verb, target):
        self.proposed.append((verb, target))


def tab(maps, may_act=True):
    made = FragmentationTab(FakePoller(maps), FakeActions(may_act))
    made.update(made.poller.result.snapshot)
    return made


def shown(made) -> list[str]:
    return [row[0] for row in json.loads(made.table.rows)]


def test_the_worst_map_is_drawn_until_another_is_chosen():
    made = tab((adapters, mine))
    assert shown(made) == [f"{samples.ME.id}/sim:0", f"{samples.BOB.id}/sim:0"]
    assert "train.ipynb" in made._head.html
    made._pressed("show", f"{samples.BOB.id}/sim:0")
    assert "analysis.ipynb" in made._head.html and made._map.visible
    made.poller.maps = (mine,)  # bob's map is gone, and with it its picture
    made.update(here)
    assert "has published no map" in made._head.html and not made._map.visible


@pytest.mark.parametrize("id", ["", "/", "1.2.3/sim:0", "nobody", f"{samples.BOB.id}/sim:0"])
def test_a_click_on_defragment_names_the_owner_of_its_row(id):
    """A browser may send any row id. An invalid one proposes no action."""
    made = tab((adapters, mine))
    known = samples.BOB.id in id
    made._pressed("defrag", id)
    made._pressed("show", id)
    assert made.actions.proposed == [("defrag", f"{samples.BOB.id}/")] * known
    assert made._chosen == id * known


def test_an_empty_table_shows_that_maps_are_being_read_or_what_to_do():
    assert tab(None).table.empty == "Reading …"
    made = FragmentationTab(FakePoller((), samples.empty), FakeActions())
    made.update(samples.empty)
    assert made.table.empty == EMPTY and shown(made) == [] and not made._below.visible


def test_unchanged_maps_are_the_same_object_and_drawn_once(monkeypatch):
    fetch, rt = MapFetcher(), type("Rt", (), {"allocator_maps": lambda self: tuple([mine])})()
    assert fetch(rt) is fetch(rt)
    made = tab((mine, adapters))
    other = FragmentationTab(made.poller, FakeActions())
    monkeypatch.setattr(fragmentation, "drawing", lambda map: 1 / 0)
    other.update(here)  # another session
    assert other._map.html == made._map.html != ""
    made.poller.maps = (mine,)
    with pytest.raises(ZeroDivisionError):
        made.update(here)
