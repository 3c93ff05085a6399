"""The text for a terminal. Tests compare whole strings, because the alignment is part of the meaning."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from gpu import waiting
from gpu_panels.data.timeline import csv_of
from msgspec.structs import replace

from gpu_runtime.errors import BadSetting
from gpu_runtime.facts import (
    HOST,
    OVER_CAP,
    Drain,
    Event,
    Health,
    Level,
    Move,
    Outcome,
    Phase,
    Section,
    Share,
    Wait,
    parse_importance,
)
from gpu_runtime.owner import status
from gpu_runtime.rendering import answers, render, text, views
from gpu_runtime.scheduler import recall
from gpu_runtime.settings import Settings
from gpu_runtime.verbs import preset

from . import samples
from .samples import GIB, lease, snapshot


def test_status_shows_devices_holders_and_the_last_decision():
    expected = """\
1 simulated GPU

sim:0  ███████████████████▓▓▓▓▓·····│··  18.0 of 21.6 GiB    83%
       █ qwen 14.0 GiB  ▓ reranker 4.0 GiB
RAM    ████············│···············   8.0 of 32.0 GiB    25%  1 model in RAM
       █ llama 8.0 GiB

MODEL         SIZE  WHERE  HELD BY                         IMPORTANCE  STATE
qwen      14.0 GiB  sim:0  this process                    pinned      in use for 40 s
reranker   4.0 GiB  sim:0  analysis.ipynb (pid 4121), bob  high        idle 12 s
llama      8.0 GiB  RAM    this process                                in RAM, idle 3 min

Last decision  12:02:08  qwen was loaded, 14.0 GiB on sim:0: qwen needs 14.0 GiB; sim:0 has 21.6 GiB free.
3 evictions (2 offloaded, 1 unloaded) · 2 restored · 4 loaded"""
    assert answers.status(samples.busy).text == expected


def test_status_shows_an_overdraft_other_programs_and_a_failing_monitor():
    """On a real card, memory without a lease is shown with the process that holds it."""
    expected = """\
1 × NVIDIA H100
The monitor cannot see: cuda:0 did not answer 5 times in a row; next try in 30 s. To look at it: gpu doctor
cuda:0 is over its budget by 1.4 GiB: qwen in train.ipynb (pid 4000) 14.0 GiB, \
llama in analysis.ipynb (pid 4121) of bob 9.0 GiB. Nothing is granted on it.

cuda:0  ███████████████████▓▓▓▓▓▓▓▓▓▓│▓░  23.0 of 21.6 GiB   106%  over its budget by 1.4 GiB, measured \
23.5 GiB, 37 % busy
        █ qwen 14.0 GiB  ▓ llama 9.0 GiB  ░ other programs 512 MiB
RAM     ················│···············   0 B of 32.0 GiB     0%  0 models in RAM

MODEL               SIZE  WHERE   HELD BY                         STATE
qwen            14.0 GiB  cuda:0  this process                    idle 12 s
llama            9.0 GiB  cuda:0  analysis.ipynb (pid 4121), bob  idle 12 s
other programs   512 MiB  cuda:0  python3, carol, pid 999         not governed"""
    assert answers.status(samples.overdraft).text == expected


def test_status_lists_the_queue_and_leases_above_the_cap():
    """The importance of such a lease in the book is a number, which nobody can type."""
    expected = """\
: 2
  1. llama, 8.0 GiB on sim:0, for analysis.ipynb (pid 4121), bob, waiting 12 s: qwen (14.0 GiB on sim:0) is in use
  2. this process requested: evict reranker of analysis.ipynb (pid 4121), bob, 3.0 s ago"""
    assert (
        answers.status(samples.waiting).text.partition("Waiting")[2].partition("\n\n")[0]
        == expected
    )
    code = replace(samples.waiting.tickets[0], name="kernel", arrived=samples.NOW - 12)
    [waits] = views.waiting(replace(samples.waiting, tickets=(code,)))
    assert waits.startswith("analysis.ipynb (pid 4121), bob, 8.0 GiB on sim:0, waiting 12 s")
    shown = answers.status(snapshot(lease("qwen", 14, importance=OVER_CAP))).text
    [row] = [line for line in shown.splitlines() if line.startswith("qwen")]
    assert "above the cap" in row
    with pytest.raises(BadSetting):
        parse_importance(OVER_CAP)


@pytest.mark.parametrize(("seen", "prompt", "hint"), [
    (samples.empty, "%gpu", "Nothing is loaded yet. Tensors of plain torch code appear here by themselves. "
     "Load a model:  %gpu load NAME PATH"),
    (samples.registered, "%gpu", "Nothing is loaded. Registered here: qwen. Load one:  %gpu preload qwen"),
    (samples.empty, "gpu", "Nothing is loaded yet. In a notebook, type  %load_ext gpu  and run torch code, "
     "or load a model:  %gpu load NAME PATH"),
])  # fmt: skip
def test_an_empty_status_says_what_to_type(seen, prompt, hint):
    assert answers.status(seen, prompt).text.splitlines()[-1] == hint


def test_unknown_is_never_shown_as_zero():
    """If the driver does not answer, no figure of the card is known."""
    assert "not measured" in answers.status(samples.unmeasured).text
    assert text.cell("free_bytes", float("nan")) == text.size(None) == "unknown"
    assert text.cell("celsius", None) == "" and text.cell("free_bytes", 0) == "0 B"


def test_a_table_has_the_words_of_the_other_texts():
    """The DataFrame keeps `host` and `me`, which code compares."""
    found = [text.cell("where", place) for place in ("host", "cuda:0 + host", "cuda:0,1", "disk")]
    assert found == ["RAM", "cuda:0 + RAM", "cuda:0,1", "disk"]
    assert text.cell("device", "host") == "RAM" and text.cell("model", "host") == "host"
    assert text.cell("owner", "me") == "this process"


def test_names_that_would_look_the_same_are_not_shortened():
    """Paths and names of one family often differ in the middle alone."""
    first, second = (f"{'a' * 25}{n}{'z' * 30}" for n in range(2))
    assert text.table([[first], [second]], ["NAME"])[1:] == [first, second]
    assert len(text.table([[first], [first]], ["NAME"])[1]) == text.LONGEST


def test_a_plan_shows_its_verdict_its_steps_and_the_devices_after_them():
    expected = """\
gemma fits once 1 other is evicted · simulated
qwen was used least recently. gemma needs 12.0 GiB; sim:0 has 17.6 GiB free.
Needs 12.0 GiB
  PART             SIZE  FROM
  weights      11.0 GiB  header
  activations   1.0 GiB  declared
  1. move qwen (14.0 GiB) from sim:0 to RAM
  2. load gemma (12.0 GiB) on sim:0
then  sim:0  █████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓········│··  16.0 GiB
             █ reranker 4.0 GiB  ▓ gemma 12.0 GiB
then  RAM    ████▓▓▓▓▓▓▓·····│···············  22.0 GiB
             █ llama 8.0 GiB  ▓ qwen 14.0 GiB
Also considered:
  sim:1 2.0 GiB free of 12.0 GiB needed
Nothing was done. Do it:  %gpu preload gemma"""
    assert answers.plan(samples.fits, samples.busy).text == expected


@pytest.mark.parametrize(("command", "in_notebook", "in_terminal"), [
    ("load models/gemma", "Do it:  %gpu load models/gemma", "Do it, in a notebook:  %gpu load models/gemma"),
    ("preload gemma", "Do it:  %gpu preload gemma", "Do it:  gpu preload gemma"),
    ("rt.load('gemma', seed=3)", "Do it in Python:  rt.load('gemma', seed=3)", "rt.load('gemma', seed=3)"),
])  # fmt: skip
def test_a_plan_says_how_to_do_it(command, in_notebook, in_terminal):
    """A model that is not registered cannot be preloaded by name, and a command cannot hold it."""
    planned = replace(samples.fits, command=command)
    assert answers.plan(planned, samples.busy).text.endswith(in_notebook)
    assert answers.plan(planned, samples.busy, "gpu").text.endswith(in_terminal)


def test_a_refusal_is_a_plan_too():
    expected = """\
gemma does not fit, even after a wait · simulated
gemma needs 40.0 GiB on one device; the largest budget is 21.6 GiB (sim:0)
Needs 40.0 GiB (declared)"""
    assert answers.plan(samples.refused, samples.busy).text == expected
    blocked = replace(samples.refused, obstacle="the file is cut")
    assert answers.plan(blocked, samples.busy).text.endswith(
        "would not be loaded: the file is cut."
    )
    bobs = Move(f"{samples.BOB.id}/reranker", (Share("sim:0", GIB),), (Share(HOST, GIB),))
    step = views.step_sentence(samples.busy, bobs)
    assert step.startswith("move reranker (1.0 GiB) of analysis.ipynb (pid 4121), bob from sim:0")


def test_the_versions_of_the_processes_are_shown_if_they_differ():
    me, bob = (replace(owner, version="0.3.0") for owner in (samples.ME, samples.BOB))

    def seen(*owners):
        sections = {one.id: Section(one) for one in owners}
        return replace(samples.busy, owner=me, sections=sections)

    assert views.versions(seen(me, bob)) == ""
    assert views.versions(seen(me, replace(bob, version=""))) == "", "that version does not say it"
    long = views.versions(seen(me, replace(bob, version="9" * 9999)))
    assert "9" * 20 in long and len(long) < 200
    newer = [replace(bob, pid=pid, version="0.4.0\x1b") for pid in range(1, 6)]
    names = "; ".join(f"analysis.ipynb (pid {pid}), bob" for pid in (1, 2, 3))
    expected = f"Versions: 0.3.0 in this process · 0.4.0\ufffd in {names} and 2 more"
    assert views.versions(seen(me, *newer)) == expected
    assert all(expected in face for face in answers.status(seen(me, *newer)))


def test_a_decision_is_shown_with_its_process_if_there_are_several():
    """Two notebooks may have models of one name. A notebook's own memory has its name already."""
    expected = """\
12:02:08  qwen was loaded, 14.0 GiB on sim:0: qwen needs 14.0 GiB; sim:0 has 21.6 GiB free.
12:02:06  llama was offloaded from sim:0, freeing 8.0 GiB: qwen needs room."""
    assert answers.why("qwen", samples.EVENTS[:0:-1]).text == expected
    grant = samples.event(5, "gemma", "granted", "gemma needs 2.0 GiB.", 2)
    shown = answers.why("", (grant, *samples.EVENTS[::-1])).text
    assert "gemma was granted 2.0 GiB on sim:0: gemma needs" in shown, "it is not loaded yet"
    mine, bobs = (replace(samples.EVENTS[0], owner=id) for id in (samples.ME.id, samples.BOB.id))
    code = replace(bobs, model="kernel", notebook="/w/analysis.ipynb")
    lines = answers.why("llama", [mine, bobs, code], around=samples.busy).text.splitlines()
    assert [line.partition(" was")[0][10:] for line in lines] == [
        "llama of this process", "llama of analysis.ipynb (pid 4121), bob", "analysis.ipynb",
    ]  # fmt: skip
    twice = [bobs, replace(bobs, seq=9)]
    assert "llama of analysis.ipynb" not in answers.why("llama", twice, around=samples.busy).text
    assert (
        "<b>llama of this process</b>"
        in answers.why("llama", [mine, bobs], around=samples.busy).html
    )


def test_an_outcome_and_the_health_are_one_line():
    """`gpu health` said 73 % (of the card) where `gpu status` said 81 % (of the budget)."""
    because = "qwen stepped aside to host; 14.0 GiB came free"
    evicted = Outcome("evict", "qwen", True, because, 14 * GIB, "host", 0.8)
    loaded = Outcome("load", "qwen", True, "qwen is on sim:0", 14 * GIB, "sim:0", 2.5)
    refused = Outcome("evict", "qwen", False, "pid 7 was asked")
    assert [answers.outcome(one).text for one in (evicted, loaded, refused)] == [
        "evict qwen: qwen stepped aside to host; 14.0 GiB came free (800 ms)",
        "load qwen: qwen is on sim:0 (14.0 GiB, 2.5 s)",
        "evict qwen, not done: pid 7 was asked",
    ]
    bad = Health(False, Level.CRITICAL, None, "x")
    fine = Health(True, Level.MODERATE, 42.0, "Memory usage moderate", "sim:1 79 %")
    assert answers.health(bad).text == "NOT healthy · pressure CRITICAL · x"
    said = "healthy · pressure MODERATE, sim:1 79 % · Memory usage moderate"
    assert answers.health(fine).text == said
    line = answers.health(status.health(samples.busy)).text
    [shown] = re.findall(r"sim:0 (\d+ %)", line)
    assert shown.replace(" ", "") in answers.status(samples.busy).text


def test_an_event_without_a_model_names_its_process():
    """A cache is released by a process, not by a model. A notebook's own memory has no name."""
    [other] = [id for id in samples.busy.sections if id != samples.busy.owner.id]
    released = Event(9, 0.0, "", "defrag", "defrag", "0 B came free", owner=other, by="root, pid 7")
    stepped_aside = Event(9, 0.0, "kernel", "offloaded", "evict", "", 8 * GIB, "sim:0", other)
    for event, sentence in (
        (released, "released its allocator's cache, requested by root, pid 7: 0 B came free."),
        (stepped_aside, "was offloaded from sim:0, freeing 8.0 GiB."),
        (replace(stepped_aside, action="adopted"), "got 8.0 GiB on sim:0."),
        (replace(stepped_aside, action="grown"), "was granted 8.0 GiB more on sim:0."),
    ):
        shown = answers.status(replace(samples.busy, events=(event,)))
        assert f"analysis.ipynb (pid 4121), bob {sentence}" in shown.text
        assert "<b>analysis.ipynb (pid 4121), bob</b>" in shown.html


def test_settings_are_lines_for_a_shell_or_with_their_source():
    expected = """\
export GPU_MEMORY_MAX_PERCENT=0.85
export ENABLE_CPU_OFFLOAD=true
export EVICTION_IDLE_THRESHOLD_SECONDS=60"""
    assert answers.preset(preset("8GB")).text == expected
    lines = answers.config(Settings.load(gpu_policy="cost_aware").sources()).text.splitlines()
    line = next(line for line in lines if line.startswith("GPU_POLICY"))
    assert line.split()[:3] == ["GPU_POLICY", "cost_aware", "argument"]


def _spoiled(value):
    """The text `value` with added characters that would control a terminal."""
    return f"a\x1b]0;x\x07{value}\x9b31m\x7f"


def test_no_text_face_can_control_the_terminal():
    """Names, paths, reasons and device names come from other users. The test checks the text, `print` and JSON."""
    event = Event(
        1, samples.WALL, *map(_spoiled, ("qwen", "loaded", "sim:0")), because=_spoiled("it")
    )
    shut = Drain(by=_spoiled("ops"), wall=samples.WALL)
    devices = tuple(
        replace(view, drained=shut, device=replace(view.device, id=_spoiled(view.device.id), name=_spoiled("card")))
        for view in samples.hostile.devices
    )  # fmt: skip
    found = replace(
        samples.hostile, degraded=_spoiled("sensor"), ledger=_spoiled("keeper:///x"), host=_spoiled("box"),
        events=(event,), devices=devices,
    )  # fmt: skip
    done = Outcome("evict", _spoiled("qwen"), True, _spoiled("done"))
    health = Health(True, Level.LOW, 25.0, _spoiled("fine"))
    wait = Wait(because=_spoiled("it is in use"))
    for shown in (
        *(repr(render.shown("status", value)) for value in (found, done, health)),
        repr(render.shown("why", (event,), subject=_spoiled("qwen"))),
        *(str(value) for value in (found, event, done, health)),
        *(render.as_json(value) for value in (found, event, done)),
        waiting.sentence(_spoiled("qwen"), wait, 2.0),
        answers.status(samples.hostile).text,
    ):
        assert shown.replace("\n", "").isprintable(), shown
    assert json.loads(render.as_json(done))["name"] == _spoiled("qwen")


@pytest.mark.parametrize("cells", [8, 16, 32])
@pytest.mark.parametrize("name", ["busy", "overdraft", "eight", "empty", "waiting"])
def test_a_bar_is_as_long_as_requested(name, cells):
    """The length is right also if a device is overdrawn, that is, if more is claimed than it has."""
    assert {len(text.draw(bar, cells)[0]) for bar in views.bars(getattr(samples, name))} == {cells}


def test_wide_letters_and_small_leases_do_not_break_the_columns():
    """A Chinese character is as wide as two columns."""
    lines = text.table([("千问", "1"), ("qwen", "2")], ("MODEL", "N"))
    assert [text.width(line) for line in lines] == [8, 8, 8]
    (card, _) = views.bars(snapshot(lease("tiny", 0.001), lease("large", 20)))
    assert text.draw(card)[0].startswith("█▓▓▓")


def test_more_rows_than_fit_are_counted_and_an_arriving_lease_is_at_its_device():
    for count in (views.MOST_ROWS, views.MOST_ROWS + 1):
        shown = answers.status(snapshot(*(lease(f"m{n:02}", 0.1) for n in range(count)))).text
        assert ("and 1 more:  %gpu leases" in shown) is (count > views.MOST_ROWS)
        assert "m19 " in shown and "more:" not in shown.replace("and 1 more:", "")
    arriving = replace(
        lease("arriving", 1), shares=(), target=(Share("sim:0", GIB),), phase=Phase.ARRIVING
    )
    rows = views.holdings(snapshot(lease("large", 20, "sim:1"), arriving, cards=2))
    assert [(row.name, row.where) for row in rows] == [("arriving", "sim:0"), ("large", "sim:1")]


@pytest.mark.parametrize("device", ["", "sim:0"])
@pytest.mark.parametrize(
    "action", ["granted", "loaded", "offloaded", "moved", "refused", "reaped", "pin", "unheard of"]
)
def test_an_event_without_bytes_or_device_is_still_a_phrase(action, device):
    """An unknown size is not shown as 0."""
    phrase = views.event_phrase(Event(1, 0.0, "qwen", action, "request", "", 0, device))
    assert "0 B" not in phrase and "{" not in phrase and "  " not in phrase
    assert phrase.split()[-1] not in ("on", "from", "to", "freeing") and "on to" not in phrase


@pytest.mark.parametrize("verb", sorted(set(recall.ASKS) - {"evict", "shed"}))
def test_what_a_process_has_done_for_another_one_is_a_phrase(verb):
    """`train.ipynb hibernate, requested by ann` was shown. What leaves has an event of its own."""
    assert views.event_phrase(Event(1, 0.0, "qwen", verb, verb, "")) != verb


def test_an_event_of_several_cards_names_all_of_them():
    """It read `was loaded, 40.0 GiB on sim:0`, a card of 24 GiB. A book may have any text in place of a card's id."""
    both = (Share("sim:0", 20 * GIB), Share("sim:1", 20 * GIB))
    event = Event(1, 0.0, "giant", "loaded", "request", "", 40 * GIB, "sim:0", shares=both)
    assert views.event_phrase(event) == "was loaded, 40.0 GiB on sim:0,1"
    odd = replace(event, shares=(Share("sim", GIB), Share("sim:1", GIB)))
    assert "was loaded" in views.event_phrase(odd)


@pytest.mark.parametrize("action", ["{", "{bytes.real}", "{0}", "paused {device}"])
def test_an_action_that_another_process_has_invented_is_shown_as_it_is(action):
    """A book may have any text there, also of another user."""
    seen = replace(samples.busy, events=(Event(1, 0.0, "qwen", action, "request", "", 8, "sim:0"),))
    assert f"qwen {action}." in answers.status(seen).text


@pytest.mark.parametrize("wall", [1e300, -1e300, 1e12, float("nan")])
def test_a_time_that_no_calendar_has_is_shown_as_another(wall):
    """One such event of any user ended `%gpu` of all in an error."""
    events = tuple(replace(event, wall=wall) for event in samples.EVENTS)
    seen = replace(samples.busy, events=events)
    assert "Last decision" in answers.status(seen).text and "qwen" in answers.why("", events).text
    assert len(status.events(events)) == len(csv_of(events, seen).splitlines()) - 1 == len(events)


@pytest.mark.parametrize(("seconds", "quiet"), [(9.9, ""), (10.0, ""), (10.1, ", quiet for 10 s")])
def test_a_host_is_quiet_only_after_a_while_without_an_update(seconds, quiet):
    seen = replace(samples.busy, host="box7", seen_seconds=seconds)
    assert answers.host(seen).text.startswith(f"── box7{quiet} ──\n")
    assert answers.host(samples.busy).text.startswith("── box (this host) ──")


@pytest.mark.parametrize(("peak", "delta", "words"), [
    (None, None, "peak and delta unknown"), (0, 0, "peak 0 B · 1.0 GiB reserved on sim:0 · delta 0 B"),
    (GIB, None, "peak 1.0 GiB · 1.0 GiB reserved on sim:0 · delta unknown"),
    (GIB, 2 * GIB, "delta +2.0 GiB"),
])  # fmt: skip
def test_the_memory_that_a_block_used_is_shown_as_far_as_it_is_known(peak, delta, words):
    device = samples.busy.devices[0].device
    used = SimpleNamespace(device=device, bytes=GIB, peak_bytes=peak, delta_bytes=delta)
    assert words in answers.block(used).text


def test_a_plan_for_a_size_says_how_to_run_a_cell_under_it(rt):
    shown = render.shown("plan", rt.plan("4 GiB", importance="low"), around=rt.status())
    assert repr(shown).endswith("Nothing was done. Do it for a cell:  %%gpu 4GiB --importance low")


def test_a_drained_card_and_the_beginning_of_a_problem_are_told():
    seen = samples.drained
    shown = answers.status(seen)
    line = next(line for line in shown.text.splitlines() if line.startswith("cuda:1"))
    assert "drained by ann since " + views.clock(samples.WALL - 600) in line
    assert "measured" not in line, "the driver and the book agree"
    assert "drained by ann since" in shown.html
    assert render.status(seen)["devices"][1]["drained_by"] == "ann"
    event = Event(9, samples.busy.wall, "giant", "refused", "request", "giant needs 50.0 GiB")
    owner = next(iter(samples.busy.sections))
    seen = replace(samples.busy, events=(replace(event, owner=owner),))
    (alarm,) = views.alarms(seen)
    assert alarm.startswith("Model giant in train.ipynb was refused: giant needs 50.0 GiB. Since ")


def test_json_has_every_field_and_plain_values():
    """Empty fields are included. Times are seconds since the epoch, and idle times are seconds before now."""
    shown = render.status(samples.busy)
    assert shown["devices"][0] == {
        "id": "sim:0", "name": "", "uuid": "", "total_bytes": 24 * GIB,
        "limit_bytes": int(24 * GIB * 0.9), "claimed_bytes": 18 * GIB, "measured_bytes": 18 * GIB,
        "residue_bytes": 0, "pressure_percent": 83.3, "level": "HIGH", "drained_by": None,
        "utilisation_percent": None, "temperature_celsius": None, "power_watts": None,
        "simulated": True,
    }  # fmt: skip
    assert [one["idle_seconds"] for one in shown["leases"]] == [0.0, 200.0, 12.0]
    step = {"step": "load", "lease": f"{samples.ME.id}/gemma", "because": ""}
    shares = [{"device": "sim:0", "bytes": 12 * GIB}]
    assert render.plain(samples.fits)["steps"][1] == step | {"shares": shares}
    assert render.plain(Share(HOST, 1)) == {"device": HOST, "bytes": 1}


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_json_has_null_for_a_number_that_json_lacks(number):
    """`gpu backtest --json` wrote Infinity where lru does not wait, and no other program could read it."""
    for value in (number, np.float32(number)):
        assert render.as_json([{"wait_vs_lru": value}]) == render.as_json([{"wait_vs_lru": None}])
