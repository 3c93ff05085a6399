"""`drain` from Python: which leases leave at once or later, which users may drain, and how long a drain lasts."""

import contextlib

import pytest

from gpu_runtime.errors import DoesNotFit, NotAllowed, UnknownDevice
from gpu_runtime.ledgers.memory import MemoryLedger
from gpu_runtime.owner import lifetime, requests
from tests.clock import PATIENCE

from .conftest import places


def fake(rt, name, gib=4, **options):
    rt.register(name, backend="fake", size=f"{gib}GiB", **options)
    return rt.preload(name).where


def test_idle_models_leave_at_once_and_come_back_elsewhere(runtime):
    rt = runtime(devices="sim:2x16GiB")
    assert (fake(rt, "a"), fake(rt, "b")) == ("sim:0", "sim:0")
    done = rt.drain("sim:0")
    assert done.done
    assert done.bytes == 8 * 2**30
    assert done.because == "sim:0 is drained: it takes no new lease. 8.0 GiB left it"
    assert places(rt) == {"a": "host", "b": "host"}
    assert rt.preload("a").where == "sim:1"
    assert rt.status().devices[0].drained.by == rt.status().owner.user
    assert rt.why("b")[0].reason == "drain"


def test_of_a_model_on_two_cards_the_bytes_of_the_drained_card_count(runtime):
    """A card may be named by its UUID."""
    rt = runtime(devices="sim:2x6GiB,host:64GiB", gpu_split_margin_mb=0)
    assert fake(rt, "a", 8) == "sim:0,1"
    done = rt.drain("SIM-1")
    assert (done.name, done.bytes, places(rt)) == ("sim:1", 4 * 2**30, {"a": "host"})


def test_what_is_in_use_leaves_when_it_is_idle(runtime):
    rt = runtime(devices="sim:2x16GiB")
    fake(rt, "a")
    with rt.use("a"):
        told = rt.drain("sim:0", timeout=0)
        assert "a (4.0 GiB) is in use" in told.because and "leaves when it is idle" in told.because
        rt.tick()
        assert places(rt) == {"a": "sim:0"}
    rt.tick()
    assert places(rt) == {"a": "host"}


def test_what_is_pinned_stays_and_what_is_new_is_refused(runtime):
    rt = runtime(devices="sim:16GiB")
    fake(rt, "a", keep=True)
    assert "a (4.0 GiB) is pinned and stays until it is unpinned" in rt.drain("sim:0").because
    rt.register("b", backend="fake", size="1GiB")
    with pytest.raises(
        DoesNotFit,
        match=r"sim:0 was drained by .*, and takes nothing new.*\n.*gpu drain sim:0 --undo",
    ):
        rt.preload("b")
    rt.unpin("a")
    rt.tick()
    assert places(rt) == {"a": "host"}


def test_undone_the_card_is_as_before(runtime):
    rt = runtime(devices="sim:16GiB")
    rt.drain("sim:0")
    assert rt.drain("sim:0").because == "sim:0 is drained already"
    assert rt.drain("sim:0", undo=True).because == "sim:0 can be used again"
    assert rt.drain("sim:0", undo=True).because == "sim:0 was not drained"
    assert fake(rt, "a") == "sim:0"
    assert [event.action for event in rt.why("sim:0")] == ["undrained", "drained"]


def test_it_outlives_who_said_so_and_all_owners(runtime, tmp_path):
    ledger = f"keeper://{tmp_path}/ledger"
    terminal = runtime(devices="sim:2x16GiB", ledger=ledger)
    terminal.drain("sim:0")
    terminal.close()
    rt = runtime(devices="sim:2x16GiB", ledger=ledger)
    assert fake(rt, "a") == "sim:1"
    assert rt.plan("1GiB").considered[-1].because.startswith("sim:0 was drained by")


@pytest.mark.parametrize("reasons", [[], ["used"], ["kept"], ["used", "kept"]])
def test_a_drain_waits_for_all_that_may_leave_and_for_nothing_else(
    runtime, shared_book, clock, monkeypatch, reasons
):
    a, b = (runtime(ledger=shared_book, clock=clock, monitor=False) for _ in "ab")
    for name in ("idle", *reasons):
        fake(b, name, keep=name == "kept")
    monkeypatch.setattr(MemoryLedger, "wait", lambda *_: clock.advance(1) or b.tick())
    began = clock.now
    with b.use("used") if "used" in reasons else contextlib.nullcontext():
        done = a.drain("sim:0", timeout=PATIENCE)
    assert done.bytes == 4 * 2**30 and clock.now == began + 1
    assert places(a) == {"idle": "host"} | dict.fromkeys(reasons, "sim:0")


def test_the_owners_of_what_is_there_are_woken(runtime, shared_book):
    """An owner with many neighbours sleeps for up to 12 s."""
    a, b = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    b.register("m", backend="fake", size="4GiB")
    b.preload("m")
    doorbell = b._session.ledger
    while doorbell.wait(0):
        pass
    a.drain("sim:0", timeout=0)
    assert doorbell.wait(0)


def test_a_device_that_there_is_not_is_named(runtime):
    with pytest.raises(
        UnknownDevice, match="no device is called 'sim:7'. This machine has sim:0, sim:1"
    ):
        runtime(devices="sim:2x16GiB").drain("sim:7")
    with pytest.raises(UnknownDevice):
        runtime(devices="sim:16GiB").drain("host")


@pytest.fixture
def as_user(monkeypatch):
    """`as_user(name)` sets the user of the runtimes that are opened from now on. They share one ledger in memory."""

    def become(user):
        def opened(url, **options):
            return MemoryLedger("crowd", notebook=options["notebook"], user=user)

        monkeypatch.setattr(lifetime, "open_ledger", opened)

    return become


def test_where_others_share_the_cards_only_an_operator_drains(
    runtime, tmp_path, as_user, monkeypatch
):
    monkeypatch.setattr(requests, "is_shared", lambda session: True)
    config = tmp_path / "config.toml"
    config.write_text('[operators]\nusers = ["ops"]\n')
    as_user("ann")
    ann = runtime(gpu_config_file=str(config))
    fake(ann, "a")
    with pytest.raises(
        NotAllowed, match="ann may not drain a card: the ledger is shared. Only an operator may"
    ):
        ann.drain("sim:0")
    as_user("ops")
    ops = runtime(gpu_config_file=str(config))
    assert ops.drain("sim:0", timeout=0).done
    with pytest.raises(NotAllowed):
        ann.drain("sim:0", undo=True)
    ann.tick()
    assert places(ann) == {"a": "host"} and ann.status().devices[0].drained.by == "ops"


def test_in_a_ledger_that_vouches_for_nobody_whoever_is_not_alone_must_be_an_operator(
    runtime, as_user
):
    as_user("ann")
    ann = runtime()
    assert ann.drain("sim:0").done and ann.drain("sim:0", undo=True).done
    as_user("bob")
    fake(runtime(), "b")
    with pytest.raises(NotAllowed, match="bob use it too"):
        ann.drain("sim:0")
