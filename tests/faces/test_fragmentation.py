"""The tab Fragmentation: maps and a Snapshot in, a table, words and a picture out; and what its buttons ask for."""

from __future__ import annotations

import json

import pytest
from bokeh.models import ColumnDataSource
from gpu_panels.charts.map_chart import MapChart
from gpu_panels.data import fragmentation
from gpu_panels.data.fragmentation import (
    COLUMNS,
    EMPTY,
    FetchedMaps,
    process_memories,
    report,
    rows,
)
from gpu_panels.palette import EDGE
from gpu_panels.poller import PollResult
from gpu_panels.tabs.fragmentation import FragmentationTab, MapFetcher
from msgspec.structs import replace

from gpu_runtime.devices.allocator_stats import bounded
from gpu_runtime.facts import AllocatorMap
from gpu_runtime.rendering.allocator_map import MOST_ROWS, picture
from gpu_runtime.units import GIB, MIB

from . import samples
from .sight import SIGHT, contrast, distance
from .test_allocator_map import FREE, USED, adapters, drawn, segment

here = replace(
    samples.busy, devices=tuple(replace(view, room_bytes=3 * GIB) for view in samples.busy.devices)
)
mine = AllocatorMap(
    samples.ME.id,
    "sim:0",
    1.0,
    14 * GIB,
    15 * GIB,
    GIB,
    GIB,
    512 * MIB,
    2,
    1,
    (segment(0, (14 * 1024, USED)), segment(1 << 40, (512, FREE)), segment(1 << 41, (512, FREE))),
)


def texts(row) -> list[str]:
    return [cell.text for cell in row.cells]


def table(maps, snapshot=here, acts=True, chosen=""):
    return rows(process_memories(maps, snapshot), snapshot, acts, chosen)


def test_a_row_a_process_and_card_the_most_inactive_first():
    """The largest free block stands beside the largest request that would fit."""
    first, second = table((adapters, mine))
    assert texts(first) == [
        "this process",
        "sim:0",
        "14.0 GiB",
        "15.0 GiB",
        "1.0 GiB",
        "1.0 GiB",
        "512 MiB",
        "3.0 GiB",
        "2",
        "1",
    ]
    assert texts(second) == [
        "analysis.ipynb (pid 4121), bob",
        "sim:0",
        "9.0 MiB",
        "40.0 MiB",
        "31.0 MiB",
        "20.0 MiB",
        "20.0 MiB",
        "3.0 GiB",
        "1",
        "0",
    ]
    assert len(first.cells) == len(COLUMNS)


def test_who_does_not_tell_is_unknown_and_not_empty():
    """It holds memory on the card, and has published no map; the host has no allocator of a card's."""
    (bob,) = [row for row in table((mine,)) if "bob" in row.cells[0].text]
    assert texts(bob)[1:] == ["sim:0", *["unknown"] * 8]
    assert bob.buttons[0].why_not == "This process publishes no map of its memory"
    assert not any(row.cells[1].text == "host" for row in table((mine,)))


def test_unknown_figures_stay_unknown():
    """A card whose driver does not tell; an allocator that tells only sums."""
    sums = AllocatorMap(samples.ME.id, "sim:0", 1.0, 3 * GIB, 4 * GIB)
    row = table((sums,))[0]
    assert texts(row)[2:8] == ["3.0 GiB", "4.0 GiB", "unknown", "unknown", "unknown", "unknown"]
    assert "is unknown" in report(process_memories((sums,), here)[0], here)


def test_a_map_of_somebody_who_has_left_is_not_shown():
    assert [row.id for row in table((replace(mine, owner="1.2.3"),))] == [
        f"{samples.ME.id}/sim:0",
        f"{samples.BOB.id}/sim:0",
    ]


def test_buttons_are_for_those_who_may_act_and_say_why_they_cannot_be_pressed():
    """Everybody may look at a map."""
    bob = next(
        row
        for row in table((adapters, mine), chosen=f"{samples.BOB.id}/sim:0")
        if "bob" in row.cells[0].text
    )
    assert [(button.verb, button.why_not) for button in bob.buttons] == [
        ("show", "It is shown below"),
        ("defrag", ""),
    ]
    assert [button.verb for button in table((mine,), acts=False)[0].buttons] == ["show"]
    stuck = table((replace(mine, releasable_bytes=0),))[0]
    assert stuck.buttons[1].why_not.startswith("Nothing to release")


def test_the_report_says_what_the_map_shows():
    said = report(process_memories((mine,), here)[0], here)
    assert "14.0 GiB of 15.0 GiB reserved are allocated" in said
    assert "512 MiB in one piece at most: defrag releases them." in said
    assert "The largest request that would fit now: 3.0 GiB." in said


def test_a_notebook_named_like_a_script_is_only_a_name():
    owner = replace(samples.BOB, notebook="<script>alert(1)</script>")
    section = replace(here.sections[owner.id], owner=owner)
    hostile = replace(here, sections={**here.sections, owner.id: section})
    cut = next(cut for cut in process_memories((adapters,), hostile) if cut.owner == owner.id)
    assert "<script>" not in report(cut, hostile)


# -- the picture --------------------------------------------------------------------------------------------------


def test_every_piece_of_a_map_is_in_its_place():
    """The first row on top; a row is as long as the figure is wide."""
    chart = MapChart()
    assert chart.show(picture(adapters))
    data = chart.source.data
    assert sum(
        (right - left)
        for left, right, what in zip(data["left"], data["right"], data["what"], strict=True)
        if what == "allocated"
    ) == pytest.approx(9 / 20)
    assert max(data["top"]) < 0 and min(data["bottom"]) > -2
    assert {(what, hatch) for what, hatch in zip(data["what"], data["hatch"], strict=True)} == {
        ("allocated", " "),
        ("inactive, in a segment in use", "/"),
        ("inactive, released by defrag", " "),
    }
    assert len(chart.edges.data["left"]) == 2
    assert (chart.figure.y_range.start, chart.figure.y_range.end) == (-2, 0)
    assert chart.figure.yaxis[0].major_label_overrides == {-0.5: "0 B", -1.5: "20.0 MiB"}


def test_the_same_map_sends_nothing(monkeypatch):
    chart = MapChart()
    chart.show(picture(adapters))
    monkeypatch.setattr(ColumnDataSource, "patch", lambda *_: pytest.fail("sent"))
    chart.source.on_change("data", lambda attr, old, new: pytest.fail("sent"))
    assert not chart.show(picture(adapters))


def test_a_map_of_thousands_of_blocks_is_drawn_in_bounded_pieces():
    """And a figure is as high as its map has rows."""
    cut_up = drawn(*(segment(n << 40, *[(0.3, USED), (0.7, FREE)] * 4000) for n in range(8)))
    chart = MapChart()
    chart.show(picture(bounded([cut_up])[0]))
    assert len(chart.source.data["left"]) < 13_000
    tall = chart.figure.height
    chart.show(picture(adapters))
    assert chart.figure.height < tall <= 48 + 24 * MOST_ROWS


@pytest.mark.parametrize("sight", SIGHT)
def test_neighbours_are_told_apart_by_everybody_on_both_pages(sight):
    """A free block lies beside one in use; its edge stands out from the page, and what is stuck is hatched too."""
    from gpu_runtime.rendering.allocator_map import ALLOCATED, COLOURS, RELEASABLE, STUCK

    assert distance(COLOURS[ALLOCATED], COLOURS[STUCK], sight) > 25
    assert distance(COLOURS[ALLOCATED], COLOURS[RELEASABLE], sight) > 25
    assert min(contrast(EDGE, page) for page in ("#ffffff", "#121212")) >= 3


# -- the tab ------------------------------------------------------------------------------------------------------


class FakePoller:
    """Tells these maps."""

    def __init__(self, maps, snapshot=here):
        self.told, self.result = maps if maps is None else FetchedMaps(maps), PollResult(snapshot)

    def latest(self, key, fetch, every):
        return self.told


class FakeActions:
    """Notes what is proposed."""

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


def test_the_worst_is_drawn_until_another_is_chosen():
    made = tab((adapters, mine))
    assert shown(made) == [f"{samples.ME.id}/sim:0", f"{samples.BOB.id}/sim:0"]
    assert "train.ipynb" in made._head.object
    made._pressed("show", f"{samples.BOB.id}/sim:0")
    assert "analysis.ipynb" in made._head.object and made._plot in list(made._below)
    made.poller.told = FetchedMaps(
        (mine,)
    )  # it no longer tells: that is said, and no old picture stays
    made.update(here)
    assert "has published no map" in made._head.object and made._plot not in list(made._below)


def test_a_click_on_defragment_names_the_owner_of_its_row():
    made = tab((adapters, mine))
    made._pressed("defrag", f"{samples.BOB.id}/sim:0")
    assert made.actions.proposed == [("defrag", f"{samples.BOB.id}/")]


@pytest.mark.parametrize("id", ["", "/", "1.2.3/sim:0", "nobody"])
def test_a_forged_id_proposes_nothing(id):
    """What a browser sends is a request like any other."""
    made = tab((adapters, mine))
    made._pressed("defrag", id)
    made._pressed("show", id)
    assert made.actions.proposed == [] and made._chosen == ""


def test_before_the_maps_have_come_it_says_so_and_where_there_are_none_what_to_do():
    assert tab(None).table.empty == "Reading …"
    made = FragmentationTab(FakePoller((), samples.empty), FakeActions())
    made.update(samples.empty)
    assert made.table.empty == EMPTY and shown(made) == [] and list(made._below) == []


def test_what_has_not_changed_is_the_same_object_and_reckoned_once(monkeypatch):
    """Twenty sessions that look at one picture cost one."""
    fetch, rt = MapFetcher(), type("Rt", (), {"allocator_maps": lambda self: tuple([mine])})()
    told = fetch(rt)
    first = told.rows(here, True, ""), told.picture(mine)
    monkeypatch.setattr(fragmentation, "rows", pytest.fail)
    monkeypatch.setattr(fragmentation.allocator_map, "picture", pytest.fail)
    assert fetch(rt) is told and (told.rows(here, True, ""), told.picture(mine)) == first


def test_a_newer_snapshot_is_another_table():
    """Its room may have changed, and with it the largest request that fits."""
    told = FetchedMaps((mine,))
    fuller = replace(here, devices=tuple(replace(view, room_bytes=GIB) for view in here.devices))
    assert told.rows(here, True, "") != told.rows(fuller, True, "")


def test_the_console_finds_the_tab():
    from gpu_panels.tabs import registry

    assert registry.kind("Fragmentation") is FragmentationTab
