"""One look at the devices, as a line of their history."""
from __future__ import annotations

from gpu_runtime.facts import Level, Moment, Share
from gpu_runtime.moments import moments_of
from gpu_runtime.pressure import views
from gpu_runtime.units import GIB
from tests.worlds import WALL, book, lease, world


def test_a_moment_says_who_claims_what_of_a_device():
    """Two processes may hold models of one name; a model on its way counts where it lies and where it goes."""
    page = book(lease("a", sim0=4), lease("a", by=2, sim0=8),
                lease("b", by=2, sim1=1, target=(Share("sim:0", GIB),)))
    there = world(sim0=20, sim1=20, host=64)
    zero, one, host = moments_of(views(page, there), page.sections.values(), WALL)
    assert zero == Moment(WALL, "sim:0", 20 * GIB, 20 * GIB, 13 * GIB, Level.MODERATE,
                          claims={"a@1": 4 * GIB, "a@2": 8 * GIB, "b@2": GIB})
    assert (one.claims, host.claims) == ({"b@2": GIB}, {})
    assert (zero.claimed_bytes, zero.peak_bytes) == (13 * GIB, 13 * GIB)


def test_what_nobody_leased_is_what_was_measured_beyond_the_claims():
    page, there = book(lease("a", cuda0=4)), world(cuda0=20, free={"cuda:0": 10})
    card, _ = moments_of(views(page, there), page.sections.values(), WALL)
    assert (card.measured_bytes - card.claimed_bytes, card.peak_bytes) == (6 * GIB, 10 * GIB)


def test_a_driver_that_will_not_say_leaves_a_gap_and_no_zero():
    page, there = book(lease("a", cuda0=4)), world(cuda0=20, free={"cuda:0": None})
    card, _ = moments_of(views(page, there), page.sections.values(), WALL)
    assert (card.measured_bytes, card.peak_bytes) == (None, 4 * GIB)
