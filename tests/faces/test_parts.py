"""A model in parts is shown with its bytes on the card and in host memory, by the same words everywhere."""

from gpu_panels.data import confirmations, devices, whatif
from gpu_panels.data.rows import models
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Lease, Move, Phase, Share
from gpu_runtime.rendering import answers, render, views
from gpu_runtime.serving.api import memory
from gpu_runtime.units import GIB

from . import samples

SHARES = (Share("sim:0", 24 * GIB), Share(HOST, 16 * GIB))
BIG = Lease(
    samples.ME.id, "big", shares=SHARES, piece_bytes=GIB, last_used=samples.NOW - 60, uses=1
)
SHOWN = samples.snapshot(BIG, gib=40.0)
WORDS = "24.0 of 40.0 GiB on sim:0, 16.0 GiB in RAM"


def test_every_face_says_how_many_bytes_are_where():
    """The console offers both ways. The question before an eviction names only the bytes on the card."""
    assert WORDS in answers.status(SHOWN).text and WORDS in str(SHOWN)
    [found] = render.status(SHOWN)["leases"]
    assert found["shares"] == {"sim:0": 24 * GIB, HOST: 16 * GIB}
    [row] = memory.models(SHOWN)
    assert row["shares_mb"] == {"sim:0": 24 * 1024, HOST: 16 * 1024}
    assert (row["location"], row["device"], row["memory_mb"]) == ("gpu", "sim:0 + host", 40 * 1024)
    [row] = models(SHOWN)
    assert row.cells[1].text == WORDS
    assert [button.label for button in row.buttons] == ["Restore", "Evict", "Pin"]
    for verb, line in (
        ("evict", "This frees 24.0 GiB on sim:0."),
        ("restore", f"It has {WORDS}."),
    ):
        proposal = confirmations.propose(verb, BIG.id, SHOWN)
        assert confirmations.question(proposal, SHOWN).lines[0] == line
    [card, host] = devices.bars(SHOWN)
    assert [(one.title, one.bytes) for one in card.segments] == [("big", 24 * GIB)]
    assert [(one.title, one.bytes) for one in host.segments] == [("big", 16 * GIB)]
    assert f"24.0 GiB: {WORDS}" in card.segments[0].tooltip


def test_only_the_part_that_leaves_is_hatched():
    going = replace(
        BIG, shares=(Share("sim:0", 40 * GIB),), target=(Share(HOST, 3 * GIB),), phase=Phase.LEAVING
    )
    [card, _] = devices.bars(samples.snapshot(going, gib=40.0))
    assert [(one.bytes, one.kind) for one in card.segments] == [
        (37 * GIB, "settled"),
        (3 * GIB, "leaving"),
    ]


def test_what_if_shows_the_part_that_would_leave():
    whole = samples.snapshot(replace(BIG, shares=(Share("sim:0", 40 * GIB),)), gib=40.0)
    out = Move(BIG.id, (Share("sim:0", 3 * GIB),), (Share(HOST, 3 * GIB),))
    plan = replace(samples.fits, steps=(out,), name="new", victims=(BIG.id,))
    then = views.after(whole, plan.steps)
    [lease] = then.leases()
    assert lease.shares == (Share("sim:0", 37 * GIB), Share(HOST, 3 * GIB))
    sizes = [bar.used_bytes for bar in views.bars_after(whole, plan.steps)]
    assert sizes == [37 * GIB, 3 * GIB]
    assert "big (3.0 GiB of 40.0 GiB)" in whatif.evicted(plan, whole)[0]
