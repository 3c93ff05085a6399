"""A snapshot has the free room of each device, so that no view has to calculate it."""

from gpu_runtime.facts import Declared, Level, Sample
from gpu_runtime.units import GIB

from .conftest import fakes, loaded


def test_a_snapshot_tells_what_a_grant_may_spend_and_by_which_rules(runtime):
    rt = runtime(devices="sim:20GiB,host:64GiB", gpu_memory_max_percent=0.9, monitor=False)
    loaded(rt, qwen="8GiB")
    card = rt.status().devices[0]
    assert card.room_bytes == card.limit_bytes - 8 * GIB and card.blind == ""
    assert rt.status().rules.high == 0.80


def test_room_that_cannot_be_seen_is_unknown_and_says_why(runtime, monkeypatch):
    """The driver of this card does not answer. So the room is shown neither as zero nor as free."""
    rt = runtime(monitor=False)
    devices = tuple(
        device if device.is_host else type(device)("cuda:0", device.total_bytes, "card", "GPU-1")
        for device in rt.probe.devices
    )
    monkeypatch.setattr(rt.probe, "devices", devices)
    monkeypatch.setattr(
        rt.probe, "samples", lambda now, fresh=False: {"cuda:0": Sample("cuda:0", now, None)}
    )
    rt._session.limits["cuda:0"] = rt._session.limits["sim:0"]
    card = rt.status().devices[0]
    assert card.room_bytes is None
    assert card.blind == "the driver of cuda:0 does not say how much memory is free"


def test_health_counts_all_cards_and_names_the_fullest(runtime):
    rt = runtime(devices="sim:2x10GiB,host:64GiB", gpu_memory_max_percent=1.0)
    for number, size in enumerate(("1GiB", "9GiB")):
        rt.register(f"m{number}", backend="fake", size=size, devices=(f"sim:{number}",))
        rt.preload(f"m{number}")
    found = rt.health()
    expected = (50.0, "sim:1 90 %", Level.CRITICAL)
    assert (found.used_percent, found.fullest, found.pressure) == expected


def test_what_this_process_can_load_is_shown_as_it_is_now(runtime):
    """Other processes read what was published at the last tick."""
    rt = fakes(runtime(), m="1GiB")
    rt.load("m", size="2GiB")
    assert rt.status().declared[rt._session.me] == {"m": Declared(2 * GIB, 10)}
