"""The rows of the tables of models, leases and the queue, made from a snapshot."""

import json
from functools import partial

import pytest
from gpu_panels.data.cells import Button, Cell, encoded, place
from gpu_panels.data.devices import device_rows
from gpu_panels.data.rows import (
    MODELS,
    NOTEBOOKS,
    kernel_cell,
    leases,
    models,
    notebooks,
    queue,
    state_of,
    summary,
)
from gpu_panels.lab import view
from gpu_panels.lab.view import LedgerName
from gpu_panels.widgets import Table
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Declared,
    Lease,
    ModelSpec,
    Presence,
    ProcessState,
    Share,
    Staying,
    Ticket,
    Unanswered,
    lease_state,
    place_label,
)
from gpu_runtime.rendering.views import bars, clock

from . import samples
from .samples import BOB, GIB, ME, NOW, lease, snapshot

ASLEEP = "Its process is stopped, and acts on no request until it is continued"


def texts(row):
    return [cell.text for cell in row.cells]


def column(found, columns, title):
    n = [column.title for column in columns].index(title)
    return [row.cells[n].text for row in found]


def test_a_model_is_shown_with_its_place_and_its_owner():
    world = snapshot(lease("qwen", 14, uses=3, last_used=NOW - 200, importance=5, keep=True))
    (row,) = models(world)
    assert row.id == f"{ME.id}/qwen"
    assert texts(row) == [
        "qwen", "sim:0", "14.0 GiB", "idle", "3 min", "3", "high", "pinned", "this process",
    ]  # fmt: skip


def test_parked_memory_on_a_disk_is_shown_there_and_takes_no_ram():
    parked = Lease(
        ME.id, "kernel", kind="kernel", shares=(Share(HOST, 8 * GIB),), last_used=NOW - 9
    )
    for on_disk, shown, word, in_ram in (
        (0, "RAM", "parked", "8.0 GiB"),
        (8, "disk", "on disk", "–"),
    ):
        own = replace(parked, disk_bytes=on_disk * GIB)
        world = snapshot(own)
        assert place(own) == place_label(own) == shown
        [ram] = [bar for bar in bars(world) if bar.device.is_host]
        assert sum(one.bytes for one in ram.segments) == (8 - on_disk) * GIB
        assert state_of(own, world).text == word
        assert lease_state(own, NOW).text() == f"{word}, idle 9.0 s"
        [row] = [row for row in notebooks(world) if row.id == ME.id]
        found = {column.title: cell.text for column, cell in zip(NOTEBOOKS, row.cells, strict=True)}
        assert (found["State"], found["In RAM"]) == (word, in_ram)
        assert found["What"] == f"its own code ({'8.0 GiB on disk' if on_disk else 'parked'})"
        [held] = [row for row in leases(world) if row.id.startswith(ME.id)]
        assert held.cells[5].text == shown
        groups = view.shown(world, [], LedgerName("a1", "a ledger"))["groups"]
        [group] = [group for group in groups if group["id"] == ME.id]
        [row] = group["rows"]
        assert (row["where"], row["state"]) == (("", "on disk") if on_disk else ("RAM", "parked"))
        assert "returns before the notebook's next cell" in row["hint"]
        assert group["bytes"] == ("8.0 GiB on disk" if on_disk else "8.0 GiB in RAM")


@pytest.mark.parametrize(("backend", "shares", "words"), [
    ("fake", (Share("cuda:0", 8),), "cuda:0"),
    ("vllm", (Share("cuda:0", 8), Share("cuda:1", 8)), "cuda:0,1 (TP:2)"),
    ("transformers", (Share("cuda:0", 8), Share("cuda:1", 8)), "cuda:0,1"),
    ("fake", (Share(HOST, 8),), "RAM"),
])  # fmt: skip
def test_a_place_has_the_names_of_the_devices(backend, shares, words):
    """Equal shares are not always tensor parallel: the engine must compute that way."""
    assert place(Lease("1", "qwen", shares=shares, backend=backend)) == words
    assert words == "RAM" or place(Lease("1", "qwen", target=shares, backend=backend)) == words


def test_models_are_ordered_on_devices_warm_not_loaded_in_the_catalogue():
    """The column Keep sorts pinned models together, also those that are not loaded."""
    world = snapshot(lease("zeta", 1), lease("alpha", 1, HOST))
    world = replace(world, names={BOB.id: ("mid",)})
    found = models(world, [ModelSpec(name, "fake", size=GIB) for name in ("anew", "zeta", "mid")])
    assert column(found, MODELS, "Model") == ["zeta", "alpha", "mid", "anew"], "each has one row"
    assert [[button.verb for button in row.buttons] for row in found] == [
        ["evict", "pin"], ["restore", "pin"], ["preload"], ["preload"],
    ]  # fmt: skip
    catalogue = (ModelSpec("off", "fake"), ModelSpec("kept", "fake", keep=True))
    rows = models(snapshot(lease("qwen", 14, keep=True)), catalogue)
    keep = [row.cells[[one.title for one in MODELS].index("Keep")] for row in rows]
    assert [(cell.text, cell.value) for cell in keep] == [("pinned", 1), ("pinned", 1), ("", 0)]
    mine = replace(snapshot(specs=catalogue), names={ME.id: ("kept",), BOB.id: ("kept",)})
    kept = {row.id: row.cells[7].text for row in models(mine)}
    assert kept == {f"{ME.id}/kept": "pinned", f"{BOB.id}/kept": ""}, "another process's model"


def test_a_model_that_is_not_loaded_shows_what_is_known_of_it():
    declared = {BOB.id: {"mid": Declared(8 * GIB, 5), "bare": Declared()}}
    world = replace(snapshot(), names={BOB.id: ("mid", "bare")}, declared=declared)
    found = models(world)
    assert column(found, MODELS, "Size") == ["unknown", "8.0 GiB"]
    assert column(found, MODELS, "Importance") == ["normal", "high"]
    (row,) = models(snapshot(), (ModelSpec("off", "fake", enabled=False),))
    assert row.buttons[0].why_not and "disabled" in texts(row)
    specs = (ModelSpec("qwen", "fake", size=GIB),)  # the catalogue has it too
    (row,) = models(replace(snapshot(specs=specs), sections={}), specs)
    assert texts(row)[:4] == ["qwen", "disk", "1.0 GiB", "registered"]


def test_the_header_says_what_is_unusual_without_being_a_problem():
    assert summary(samples.busy) == "No problems"
    assert summary(samples.waiting) == "No problems; 1 waits"
    assert summary(samples.drained) == "No problems; cuda:1 drained"


@pytest.mark.parametrize(("more", "buttons"), [
    ({"pins": 1}, (Button("evict", "Evict", "In use by train.ipynb (pid 4000)"), Button("pin", "Pin"))),
    ({"keep": True}, (Button("evict", "Evict", "It is pinned; unpin it first"), Button("unpin", "Unpin"))),
])  # fmt: skip
def test_a_button_that_cannot_be_pressed_shows_why(more, buttons):
    (row,) = models(snapshot(lease("qwen", 14, **more)))
    assert row.buttons == buttons
    assert column([row], MODELS, "Idle") == ["–" if "pins" in more else "10 s"]


def test_what_ram_has_no_room_for_cannot_be_parked_or_evicted_and_says_so():
    """On every page: the table of notebooks, of models, of leases, the bars, JupyterLab and a problem."""
    own, model = lease("kernel", 20, kind="kernel"), lease("qwen", 9, "sim:1", owner=BOB)
    why = "RAM has no room for it"
    seen = replace(snapshot(own, model, cards=2), stays={one.id: why for one in (own, model)})
    found = [*notebooks(seen), *models(seen), *leases(seen)]
    pressed = [button for row in found for button in row.buttons]
    pressed += [
        button for row in device_rows(seen).rows for part in row.parts for button in part.buttons
    ]
    groups = view.shown(seen, [], LedgerName("k", "t"))["groups"]
    pressed += [
        Button(**one) for group in groups for row in group["rows"] for one in row["actions"]
    ]
    leaving = [one for one in pressed if one.verb.partition(" ")[0] in ("park", "evict")]
    assert len(leaving) == 8 and {one.why_not for one in leaving} == {why}
    assert all(not one.why_not for one in pressed if one.verb in ("pin", "who"))


def test_a_stopped_process_acts_on_no_button():
    """Its requests would wait until it is continued, and fail after 30 s. The problem above has Continue."""
    world = snapshot(lease("qwen", 14), lease("kernel", 1, kind="kernel"))
    asleep = {ME.id: Presence(ProcessState.STOPPED)}
    world = replace(world, presences=asleep, names={ME.id: ("other",)})
    parts = [part for row in device_rows(world).rows for part in row.parts]
    shown = [button for row in (*models(world), *leases(world), *parts) for button in row.buttons]
    assert {one.verb for one in shown} == {"evict", "pin", "preload", "park", "who"}
    assert {one.why_not for one in shown} == {ASLEEP}


def test_a_lease_is_shown_with_its_notebook_and_its_measured_bytes():
    """A whole card can be leased for a model that fills only half of it. On two cards it has two rows."""
    filled = {"filled": (Share("sim:0", 14 * GIB),), "pins": 1, "pinned_since": NOW - 70}
    whole = lease("qwen", 20, owner=BOB, **filled)
    row, _ = leases(snapshot(lease("small", 1), whole))  # the process that holds most is first
    assert texts(row) == [
        "analysis.ipynb", "bob", "4121", "–", "qwen", "sim:0", "20.0 GiB", "14.0 GiB",
        "in use for 70 s",
    ]  # fmt: skip
    assert row.cells[0].hint == "/home/bob/analysis.ipynb"
    code = Lease(ME.id, "cell#1", shares=(Share("sim:0", GIB),), kind="block", pins=1)
    assert models(snapshot(code)) == ()
    (row,) = leases(snapshot(code))
    assert row.cells[4] == Cell("cell#1", None, "memory for running code", "strong")
    split = Lease(ME.id, "big", shares=(Share("sim:0", GIB), Share("sim:1", 2 * GIB)))
    parts = [texts(row)[5:7] for row in leases(snapshot(split, cards=2))]
    assert parts == [["sim:0", "1.0 GiB"], ["sim:1", "2.0 GiB"]]


def test_residue_and_what_cannot_be_parked_are_listed_with_the_reason():
    world = snapshot(lease("qwen", 14))
    mine = replace(world.sections[ME.id], residue={"sim:0": GIB})
    found = leases(replace(world, sections={**world.sections, ME.id: mine}))
    assert texts(found[1])[4:8] == ["context and cache", "sim:0", "–", "1.0 GiB"]
    world = snapshot(lease("qwen", 14))
    stays = (Staying("sim:0", "NumPy uses it", GIB), Staying("sim:0", "a graph", GIB))
    mine = replace(world.sections[ME.id], leases=(), residue={"sim:0": 3 * GIB}, staying=stays)
    [first, other, last] = leases(replace(world, sections={ME.id: mine}))
    assert texts(first)[4:8] == ["its own code", "sim:0", "–", "1.0 GiB"]
    assert texts(first)[8] == "stays: NumPy uses it"
    assert [[button.verb for button in row.buttons] for row in (first, other)] == [["who"], []]
    assert first.id.partition("/")[0] == ME.id
    assert texts(last)[4:8] == ["context and cache", "sim:0", "–", "1.0 GiB"]


def test_programs_without_a_lease_are_listed_also_unknown_ones():
    world = partial(snapshot, lease("qwen", 4, "cuda:0"), simulated=False, strangers=3)
    last = leases(world(processes={777: 3 * GIB}))[-1]
    assert texts(last)[:3] == ["python3", "carol", "777"]
    assert texts(last)[4:8] == ["on its own", "cuda:0", "–", "3.0 GiB"]
    assert last.cells[0].kind == "alarm"
    last = leases(world())[-1]
    assert texts(last)[0] == "other programs" and texts(last)[2] == "unknown"
    assert texts(last)[7] == "3.0 GiB"


@pytest.mark.parametrize(("busy", "idle", "words"), [
    (NOW - 200, 0.0, "busy 3 min"), (0.0, NOW - 17, "idle 15 s"), (0.0, 0.0, "–"),
])  # fmt: skip
def test_a_kernel_is_busy_idle_or_unknown(busy, idle, words):
    section = replace(snapshot(lease("qwen", 1)).sections[ME.id], busy_since=busy, idle_since=idle)
    assert kernel_cell(section, NOW).text == words


def test_the_queue_is_in_order_and_shows_what_each_request_waits_for():
    first, second = queue(samples.waiting)
    assert texts(first) == [
        "1", "llama", "analysis.ipynb (pid 4121), bob", "8.0 GiB on sim:0", "10 s", "normal",
        "qwen (14.0 GiB on sim:0) is in use",
    ]  # fmt: skip
    assert texts(second) == [
        "–", "evict reranker", "this process", "–", "< 5 s", "–",
        "an answer from analysis.ipynb (pid 4121), bob",
    ]  # fmt: skip
    wrapped = ["prose" in row.cells[-1].kind for row in (first, second)]
    assert all(wrapped), "a reason is wrapped and never cut"
    assert first.buttons[0].why_not == ""
    assert first.cells[4].hint == f"since {clock(samples.WALL - 12)}"


def test_a_process_that_does_not_answer_is_named_in_the_queue_and_in_its_leases():
    """An operator who clicked Evict sees that the process is stopped, and that the request is kept."""
    asked = Ticket(
        "k", BOB.id, "evict", f"{ME.id}/qwen", NOW - 40, NOW, recalls={f"{ME.id}/qwen": 0},
        said_by="ann",
    )  # fmt: skip
    silent = snapshot(lease("qwen", 4), tickets=(asked,))
    (row,) = queue(silent)
    assert "No answer since" in texts(row)[-1] and texts(row)[-1].endswith(". Requested by ann.")
    assert row.cells[-1].kind == "prose alarm" and "when it runs again" in row.cells[-1].hint
    (held,) = leases(silent)
    assert (held.cells[3].text, held.cells[3].kind) == ("no answer, 40 s", "alarm")
    recent = snapshot(lease("qwen", 4), tickets=(replace(asked, arrived=NOW - 1),))
    (held,) = leases(recent)
    assert held.cells[3].text == "–", "too early to know"
    wants = Ticket(
        "k", BOB.id, "use", "big", NOW - 60, NOW, recalls={f"{ME.id}/qwen": 0},
        recalled_since=NOW - 30, because="qwen is asked to step aside.",
    )  # fmt: skip
    seen = snapshot(lease("qwen", 4), tickets=(wants,))
    [since] = [one.since for one in seen.unanswered]
    later = Unanswered(BOB, wants, since + 5)
    (row,) = queue(replace(seen, unanswered=(*seen.unanswered, later)))
    began = clock(samples.WALL - (NOW - since))
    assert f"No answer since {began} from this process and analysis" in texts(row)[-1]
    assert texts(row)[-1].endswith("qwen is asked to step aside.")
    ticket = Ticket("k", BOB.id, "use", "llama", NOW - 60, NOW - 30, because="room")
    (row,) = queue(snapshot(tickets=(ticket,)))
    assert "Its process has been stopped for 30 s" in texts(row)[-1]
    assert "cannot end its wait" in row.buttons[0].why_not


def test_a_viewer_is_sent_no_buttons_and_a_name_is_text():
    """The browser gets JSON and makes text nodes of it. It never parses a name as HTML."""
    found = models(samples.busy)
    assert any(row[2] for row in json.loads(encoded(found)))
    assert not any(row[2] for row in json.loads(encoded(found, buttons=False)))
    (row,) = json.loads(encoded(models(samples.hostile)))
    assert row[1][0][0] == "<img src=x onerror=alert(1)>\ufffd[31m\ufffd"


def test_the_same_rows_are_not_sent_again_and_a_press_sends_the_id_of_its_row():
    """Two hundred rows would be sent each second to each session."""
    pressed, sent = [], []
    table = Table(MODELS, lambda *press: pressed.append(press))
    table.param.watch(sent.append, "rows")
    for _ in range(3):
        table.show(encoded(models(samples.busy)))
    table._handle_msg({"verb": "evict", "id": "1/qwen"})
    assert len(sent) == 1 and pressed == [("evict", "1/qwen")]
    world = replace(samples.eight, now=5000.0)
    encodings = [encoded(leases(replace(world, now=world.now + passed))) for passed in (0, 2.9)]
    assert encodings[0] == encodings[1]


@pytest.mark.parametrize(
    "said", [None, "evict", ["evict"], {}, {"verb": 1, "id": "x"}, {"verb": "evict", "id": None}]
)
def test_a_malformed_message_does_nothing(said):
    pressed = []
    Table(MODELS, lambda *press: pressed.append(press))._handle_msg(said)
    assert pressed == []
