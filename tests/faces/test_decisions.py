"""The tab Decisions. It shows each verdict with its reason and the other places that were
considered.
"""

from __future__ import annotations

from gpu_panels.data.cells import Cell
from gpu_panels.data.decisions import rows
from gpu_panels.tabs.decisions import DecisionsTab
from msgspec.json import decode
from msgspec.structs import replace

from gpu_runtime.facts import Event

from . import samples
from .polling import opened, refresh

REFUSED = Event(
    7,
    samples.WALL,
    "gemma",
    "refused",
    "hopeless",
    "gemma needs 40.0 GiB",
    40 * samples.GIB,
    "sim:0",
    samples.BOB.id,
    runners_up=("sim:0: 21.6 GiB of 40.0 GiB needed", "sim:1: it is drained"),
)
GRANTED = Event(
    6,
    samples.WALL - 5,
    "qwen",
    "granted",
    "request",
    "sim:0 has room",
    14 * samples.GIB,
    "sim:0",
    "9.1.0",
    by="ann, console",
)
WAITED = replace(GRANTED, seq=5, action="waiting", because="llama is in use", bytes=0)
DECISIONS = (REFUSED, GRANTED, WAITED)


def texts(row):
    return [cell.text for cell in row.cells]


def test_a_row_shows_verdict_model_process_need_reason_and_other_places():
    (row,) = rows((REFUSED,), samples.busy)
    assert texts(row)[1:] == [
        "✗ refused",
        "gemma",
        "analysis.ipynb (pid 4121), bob",
        "40.0 GiB",
        "gemma needs 40.0 GiB",
        "sim:0: 21.6 GiB of 40.0 GiB needed\nsim:1: it is drained",
    ]


def test_the_time_is_sent_as_a_number():
    """The browser shows the time in the viewer's time zone, which may differ from the server's."""
    assert rows((REFUSED,), samples.busy)[0].cells[0] == Cell("", samples.WALL, kind="time")


def test_the_person_is_named_even_if_the_process_has_ended():
    assert texts(rows((GRANTED,), samples.busy)[0])[3] == "pid 9, ended, requested by ann, console"


def test_a_wait_without_bytes_is_not_shown_as_zero():
    assert texts(rows((WAITED,), samples.busy)[0])[4] == "–"


def test_verdicts_are_labelled_and_can_be_selected():
    assert [texts(row)[1] for row in rows(DECISIONS, samples.busy)] == [
        "✗ refused",
        "✓ granted",
        "◷ waits",
    ]
    assert [texts(row)[1] for row in rows(DECISIONS, samples.busy, "waiting")] == ["◷ waits"]
    assert rows((replace(REFUSED, action="loaded"),), samples.busy) == ()


def test_the_tab_shows_the_decisions_and_follows_the_filter():
    tab = opened(DecisionsTab, samples.busy, decisions=lambda limit: DECISIONS)
    assert len(decode(tab.table.rows)) == 3
    tab._verdict.value = "refused"
    assert [row[1][2][0] for row in decode(tab.table.rows)] == ["gemma"]


def test_a_new_decision_appears():
    decided = [(GRANTED,)]
    tab = opened(DecisionsTab, samples.busy, decisions=lambda limit: decided[0])
    decided[0] = DECISIONS
    tab.poller._fetched["decisions"].fetched_at -= 60
    refresh(tab)
    assert len(decode(tab.table.rows)) == 3


def test_names_are_text():
    """A model may have any name, also one with markup."""
    (row,) = rows((replace(REFUSED, model="<b>\x1b"),), samples.busy)
    assert texts(row)[2] == "<b>\N{REPLACEMENT CHARACTER}"
