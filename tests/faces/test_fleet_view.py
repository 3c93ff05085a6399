"""The hosts of a fleet, shown as text and as HTML: one bar for each host."""

import re

from msgspec.structs import replace

from gpu_runtime.rendering import html, render, views
from gpu_runtime.units import GIB
from tests.faces.samples import lease, snapshot
from tests.worlds import Share


def on(host: str, *leases, **fields):
    return replace(snapshot(*leases, **fields), host=host)


SPLIT = lease("llama", 14)
SPLIT = replace(SPLIT, shares=(Share("sim:0", 14 * GIB), Share("sim:1", 14 * GIB)))
HOSTS = (on("box1", SPLIT, lease("qwen", 4), cards=2), on("a-long-name", cards=1))


def test_each_host_has_one_bar_and_a_model_on_two_cards_is_one_part():
    first, legend, second = html.fleet_text(HOSTS).splitlines()
    assert first.startswith("box1         █") and "2 cards, simulated" in first
    assert "32.0 GiB of 48.0 GiB" in first
    assert legend.strip() == "█ llama 28.0 GiB  ▓ qwen 4.0 GiB"
    assert second.startswith("a-long-name  ·") and "0 B of 24.0 GiB" in second
    assert "gpu fleet join" in html.fleet_text(())
    assert "gpu fleet join" in html.fleet_html(())
    shown = render.shown("fleet", HOSTS)
    assert "box1" in repr(shown) and "box1" in shown._repr_mimebundle_()["text/html"]


def test_names_from_outside_are_escaped():
    """A host names itself, so its name may be any text."""
    hostile = on("<script>alert(1)</script>\x1b[31m")
    assert "<script>" not in html.fleet_html((hostile,))
    assert "\x1b" not in html.fleet_text((hostile,))
    hostile = on('"><script>alert(1)</script>&')
    assert "<script>" not in html.as_chooser((hostile,), {}, chosen="")


def test_a_chooser_links_each_host_with_its_problems_and_greys_the_last_figures_of_a_silent_one():
    """A link to a host keeps the tab in front."""
    page = html.as_chooser(HOSTS, {"a-long-name": 0.0}, chosen="box1", tab="What if")
    first, second = re.findall("<tr>.*?</tr>", page)
    assert '<a href="?host=box1&amp;tab=What+if" aria-current="page">box1</a>' in first
    assert "32.0 GiB of 48.0 GiB" in first and "g-old" not in first
    assert "aria-current" not in second and second.count("g-old") == 2
    assert f"no answer since {views.clock(0.0)}" in second
    assert "problem" not in html.as_chooser(HOSTS, {}, chosen="box1")
    devices = tuple(replace(one, blind="lost") for one in HOSTS[0].devices)
    blind = replace(HOSTS[0], devices=devices)
    assert "<b>3 problems</b>" in html.as_chooser((blind,), {}, chosen="box1")
