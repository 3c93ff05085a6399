"""What a click stands for, what is asked before it is done, and what is noticed when things have changed meanwhile."""

from __future__ import annotations

import pytest
from gpu_panels.data.confirmations import Proposal, changed, propose, question
from msgspec.structs import replace

from gpu_runtime.facts import LeaseId, Phase

from .samples import BOB, HOST, ME, NOW, lease, snapshot


def idle(**more):
    return snapshot(lease("qwen", 14, **{"last_used": NOW - 200, **more}))


def at(name="qwen", owner=ME):
    return f"{owner.id}/{name}"


def test_a_click_is_resolved_to_one_lease_of_one_owner():
    """Two processes may hold a model of the same name."""
    both = snapshot(lease("qwen", 14), lease("qwen", 4, owner=BOB))
    assert propose("evict", at(owner=BOB), both) == Proposal(
        "evict", at(owner=BOB), "sim:0", 4 * 2**30, BOB.pid
    )
    assert propose("evict", at(owner=BOB), both).subject == LeaseId(BOB.id, "qwen")
    assert propose("preload", "/catalogued", both).subject == "catalogued"


def test_an_eviction_is_asked_with_the_model_the_bytes_who_has_it_and_what_becomes_of_it():
    asked = propose("evict", at(), idle(restore_seconds=2.5))
    assert question(asked, idle(restore_seconds=2.5)) == (
        "Evict qwen?",
        (
            "This frees 14.0 GiB on sim:0.",
            "Held by train.ipynb (pid 4000), ann, idle for 3 min. It is not in use.",
            "It is offloaded to host memory if there is space. Its next use restores it automatically, "
            "in about 2.5 s.",
        ),
        "Evict, freeing 14.0 GiB",
        True,
    )


@pytest.mark.parametrize("verb", ["evict", "restore", "pin", "unpin"])
def test_every_question_names_the_model_its_bytes_and_the_person(verb):
    """Whoever looks: who was let in may be another person than who serves the page."""
    world = snapshot(lease("qwen", 14, HOST if verb == "restore" else "sim:0", owner=BOB))
    asks = question(propose(verb, at(owner=BOB), world), world)
    assert "qwen" in asks.title
    for words in ("analysis.ipynb (pid 4121), bob", "14.0 GiB"):
        assert words in " ".join(asks.lines)


def test_of_what_is_not_loaded_it_is_said_whether_its_size_is_known():
    world = snapshot()
    asks = question(propose("preload", "/catalogued", world), world)
    assert asks.lines[:2] == (
        "It is not loaded, and its size is not known here.",
        "It is loaded to a device by a process that can load it.",
    )


def test_of_a_model_that_cannot_be_moved_it_is_said_that_it_is_loaded_anew():
    world = idle(movable=False, reload_seconds=20.0)
    assert "unloaded" in question(propose("evict", at(), world), world).lines[-1]
    assert "in about 20 s" in question(propose("evict", at(), world), world).lines[-1]


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("preload", "Idle models are evicted"),
        ("restore", "Idle models are evicted"),
        ("pin", "no other model can evict it"),
        ("unpin", "it is evicted when other models need the memory"),
        ("defrag", "returns cached blocks"),
    ],
)
def test_every_other_verb_says_what_it_will_do(verb, words):
    asks = question(propose(verb, at(), idle()), idle())
    assert words in " ".join(asks.lines) and asks.confirm and not asks.grave


@pytest.mark.parametrize("verb", ["evict", "pin", "defrag"])
def test_what_is_as_it_was_may_be_done(verb):
    asked = propose(verb, at(), idle())
    assert changed(asked, replace(idle(), now=NOW + 60)) == ""


def test_a_model_that_is_on_disk_may_be_preloaded():
    world = idle()
    world = replace(
        world,
        sections={**world.sections, BOB.id: replace(world.sections[BOB.id], names=("llama",))},
    )
    assert changed(propose("preload", at("llama", BOB), world), world) == ""
    assert changed(propose("preload", "/catalogued", world), world) == "", (
        "the runtime itself says who could load it"
    )


@pytest.mark.parametrize(
    ("verb", "then", "words"),
    [
        ("evict", snapshot(), "no longer holds it"),
        ("evict", idle(pins=1), "qwen is in use now"),
        ("evict", snapshot(lease("qwen", 14, HOST)), "qwen is on host now, not on sim:0"),
        ("evict", idle(phase=Phase.LEAVING), "qwen is already leaving"),
        ("pin", idle(keep=True), "qwen is already pinned"),
        ("unpin", idle(), "qwen is already not pinned"),
        ("defrag", replace(snapshot(), sections={}), "The process that held qwen has ended"),
        ("evict", replace(snapshot(), sections={}), "The process that held qwen has ended"),
        ("evict", snapshot(lease("qwen", 14, owner=BOB)), "no longer holds it"),
    ],
)
def test_what_has_changed_since_the_click_is_said_and_nothing_is_done(verb, then, words):
    """The last: another owner has it now, and the click was not about theirs."""
    told = changed(propose(verb, at(), idle()), then)
    assert words in told and told.endswith("Nothing was done.")


def test_names_that_could_steer_a_terminal_are_made_visible():
    world = snapshot(lease("a\x1b[31m\nb", 4))
    assert "\x1b" not in str(question(propose("evict", at("a\x1b[31m\nb"), world), world))
