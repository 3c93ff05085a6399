"""The record of decisions: their reasons, the other candidates, and the person or process that requested them."""

from functools import partial

import pytest

from gpu_runtime import Busy, DoesNotFit, NotAllowed, StillInUse
from gpu_runtime.owner import requests
from tests.clock import PATIENCE, until

from .conftest import fakes, loaded, together


def told(rt, action):
    return [(event.model, event.by) for event in rt.status().events if event.action == action]


# -- grants, waits and refusals -----------------------------------------------------------------------------------
def test_every_decision_says_why_and_what_else_was_considered(runtime, tmp_path):
    two = dict(
        devices="sim:2x20GiB,host:64GiB",
        gpu_memory_max_percent=1.0,
        ledger=f"keeper://{tmp_path}/ledger",
        eviction_grace_seconds=0.2,
        policy="lru",
    )
    other, rt = runtime(**two), runtime(**two)
    fakes(other, a="12GiB", b="15GiB")
    fakes(rt, c="18GiB", huge="100GiB")
    other.preload("a")
    other.preload("b")
    with other.use("a"), other.use("b"), pytest.raises(Busy):
        rt.preload("c", timeout=0.1)
    rt.preload("c", timeout=PATIENCE)
    with pytest.raises(DoesNotFit):
        rt.preload("huge")
    other.decisions()  # writes its part of the journal, which its monitor otherwise does within a second
    refused, *granted, waiting, b, a = rt.decisions()
    assert [(e.model, e.action) for e in (refused, granted[0], waiting, b, a)] == [
        ("huge", "refused"),
        ("c", "granted"),
        ("c", "waiting"),
        ("b", "granted"),
        ("a", "granted"),
    ]
    assert all(event.because for event in rt.decisions())
    assert b.runners_up == ("sim:0: has 8.0 GiB free, 7.0 GiB too little.",)
    assert waiting.runners_up == ("sim:1: has 5.0 GiB free, 13.0 GiB too little.",)
    # If the two pins are published one after the other, only one card can be emptied at that moment.
    others = {"sim:1: b would be evicted, and should stay longer."}
    assert set(granted[0].runners_up) <= others


def test_what_else_was_considered_is_kept_out_of_the_page(runtime):
    """All processes read the page, so the journal has the other candidates, and is read only on request."""
    rt = loaded(runtime(devices="sim:8x20GiB,host:64GiB"), a="12GiB")
    [granted] = [event for event in rt.status().events if event.action == "granted"]
    assert granted.runners_up == () and len(rt.decisions()[0].runners_up) == 7
    # and one event is told once
    assert [event.action for event in rt.why("a")] == ["loaded", "granted"]


# -- who asked ----------------------------------------------------------------------------------------------------
@pytest.fixture
def two(runtime, shared_book):
    """A kernel that holds a model, and a console in another process."""
    kernel, console = runtime(ledger=shared_book), runtime(ledger=shared_book)
    loaded(kernel, qwen="10GiB")
    return kernel, console


def test_what_a_console_asks_is_told_with_the_person_before_it(two):
    """Each visitor of the console acts in a thread of their own, so the event names the right visitor."""
    kernel, console = two
    process = f"{console.status().owner.user}, {console.status().owner.label}"
    ann = f"ann, console ({process})"
    with console.on_behalf_of("ann, console"):
        for verb in (console.pin, console.unpin, console.evict, console.preload):
            verb("qwen")
    console.pin("qwen")
    until(lambda: len(told(kernel, "asked")) == len(told(kernel, "pin")) + 3 == 5)
    assert told(kernel, "asked") == [("qwen", ann)] * 4 + [("qwen", process)]
    assert told(kernel, "offloaded") == [("qwen", ann)]
    until(lambda: told(kernel, "preload") == [("qwen", ann)])
    assert told(kernel, "unpin") == [("qwen", ann)] and told(kernel, "pin")[0] == ("qwen", ann)


def test_what_is_done_in_a_notebook_for_somebody_is_told_as_well(runtime):
    rt = fakes(runtime(devices="sim:2x24GiB,host:64GiB"), qwen="10GiB")
    ann = f"ann ({rt.status().owner.user}, {rt.status().owner.label})"
    with rt.on_behalf_of("ann"):
        rt.preload("qwen")
        for verb in (rt.pin, rt.unpin, rt.evict, rt.restore):
            verb("qwen")
        rt.move("qwen", "sim:1" if rt.leases()["device"][0] == "sim:0" else "sim:0")
        rt.defrag()
        rt.drain("sim:0")
    by = {event.action: event.by for event in rt.status().events}
    assert {
        by[action] for action in ("preload", "pin", "unpin", "offloaded", "moved", "defrag")
    } == {ann}
    assert by["drained"] == f"ann ({rt.status().owner.user})"
    assert rt.status().devices[0].drained.by == by["drained"]


def test_what_a_notebook_does_for_itself_has_nobody_else_to_name(runtime):
    rt = loaded(runtime(), qwen="10GiB")
    rt.pin("qwen")
    assert {event.by for event in rt.status().events} == {""}
    assert "pin" not in {event.action for event in rt.status().events}


def test_what_was_asked_in_vain_is_told(two):
    kernel, console = two
    with kernel.use("qwen"), console.on_behalf_of("ann"), pytest.raises(StillInUse):
        console.evict("qwen")
    [(model, by)] = told(kernel, "declined")
    assert model == "qwen" and by.startswith("ann (")


def test_what_may_not_even_be_asked_is_told(two, monkeypatch):
    kernel, console = two
    monkeypatch.setattr(requests, "refusal_of_request", lambda *_: "ann may not")
    with console.on_behalf_of("ann"), pytest.raises(NotAllowed):
        console.pin("qwen")
    [(_, by)] = told(kernel, "declined")
    assert by.startswith("ann (") and console._session.ledger.read().tickets == ()


def test_two_visitors_who_act_at_once_are_not_mixed_up(two):
    kernel, console = two
    fakes(kernel, llama="2GiB", phi="2GiB")

    def click(name, model):
        with console.on_behalf_of(name):
            console.preload(model)

    together(partial(click, "ann", "llama"), partial(click, "ben", "phi"))
    who = {model: by.split(" ")[0] for model, by in told(kernel, "asked")}
    assert who == {"llama": "ann", "phi": "ben"}
