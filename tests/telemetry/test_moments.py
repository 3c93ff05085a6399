"""A moment is one line of a device's history. These tests check its content and which moments are kept."""

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import Level, Moment, Section, Share
from gpu_runtime.scheduler.capacity import views
from gpu_runtime.telemetry.recorder import ChangeFilter, moments_of
from gpu_runtime.units import GIB
from tests.worlds import WALL, book, lease, owner, world


def test_a_moment_lists_the_claims_on_a_device():
    """A model that moves counts on both devices. Two runtimes of one process have one label."""
    twin = owner(1, serial=2)
    page = book(
        lease("a", sim0=3),
        lease("a", by=2, sim0=8),
        lease("b", by=2, sim1=1, target=(Share("sim:0", GIB),)),
    )
    page = page.with_section(Section(twin, (replace(lease("a", sim0=1), owner=twin.id),)))
    devices = world(sim0=20, sim1=20, host=64)
    zero, one, host = moments_of(views(page, devices), page.sections.values(), WALL)
    claims = {"a@1": 4 * GIB, "a@2": 8 * GIB, "b@2": GIB}
    sizes = (20 * GIB, 20 * GIB, 13 * GIB)
    assert zero == Moment(WALL, "sim:0", *sizes, Level.MODERATE, claims=claims)
    assert (one.claims, host.claims) == ({"b@2": GIB}, {})
    assert (zero.claimed_bytes, zero.peak_bytes) == (13 * GIB, 13 * GIB)


@pytest.mark.parametrize(
    ("free", "measured", "peak"), [(10, 10 * GIB, 10 * GIB), (None, None, 4 * GIB)]
)
def test_what_the_driver_tells_is_measured_and_a_driver_without_an_answer_leaves_a_gap(
    free, measured, peak
):
    page, devices = book(lease("a", cuda0=4)), world(cuda0=20, free={"cuda:0": free})
    card, _ = moments_of(views(page, devices), page.sections.values(), WALL)
    assert (card.claimed_bytes, card.measured_bytes, card.peak_bytes) == (4 * GIB, measured, peak)


# Which moments are kept


def moment(wall, measured=4, device="cuda:0", **fields):
    return Moment(wall, device, 20 * GIB, 18 * GIB, int(measured * GIB), Level.LOW, **fields)


def test_while_nothing_changes_a_moment_is_kept_once_in_a_while():
    changes = ChangeFilter(30.0)
    kept = [one.wall for wall in range(0, 100, 2) for one in changes.select([moment(float(wall))])]
    assert kept == [0, 30, 60, 90]


@pytest.mark.parametrize(
    "measured, kept",
    [
        ([4, 4, 4, 9, 9], [(0, 4), (4, 4), (6, 9)]),
        ([4, 4, 9, 14, 14, 4], [(0, 4), (2, 4), (4, 9), (6, 14), (8, 14), (10, 4)]),
    ],
)
def test_the_last_moment_before_a_change_is_kept_once_so_that_the_chart_shows_a_step(
    measured, kept
):
    changes = ChangeFilter(30.0)
    told = [moment(2.0 * number, size) for number, size in enumerate(measured)]
    found = [one for each in told for one in changes.select([each])]
    assert [(one.wall, one.measured_bytes // GIB) for one in found] == kept


FIGURES = dict(utilisation_percent=20.0, temperature_celsius=60.0, power_watts=100.0)
NOISE = dict(utilisation_percent=5.0, temperature_celsius=2.0, power_watts=10.0)
NOISE["measured_bytes"] = GIB // 20


def is_kept(before, **change):
    changes = ChangeFilter(30.0)
    changes.select([before])
    return bool(changes.select([replace(before, wall=2.0, **change)]))


@pytest.mark.parametrize("figure", NOISE)
def test_a_measured_figure_is_kept_if_it_changes_by_more_than_noise(figure):
    """A figure that the driver gives no longer, or again, is a change too."""
    before = moment(0.0, **FIGURES)
    value = getattr(before, figure)
    steps = [int(sign * part * NOISE[figure]) for sign in (1, -1) for part in (1, 1.5)]
    assert [is_kept(before, **{figure: value + step}) for step in steps] == [False, True] * 2
    unknown = replace(before, **{figure: None})
    assert [is_kept(before, **{figure: None}), is_kept(unknown, **{figure: value})] == [True] * 2
    assert not is_kept(unknown)


@pytest.mark.parametrize(
    "change",
    [dict(total_bytes=1), dict(limit_bytes=1), dict(level=Level.HIGH), dict(claims={"a@1": 1})],
)
def test_any_change_of_what_the_book_says_is_kept(change):
    assert is_kept(moment(0.0), **change)


def test_noise_is_no_change_and_drift_is():
    """Figures are compared with the last moment that was kept, not with the last moment that was measured."""
    changes = ChangeFilter(1000.0)
    changes.select([moment(0.0, power_watts=100.0)])
    noise = [moment(float(n), power_watts=100.0 + n % 3) for n in range(1, 20)]
    assert not any(changes.select([one]) for one in noise)
    assert any(changes.select([moment(20.0 + n, power_watts=100.0 + 3 * n)]) for n in range(1, 5))


def test_a_clock_that_was_put_back_does_not_stop_the_record():
    """Nothing was recorded until the clock was where it had been, perhaps for hours."""
    changes = ChangeFilter(30.0)
    walls = [7200.0, *range(0, 100, 2)]
    assert [one.wall for wall in walls for one in changes.select([moment(float(wall))])] == [
        7200, 0, 30, 60, 90,
    ]  # fmt: skip


def test_bytes_on_a_disk_are_in_no_moment():
    """The timeline drew a hibernated notebook in RAM, and the host's row its bytes as used."""
    parked = replace(lease("kernel", host=5), kind="kernel", disk_bytes=3 * GIB)
    page, devices = book(parked), world(sim0=20, host=64)
    *_, host = moments_of(views(page, devices), page.sections.values(), WALL)
    assert (host.claims, host.peak_bytes) == ({"kernel@1": 2 * GIB}, 2 * GIB)


def test_each_device_is_filtered_for_itself():
    changes = ChangeFilter(30.0)
    changes.select([moment(0.0), moment(0.0, device="cuda:1")])
    kept = changes.select([moment(2.0), moment(2.0, 9, device="cuda:1")])
    assert [one.device for one in kept] == ["cuda:1"]
