"""Room is made on the card whose models are worth least, whatever their size."""

import pytest

from gpu_runtime.facts import Wait, encode_uses
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import POLICIES
from tests.worlds import NOW, WALL, book, lease, request, world


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_that_was_idle_for_an_hour_leaves_although_the_other_loads_faster(policy):
    """By the seconds of loading, a small model used every minute would leave each time."""
    stale = lease("stale", sim0=18, last_used=NOW - 3600, reload_seconds=60, recent_uses=uses(3600))
    hot = lease("hot", sim1=18, last_used=NOW - 30, reload_seconds=20, recent_uses=uses(30, 60, 90))
    there = world(sim0=20, sim1=20)
    _, verdict = admit(book(stale, hot), request("qwen", 10), there, POLICIES[policy])
    assert isinstance(verdict, Wait)
    assert [step.lease for step in verdict.steps] == [stale.id] or verdict.asked == (stale.id,)
    [chosen, other] = verdict.considered
    assert (chosen.victims, other.victims) == ((stale.id,), (hot.id,))
    assert other.worth > chosen.worth


def uses(*ages: float) -> str:
    return encode_uses([WALL - age for age in ages])
