"""The tab Now, without a browser: the rows of the devices, what is kept for whom, and the buttons."""

import json
import re

import pytest
from gpu_panels.data.devices import (
    device_rows,
    lease_buttons,
    past_rows,
    reserved,
    room_after,
)
from gpu_panels.data.rows import notebooks
from gpu_panels.tabs import NowTab, notices_html
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Drain,
    Event,
    History,
    Moment,
    Phase,
    Presence,
    ProcessState,
    Section,
    Share,
    Stranger,
    Ticket,
)
from gpu_runtime.rendering import answers
from gpu_runtime.units import GIB, MIB

from . import pasts, samples
from .polling import opened, refresh


def words(html):
    """The text of a piece of HTML, without its tags."""
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def rows(snapshot, may_act=True):
    return {row.id: row for row in device_rows(snapshot, may_act).rows}


def wants(key, gib, device="sim:0", owner=samples.BOB, **more):
    """A request that waits for this much memory."""
    need = (Share(device, int(gib * GIB)),)
    return Ticket(key, owner.id, "use", key, samples.NOW - 9, samples.NOW, need=need, **more)


def test_a_row_shows_free_memory_use_the_level_and_its_leases_one_after_the_other():
    """A card full of idle models is no problem. Positions are in percent of the axis."""
    row = rows(samples.busy)["sim:0"]
    assert (row.free, row.facts) == ("3.6 GiB free", "18.0 of 21.6 GiB held · 4.0 GiB idle")
    assert (row.level, row.level_hint.partition(" of")[0]) == ("HIGH", "83 %")
    assert rows(samples.busy)["host"].level == ""
    assert not row.is_over and (row.busy, row.celsius, row.watts) == ("", "", "")
    first, second = row.parts
    assert (first.title, first.notebook, first.left) == ("qwen", "train.ipynb", 0)
    assert (first.width, second.left) == (58.33, 58.33)
    assert first.colour and first.colour != second.colour, "another process"
    assert first.id == f"{samples.ME.id}/qwen"


def test_a_figure_that_the_driver_does_not_give_is_empty():
    view = samples.unmeasured.devices[0]
    hot = replace(view.sample, temperature_celsius=61.0, power_watts=240.0)
    devices = (replace(view, sample=hot), *samples.unmeasured.devices[1:])
    row = rows(replace(samples.unmeasured, devices=devices))["cuda:0"]
    assert (row.busy, row.celsius, row.watts) == ("37 %", "61 °C", "240 W")
    assert rows(samples.unmeasured)["cuda:0"].celsius == ""


def test_all_cards_share_one_axis():
    """The host has an axis of its own. On an axis in GiB, a card of 96 MiB would end before the first tick."""
    two = samples.snapshot(cards=2)
    first, small, host = two.devices
    device = replace(small.device, total_bytes=12 * GIB)
    half = replace(small, device=device, limit_bytes=GIB)
    seen = replace(two, devices=(first, half, host))
    assert [row.length for row in rows(seen).values()] == [100, 50, 100]
    ticks = device_rows(seen).ticks
    assert ticks[:2] == ((0.0, "0"), (16.67, "4 GiB")) and ticks[-1] == (100.0, "24 GiB")
    small = samples.snapshot(samples.lease("m", 0.0625), gib=0.09375)
    assert device_rows(small).ticks[1] == (16.67, "16 MiB")
    assert small.devices[0].device.total_bytes == 96 * MIB


def test_free_memory_is_kept_for_the_first_in_the_queue():
    """Of 3.6 GiB free memory, 2 GiB are kept for llama's request, and the rest for the next request."""
    seen = replace(samples.busy, tickets=(wants("llama", 2), wants("giant", 20)))
    row = rows(seen)["sim:0"]
    kept = [part for part in row.parts if part.kind == "kept"]
    assert [part.title for part in kept] == ["kept for llama", "kept for giant"]
    assert kept[0].lines.startswith("2.0 GiB of the 2.0 GiB that it waits for\nfor analysis.ipynb")
    assert kept[1].lines.startswith("1.6 GiB of the 20.0 GiB")
    assert row.free == "no memory free" and row.facts.startswith("3.6 GiB kept · ")
    assert kept[0].left == row.parts[1].left + row.parts[1].width


def test_a_recall_of_pieces_frees_only_these_pieces():
    """The whole model counted as freed, so too few bytes were shown as kept for the request."""
    qwen = replace(samples.lease("qwen", 8, owner=samples.BOB), piece_bytes=GIB)
    wanted = wants("big", 3, recalls={qwen.id: GIB})
    seen = samples.snapshot(qwen, tickets=[wanted])
    assert reserved(seen, seen.devices[0]) == [(wanted, 2 * GIB)]


WANTS = st.tuples(st.integers(0, 6), st.booleans(), st.sampled_from((0.0, 2.0, 2.1, 60.0)))


@given(st.lists(WANTS, max_size=6), st.sampled_from((0, 1, 3)))
def test_kept_is_what_the_requests_need_beyond_what_leaves_for_them(drawn, leaving):
    """The first requests of the queue together are kept what they need beyond these bytes, if it is free.

    The request of a process that has not refreshed it for more than 2 s is overtaken.
    """
    llama = replace(
        samples.lease("llama", 8),
        phase=Phase.LEAVING if leaving else Phase.SETTLED,
        target=(Share(HOST, leaving * GIB),) if leaving else (),
        piece_bytes=GIB,
    )
    asked, tickets = {f"{samples.BOB.id}/reranker": 0}, []
    for n, (size, recalls, ago) in enumerate(drawn):
        wanted = wants(f"m{n}", size, recalls=asked if recalls else {})
        tickets.append(replace(wanted, refreshed=samples.NOW - ago))
    reranker = samples.lease("reranker", 4, owner=samples.BOB)
    seen = samples.snapshot(llama, reranker, tickets=tickets)
    kept = {ticket.key: size for ticket, size in reserved(seen, seen.devices[0])}
    awake = [ticket for ticket in tickets if samples.NOW - ticket.refreshed <= 2.0]
    freed = (leaving + 4 * any(ticket.recalls for ticket in awake)) * GIB
    for last in range(len(awake) + 1):
        first = awake[:last]
        beyond = max(0, sum(ticket.need[0].bytes for ticket in first) - freed)
        expected = min(seen.devices[0].room_bytes, beyond)
        assert sum(kept.get(ticket.key, 0) for ticket in first) == expected
    assert set(kept) <= {ticket.key for ticket in awake} and all(kept.values())


def verbs(snapshot, name):
    """The buttons of a model that can be pressed."""
    lease = next(one for one in snapshot.leases() if one.name == name)
    owner = snapshot.sections[lease.owner].owner
    kept = {view.device.id: reserved(snapshot, view) for view in snapshot.devices}
    room = room_after(snapshot, kept)
    return [one.verb for one in lease_buttons(lease, owner, room) if not one.why_not]


@pytest.mark.parametrize(("more", "expected"), [
    ({}, ["evict", "pin", "drop", "move sim:2", "move sim:1"]),
    ({"keep": True}, ["unpin_evict", "unpin"]), ({"pins": 1}, ["pin"]),
    ({"keep": True, "pins": 1}, ["unpin"]), ({"phase": Phase.LEAVING}, ["pin"]),
    ({"movable": False}, ["evict", "pin", "drop"]),
    ({"movable": False, "droppable": False}, ["evict", "pin"]),
])  # fmt: skip
def test_a_lease_offers_what_is_possible_now(more, expected):
    """A pinned model has one button that unpins and evicts it. A model in use cannot leave.

    Of the cards to which it could move, the one with the most room is first.
    """
    seen = samples.snapshot(
        samples.lease("qwen", 4, **{"droppable": not more.get("keep"), **more}),
        samples.lease("big", 17, "sim:1"),
        samples.lease("full", 20, "sim:3"),
        cards=4,
    )
    just_enough = replace(seen.devices[1], room_bytes=4 * GIB)
    seen = replace(seen, devices=(seen.devices[0], just_enough, *seen.devices[2:]))
    assert verbs(seen, "qwen") == expected


def test_a_drained_card_says_by_whom_and_offers_the_end_of_the_drain():
    row = rows(samples.drained)["cuda:1"]
    assert row.is_drained and row.free == "drained by ann"
    assert [one.verb for one in row.buttons] == ["undrain", "compact", "evict_idle"]
    seen = samples.snapshot(samples.lease("qwen", 4), cards=3)
    shut = replace(seen.devices[1], drained=Drain("ann", samples.WALL))
    seen = replace(seen, devices=(seen.devices[0], shut, *seen.devices[2:]))
    assert [verb for verb in verbs(seen, "qwen") if "move" in verb] == ["move sim:2"]
    asked = replace(seen, tickets=(wants("next", 20, "sim:2"),))
    assert not any("move" in verb for verb in verbs(asked, "qwen")), "its room is kept"
    assert [one.verb for one in rows(samples.busy)["sim:0"].buttons][0] == "drain"


def test_a_viewer_has_no_buttons():
    seen = rows(samples.busy, may_act=False).values()
    assert not any(row.buttons or any(part.buttons for part in row.parts) for row in seen)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_card_over_its_budget_is_marked(more):
    """A full card is no problem. Only a problem has a saturated colour."""
    view = samples.busy.devices[0]
    full = replace(view, claimed_bytes=view.limit_bytes + more, room_bytes=-more)
    seen = replace(samples.busy, devices=(full, *samples.busy.devices[1:]))
    assert rows(seen)["sim:0"].is_over is (more > 0)
    assert ("over its budget" in answers.status(seen).text) is (more > 0)


def moment(ago, gib, device="sim:0"):
    figures = (20 * GIB, 20 * GIB, gib * GIB, samples.busy.devices[0].level)
    return Moment(samples.WALL - ago, device, *figures, claims={"qwen@1": gib * GIB})


def test_the_small_history_has_the_use_over_time_and_gaps_stay_gaps():
    """Between 500 s and 200 s ago nothing was recorded. Equal moments are one rectangle."""
    moments = [moment(ago, 10) for ago in range(900, 500, -10)]
    moments += [moment(ago, 5) for ago in range(200, 0, -10)]
    evicted = Event(1, samples.WALL - 450, "qwen", "offloaded", "request", "x", GIB, "sim:0", "1.1")
    others = (replace(evicted, device="sim:1"), replace(evicted, wall=samples.WALL - 901))
    past = past_rows(History(tuple(moments), (evicted, *others), 900.0), samples.WALL)["sim:0"]
    assert past.spans == ((0.0, 44.33, 50.0), (77.67, 100.0, 25.0))
    assert past.marks == (50.0,) and past.words == "at most 50 % in use, 1 eviction"


def test_a_machine_without_leases_or_governor_shows_what_to_do():
    assert "%gpu load NAME PATH" in notices_html(samples.empty)
    assert notices_html(samples.busy) == ""
    assert notices_html(replace(samples.empty, full_disks=("/var/lib",))) == ""
    text = notices_html(replace(samples.busy, governed=False))
    assert "The governor is off" in text
    me = replace(samples.ME, version="0.3.0")
    others = {samples.BOB.id: Section(replace(samples.BOB, version="0.4.0"))}
    text = notices_html(replace(samples.busy, owner=me, sections=others))
    assert "Versions: 0.3.0 in this process · 0.4.0 in analysis.ipynb (pid 4121), bob" in text


def test_the_tab_shows_devices_history_and_queue():
    past = pasts.day(seconds=900)
    tab = opened(NowTab, samples.eight, history=lambda seconds, points: past)
    shown = json.loads(tab.devices.rows)["rows"]
    assert [row["id"] for row in shown] == [*(f"cuda:{n}" for n in range(8)), HOST]
    assert "sim:0" in json.loads(tab.devices.past)
    tab.poller.rt.snapshot = samples.waiting
    refresh(tab)
    assert [row["id"] for row in json.loads(tab.devices.rows)["rows"]] == ["sim:0", HOST]
    assert json.loads(tab.queue.rows)[0][1][1][0] == "llama"


NOW = samples.NOW


def own(gib, device="sim:0", **more):
    return samples.lease("kernel", gib, device, kind="kernel", droppable=False, **more)


def row_of(*leases, tickets=(), presence=None, **section):
    """The row of train.ipynb with these leases, as a dictionary, and its button."""
    seen = samples.snapshot(tickets=tickets)
    me = samples.ME.id
    seen = replace(seen, sections={me: Section(samples.ME, leases, **section)}, unanswered=())
    seen = replace(seen, presences={me: presence} if presence else {})
    [row] = notebooks(seen)
    name, user, state, cell, on_cards, in_ram, what = (cell.text for cell in row.cells)
    assert (name, user) == ("train.ipynb", "ann")
    return (state, cell, on_cards, in_ram, what), row.buttons


def test_a_notebook_is_one_row_with_what_it_holds_on_the_cards_and_in_ram():
    row, [button] = row_of(
        own(4), samples.lease("qwen", 2), samples.lease("bge", 1, HOST), idle_since=NOW - 720,
        residue={"sim:0": GIB // 2},
    )  # fmt: skip
    assert row == ("idle", "12 min ago", "6.5 GiB", "1.0 GiB", "qwen, bge, its own code")
    assert (button.verb, button.why_not) == (f"park {samples.ME.id}/kernel", "")


WAITS = wants("kernel", 2, owner=samples.ME)
STOPPED = Presence(ProcessState.STOPPED, NOW - 60)


@pytest.mark.parametrize(("leases", "more", "state", "verb", "why_not"), [
    ([own(1)], {"busy_since": NOW - 9}, "runs", "park", ""),
    ([own(1, pins=1)], {"busy_since": NOW - 9}, "runs", "interrupt", ""),
    ([own(1, HOST)], {"idle_since": NOW - 9}, "parked", "unpark", ""),
    ([own(1, HOST), samples.lease("m", 1)], {"idle_since": NOW - 9}, "idle", "evict", ""),
    ([samples.lease("m", 1, pins=1)], {}, "runs", "evict", "In use"),
    ([samples.lease("m", 1, keep=True)], {}, "idle", "unpin", ""),
    ([samples.lease("m", 1), samples.lease("n", 2, pins=1)], {}, "runs", "evict", ""),
    ([own(1)], {"tickets": [WAITS], "busy_since": NOW - 9}, "waits 5.0 s", "cancel", ""),
    ([own(1)], {"presence": STOPPED}, "stopped for 60 s", "resume", ""),
    ([own(1)], {"presence": Presence(ProcessState.SILENT)}, "no answer", "interrupt", ""),
    ([samples.lease("b", 1, kind="block", pins=1)], {}, "runs", "", ""),
    ([], {"idle_since": NOW - 9}, "idle", "", ""),
])  # fmt: skip
def test_a_notebook_has_its_state_and_the_one_button_that_helps(leases, more, state, verb, why_not):
    """Who waits is not idle. Of several models, the largest unused one is offered."""
    (shown, *_), buttons = row_of(*leases, **more)
    assert shown == state
    assert [button.verb.partition(" ")[0] for button in buttons] == ([verb] if verb else [])
    for button in buttons:
        assert why_not in button.why_not and bool(why_not) == bool(button.why_not)


def test_a_load_that_failed_is_in_its_notebooks_row_until_another_one_ends():
    """The error of a model is no problem of the machine, and still nobody has to look for it."""
    failed = replace(
        samples.event(5, "m", "failed", "ValueError: no layer 3."),
        reason="load",
        owner=samples.BOB.id,
    )
    seen = samples.snapshot(samples.lease("qwen", 9), events=(failed,))
    seen = replace(seen, names={samples.BOB.id: ("m",)})
    first, second = notebooks(seen)
    assert "could not load m" in first.cells[2].text and "no layer 3" in first.cells[2].text
    assert [one.verb for one in first.buttons] == [f"preload {samples.BOB.id}/m"]
    assert second.cells[2].text == "idle", "who needs a person is above who holds most"
    later = replace(samples.event(6, "m", "loaded", "there is room"), owner=samples.BOB.id)
    interrupted = replace(failed, because="interrupted")
    old = replace(failed, wall=samples.WALL - 601)
    for events in ((failed, later), (interrupted,), (old,)):
        assert not any(
            "could not" in row.cells[2].text for row in notebooks(replace(seen, events=events))
        )


def test_who_holds_most_is_first_and_a_program_outside_is_one_row():
    program = [Stranger(f"cuda:{n}", 999, 3 * GIB, "carol", "python3") for n in (0, 1)]
    found = notebooks(replace(samples.busy, strangers=tuple(program)))
    assert [row.cells[0].text for row in found] == ["train.ipynb", "python3", "analysis.ipynb"]
    assert found[1].cells[4].text == "6.0 GiB" and not found[1].buttons
    assert [row.cells[2].text for row in found] == ["runs", "on its own", "idle"]
    assert notebooks(samples.snapshot()) != () and all(
        not row.buttons for row in notebooks(samples.empty)
    )
