"""The tab What if. It shows a plan in words and the bars after the plan, and changes nothing."""

import json
from contextlib import ExitStack

import pytest
from gpu_panels.data import devices, whatif
from gpu_panels.data.whatif import PlanAnswer, answer, details, evicted, model_choices
from gpu_panels.tabs import ANY, NO_MODEL, USUAL, PlanWish, WhatIfTab, replayed, request_plan
from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.facts import (
    HOST,
    Decisions,
    Drop,
    Lease,
    Leaver,
    Load,
    ModelSpec,
    Move,
    Plan,
    Share,
    Shed,
)
from gpu_runtime.rendering import answers, views
from gpu_runtime.rendering.views import after
from gpu_runtime.units import GIB

from . import samples
from .polling import opened, refresh
from .test_now import words

OUT = Move(f"{samples.ME.id}/qwen", (Share("sim:0", 14 * GIB),), (Share(HOST, 14 * GIB),))
IN = Load(f"{samples.ME.id}/gemma", (Share("sim:0", 12 * GIB),))
PLAN = replace(samples.fits, steps=(OUT, IN))


def drawn(snapshot):
    """The title, bytes and kind of every stretch, by device."""
    return {
        bar.device.id: [(one.title, one.bytes, one.kind) for one in bar.segments]
        for bar in devices.bars(snapshot)
    }


def test_the_bars_after_a_plan_are_those_of_its_steps():
    """The new model is hatched, since it is not on the card yet. Unknown figures stay unknown."""
    assert drawn(after(samples.busy, PLAN.steps)) == {
        "sim:0": [("gemma", 12 * GIB, "arriving"), ("reranker", 4 * GIB, "settled")],
        "host": [("qwen", 14 * GIB, "settled"), ("llama", 8 * GIB, "settled")],
    }
    gone = after(samples.busy, (Drop(f"{samples.BOB.id}/reranker", (Share("sim:0", 4 * GIB),)),))
    assert drawn(gone)["sim:0"] == [("qwen", 14 * GIB, "settled")]
    then = after(samples.unmeasured, (Load("5.1.0/gemma", (Share("cuda:0", 2 * GIB),)),))
    assert then.devices[0].claimed_bytes == 16 * GIB and then.devices[0].measured_bytes is None
    then = after(samples.busy, PLAN.steps)
    moved = (-2 * GIB, 14 * GIB)
    for view, was, more in zip(then.devices, samples.busy.devices, moved, strict=True):
        assert view.claimed_bytes == was.claimed_bytes + more
        assert view.measured_bytes == was.measured_bytes + more
        assert view.room_bytes == was.room_bytes - more


def test_a_model_that_leaves_for_ram_is_its_copy_there():
    """It was counted twice: as the model, and as its copy."""
    section = samples.busy.sections[samples.ME.id]
    leases = [replace(one, shadow_bytes=14 * GIB * (one.name == "qwen")) for one in section.leases]
    copied = replace(section, leases=tuple(leases))
    seen = replace(samples.busy, sections={**samples.busy.sections, samples.ME.id: copied})
    [(_, ram)] = [item for item in drawn(after(seen, (OUT,))).items() if item[0] == HOST]
    assert ram == [("qwen", 14 * GIB, "settled"), ("llama", 8 * GIB, "settled")]


def test_what_moves_from_ram_to_a_disk_or_gives_up_its_copy_is_said_so():
    """Neither leaves the book, and reading back takes the disk's measured time, not that of a load."""
    llama = f"{samples.ME.id}/llama"
    step = Shed(llama, (Share(HOST, 8 * GIB),))
    for fields, moves, stows in (
        (
            {"disk_seconds": 4.0, "disk_room": 9 * GIB},
            "move llama (8.0 GiB) from RAM to its disk",
            True,
        ),
        ({"shadow_bytes": 8 * GIB}, "free the copy of llama (8.0 GiB) in RAM", False),
    ):
        section = samples.busy.sections[samples.ME.id]
        held = [
            replace(one, reload_seconds=60.0, **fields) if one.name == "llama" else one
            for one in section.leases
        ]
        section = replace(section, leases=tuple(held))
        page = replace(samples.busy, sections={**samples.busy.sections, samples.ME.id: section})
        assert views.step_sentence(page, step) == moves
        said = evicted(replace(PLAN, steps=(step, IN)), page)
        assert [one.rpartition(" would ")[2] for one in said] == (
            ["move from RAM to its disk; reading it back takes 4.0 s"] if stows else []
        )
        [after_it] = [
            one
            for one in after(page, (step,)).sections[samples.ME.id].leases
            if one.name == "llama"
        ]
        assert after_it.on_disk is stows and not after_it.shadow_bytes


def test_an_evicted_model_is_named_with_its_process_and_its_move():
    """Models are equal if their ids are, not their names."""
    assert evicted(PLAN, samples.busy) == [
        "qwen (14.0 GiB), held by train.ipynb (pid 4000) of ann, would move from sim:0 to RAM"
    ]
    section = samples.busy.sections[samples.ME.id]
    leases = tuple(replace(lease, restore_seconds=1.4) for lease in section.leases)
    sections = {samples.ME.id: replace(section, leases=leases)}
    known_to_return = replace(samples.busy, sections=sections)
    assert evicted(PLAN, known_to_return)[0].endswith("; restoring it again takes 1.4 s")
    step, load = samples.fits.steps
    own = replace(load, lease=f"{samples.ME.id}/qwen")
    other = replace(step, lease=f"{samples.BOB.id}/qwen")
    steps = (other, step, own)  # the second model only moves
    plan = replace(samples.fits, steps=steps, name="qwen", victims=(other.lease,))
    assert len(evicted(plan, samples.busy)) == 1
    assert whatif.verdict(plan) == "✓ After 1 model left · qwen fits once 1 other is evicted"


def test_the_answer_shows_verdict_reason_and_evicted_models():
    found = words(answer(PlanAnswer(PLAN), samples.busy))
    assert found.startswith(
        "✓ After 1 model left · gemma fits once 1 other is evicted qwen was used least recently."
    )
    assert "Would be evicted qwen (14.0 GiB), held by train.ipynb" in found
    more = words(details(PlanAnswer(PLAN), samples.busy))
    assert "move qwen (14.0 GiB) from sim:0 to RAM load gemma (12.0 GiB) on sim:0" in more
    assert "weights 11.0 GiB header" in more and "sim:1 2.0 GiB free of 12.0 GiB needed" in more
    found = words(answer(PlanAnswer(samples.refused), samples.busy))
    assert found.startswith("✗ Never, as things are · gemma does not fit, even after a wait")
    assert "would be evicted" not in found
    assert views.touched(samples.refused.steps) == []
    plan = Plan(False, (), (), "<script>alert(1)</script>", name="<b>x</b>")
    shown = [face(PlanAnswer(plan), samples.busy) for face in (answer, details)]
    assert "<script" not in "".join(shown)
    assert "<i>" not in answer(PlanAnswer(error="<i>"), samples.busy)


def test_the_details_list_what_may_leave():
    """They have the bytes and the cost of each, in the order of the plan. The verb `why` shows the same rows."""
    leavers = [
        Leaver(
            f"{samples.ME.id}/qwen", "model", (Share("sim:0", 14 * GIB),), 1.4, True, 0.09, True
        ),
        Leaver(f"{samples.BOB.id}/llama", "copy", (Share(HOST, GIB),), 0.0, True, 0.0),
        *[Leaver(f"{samples.BOB.id}/<b>{n}", "in RAM", (), 2.0, False, 0.5) for n in range(5)],
    ]
    plan = replace(samples.fits, leavers=tuple(leavers))
    more = words(details(PlanAnswer(plan), samples.busy))
    assert (
        "→ qwen model 14.0 GiB sim:0 1.4 s 90 ms" in more
        and "llama copy 1.0 GiB RAM nothing" in more
    )
    assert "~2.0 s 500 ms" in more and "and 1 more" in more
    found = Decisions(samples.EVENTS)
    found.leavers = plan.leavers
    for shown in (
        details(PlanAnswer(plan), samples.busy),
        answers.why("qwen", found, around=samples.busy).html,
    ):
        assert "14.0 GiB sim:0" in shown and "<b>0" not in shown


def test_the_choices_name_the_process_that_has_the_model():
    """If two processes know the same name, each of them has an entry."""
    twice = samples.snapshot(
        samples.lease("qwen", 1),
        samples.lease("qwen", 1, owner=samples.BOB),
        Lease(samples.ME.id, "cell#1", kind="block"),
        specs=(ModelSpec("gemma", "fake"),),
    )
    assert model_choices(twice) == ["gemma", "qwen@4000", "qwen@4121"]
    bobs = [samples.lease(name, 1, owner=samples.BOB) for name in ("llama", "qwen")]
    both = samples.snapshot(samples.lease("qwen", 1), *bobs)
    assert whatif.preload_target("llama", both) == f"{samples.BOB.id}/llama"
    for owner in (samples.ME, samples.BOB):
        assert whatif.preload_target(f"qwen@{owner.pid}", both) == f"{owner.id}/qwen"
    assert whatif.preload_target("catalogued", both) == "/catalogued"


@pytest.mark.parametrize("typed", ["14 Gob", "0", "-3 GiB", "<b>", "nobody", __file__])
def test_bad_input_gets_one_clear_message(rt, monkeypatch, typed):
    """A viewer could otherwise make the server read any file by typing its path."""
    monkeypatch.setattr(rt, "plan", lambda *_: pytest.fail("planned"))
    found = request_plan(rt, PlanWish(typed), ["qwen"])
    assert found.plan is None
    assert "is not a size" in found.error and found.error.endswith("Or choose one of the models.")


def test_the_tab_shows_the_plan_and_the_devices_that_change():
    planned = []
    tab = opened(WhatIfTab, samples.busy, plan=lambda words: planned.append(words) or PLAN)
    assert "Choose a model" in tab.answer.html and tab.model.options == [
        NO_MODEL, "llama", "qwen", "reranker",
    ]  # fmt: skip
    tab.model.value = "qwen"
    assert "Computing" in tab.answer.html
    refresh(tab)
    assert planned == ["qwen"] and "fits once 1 other" in tab.answer.html
    rows = json.loads(tab.devices.rows)["rows"]
    assert [row["id"] for row in rows] == ["sim:0 now", "sim:0 after", "host now", "host after"]
    titles = [[part["title"] for part in row["parts"]] for row in rows[:2]]
    assert titles == [["qwen", "reranker"], ["gemma", "reranker"]]
    assert not any(row["buttons"] for row in rows), "a dry run changes nothing"


def test_a_typed_size_replaces_the_chosen_model_and_further_choices_are_asked_too():
    """A field that the visitor leaves as registered becomes no option."""
    planned, asked = [], []
    plan = lambda words: planned.append(words) or samples.refused
    tab = opened(WhatIfTab, samples.busy, plan=plan)
    tab.model.value = "qwen"
    tab.size.value = "3 GiB"
    refresh(tab)
    assert tab.model.value == NO_MODEL and planned[-1] == 3 * GIB
    assert not tab.devices.visible and "does not fit, even after a wait" in tab.answer.html
    tab.model.value = "llama"
    assert tab.size.value == ""
    plan = lambda words, **options: asked.append(options) or PLAN
    tab = opened(WhatIfTab, samples.busy, plan=plan)
    assert tab.cards.options == [ANY, "sim:0"]
    tab.model.value = "qwen"
    refresh(tab)
    tab.cards.value, tab.layout.value, tab.importance.value = "sim:0", "balanced", "high"
    refresh(tab)
    assert asked[0] == {}
    assert asked[-1] == {"devices": "sim:0", "layout": "balanced", "importance": "high"}
    assert PlanWish("qwen", ANY, USUAL, USUAL).options == {}


@pytest.mark.parametrize(("ask", "words"), [
    (PlanWish("2 GiB"), "✓ Now · "),
    (PlanWish("14 GiB"), "✓ After 1 model left · "),
    (PlanWish("in use"), "◷ It waits · "),
    (PlanWish("30 GiB"), "✗ Never, as things are · "),
    (PlanWish("30 GiB", layout="balanced"), "✓ After 2 models left · "),
])  # fmt: skip
def test_the_verdict_is_now_after_a_departure_after_a_wait_or_never(ask, words):
    """30 GiB fit on no card, but two cards can share them. The plan changes nothing."""
    with Runtime(devices="sim:2x24GiB", ledger="memory:", monitor=False) as rt, ExitStack() as used:
        for name in ("a", "b"):
            rt.register(name, backend="fake", size="14GiB")
            rt.preload(name)
            if ask.subject == "in use":
                used.enter_context(rt.use(name))
        rt.register("in use", backend="fake", size="20GiB")
        before = rt.status()
        found = request_plan(rt, ask, ["in use"])
        assert rt.status().sections == before.sections and rt.status().events == before.events
    assert whatif.verdict(found.plan).startswith(words)


def row(host, wait, engine="full", requests=9):
    return {"host_bytes": host * GIB, "wait_s": wait, "engine": engine, "requests": requests}


@pytest.mark.parametrize(("rows", "words"), [
    ([row(128, 100.0), row(256, 62.0)], "With 256 GiB of RAM for models instead of 128 GiB,"),
    ([row(128, 500, "plain"), row(256, 62.0), row(128, 100.0)], "would have been 38 % less"),
    ([row(128, 50.0), row(256, 50.0)], "would have been the same"),
    ([row(128, 0.0), row(256, 0.0)], "Nobody waited in the last 7 days"),
])  # fmt: skip
def test_more_ram_in_one_sentence(rows, words):
    """The rows of the engine `plain` are only a reference, and are not used for the sentence."""
    assert words in whatif.ram_sentence(rows, 7)


def test_a_replay_of_the_journal_is_a_sentence_about_more_ram(rt):
    nothing = "There is nothing to replay: the history has no use of a model."
    assert replayed(rt, rt.status()) == nothing
    for name in ("a", "b"):
        rt.register(name, backend="fake", size="14GiB")
        rt.preload(name)
    assert "replay of 2 requests" in replayed(rt, rt.status())
    two = samples.snapshot(cards=2)
    card, _, host = (view.limit_bytes for view in two.devices)
    assert whatif.host_choices(two) == (card, host, 2 * host)
