"""How long loads took alone and beside other models: what a load records, and what a plan says."""

from msgspec.structs import replace

from gpu_runtime.facts import Event, Lease, Phase, Share
from gpu_runtime.scheduler.plan import interference
from gpu_runtime.scheduler.transitions import arrived
from gpu_runtime.units import GIB
from tests.worlds import book, lease, owner, world


def load(seconds: float, *beside: str, source: str = "a") -> Event:
    return Event(
        1, 0.0, "qwen", "loaded", "request", "", seconds=seconds, beside=beside, source=source
    )


def arriving(name: str, *, by: int) -> Lease:
    target = (Share("sim:0", 4 * GIB),)
    return replace(lease(name, by=by), shares=(), target=target, phase=Phase.ARRIVING, pins=1)


def test_the_medians_of_both_kinds_are_compared_if_both_were_measured():
    loads = [load(4.0), load(5.0), load(9.0), load(8.0, "llama"), load(12.0, "llama", "phi")]
    assert interference(loads) == "Loads took 5.0 s alone, and 10 s beside llama, phi."
    # A load without a measurement, or from another source, says nothing about the next load.
    assert interference([]) == interference([load(4.0)]) == ""
    assert interference([load(8.0, "llama"), load(0.0)]) == ""
    assert interference([load(4.0, source="old"), load(8.0, "llama")]) == ""


def test_a_load_records_the_models_that_were_in_use_or_arriving_on_its_cards():
    """An idle model reads nothing from the disk and computes nothing. Another card does not count."""
    shares = (Share("sim:0", 4 * GIB),)
    page = book(
        arriving("qwen", by=1),
        arriving("phi", by=2),
        lease("llama", by=2, sim0=4, pins=1),
        lease("idle", by=2, sim0=4),
        lease("elsewhere", by=2, sim1=4, pins=1),
    )
    there = world(sim0=24, sim1=24)
    after = arrived(page, owner(1).id, "qwen", shares, there, reload_seconds=3.0)
    assert after.events[-1].beside == ("llama", "phi")
    alone = page.without_lease(owner(2).id, "llama").without_lease(owner(2).id, "phi")
    after = arrived(alone, owner(1).id, "qwen", shares, there, reload_seconds=3.0)
    assert after.events[-1].beside == ()
