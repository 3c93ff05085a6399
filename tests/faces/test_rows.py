"""Snapshot in, rows out: what stands in the tables of models, leases and the queue."""

from __future__ import annotations

import json

import pytest
from gpu_panels.data.cells import Button, Cell, encoded
from gpu_panels.data.lease_rows import kernel_cell, leases
from gpu_panels.data.model_rows import MODELS, models
from gpu_panels.data.queue_rows import queue
from gpu_panels.data.row_parts import place
from gpu_panels.widgets.table import Table
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Lease, ModelSpec, Share, Ticket

from . import samples
from .samples import BOB, GIB, ME, NOW, lease, snapshot


def texts(row):
    return [cell.text for cell in row.cells]


def column(found, columns, title):
    n = [column.title for column in columns].index(title)
    return [row.cells[n].text for row in found]


# -- models -------------------------------------------------------------------------------------------------------


def test_a_model_is_shown_with_where_it_lies_and_who_has_it():
    world = snapshot(lease("qwen", 14, uses=3, last_used=NOW - 200, importance=5, keep=True))
    (row,) = models(world)
    assert row.id == f"{ME.id}/qwen"
    assert texts(row) == [
        "qwen",
        "GPU: 0",
        "14.0 GiB",
        "idle",
        "3 min",
        "3",
        "high",
        "pinned",
        "this process",
    ]


@pytest.mark.parametrize(
    ("backend", "shares", "words"),
    [
        ("fake", (Share("cuda:0", 8),), "GPU: 0"),
        ("vllm", (Share("cuda:0", 8), Share("cuda:1", 8)), "GPUs: 0,1 (TP:2)"),
        ("transformers", (Share("cuda:0", 8), Share("cuda:1", 8)), "GPUs: 0,1"),
        ("fake", (Share(HOST, 8),), "host"),
    ],
)
def test_a_place_is_told_as_the_seeds_tell_it(backend, shares, words):
    """Equal shares alone are not tensor parallel: the engine has to compute that way."""
    assert place(Lease("1", "qwen", shares=shares, backend=backend)) == words


def test_models_on_devices_come_first_then_the_warm_ones_then_what_lies_on_disk_then_the_catalogue():
    world = snapshot(lease("zeta", 1), lease("alpha", 1, HOST))
    section = world.sections[BOB.id]
    world = replace(world, sections={**world.sections, BOB.id: replace(section, names=("mid",))})
    found = models(
        world, (ModelSpec("anew", "fake", size=GIB), ModelSpec("zeta", "fake", size=GIB))
    )
    assert column(found, MODELS, "Model") == ["zeta", "alpha", "mid", "anew"], (
        "zeta has no second row"
    )
    assert [[button.verb for button in row.buttons] for row in found] == [
        ["evict", "pin"],
        ["restore", "pin"],
        ["preload"],
        ["preload"],
    ]


@pytest.mark.parametrize(
    ("more", "buttons"),
    [
        (
            {"pins": 1},
            (Button("evict", "Evict", "In use by train.ipynb (pid 4000)"), Button("pin", "Pin")),
        ),
        (
            {"keep": True},
            (Button("evict", "Evict", "It is pinned; unpin it first"), Button("unpin", "Unpin")),
        ),
    ],
)
def test_a_button_that_would_be_refused_says_why(more, buttons):
    (row,) = models(snapshot(lease("qwen", 14, **more)))
    assert row.buttons == buttons


def test_a_disabled_model_of_the_catalogue_cannot_be_preloaded():
    (row,) = models(snapshot(), (ModelSpec("off", "fake", enabled=False),))
    assert row.buttons[0].why_not and "disabled" in texts(row)


def test_what_is_registered_here_is_listed_before_anything_was_published():
    (row,) = models(replace(snapshot(specs=(ModelSpec("qwen", "fake", size=GIB),)), sections={}))
    assert texts(row)[:4] == ["qwen", "disk", "1.0 GiB", "registered"]


def test_blocks_of_code_are_no_models():
    code = Lease(ME.id, "cell#1", shares=(Share("sim:0", GIB),), kind="block", pins=1)
    assert models(snapshot(code)) == ()
    (row,) = leases(snapshot(code))
    assert row.cells[4] == Cell("cell#1", None, "memory for running code", "strong")


# -- leases -------------------------------------------------------------------------------------------------------


def test_a_lease_is_shown_with_its_notebook_and_with_what_it_really_takes():
    """A whole card may be leased for a model that fills half of it."""
    whole = lease(
        "qwen", 20, owner=BOB, filled=(Share("sim:0", 14 * GIB),), pins=1, pinned_since=NOW - 70
    )
    (row,) = leases(snapshot(whole))
    assert texts(row) == [
        "analysis.ipynb",
        "bob",
        "4121",
        "–",
        "qwen",
        "sim:0",
        "20.0 GiB",
        "14.0 GiB",
        "in use for 70 s",
    ]
    assert row.cells[0].hint == "/home/bob/analysis.ipynb"


def test_a_model_on_two_cards_has_a_row_for_each():
    split = Lease(ME.id, "big", shares=(Share("sim:0", GIB), Share("sim:1", 2 * GIB)))
    assert [(texts(row)[5], texts(row)[6]) for row in leases(snapshot(split, cards=2))] == [
        ("sim:0", "1.0 GiB"),
        ("sim:1", "2.0 GiB"),
    ]


def test_what_a_process_holds_beside_its_leases_is_listed_and_was_leased_by_nobody():
    world = snapshot(lease("qwen", 14))
    mine = replace(world.sections[ME.id], residue={"sim:0": GIB})
    found = leases(replace(world, sections={**world.sections, ME.id: mine}))
    assert texts(found[1])[4:8] == ["context and cache", "sim:0", "–", "1.0 GiB"]


def test_programs_that_lease_nothing_are_named():
    last = leases(
        snapshot(lease("qwen", 4, "cuda:0"), simulated=False, strangers=3, processes={777: 3 * GIB})
    )[-1]
    assert texts(last)[:3] == ["python3", "carol", "777"] and texts(last)[4:8] == [
        "no lease",
        "cuda:0",
        "–",
        "3.0 GiB",
    ]
    assert last.cells[0].kind == "alarm"


def test_memory_whose_holder_the_driver_does_not_name_is_told_as_that():
    last = leases(snapshot(lease("qwen", 4, "cuda:0"), simulated=False, strangers=3))[-1]
    assert (
        texts(last)[0] == "other programs"
        and texts(last)[2] == "unknown"
        and texts(last)[7] == "3.0 GiB"
    )


@pytest.mark.parametrize(
    ("busy", "idle", "words"),
    [(NOW - 200, 0.0, "busy 3 min"), (0.0, NOW - 17, "idle 15 s"), (0.0, 0.0, "–")],
)
def test_a_kernel_is_busy_or_idle_or_does_not_say(busy, idle, words):
    section = replace(snapshot(lease("qwen", 1)).sections[ME.id], busy_since=busy, idle_since=idle)
    assert kernel_cell(section, NOW).text == words


def test_a_table_of_idle_models_says_the_same_for_five_seconds():
    """Two hundred rows that change each second would be sent each second, to each session."""
    world = replace(samples.eight, now=5000.0)
    told = [encoded(leases(replace(world, now=world.now + passed))) for passed in (0, 2.9)]
    assert told[0] == told[1]


# -- the queue ----------------------------------------------------------------------------------------------------


def test_the_queue_is_told_in_order_each_with_what_it_waits_for():
    first, second = queue(samples.waiting)
    assert texts(first) == [
        "1",
        "llama",
        "analysis.ipynb (pid 4121), bob",
        "8.0 GiB on sim:0",
        "10 s",
        "normal",
        "qwen (14.0 GiB on sim:0) is in use",
    ]
    assert texts(second) == [
        "–",
        "evict reranker",
        "this process",
        "–",
        "< 5 s",
        "–",
        "an answer from analysis.ipynb (pid 4121), bob",
    ]
    assert all("prose" in row.cells[-1].kind for row in (first, second)), (
        "a reason is wrapped, never cut"
    )


def test_a_request_of_a_stopped_process_is_said_to_be_passed():
    ticket = Ticket("k", BOB.id, "use", "llama", NOW - 60, NOW - 30, because="room")
    (row,) = queue(snapshot(tickets=(ticket,)))
    assert "Its process has been stopped for 30 s" in texts(row)[-1]


def test_who_does_not_answer_is_named_with_since_when_beside_what_was_asked_and_what_it_holds():
    """An operator who clicked evict sees that the process is stopped, and that the click is not lost."""
    asked = Ticket(
        "k",
        BOB.id,
        "evict",
        f"{ME.id}/qwen",
        NOW - 40,
        NOW,
        recalls=(f"{ME.id}/qwen",),
        said_by="ann",
    )
    silent = snapshot(lease("qwen", 4), tickets=(asked,))
    (row,) = queue(silent)
    assert "No answer since" in texts(row)[-1] and texts(row)[-1].endswith(
        ". Requested by ann."
    )
    assert row.cells[-1].kind == "prose alarm" and "when it runs again" in row.cells[-1].hint
    (held,) = leases(silent)
    assert (held.cells[3].text, held.cells[3].kind) == ("no answer, 40 s", "alarm")
    recent = snapshot(lease("qwen", 4), tickets=(replace(asked, arrived=NOW - 1),))
    (held,) = leases(recent)
    assert held.cells[3].text == "–", "too soon to say"


def test_a_request_names_who_does_not_make_room_for_it():
    wants = Ticket(
        "k",
        BOB.id,
        "use",
        "big",
        NOW - 60,
        NOW,
        recalls=(f"{ME.id}/qwen",),
        recalled_since=NOW - 30,
        because="qwen is asked to step aside.",
    )
    (row,) = queue(snapshot(lease("qwen", 4), tickets=(wants,)))
    assert "No answer since" in texts(row)[-1] and texts(row)[-1].endswith(
        "qwen is asked to step aside."
    )


# -- the sheet ----------------------------------------------------------------------------------------------------


def test_who_may_not_act_is_sent_no_buttons():
    found = models(samples.busy)
    assert any(row[2] for row in json.loads(encoded(found)))
    assert not any(row[2] for row in json.loads(encoded(found, buttons=False)))


def test_the_same_rows_are_not_sent_again():
    sheet, sent = Table(MODELS), []
    sheet.param.watch(sent.append, "rows")
    for _ in range(3):
        sheet.show(encoded(models(samples.busy)))
    assert len(sent) == 1


@pytest.mark.parametrize(
    "said", [None, "evict", ["evict"], {}, {"verb": 1, "id": "x"}, {"verb": "evict", "id": None}]
)
def test_a_message_that_is_no_press_of_a_button_does_nothing(said):
    """Whoever has a websocket can send anything over it."""
    pressed = []
    Table(MODELS, lambda *press: pressed.append(press))._handle_msg(said)
    assert pressed == []


def test_a_press_names_the_row_by_its_id():
    pressed = []
    Table(MODELS, lambda *press: pressed.append(press))._handle_msg(
        {"verb": "evict", "id": "1/qwen"}
    )
    assert pressed == [("evict", "1/qwen")]


def test_names_are_text_whatever_they_say():
    """The browser is given JSON, and writes text nodes: nothing in a name is ever read as HTML."""
    (row,) = json.loads(encoded(models(samples.hostile)))
    assert (
        row[1][0][0]
        == "<img src=x onerror=alert(1)>\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    )
