"""The stop button at random instructions, on a real ledger, in a process of its own: nothing is leaked.

python -m tests.stories.test_storms URL INTERRUPTS SEED
"""

import gc
import json
import random
import signal
import sys
import time
from collections.abc import Callable

import pytest

from gpu_runtime import Runtime, StillInUse
from gpu_runtime.units import GIB
from tests import soak
from tests.clock import PATIENCE

from .kernels import counted, kind

DEVICES = "sim:16GiB,host:16GiB"
HELD = {"here": 9, "there": 9, "small": 3}  # GiB; the first two do not fit beside each other


def storm(url: str, wanted: int, seed: int) -> dict[str, int]:
    """Sends `wanted` interrupts, and returns how often each action was done. Raises AssertionError for every leak."""
    dice = random.Random(seed)
    whole = {"gpu_memory_max_percent": 1.0, "cpu_memory_max_percent": 1.0}
    rt = Runtime(devices=DEVICES, ledger=url, eviction_grace_seconds=0, **whole)
    for name, size in HELD.items():
        rt.register(name, backend="fake", size=f"{size}GiB")
    deeds: dict[str, Callable[[], object]] = {
        "use": lambda: used(rt, dice.choice(list(HELD))),
        "nested": lambda: nested(rt),
        "lease": lambda: leased(rt),
        "evict": lambda: rt.evict(dice.choice(list(HELD))),
        "preload": lambda: rt.preload(dice.choice(list(HELD)), timeout=PATIENCE),
        "pin": lambda: (rt.pin("small"), rt.unpin("small")),
        "status": rt.status,
    }
    done = dict.fromkeys([*deeds, "interrupts", "looks"], 0)
    last: BaseException | None = None
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    while done["interrupts"] < wanted or not all(map(done.get, deeds)):
        name = dice.choice(list(deeds))
        seconds = dice.choice([0.0001, 0.0005, 0.002]) * dice.uniform(0.2, 2)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                # An interrupt can be lost, because the interpreter ignores it in a destructor.
                until = time.monotonic() + 0.05
                while time.monotonic() < until:
                    deeds[name]()
                    done[name] += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt as error:  # also one that arrives before the timer is stopped
            last = error  # noqa: F841 - kept, frames and all, as a notebook keeps its last error
            done["interrupts"] += 1
        except StillInUse:
            assert name == "evict"  # the eviction met a step that an interrupted use had started
        if name == "pin":
            rt.unpin("small")  # an interrupted `pin` may have been done, and stays done
        if done["interrupts"] % 250 == 0:
            done["looks"] += 1
            look_for_leaks(rt)
    look_for_leaks(rt)
    rt.close()
    assert not rt.probe.used()["sim:0"] and not rt.probe.used()["host"]
    with Runtime(devices=DEVICES, ledger=url, monitor=False) as other:
        assert not other._session.ledger.read().sections
    return done


def used(rt: Runtime, name: str) -> None:
    with rt.use(name, timeout=PATIENCE) as model:
        held = {share.device: share.bytes for share in model.place[0]}
        assert held == {"sim:0": HELD[name] * GIB}, f"{name} is used where it is not: {held}"


def nested(rt: Runtime) -> None:
    with rt.use("here", timeout=PATIENCE), rt.use("small", timeout=PATIENCE):
        pass


def leased(rt: Runtime) -> None:
    with rt.lease("5GiB", purpose="work", timeout=PATIENCE):
        pass


def look_for_leaks(rt: Runtime) -> None:
    """After all moves and a publication: nothing pinned, leased or requested, and each model's real place."""
    keeper = rt._session
    deadline = time.monotonic() + PATIENCE
    while why := leaks(rt):
        assert time.monotonic() < deadline, why
        keeper.ledger.ring([keeper.me])
        time.sleep(0.01)


def leaks(rt: Runtime) -> str:
    gc.collect()
    keeper = rt._session
    book = keeper.ledger.read()
    pins = [resident.spec.name for resident in keeper.residents.values() if resident.pins]
    truth = {
        resident.spec.name: resident.lease.shares
        for resident in keeper.residents.values()
        if resident.handle
    }
    places = {name: keeper.residents[name].handle.place[0] for name in truth}
    said = {lease.name: lease.shares for lease in book.leases()}
    unsettled = [
        lease.name
        for lease in book.leases()
        if lease.target or lease.pins or lease.key and not lease.shares
    ]
    keys = list(keeper.keys.texts())
    held: dict[str, int] = {"sim:0": 0, "host": 0}
    for shares in places.values():
        for share in shares:
            held[share.device] += share.bytes
    blocks = [name for name, (_, anchor) in list(keeper.blocks.items()) if anchor() is not None]
    problems = {
        "pinned": pins,
        "blocks": blocks,
        "unsettled": unsettled,
        "keys": keys,
        "tickets": [ticket.key for ticket in book.tickets],
        "the book says otherwise": said != truth and (said, truth),
        "models are not where they are said to be": places != truth and (places, truth),
        "bytes of nobody": rt.probe.used() != held and (rt.probe.used(), held),
    }
    return str({what: found for what, found in problems.items() if found} or "")


def test_a_storm_of_interrupts_leaves_nothing_behind(ledger):
    interrupts = {"keeper": 3000, "redis": 500}[kind(ledger)]
    done = counted("test_storms", ledger, interrupts, 1)
    assert all(done.values()), done


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_long_storm_of_interrupts_leaves_nothing_behind(ledger, seed):
    done = counted("test_storms", ledger, 10_000, seed)
    assert all(done.values()), done
    soak.add(kind(ledger), interrupts=done["interrupts"])


if __name__ == "__main__":
    print(json.dumps(storm(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
