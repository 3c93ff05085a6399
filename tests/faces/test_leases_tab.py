"""Notebooks of plain code on the console: their rows, the buttons Park and Unpark, and the list of
a notebook's variables.
"""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from gpu_panels.acting import perform
from gpu_panels.actions import Actions
from gpu_panels.data.confirmations import changed, propose, question
from gpu_panels.data.rows import leases, models, queue
from gpu_panels.data.timeline import lease_titles
from gpu_panels.tabs import LeasesTab
from msgspec.structs import replace

from gpu_runtime.errors import GpuError
from gpu_runtime.facts import HOST, Holder, Holdings, LeaseId, Outcome, Ticket
from gpu_runtime.owner import status
from gpu_runtime.rendering.views import clock

from .polling import FixedRuntime, Poller
from .samples import BOB, GIB, ME, NOW, WALL, event, lease, snapshot

ROWS = (
    Holder("optimizer", "variable", "sim:0", 4 * GIB, 3 * GIB, "In [4]", "Adam"),
    Holder("<b>", "output", "sim:0", GIB, GIB, "In [7]", "Tensor"),
)
OF_BOB = {"unknown_bytes": GIB, "process": "analysis.ipynb (pid 4121)"}
TABLE = status.holders(Holdings(ROWS, 6 * GIB, 5 * GIB, **OF_BOB))


def kernel(gib=4, device="sim:0", owner=BOB, **more):
    """The lease of a notebook's own code."""
    return lease("kernel", gib, device, owner, kind="kernel", **more)


def buttons(row):
    return [(button.verb, button.why_not) for button in row.buttons]


def test_a_notebooks_own_code_is_a_lease_with_its_title_and_no_model():
    """A parked notebook can return. Of several shares, the first has the buttons."""
    world = snapshot(kernel())
    (row,) = leases(world)
    assert row.cells[0].text == "analysis.ipynb"
    assert [cell.text for cell in row.cells][4:] == [
        "its own code", "sim:0", "4.0 GiB", "4.0 GiB", "idle",
    ]  # fmt: skip
    assert buttons(row) == [("park", ""), ("who", "")]
    assert models(world) == ()
    assert lease_titles(["kernel@4121"], world) == {"kernel@4121": "analysis.ipynb"}
    (row,) = leases(snapshot(kernel(device=HOST, away_since=NOW - 60)))
    assert row.cells[-1].text == "parked" and "returns before" in row.cells[-1].hint
    assert f"since {clock(WALL - 60)}" in row.cells[-1].hint
    assert buttons(row) == [("unpark", ""), ("who", "")]
    both = replace(kernel(), shares=(*kernel().shares, *kernel(1, "sim:1").shares))
    assert [bool(row.buttons) for row in leases(snapshot(both, cards=2))] == [True, False]


@pytest.mark.parametrize(("more", "why"), [
    ({"pins": 1}, "analysis.ipynb (pid 4121) runs a cell"),
    ({"movable": False}, "It is exempt from parking (%gpu park never, or GPU_PARK=never)"),
    ({"movable": False, "fixed": "torch 2.3 is older than 2.4"},
     "Its process cannot move it (torch 2.3 is older than 2.4)"),
])  # fmt: skip
def test_park_says_why_it_cannot_be_pressed(more, why):
    (row,) = leases(snapshot(kernel(**more)))
    assert buttons(row)[0] == ("park", why)


def test_a_notebook_that_could_not_be_parked_says_why():
    """The reason is in the words of the notebook's own process. Once the pause is over, parking may be tried again."""
    because = "kernel stays where it is: a thread of its own runs (worker)."
    failed = replace(event(9, "kernel", "failed", because), owner=BOB.id)
    stuck = kernel(moves_again_at=NOW + 5)
    earlier = replace(failed, because="kernel stays where it is: NumPy uses it.")
    refused = replace(failed, because="only ann may: not bob", answers="k")
    of_another = replace(earlier, owner=ME.id)
    (row,) = leases(snapshot(stuck, events=(earlier, failed, refused, of_another)))
    assert row.cells[-1].text == "idle; it was not parked: a thread of its own runs (worker)"
    (row,) = leases(snapshot(stuck))
    assert row.cells[-1].text == "idle; it was not parked"
    (row,) = leases(snapshot(kernel(moves_again_at=NOW - 1), events=(failed,)))
    assert row.cells[-1].text == "idle"


def test_requests_name_the_notebook():
    use = Ticket("k", BOB.id, "use", "kernel", NOW - 10, NOW, because="room")
    who = Ticket("w", ME.id, "who", f"{BOB.id}/", NOW - 1, NOW)
    park = Ticket("p", ME.id, "evict", f"{BOB.id}/kernel", NOW - 1, NOW)
    rows = queue(snapshot(kernel(device=HOST), tickets=(use, who, park)))
    assert [row.cells[1].text for row in rows] == ["analysis.ipynb", "who", "evict analysis.ipynb"]


def test_the_questions_before_parking_and_unparking():
    world = snapshot(kernel(restore_seconds=0.6))
    assert question(propose("park", f"{BOB.id}/kernel", world), world) == (
        "Park analysis.ipynb?",
        (
            "This frees 4.0 GiB on sim:0.",
            "Held by analysis.ipynb (pid 4121) of bob, idle for 12 s. It is not in use.",
            "All its tensors move to RAM. They return before its next cell, in about 600 ms.",
        ),
        "Park, freeing 4.0 GiB",
        False,
    )
    world = snapshot(kernel(device=HOST))
    text = question(propose("unpark", f"{BOB.id}/kernel", world), world)
    assert (text.title, text.confirm, text.grave) == ("Unpark analysis.ipynb?", "Unpark", False)
    assert "4.0 GiB in RAM return to the card" in text.lines[0]


@pytest.mark.parametrize(("verb", "before", "after", "words"), [
    ("park", kernel(), kernel(pins=1), "analysis.ipynb (pid 4121) of bob runs a cell now."),
    ("park", kernel(), kernel(device=HOST), "analysis.ipynb is in RAM now, not on sim:0."),
    ("unpark", kernel(device=HOST), kernel(), "analysis.ipynb is on sim:0 now, not in RAM."),
    ("park", kernel(), lease("qwen", 1), "analysis.ipynb is gone"),
])  # fmt: skip
def test_nothing_is_done_if_it_changed_since_the_click(verb, before, after, words):
    proposal = propose(verb, f"{BOB.id}/kernel", snapshot(before))
    assert words in changed(proposal, snapshot(after))
    assert changed(proposal, snapshot(before)) == ""


def test_parking_waits_for_a_bounded_time():
    """The console parks with a time-out, since `rt.park` itself would wait without a limit."""
    asked = []

    def act(name):
        def record(subject, timeout):
            asked.append((name, subject, timeout))
            return Outcome(name, "kernel", True, "done")

        return record

    rt = SimpleNamespace(evict=act("evict"), preload=act("preload"), on_behalf_of=nullcontext)
    for verb in ("park", "unpark"):
        assert perform(rt, propose(verb, f"{BOB.id}/kernel", snapshot(kernel())), "ann").done
    subject = LeaseId(BOB.id, "kernel")
    assert asked == [("evict", subject, 30.0), ("preload", subject, 30.0)]


@pytest.fixture
def tab(monkeypatch):
    """The tab of a session. `who` runs at once instead of in a thread."""
    monkeypatch.setattr("gpu_panels.tabs.threads.start", lambda run: run())

    def make(who, may_act=True):
        rt = FixedRuntime(snapshot(kernel()), who=who, on_behalf_of=nullcontext)
        poller = Poller(rt, start=lambda run: None)
        poller.poll()
        made = LeasesTab(poller, Actions(poller, SimpleNamespace(may_act=may_act, name="ann")))
        made.update(poller.result.snapshot)
        return made

    return make


def press(tab, verb="who", owner=BOB):
    tab._pressed(verb, f"{owner.id}/kernel/sim:0")
    tab.update(tab.poller.result.snapshot)


def test_the_variables_of_a_notebook_are_shown_below_its_row(tab):
    asked = []
    shown = tab(lambda owner: asked.append(owner) or TABLE)
    assert shown.table.detail == ""
    press(shown)
    found = json.loads(shown.table.detail)
    assert asked == [BOB.id] and found["title"] == "Variables of analysis.ipynb (pid 4121)"
    assert found["id"] == f"{BOB.id}/kernel/sim:0"
    assert [cell[0] for cell in found["rows"][0][1]] == [
        "optimizer", "variable", "sim:0", "4.0 GiB", "3.0 GiB", "In [4]", "Adam",
    ]  # fmt: skip
    assert [title for title, *_ in found["columns"]][3:5] == ["Holds", "Frees"]
    assert any("explained 5.0 GiB of 6.0 GiB" in line for line, _ in found["lines"])
    press(shown, "hide")
    assert shown.table.detail == ""


def test_who_does_not_answer_in_time_is_an_alarm_and_no_table(tab):
    def who(owner):
        raise GpuError("analysis.ipynb <is> stopped, so it cannot answer.")

    shown = tab(who)
    press(shown)
    found = json.loads(shown.table.detail)
    alarm = ["analysis.ipynb <is> stopped, so it cannot answer.", "alarm"]
    assert (found["rows"], found["lines"]) == ([], [alarm]), "data, which the browser shows as text"
    shown = tab(lambda owner: TABLE)
    shown._row = f"{ME.id}/kernel/sim:0"
    shown._ask(shown.poller.rt, BOB.id, "ann")
    shown.update(shown.poller.result.snapshot)
    assert shown.table.detail == "", "another row was pressed meanwhile"


@pytest.mark.parametrize("owner", [BOB, replace(BOB, pid=9)])
def test_a_viewer_and_a_forged_id_ask_nobody(tab, owner):
    shown = tab(lambda owner: pytest.fail("asked"), may_act=owner is not BOB)
    press(shown, owner=owner)
    assert shown.table.detail == ""
