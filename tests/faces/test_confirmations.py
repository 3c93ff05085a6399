"""A click becomes a proposal with a question. Before the action runs, the model is checked for
changes since the click.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from gpu_panels.acting import attempt, perform
from gpu_panels.data.confirmations import Proposal, changed, propose, question
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime import Runtime
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import Declared, LeaseId, Outcome, Phase, Presence, ProcessState, Share
from gpu_runtime.units import GIB, show_bytes

from . import samples
from .samples import BOB, HOST, ME, NOW, drained, lease, snapshot


def idle(**more):
    """A snapshot with the idle model qwen. `more` are changed fields of its lease."""
    return snapshot(lease("qwen", 14, **{"last_used": NOW - 200, **more}))


STOPPED = replace(idle(), presences={ME.id: Presence(ProcessState.STOPPED)})


def at(name="qwen", owner=ME):
    return f"{owner.id}/{name}"


def test_a_click_is_resolved_to_one_lease_of_one_owner():
    both = snapshot(lease("qwen", 14), lease("qwen", 4, owner=BOB))
    found = Proposal("evict", at(owner=BOB), "sim:0", 4 * 2**30, BOB.pid, "qwen")
    assert propose("evict", at(owner=BOB), both) == found
    assert propose("evict", at(owner=BOB), both).subject == LeaseId(BOB.id, "qwen")
    assert propose("preload", "/catalogued", both).subject == "catalogued"


def test_the_question_of_an_eviction_shows_bytes_process_and_consequence():
    proposal = propose("evict", at(), idle(restore_seconds=2.5))
    assert question(proposal, idle(restore_seconds=2.5)) == (
        "Evict qwen?",
        (
            "This frees 14.0 GiB on sim:0.",
            "Held by train.ipynb (pid 4000) of ann, idle for 3 min. It is not in use.",
            "It moves to RAM if there is space. Its next use restores it automatically, "
            "in about 2.5 s.",
        ),
        "Evict, freeing 14.0 GiB",
        True,
    )


def test_the_questions_about_a_model_on_a_disk_and_about_an_engine_say_what_happens():
    """The model is not loaded anew from its source, and the engine is not offloaded."""
    stowed = snapshot(lease("qwen", 14, HOST, disk_bytes=14 * GIB, restore_seconds=7.0))
    first, then, _ = question(propose("restore", at(), stowed), stowed).lines
    assert first == "Its 14.0 GiB are in a file on a disk, read back in about 7.0 s."
    assert then.startswith("It is moved to a device")
    assert (
        "It leaves its file on the disk too"
        in question(propose("drop", at(), stowed), stowed).lines[-1]
    )
    engine = idle(backend="vllm", restore_seconds=2.5)
    last = question(propose("evict", at(), engine), engine).lines[-1]
    assert (
        last
        == "It sleeps if RAM has space for it. Its next use wakes it automatically, in about 2.5 s."
    )


@pytest.mark.parametrize("verb", ["evict", "drop", "unpin_evict", "restore", "pin", "unpin"])
def test_every_question_names_the_model_its_bytes_and_its_user(verb):
    """The model can belong to another user than the one who started the server."""
    world = snapshot(lease("qwen", 14, HOST if verb == "restore" else "sim:0", owner=BOB))
    text = question(propose(verb, at(owner=BOB), world), world)
    assert "qwen" in text.title
    for words in ("analysis.ipynb (pid 4121) of bob", "14.0 GiB"):
        assert words in " ".join(text.lines)


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("drop", "This frees 14.0 GiB in RAM."),
        ("pin", "It is in RAM now. It keeps its 14.0 GiB once it is on a card"),
        ("unpin", "After that its 14.0 GiB in RAM are available again"),
        ("move sim:1", "Its 14.0 GiB move from RAM to sim:1."),
    ],
)
def test_host_memory_is_called_ram(verb, words):
    """It was `on host`, a word of the book."""
    world = snapshot(lease("qwen", 14, HOST))
    assert words in " ".join(question(propose(verb, at(), world), world).lines)


def test_the_question_says_what_the_state_of_the_model_means():
    """It may be in use, not loaded yet, unmovable, or pinned. Control characters are made visible."""
    used = idle(pins=1, pinned_since=NOW - 40)
    lines = question(propose("evict", at(), used), used).lines
    assert "In use by train.ipynb (pid 4000) of ann for 40 s: the eviction is refused" in lines[1]
    world = snapshot()
    text = question(propose("preload", "/catalogued", world), world)
    assert text.lines[:2] == (
        "It is not loaded, and its size is not known here.",
        "It is loaded to a device by a process that can load it.",
    )
    world = replace(snapshot(), declared={BOB.id: {"llama": Declared(8 << 30)}})
    text = question(propose("preload", at("llama", BOB), world), world)
    assert text.lines[0] == "It is not loaded (8.0 GiB)."
    world = idle(movable=False, reload_seconds=20.0)
    assert "unloaded" in question(propose("evict", at(), world), world).lines[-1]
    assert "in about 20 s" in question(propose("evict", at(), world), world).lines[-1]
    text = question(propose("unpin_evict", at(), idle(keep=True)), idle(keep=True))
    assert "It is pinned. It is unpinned first." in text.lines and text.grave
    assert text.confirm == "Unpin and evict, freeing 14.0 GiB"
    world = snapshot(lease("a\x1b[31m\nb", 4))
    assert "\x1b" not in str(question(propose("evict", at("a\x1b[31m\nb"), world), world))


def test_only_a_request_that_waits_for_memory_can_be_ended():
    """The other requests of the queue wait for the answer of a process."""
    waits = propose("cancel", "k1", samples.waiting)
    assert changed(waits, samples.waiting) == ""
    text = question(waits, samples.waiting)
    assert text.lines[0].endswith("(pid 4121) of bob has waited 12 s for 8.0 GiB.") and text.grave
    assert changed(waits, samples.busy).startswith("Nothing waits for llama any more.")
    answered = propose("cancel", "k2", samples.waiting)
    assert changed(answered, samples.waiting).startswith("This request no longer waits.")


@pytest.mark.parametrize(("verb", "words"), [
    ("preload", "Idle models are evicted"), ("restore", "Idle models are evicted"),
    ("pin", "no other model can evict it"),
    ("unpin", "it is evicted when other models need the memory"),
    ("defrag", "returns cached blocks"), ("move sim:1", "Its 14.0 GiB move from sim:0 to sim:1"),
])  # fmt: skip
def test_the_question_of_every_other_verb_shows_its_effect(verb, words):
    text = question(propose(verb, at(), idle()), idle())
    assert words in " ".join(text.lines) and text.confirm and not text.grave


STATES = {
    "idle": {}, "in use": {"pins": 1}, "pinned": {"keep": True}, "leaving": {"phase": Phase.LEAVING},
    "elsewhere": {"shares": (Share(HOST, 14 * GIB),)},
}  # fmt: skip
MOVES = ("evict", "drop", "unpin_evict", "move sim:1")
FORBIDS = {
    "in use": MOVES, "pinned": ("pin",), "leaving": (*MOVES, "restore"),
    "elsewhere": (*MOVES, "restore", "preload"),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", [*MOVES, "restore", "preload", "pin", "unpin", "defrag"])
def test_an_action_is_refused_only_if_the_new_state_of_its_model_forbids_it(verb, state):
    """The minute that has passed since the click is no change."""
    then = replace(snapshot(replace(lease("qwen", 14), **STATES[state])), now=NOW + 60)
    forbidden = verb in FORBIDS.get(state, ()) or (verb == "unpin" and state != "pinned")
    assert bool(changed(propose(verb, at(), idle()), then)) is forbidden


def test_a_model_that_is_on_disk_may_be_preloaded():
    world = replace(idle(), names={BOB.id: ("llama",)})
    assert changed(propose("preload", at("llama", BOB), world), world) == ""
    # The runtime itself reports which process could load it.
    assert changed(propose("preload", "/catalogued", world), world) == ""


@pytest.mark.parametrize(("verb", "then", "words"), [
    ("evict", snapshot(), "no longer holds it"), ("evict", idle(pins=1), "qwen is in use now"),
    ("evict", idle(phase=Phase.LEAVING), "qwen is already leaving"),
    ("move sim:1", snapshot(lease("qwen", 14, "sim:1")), "qwen is on sim:1 now, not on sim:0"),
    ("pin", idle(keep=True), "qwen is already pinned"),
    ("defrag", replace(snapshot(), sections={}), "The process that held qwen has ended"),
    ("evict", replace(snapshot(), sections={}), "The process that held qwen has ended"),
    ("evict", snapshot(lease("qwen", 14, owner=BOB)), "no longer holds it"),
    *[(verb, STOPPED, "acts on no request until it is continued") for verb in ("evict", "pin", "defrag")],
])  # fmt: skip
def test_a_change_since_the_click_is_reported_and_nothing_is_done(verb, then, words):
    """In the last case another owner has a model of that name. The visitor did not mean that model."""
    difference = changed(propose(verb, at(), idle()), then)
    assert words in difference and difference.endswith("Nothing was done.")


def test_a_stopped_process_is_continued_only_while_it_is_stopped():
    proposal = propose("resume", at(""), STOPPED)
    text = question(proposal, STOPPED)
    assert (text.title, text.confirm) == ("Continue train.ipynb (pid 4000) of ann?", "Continue")
    assert "SIGCONT" in text.lines[0] and not text.grave
    assert changed(proposal, STOPPED) == ""
    assert changed(proposal, idle()).startswith("train.ipynb (pid 4000) is not stopped any more.")
    assert "has ended" in changed(proposal, replace(STOPPED, sections={}))
    done = Outcome("resume", ME.id, True, "train.ipynb (pid 4000) runs again")
    act = {"on_behalf_of": nullcontext, "resume": {ME.id: done}.__getitem__}
    rt = SimpleNamespace(status=lambda: STOPPED, **act)
    assert attempt(rt, proposal, "ann") == ("done", done.because)


def test_all_idle_models_are_those_of_processes_that_answer():
    """The model of a stopped process would be awaited for 30 s. Its bytes are not promised."""
    both = snapshot(lease("qwen", 14), lease("phi", 2, owner=BOB))
    world = replace(STOPPED, sections=both.sections)
    text = question(propose("evict_idle", "/sim:0", world), world)
    assert text.lines[0] == "This frees 2.0 GiB on sim:0: 1 idle model."
    assert changed(propose("evict_idle", "/sim:0", STOPPED), STOPPED).startswith("No idle model")


ON_A_CARD = ("idle", "in use", "pinned", "leaving")


GIBS = st.sampled_from((0, 1, 20))


@given(st.lists(st.tuples(st.sampled_from(ON_A_CARD), GIBS, GIBS), max_size=3))
def test_the_question_for_a_card_promises_what_idle_models_free_on_that_card(models):
    """A model on two cards frees only a part on each. A pinned model and a model in use stay."""
    leases = []
    for n, (state, first, second) in enumerate(models):
        shares = (Share("sim:0", first * GIB), Share("sim:1", second * GIB))
        leases.append(replace(lease(f"m{n}", 0, **STATES[state]), shares=shares))
    seen = snapshot(*leases, cards=2, gib=80)
    for card, column in (("sim:0", 1), ("sim:1", 2)):
        idle = [model[column] for model in models if model[0] == "idle" and model[column]]
        count = f"{len(idle)} idle model{'' if len(idle) == 1 else 's'}"
        size = show_bytes(sum(idle) * GIB)
        text = question(propose("evict_idle", f"/{card}", seen), seen)
        assert text.confirm == f"Evict, freeing {size}" and count in text.lines[0]
        text = question(propose("drain", f"/{card}", seen), seen)
        leave = f"{count} with {size} {'leaves' if len(idle) == 1 else 'leave'} now. "
        rest = "Models in use leave when they are idle."
        assert text.grave and text.lines[1] == f"{leave if idle else ''}{rest}"


@pytest.mark.parametrize(("verb", "card", "words"), [
    ("drain", "cuda:1", "cuda:1 is already drained"),
    ("undrain", "cuda:0", "cuda:0 is not drained"),
    ("compact", "cuda:9", "cuda:9 is no longer a device"),
    ("evict_idle", "cuda:1", "No idle model is on cuda:1"),
])  # fmt: skip
def test_a_card_is_looked_at_again_before_an_action(verb, card, words):
    assert words in changed(propose(verb, f"/{card}", drained), drained)


@pytest.fixture
def two():
    """Two runtimes of one process and one ledger, with models of the same names. `llama` is pinned."""
    book = {"devices": "sim:24GiB,host:64GiB", "ledger": "memory:confirmed"}
    with Runtime(**book) as mine, Runtime(**book) as others:
        for rt in (mine, others):
            rt.register("qwen", backend="fake", size="4GiB")
            rt.register("llama", backend="fake", size="3GiB", keep=True)
            for name in ("qwen", "llama"):
                rt.preload(name)
        yield mine, others


def test_what_a_confirmed_action_does(two):
    """Each verb of a row and of a part, by the other process, whose models have the same names."""
    rt, others = two
    me, other = (one.status().owner.id for one in two)

    def does(verb, target):
        """Carries out the action, and returns where the two models of this runtime are."""
        state, sentence = attempt(others, propose(verb, target, others.status()), "ann")
        assert state == "done", sentence
        leases = list(rt.status().leases())
        assert {one.where for one in leases if one.owner == other} == {"sim:0"}
        return {one.name: one.where for one in leases if one.owner == me}

    assert does("evict", f"{me}/qwen") == {"qwen": "host", "llama": "sim:0"}
    assert does("unpin_evict", f"{me}/llama") == {"qwen": "host", "llama": "host"}
    assert does("restore", f"{me}/qwen")["qwen"] == "sim:0"
    assert "qwen" not in does("drop", f"{me}/qwen")
    others.pin("qwen")
    does("preload", f"{me}/llama")
    assert does("evict_idle", "/sim:0") == {"llama": "host"}
    does("drain", "/sim:0")
    assert rt.status().devices[0].drained.by.startswith("ann")
    does("undrain", "/sim:0")
    assert rt.status().devices[0].drained is None
    does("compact", "/sim:0")


@pytest.mark.parametrize(
    "answer",
    [
        {"side_effect": GpuError("it is used")},
        {"return_value": Outcome("evict", "qwen", False, "it is used")},
    ],
)
def test_a_model_that_is_unpinned_and_stays_is_told_as_such(answer):
    """It was used between the click and the request."""
    rt = MagicMock(**{f"evict.{key}": value for key, value in answer.items()})
    outcome = perform(rt, propose("unpin_evict", at(), idle(keep=True)), "ann")
    assert not outcome.done and outcome.because == "It is no longer pinned. it is used"


def test_an_interrupt_is_confirmed_with_how_long_the_cell_has_run():
    """In the console and in JupyterLab's panel."""
    world = snapshot(lease("qwen", 4))
    section = replace(world.sections[ME.id], busy_since=NOW - 90)
    world = replace(world, sections=world.sections | {ME.id: section})
    asked = question(propose("interrupt", f"{ME.id}/", world), world)
    assert asked.title.startswith("Interrupt train.ipynb") and "90 s" in asked.lines[0]
    assert asked.grave
