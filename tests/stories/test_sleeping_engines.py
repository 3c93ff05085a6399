"""Two engines and one card: they take turns, and none is ended. The engines are stand-ins in processes."""

import logging
import os
import re
import signal
import sys
import threading

import psutil
import pytest

from gpu_runtime import Runtime, samples
from gpu_runtime.backends.engines import backend as engines
from gpu_runtime.backends.engines.recipes import Vllm
from gpu_runtime.facts import HOST, Evidence, Share
from gpu_runtime.owner import registry
from gpu_runtime.rendering import answers
from gpu_runtime.serving.api import openai
from gpu_runtime.serving.gateway import Gateway
from gpu_runtime.units import GIB, MIB, show_seconds
from tests.backends.test_engine_server import alive
from tests.backends.test_engine_sleep import WEIGHTS, charged_in
from tests.backends.test_engine_sleep import place as place
from tests.backends.test_programs import PROGRAM
from tests.clock import PATIENCE, until
from tests.owner.conftest import alongside
from tests.serving.app_client import Exchange
from tests.serving.harness import chat
from tests.serving.loops import until as until_in_loop


@pytest.fixture
def rt(keeper, place, monkeypatch):
    """A runtime whose card has room for one of the models `a` and `b`."""
    monkeypatch.setattr(Vllm, "sleeps", lambda self, device: True)
    found = Evidence(weight_bytes=WEIGHTS, at_load=True)
    monkeypatch.setattr(Vllm, "evidence", lambda self, spec: found)
    with Runtime(devices="sim:6GiB,host:8GiB", ledger=keeper, eviction_grace_seconds=0) as rt:
        for name in "ab":
            rt.register(name, "org/name", backend="vllm", size="4GiB")
        yield rt


def use(rt, name) -> tuple[int, ...]:
    """Uses the model. Returns the pids of its server."""
    with rt.use(name) as served:
        assert served.health()
        return served.pids


def places(rt) -> dict[str, dict[str, int]]:
    """The bytes of each lease on each device."""
    return {one.name: {s.device: s.bytes for s in one.shares} for one in rt.status().leases()}


def test_two_models_take_turns_on_one_card_and_none_is_ended(rt):
    pids = {name: use(rt, name) for name in "ab"}
    assert places(rt) == {"a": {HOST: WEIGHTS}, "b": {"sim:0": 4 * GIB}}
    for name, other in ("ab", "ba", "ab"):
        assert use(rt, name) == pids[name] and all(map(alive, pids[other]))
        assert places(rt) == {name: {"sim:0": 4 * GIB}, other: {HOST: WEIGHTS}}
    totals = rt.status().totals
    assert (totals["loads"], totals["restorations"], totals["unloads"]) == (2, 3, 0)


def test_what_sleeping_engines_keep_on_the_card_is_residue_and_no_byte_counts_twice(
    rt, place, monkeypatch
):
    """An engine that has slept once claims its context as residue from then on, asleep or awake."""
    monkeypatch.setattr(rt.probe, "charged", charged_in(place))
    kept, residue = GIB // 2, []
    for name in "aba":
        use(rt, name)
        residue += [rt.status().devices[0].residue_bytes]
    assert residue == [0, kept, 2 * kept]
    assert places(rt) == {"a": {"sim:0": 4 * GIB - kept}, "b": {HOST: WEIGHTS}}
    rt.evict("b", drop=True)
    assert rt.status().devices[0].residue_bytes == kept


def test_an_engine_ends_if_what_it_keeps_asleep_is_all_that_stands_in_the_way(
    rt, place, monkeypatch
):
    """Both models sleep for the third. The budget of 5.4 GiB lacks 0.35 then, so one of them ends."""
    monkeypatch.setattr(rt.probe, "charged", charged_in(place))
    pids = {name: use(rt, name) for name in "ab"}
    rt.register("c", "org/name", backend="vllm", size="4.75GiB")
    use(rt, "c")
    assert sum(all(map(alive, pids[name])) for name in "ab") == 1
    assert rt.status().devices[0].residue_bytes == GIB // 2
    [gone] = {"a", "b"} - places(rt).keys()
    assert rt.why(gone)[0].action == "unloaded" and "c needs 4.8 GiB" in rt.why(gone)[0].because
    found = next(one for one in rt.why(gone).leavers if one.what == "asleep")
    assert found.frees == (Share("sim:0", GIB // 2),) and found.seconds > 0


def test_an_engine_that_is_awake_ends_if_its_sleep_would_not_free_enough(rt, place, monkeypatch):
    """It has slept before, so what it would keep of the budget of 5.4 GiB is known."""
    monkeypatch.setattr(rt.probe, "charged", charged_in(place))
    pids = use(rt, "a")
    rt.evict("a")
    assert use(rt, "a") == pids
    rt.register("c", "org/name", backend="vllm", size="5.2GiB")
    assert rt.plan("c").granted and use(rt, "c")
    assert not any(map(alive, pids)) and "a" not in places(rt)
    assert rt.status().devices[0].residue_bytes == 0


def test_an_engine_that_sleeps_is_called_asleep_and_why_compares_its_seconds(rt):
    for name in "aba":
        use(rt, name)
    use(rt, "b")
    assert "asleep, idle" in answers.status(rt.status()).text
    first = rt.why("a")[0]
    lease = rt.status().lease(*registry.resolve(rt._session, "a"))
    assert first.action == "asleep" and min(lease.restore_seconds, lease.reload_seconds) > 0
    assert f"wakes in {show_seconds(lease.restore_seconds)} (measured)" in first.because
    assert f"start it in {show_seconds(lease.reload_seconds)} (measured)" in first.because
    assert rt.why("b")[0].action != "asleep"


def test_an_engine_that_does_not_sleep_is_ended_and_says_so_once(rt, place, caplog):
    use(rt, "a")
    (place / "fault").write_text("500")
    use(rt, "b")
    [left] = [event for event in rt.why("a") if event.action in ("unloaded", "offloaded", "lost")]
    assert left.action == "unloaded" and "did not sleep: it answered 500" in left.because
    said = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 1 and "did not sleep" in said[0].getMessage()
    assert places(rt) == {"b": {"sim:0": 4 * GIB}}


@pytest.mark.parametrize(("fault", "said"), [("500", "answered 500"), ("dies", "did not answer")])
def test_an_engine_that_does_not_wake_is_started_cold_and_says_so_once(
    rt, place, caplog, fault, said
):
    first = use(rt, "a")
    use(rt, "b")
    (place / "fault").write_text(fault)
    rt.evict("b", drop=True)
    assert use(rt, "a") != first and not any(map(alive, first))
    # That its server has ended may be noticed before, and is said too.
    left = [event for event in rt.why("a") if event.action != "lost"]
    assert [event.action for event in left[:4]] == ["loaded", "granted", "failed", "granted"]
    assert f"did not wake: it {said}" in left[2].because
    warned = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert ["did not wake" in one.getMessage() for one in warned].count(True) == 1
    assert fault == "dies" or len(warned) == 1
    assert places(rt) == {"a": {"sim:0": 4 * GIB}}


def test_an_engine_that_dies_asleep_gives_its_host_memory_back(rt):
    use(rt, "a")
    use(rt, "b")
    resident = registry.find(rt._session, "a")
    os.kill(resident.engines[1], signal.SIGKILL)
    until(lambda: places(rt) == {"b": {"sim:0": 4 * GIB}})
    assert use(rt, "a")


def test_an_engine_that_sleeps_while_its_card_is_drained_is_started_on_another_one(
    keeper, place, rt
):
    """It wakes on its own card only, which takes no leases."""
    with Runtime(devices="sim:2x6GiB,host:8GiB", ledger=f"{keeper}2") as two:
        two.register("a", "org/name", backend="vllm", size="4GiB")
        pids = use(two, "a")
        [home] = places(two)["a"]
        two.evict("a")
        two.drain(home)
        assert use(two, "a") != pids and not any(map(alive, pids))
        [card] = places(two)["a"]
        assert {home, card} == {"sim:0", "sim:1"}
        assert "its card was drained" in " ".join(event.because for event in two.why("a"))


def test_an_engine_without_room_in_host_memory_is_ended(keeper, rt):
    """It is loaded again from its source. No room is reserved for the cache that it loses."""
    rt._session.limits[HOST] = WEIGHTS - 1
    pids = use(rt, "a")
    use(rt, "b")
    assert places(rt) == {"b": {"sim:0": 4 * GIB}} and not any(map(alive, pids))


async def test_a_call_that_waits_for_a_sleeping_engine_says_that_it_wakes(rt, place, monkeypatch):
    """The answer comes from the same process. Its time is the engine's last waking, not its start."""
    monkeypatch.setattr(openai, "HEADERS_SECONDS", 0.0)
    monkeypatch.setattr(openai, "COMMENT_SECONDS", 0.01)
    pids = use(rt, "a")
    rt.evict("a")
    gateway = Gateway(rt)
    gateway.costs.add_load("a", 40.0)
    gateway.costs.add_load("a", 9.0, from_ram=True)
    (place / "fault").write_text("waits")
    try:
        there = Exchange(rt, gateway, "/v1/chat/completions", chat("a", "hi", stream=True))
        await until_in_loop(lambda: re.search(rb"waking a, \d+ of 9 s", there.sent))
        (place / "fault").unlink()
        await there.done
    finally:
        await gateway.close()
    assert b"data: " in there.sent and use(rt, "a") == pids


def test_by_hand_it_sleeps_wakes_and_moves_to_no_other_card(rt):
    use(rt, "a")
    done = rt.evict("a")
    assert (done.where, done.because) == (HOST, "a sleeps; 4.0 GiB came free")
    assert places(rt) == {"a": {HOST: WEIGHTS}}
    assert rt.restore("a").where == "sim:0" and places(rt) == {"a": {"sim:0": 4 * GIB}}


def test_by_hand_an_engine_that_does_not_sleep_is_unloaded_and_the_answer_says_so(rt, place):
    use(rt, "a")
    (place / "fault").write_text("500")
    done = rt.evict("a")
    assert (done.where, done.because) == ("disk", "a was unloaded; 4.0 GiB came free")
    assert places(rt) == {}


def test_on_a_card_the_driver_shows_what_an_engine_has_given_back(host, driver, place):
    """The next engine gets the room only after the driver shows it. A helper process samples the driver."""
    model, ended = samples.causal_lm(place / "model", size="16 MiB"), threading.Event()

    def show() -> None:
        while not ended.wait(0.05):
            held = {one.name: int(one.read_text()) for one in (place / "held").glob("*[0-9]")}
            listed = ",".join(f"{pid}:{size}" for pid, size in held.items())
            driver.set(_0_processes=listed, _0_total=6 * GIB, _0_free=6 * GIB - sum(held.values()))

    driver.set(_0_total=6 * GIB, _0_free=6 * GIB)
    with alongside(show):
        try:
            kernel = host.kernel()
            for name in "ab":
                words = f"{name!r}, {str(model)!r}, backend='vllm', size='4GiB'"
                assert kernel.evaluate(f"rt.register({words}) and None") is None
            for name in "ab":
                loaded = kernel.evaluate(f"rt.preload({name!r}, timeout={PATIENCE}).where")
                assert loaded == "cuda:0"
                until(lambda: f":{4 * GIB}" in driver.lines.get("0.processes", ""))
            leases = "{one.name: [one.where, one.bytes] for one in rt.status().leases()}"
            found = kernel.evaluate(leases)
            assert found["b"] == ["cuda:0", 4 * GIB] and found["a"][0] == HOST
            assert 0 < found["a"][1] < 20 * 2**20, "its weights, as its files show them"
            assert kernel.evaluate("rt.status().devices[0].residue_bytes") == GIB // 2
            assert kernel.evaluate("rt.status().totals['unloads']") == 0
        finally:
            ended.set()


PROGRAMS = """
models:
  a: &program
    runtime: program
    memory: 96MiB
    command: [{python}, {program}, "{{port}}", "64", {fault}]
    health: /ready
    sleep: /sleep
    wake: /wake
    asleep: /state
  b: *program
"""


@pytest.fixture
def programs(keeper, tmp_path):
    """A runtime with two programs of the catalogue. Its card has room for one."""
    names = {"python": sys.executable, "program": PROGRAM, "fault": tmp_path / "fault"}
    (tmp_path / "models.yaml").write_text(PROGRAMS.format(**names))
    settings = {"eviction_grace_seconds": 0, "gpu_catalog": str(tmp_path / "models.yaml")}
    with Runtime(devices="sim:128MiB,host:1GiB", ledger=keeper, **settings) as rt:
        yield rt


def test_programs_of_the_catalogue_take_turns_and_none_is_ended(programs):
    """The RAM that each keeps is measured, and leased from its first sleep on."""
    pids = {name: use(programs, name) for name in "ab"}
    for name, other in ("ab", "ba", "ab"):
        assert use(programs, name) == pids[name]
        held = places(programs)
        assert held[name] == {"sim:0": 96 * MIB}
        assert abs(held[other][HOST] - psutil.Process(pids[other][1]).memory_info().rss) < 4 * MIB
    totals = programs.status().totals
    assert (totals["loads"], totals["restorations"], totals["unloads"]) == (2, 3, 0)
    assert "asleep, idle" in answers.status(programs.status()).text


def test_a_measured_size_is_that_of_the_whole_engine(rt):
    """The next start would otherwise reserve the weights alone."""
    use(rt, "a")
    assert registry.find(rt._session, "a").measured.resident_bytes == 4 * GIB
    assert engines.ServerBackend.can_move
