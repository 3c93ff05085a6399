"""The first figures inside the HTML of the console's page."""

import json
import re
from types import SimpleNamespace

import pytest
from gpu_panels.console import Console
from gpu_panels.poller import Poller
from gpu_panels.widgets import Prose

from gpu_runtime.web.auth import Visitor

from . import samples
from .polling import FixedRuntime

OPERATOR, VIEWER = Visitor("ann", True), Visitor("eve", False)


def console_of(snapshot, visitor=OPERATOR, **more):
    poller = Poller(FixedRuntime(snapshot), start=lambda work: None)
    poller._answered.set()
    if snapshot is not None:
        poller.poll()
    return Console(poller, visitor, **more)


def values(made):
    """The values in the preview of the console `made`, as its script gets them."""
    (text,) = re.findall(r"\}\)\n\((\{.*\}), widgets\)</script>$", made.preview(), re.DOTALL)
    return json.loads(text)


def test_the_preview_has_the_figures_of_the_tab_in_front():
    """Problems are above the tabs. A viewer's preview has no button."""
    made = console_of(samples.snapshot(samples.lease("qwen", 14)))
    shown = values(made)
    assert shown["front"] == "Now" and shown["tabs"] == made._titles and shown["problems"] == []
    assert [part["kind"] for part in shown["parts"]] == ["Prose", "Devices", *["Table"] * 2]
    assert "14.0 of 21.6 GiB" in shown["parts"][1]["values"]["rows"]
    assert "1 simulated GPU" in shown["bar"]["values"]["words"]
    shown = values(console_of(samples.snapshot(), address={"tab": "Models"}))
    assert shown["front"] == "Models" and [part["kind"] for part in shown["parts"]] == ["Table"]
    world = samples.snapshot(samples.lease("qwen", 22))
    [problems] = values(console_of(world))["problems"]
    assert "over its budget" in problems["values"]["rows"]
    world = samples.snapshot(samples.lease("qwen", 14))
    assert '["evict"' in json.dumps(values(console_of(world))).replace("\\", "")
    assert '["evict"' not in json.dumps(values(console_of(world, VIEWER))).replace("\\", "")


@pytest.mark.parametrize("evil", ["</script><b>", "<!--<script>"])
def test_a_name_cannot_end_the_script_of_the_preview(evil):
    world = samples.snapshot(samples.lease(evil, 14))
    text = console_of(world).preview()
    assert text.count("</script>") == 1 and evil not in text
    assert evil in values(console_of(world))["parts"][1]["values"]["rows"]


def test_there_is_no_preview_without_figures_and_none_of_a_fleet():
    """The hosts of a fleet are above the tabs, and the preview does not draw them."""
    assert console_of(None).preview() == ""
    chooser = SimpleNamespace(panel=Prose("box1, box2"), update=lambda poller, title: None)
    world = samples.snapshot(samples.lease("qwen", 14))
    assert console_of(world, chooser=chooser).preview() == ""
