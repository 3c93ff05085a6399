"""The problems of a host: which conditions are problems, and which are not."""

import itertools

import pytest
from msgspec.structs import replace

from gpu_runtime import DoesNotFit, Runtime
from gpu_runtime.facts import (
    Level,
    Presence,
    ProblemKind,
    ProcessState,
    Rules,
    Share,
    Stranger,
    Ticket,
    problems,
)
from gpu_runtime.owner.status import health
from tests.clock import PATIENCE
from tests.faces.samples import BOB, GIB, ME, NOW, WALL, event, lease, snapshot


def kinds(seen) -> list[str]:
    return [str(problem.kind) for problem in problems(seen)]


def with_views(seen, **changes):
    """The snapshot `seen`, with changed first device."""
    first, *rest = seen.devices
    return replace(seen, devices=(replace(first, **changes), *rest))


def test_a_full_card_is_no_problem_unless_relief_always_empties_it():
    """The Semantik document's rule holds with GPU_RELIEF=always: false at CRITICAL."""
    full = with_views(snapshot(lease("qwen", 21.6)), level=Level.CRITICAL)
    assert kinds(full) == [] and health(full).healthy
    always = replace(full, rules=Rules(relief="always"))
    assert kinds(always) == ["pressure"] and not health(always).healthy
    assert health(always).message.startswith("Memory pressure critical")


def test_a_stopped_process_is_a_problem_while_it_holds_memory():
    stopped = {
        ME.id: Presence(ProcessState.STOPPED),
        BOB.id: Presence(ProcessState.SILENT, NOW - 9),
    }
    found = problems(
        replace(snapshot(lease("qwen", 14), lease("b", 2, owner=BOB)), presences=stopped)
    )
    assert [(p.kind, p.subject, p.bytes, p.wall) for p in found] == [
        (ProblemKind.STOPPED, ME.id, 14 * GIB, 0.0),
        (ProblemKind.SILENT, BOB.id, 2 * GIB, WALL - 9),
    ]
    assert "kill -CONT 4000" in found[0].text
    assert "kill -9 4000" in found[0].text, "SIGTERM waits until the process continues"
    assert [p.actions for p in found] == [
        (("resume", f"{ME.id}/"),),
        (("interrupt", f"{BOB.id}/"),),
    ]
    assert kinds(replace(snapshot(), presences=stopped)) == []


@pytest.mark.parametrize("waited, expected", [(299, []), (300, ["long_wait"])])
def test_a_long_wait_offers_to_unpin_what_is_in_the_way(waited, expected):
    need = (Share("sim:0", 8 * GIB),)
    ticket = Ticket("k", BOB.id, "use", "llama", NOW - waited, NOW, need=need, because="no room")
    seen = snapshot(
        lease("qwen", 14, keep=True), lease("used", 4, pins=1, keep=True), tickets=[ticket]
    )
    found = problems(seen)
    assert [str(problem.kind) for problem in found] == expected
    for problem in found:
        assert problem.actions == (("unpin", f"{ME.id}/qwen"), ("cancel", "k"))
        assert (problem.bytes, problem.wall) == (8 * GIB, WALL - waited)


def test_what_is_said_of_a_card_does_not_depend_on_another_card():
    """Two cards with programs without a lease, and one of them is above its budget."""
    both = snapshot(lease("a", 23, "cuda:0"), lease("b", 2, "cuda:1"), cards=2, simulated=False)
    first, second, host = [replace(one, stranger_bytes=3 * GIB) for one in both.devices]
    programs = [Stranger(card, n, GIB, "eve", "R") for n, card in enumerate(("cuda:0", "cuda:1"))]
    devices = (first, second, host)
    both = replace(both, devices=devices, strangers=tuple(programs))
    alone = [
        replace(both, devices=(card, host), strangers=(program,))
        for card, program in zip((first, second), programs, strict=True)
    ]
    found = [problem for one in alone for problem in problems(one)]
    assert sorted(found, key=str) == sorted(problems(both), key=str) and len(found) == 3
    assert all(problem.subject in problem.text for problem in found)


def left(*models, seconds=0.5):
    """Each model leaves, one a second, and returns with the next event after a move of these `seconds`."""
    gone = [event(2 * n, model, "offloaded", "room", 8) for n, model in enumerate(models)]
    back = [replace(one, action="restored", wall=one.wall + 1, seconds=seconds) for one in gone]
    return [*gone, *back]


def test_two_models_that_evict_one_another_in_turn_are_a_problem():
    found = problems(snapshot(lease("a", 8), events=left("c", "a", "b", "a", "b")))
    assert [problem.subject for problem in found] == [f"sim:0 {ME.id}/a {ME.id}/b"]
    assert found[0].text.endswith("4 × in turn. Moving takes 50 % of the time. Pin one of them."), (
        "one card"
    )
    assert found[0].actions == (("pin", f"{ME.id}/a"),)
    [of_two_cards] = problems(snapshot(lease("a", 8), cards=2, events=left("a", "b", "a", "b")))
    assert of_two_cards.text.endswith("Pin one of them, or use another card for one.")
    for harmless in (left("a", "b", "a"), left("a", "b", "c", "a"), left("a", "a", "b", "b")):
        assert problems(snapshot(events=harmless)) == ()
    for reason in ("evict", "memory_pressure", "drain"):  # no model took the place of the other
        left_alone = [replace(one, reason=reason) for one in left("a", "b", "a", "b")]
        assert problems(snapshot(events=left_alone)) == ()


@pytest.mark.parametrize(("seconds", "is_problem"), [(0.099, False), (0.101, True)])
def test_models_that_take_turns_are_a_problem_if_their_moves_take_a_tenth_of_the_time(
    seconds, is_problem
):
    """Three returns within 6 s, and as many moves away, take 6 × 99 or 6 × 101 ms: less than 0.6 s, or more."""
    assert bool(problems(snapshot(events=left("a", "b", "a", "b", seconds=seconds)))) is is_problem


def refusal(gib: float, kind: str):
    return replace(event(1, "giant", "refused", f"it needs {gib} GiB", gib), reason=kind)


def test_a_refusal_is_a_problem_until_the_model_is_granted_room_and_offers_to_unpin():
    refused = refusal(20, "kept")
    assert kinds(snapshot(events=[refused])) == ["refused"]
    assert kinds(snapshot(events=[refused, event(2, "giant", "granted", "", 8)])) == []
    assert kinds(snapshot(events=[replace(refused, wall=WALL - 601)])) == []
    refused = refusal(20, "kept")
    pinned = lease("qwen", 14, keep=True)
    [found] = problems(snapshot(pinned, lease("llama", 4), events=[refused]))
    assert found.actions == (("unpin", pinned.id),)
    [larger_than_any_card] = problems(snapshot(pinned, events=[refusal(900, "kept")]))
    assert larger_than_any_card.actions == ()


@pytest.mark.parametrize("kind, expected", [
    *((kind, []) for kind in ("hopeless", "nested", "cap", "limit")),
    *((kind, ["refused"]) for kind in ("kept", "precious", "deadlock", "full", "drained")),
])  # fmt: skip
def test_a_request_that_only_its_caller_can_change_is_no_problem_of_the_host(kind, expected):
    """`%%gpu 900GiB`, or a model larger than the card, made the host unhealthy for ten minutes."""
    assert kinds(snapshot(events=[refusal(20, kind)])) == expected


def test_a_real_request_that_can_never_fit_leaves_the_host_healthy():
    """The kind of the refusal is in the event that admission records."""
    with Runtime(devices="sim:24GiB,host:64GiB", ledger="memory:", monitor=False) as rt:
        rt.register("giant", backend="fake", size="40GiB")
        with pytest.raises(DoesNotFit), rt.use("giant"):
            pass
        with pytest.raises(DoesNotFit), rt.lease("900 GiB"):
            pass
        assert [one.action for one in rt.status().events] == ["refused", "refused"]
        assert rt.health().healthy
        rt.register("kept", backend="fake", size="14GiB", keep=True)
        rt.register("second", backend="fake", size="14GiB")
        rt.preload("kept")
        with pytest.raises(DoesNotFit), rt.use("second"):
            pass
        assert kinds(rt.status()) == ["refused"], "unpinning the other model would help"


@pytest.mark.parametrize("seconds, expected", [(5, ["swapping"]), (60, [])])
def test_two_notebooks_at_a_person_s_pace_are_no_problem(seconds, expected):
    """A person who works in two notebooks by turns gets what the turns are for."""
    left_by_turns = [
        replace(
            event(number, "kernel", "offloaded", "x"),
            owner=("1", "2")[number % 2],
            reason="recall",
            wall=WALL - 290 + seconds * number,
        )
        for number in range(4)
    ]
    returned = [
        replace(one, action="restored", wall=one.wall + 2, seconds=1.0) for one in left_by_turns
    ]
    turns = [*left_by_turns, *returned]
    assert kinds(snapshot(events=turns)) == expected


def test_memory_without_a_lease_names_its_programs():
    seen = snapshot(simulated=False, strangers=2.0, processes={999: 2 * GIB})
    [found] = problems(with_views(seen, stranger_bytes=2 * GIB))
    assert (found.kind, found.bytes) == (ProblemKind.UNLEASED, 2 * GIB)
    assert "python3, carol, pid 999" in found.text
    assert kinds(with_views(seen, stranger_bytes=GIB - 1)) == []


def test_a_driver_that_cannot_measure_is_the_first_problem():
    seen = with_views(snapshot(events=[event(1, "x", "refused", "y")]), blind="no recent sample")
    assert kinds(seen) == ["driver_fault", "refused"]
    assert kinds(replace(seen, degraded="the driver is gone"))[0] == "driver_fault"


def test_a_lost_card_names_the_commands_and_another_fault_the_doctor():
    """A reset is advised only for a card that has fallen off the bus."""
    seen = with_views(snapshot(), blind="the last measurement of sim:0 is 40 s old")
    assert problems(seen)[0].text.endswith("gpu doctor")
    for fault in (
        "cuda:3 (NVIDIA H100) does not answer: GPU is lost",
        "card 3 cannot be used: GPU has fallen off the bus",
    ):
        [found] = problems(replace(seen, degraded=fault))
        assert "dmesg | grep Xid" in found.text and "nvidia-smi -r -i 3" in found.text
    held = snapshot(lease("qwen", 14, "cuda:0", owner=BOB), simulated=False)
    [found] = problems(replace(held, degraded="cuda:0 (H100) does not answer: GPU is lost"))
    assert "On it: qwen in analysis.ipynb (pid 4121) of bob 14.0 GiB." in found.text


def test_host_memory_is_low_below_a_twentieth():
    seen = snapshot(host=100)
    card, host = seen.devices
    for used, expected in ((95, []), (96, ["host_memory_low"])):
        views = (card, replace(host, measured_bytes=used * GIB))
        assert kinds(replace(seen, devices=views)) == expected


def test_an_overdraft_offers_to_evict_the_largest_idle_models():
    seen = snapshot(lease("a", 14), lease("b", 9), lease("used", 1, pins=1))
    [found] = problems(seen)
    assert found.kind is ProblemKind.PRESSURE
    assert found.actions == (("evict", f"{ME.id}/a"), ("evict", f"{ME.id}/b"))
    assert (
        "a in train.ipynb (pid 4000) 14.0 GiB, b in train.ipynb (pid 4000) 9.0 GiB and 1 more"
        in found.text
    )
    own = lease("kernel", 23, kind="kernel", owner=BOB)
    [found] = problems(snapshot(own))
    assert found.actions == (("park", own.id),), "an idle notebook leaves too"
    assert "analysis.ipynb (pid 4121) of bob 23.0 GiB" in found.text


def test_a_full_disk_is_a_problem():
    [found] = problems(replace(snapshot(), full_disks=("/var/lib/ledger",)))
    assert (found.kind, found.subject) == (ProblemKind.DISK_FULL, "/var/lib/ledger")
    assert "df -h /var/lib/ledger" in found.text


def test_a_refusal_for_want_of_ram_says_who_fills_it():
    """`exists nowhere else` alone does not say whom to ask."""
    parked = lease("kernel", 30, "host", kind="kernel", owner=BOB)
    seen = snapshot(parked, events=[refusal(20, "precious")])
    [found] = problems(seen)
    assert "2.0 GiB of 32.0 GiB free: analysis.ipynb (pid 4121) of bob 30.0 GiB" in found.text
    assert "kill 4121" in found.text and "hibernate" not in found.text
    stowed = replace(parked, disk_room=parked.bytes)
    [found] = problems(snapshot(stowed, events=[refusal(20, "precious")]))
    assert "gpu hibernate analysis.ipynb" in found.text and "kill" not in found.text
    assert "RAM has" not in problems(snapshot(parked, events=[refusal(20, "kept")]))[0].text


@pytest.fixture
def slow_moves(monkeypatch):
    """Each move takes a second by the clock that measures it. The moves of fakes take no time."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr("gpu_runtime.owner.resident.time.perf_counter", lambda: next(seconds))


def test_a_real_runtime_that_swaps_two_models_has_that_problem(slow_moves):
    """The problem is found from the words of real events. Each of the two models left for the other one twice."""
    rt = Runtime(
        devices="sim:24GiB,host:64GiB", ledger="memory:", monitor=False, eviction_grace_seconds=0
    )
    for name in "ab":
        rt.register(name, backend="fake", size="14GiB")
    for name in "ababa":
        assert rt.health().healthy
        with rt.use(name):
            pass
    [found] = problems(rt.status())
    me = rt._session.me
    assert (found.kind, found.subject) == (ProblemKind.SWAPPING, f"sim:0 {me}/a {me}/b")
    assert rt.health().message == found.text
    rt.close()


def test_two_processes_that_swap_their_models_are_that_problem_too(slow_moves):
    """An eviction for another process is a recall. Such evictions were not counted."""
    settings = {"ledger": "memory:swapping", "eviction_grace_seconds": 0}
    devices = "sim:24GiB,host:64GiB"
    with Runtime(devices=devices, **settings) as one, Runtime(devices=devices, **settings) as other:
        for name, rt in (("a", one), ("b", other)):
            rt.register(name, backend="fake", size="14GiB")
        for _ in range(2):
            for name, rt in (("a", one), ("b", other)):
                with rt.use(name, timeout=PATIENCE):
                    pass
        assert problems(one.status()) == ()
        with one.use("a", timeout=PATIENCE):
            pass
        [found] = problems(one.status())
        assert found.kind is ProblemKind.SWAPPING and "evict one another" in found.text
        pins = {f"{one._session.me}/a", f"{other._session.me}/b"}
        assert found.actions and {verb for verb, _ in found.actions} == {"pin"}
        assert {target for _, target in found.actions} <= pins


def test_two_notebooks_of_plain_code_that_evict_one_another_are_named():
    """The memory of each notebook's own code has the same lease name, so owners tell them apart."""

    def parked(seq, notebook, owner):
        one = event(seq, "kernel", "offloaded", "pid 9 needs room for kernel.", 14)
        one = replace(one, reason="recall", notebook=notebook, owner=owner)
        return one, replace(one, action="restored", seconds=1.0)

    ours, theirs = ("/home/ann/train.ipynb", ME.id), ("/home/bob/tune.ipynb", BOB.id)
    turns = [one for seq in range(4) for one in parked(seq, *(ours if seq % 2 else theirs))]
    [found] = problems(snapshot(events=turns))
    assert found.text == (
        "tune.ipynb of bob and train.ipynb evict one another on sim:0: 4 × in turn. "
        "Moving takes 100 % of the time. Run them one after the other."
    )
    assert found.actions == () and "pin" not in found.text
    same = [one for seq in range(8) for one in parked(seq, *ours)]
    assert problems(snapshot(events=same)) == ()
