"""The HTML that a notebook shows. It is safe, the same each time, and readable without colours."""

import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import CellModels, Health, Level, Outcome, Schedule, ScheduledModel
from gpu_runtime.rendering import answers, html, render, views
from gpu_runtime.units import GIB
from tests.faces.samples import lease, snapshot
from tests.worlds import Share

from . import samples

SHOWN = ("busy", "waiting", "overdraft", "eight", "empty", "registered", "unmeasured", "hostile")
PAGES = {
    **{name: render.shown("status", getattr(samples, name)) for name in SHOWN},
    "plan": render.shown("plan", samples.fits, subject="gemma", around=samples.busy),
    "refused": render.shown("plan", samples.refused, subject="gemma", around=samples.busy),
    "why": render.shown("why", samples.EVENTS, subject="qwen"),
    "why nothing": render.shown("why", (), subject="<i>"),
    "health": render.shown("health", Health(True, Level.LOW, 25.0, "Memory usage normal")),
    "outcome": render.shown("evict", Outcome("evict", "<b>", True, "<script>")),
    "preset": render.shown("config", {"A": "<x>"}),
    "note": render.note("<y>"),
}
VOID = {"br", "img", "hr"}


class Tree(HTMLParser):
    """A parser that collects the tags and fails if a tag is not closed in the right place."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def tree(page: str) -> Tree:
    found = Tree()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_answer_has_text_and_well_formed_html_without_anything_random_or_from_elsewhere(name):
    """Notebooks are read as files and in terminals, compared, and opened without a network."""
    bundle = PAGES[name]._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"} and bundle["text/plain"].strip()
    assert tree(bundle["text/html"]).tags <= {
        "style", "div", "span", "b", "code", "pre", "table", "thead", "tbody", "tr", "th", "td",
        "ol", "li",
    }  # fmt: skip
    page = bundle["text/html"]
    assert page == PAGES[name]._repr_mimebundle_()["text/html"]
    assert not re.search(r"\bid=|<script|https?://|url\(|@import", page)


def test_names_are_escaped_wherever_they_are_shown():
    found = tree(PAGES["hostile"]._repr_mimebundle_()["text/html"])
    assert "img" not in found.tags and "script" not in found.tags
    assert not [value for key, value in found.attributes if key.startswith("on")]
    assert any("<img src=x onerror=alert(1)>" in words for words in found.words)


def test_status_has_labelled_bars_and_a_table_of_holders():
    page = PAGES["busy"]._repr_mimebundle_()["text/html"]
    table = page[page.index('<table class="g-rows"') :]
    cells = [
        re.findall(r"<t[hd]\b.*?</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)
    ]
    assert [[re.sub("<[^>]*>", "", cell).lstrip("■▨▩ ") for cell in row] for row in cells] == [
        ["model", "size", "where", "held by", "importance", "state"],
        ["qwen", "14.0 GiB", "sim:0", "this process", "pinned", "in use for 40 s"],
        ["reranker", "4.0 GiB", "sim:0", "analysis.ipynb (pid 4121), bob", "high", "idle 12 s"],
        ["llama", "8.0 GiB", "RAM", "this process", "", "in RAM, idle 3 min"],
    ]
    assert ("aria-label", "sim:0: qwen 14.0 GiB, reranker 4.0 GiB") in tree(page).attributes
    # JupyterLab removes the style sheet of an untrusted notebook and keeps its inline styles.
    assert page.split("</style>")[1].count("float:left;width:") == 3


def test_style_rules_apply_in_their_own_scope_and_only_those_that_a_page_uses_are_in_it():
    """Other rules would change the style of the user's notebook, which stores them with each output."""
    style = html.style().removeprefix("<style>").removesuffix("</style>")
    css = re.sub(r"@media[^{]*{(.*})}", r"\1", style)
    selectors = [one.strip() for rule in re.findall(r"([^{}]+){", css) for one in rule.split(",")]
    assert len(selectors) > 20 and [one for one in selectors if not one.startswith(".gpuc")] == []
    rules, body = PAGES["busy"]._repr_mimebundle_()["text/html"].split("</style>")
    used, ruled = (set(re.findall(r"\bg-\w[\w-]*", part)) for part in (body, rules))
    assert {name for name in used if f".{name}" in style} <= ruled
    assert len(render.hint("Load one:  %gpu load x")._repr_mimebundle_()["text/html"]) < 1200


@pytest.mark.parametrize("models", [1, 2, 10])
def test_a_status_is_small(models):
    """A notebook's file keeps every output: at most 3 kB, and 0.3 kB for each model."""
    leases = [samples.lease(f"model-{n}", 1.0) for n in range(models)]
    page = answers.status(samples.snapshot(*leases)).html
    assert len(page.encode()) <= 3000 + 300 * models


def test_the_segments_of_a_bar_are_not_longer_than_the_bar():
    """If a device is overdrawn, the scale of its bar grows with the claimed bytes."""
    for name in ("busy", "overdraft", "eight"):
        page = PAGES[name]._repr_mimebundle_()["text/html"]
        bars = page.split('<div class="g-fill"')[1:]
        assert len(bars) == len(getattr(samples, name).devices)
        for bar in bars:
            assert sum(map(float, re.findall(r"float:left;width:([\d.]+)%", bar))) <= 100.02


def test_the_colour_of_a_model_is_always_the_same():
    assert {name: html.look(name) for name in ("qwen", "reranker", "mistral")} == {
        "qwen": ("#e69f00", "#000", "", "■"),
        "reranker": ("#f0e442", "#000", "g-t1", "▨"),
        "mistral": ("#0072b2", "#fff", "g-t1", "▨"),
    }
    for name in ("busy", "waiting", "plan"):
        assert "background-color:#e69f00" in PAGES[name]._repr_mimebundle_()["text/html"]


def test_every_page_shows_that_devices_are_simulated():
    for name in ("busy", "empty", "plan", "refused"):
        bundle = PAGES[name]._repr_mimebundle_()
        assert "simulated" in bundle["text/plain"]
        assert "simulated" in " ".join(tree(bundle["text/html"]).words)
    assert "simulated" not in PAGES["eight"]._repr_mimebundle_()["text/plain"]


def test_an_answer_has_the_attributes_of_its_value():
    """`(%gpu plan gemma).granted` reads the attribute of the plan itself."""
    assert PAGES["plan"].granted and PAGES["plan"].value is samples.fits
    assert [event.model for event in PAGES["why"]] == ["llama", "llama", "qwen", "qwen"]


# -- the schedule of waiting cells -----------------------------------------------------------------
CELLS = (CellModels("cell 4", ("a",), ("a",), True), CellModels("cell 5", ("b", "c"), ("b", "c")))
FULL = Schedule(
    cells=CELLS,
    models=(
        ScheduledModel("a", "cell 4", True, "sim:0"),
        ScheduledModel("b", "cell 5", False, "sim:0", ahead=True),
        ScheduledModel("c", "cell 5", False, "disk", loading=True),
        ScheduledModel("d", "cell 6", False, "sim:0"),
        ScheduledModel("e", "cell 7", False, "host", because="sim:0 has 4.0 GiB free"),
        ScheduledModel("f", "cell 8", False, "disk"),
    ),
    loaded_ahead=5, used=3, unused=1,
)  # fmt: skip


def test_each_model_has_its_first_use_its_place_and_its_state():
    assert answers.schedule(FULL).text.splitlines() == [
        "MODEL  FIRST USE  WHERE  STATE", "a      cell 4     sim:0  used by the running cell",
        "b      cell 5     sim:0  loaded ahead", "c      cell 5     disk   being loaded ahead",
        "d      cell 6     sim:0  on its device",
        "e      cell 7     RAM    not loaded ahead: sim:0 has 4.0 GiB free",
        "f      cell 8     disk   not loaded yet", "Loaded ahead so far: 5; 3 used, 1 not used.",
    ]  # fmt: skip


def test_without_cells_it_says_what_to_do_and_names_are_escaped():
    assert answers.schedule(Schedule()).text == answers.NO_CELL_WAITS
    assert "GPU_PREFETCH=never" in answers.schedule(Schedule("never")).text
    assert "<code>%gpu next</code>" in answers.schedule(Schedule()).html
    evil = Schedule(models=(ScheduledModel("<b>x", "cell 1", False, "disk", because="<i>"),))
    shown = render.shown("next", evil)
    assert set(shown._repr_mimebundle_()) == {"text/plain", "text/html"}
    page = shown._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;x" in page and "&lt;i&gt;" in page and "<b>x" not in page


# -- the hosts of a fleet --------------------------------------------------------------------------
def on(host: str, *leases, **fields):
    return replace(snapshot(*leases, **fields), host=host)


SPLIT = lease("llama", 14)
SPLIT = replace(SPLIT, shares=(Share("sim:0", 14 * GIB), Share("sim:1", 14 * GIB)))
HOSTS = (on("box1", SPLIT, lease("qwen", 4), cards=2), on("a-long-name", cards=1))


def test_each_host_has_one_bar_and_a_model_on_two_cards_is_one_part():
    first, legend, second = answers.fleet(HOSTS).text.splitlines()
    assert first.startswith("box1         █") and "2 cards, simulated" in first
    assert "32.0 GiB of 48.0 GiB" in first
    assert legend.strip() == "█ llama 28.0 GiB  ▓ qwen 4.0 GiB"
    assert second.startswith("a-long-name  ·") and "0 B of 24.0 GiB" in second
    assert all("gpu fleet join" in face for face in answers.fleet(()))
    shown = render.shown("fleet", HOSTS)
    assert "box1" in repr(shown) and "box1" in shown._repr_mimebundle_()["text/html"]


def test_names_from_outside_are_escaped():
    """A host names itself, so its name may be any text."""
    hostile = on("<script>alert(1)</script>\x1b[31m")
    assert "<script>" not in answers.fleet((hostile,)).html
    assert "\x1b" not in answers.fleet((hostile,)).text
    hostile = on('"><script>alert(1)</script>&')
    assert "<script>" not in answers.as_chooser((hostile,), {}, chosen="")


def test_a_chooser_links_each_host_with_its_problems_and_greys_the_last_figures_of_a_silent_one():
    """A link to a host keeps the tab in front."""
    page = answers.as_chooser(HOSTS, {"a-long-name": 0.0}, chosen="box1", tab="What if")
    first, second = re.findall("<tr>.*?</tr>", page)
    assert '<a href="?host=box1&amp;tab=What+if" aria-current="page">box1</a>' in first
    assert "32.0 GiB of 48.0 GiB" in first and "g-old" not in first
    assert "aria-current" not in second and second.count("g-old") == 2
    assert f"no answer since {views.clock(0.0)}" in second
    assert "problem" not in answers.as_chooser(HOSTS, {}, chosen="box1")
    devices = tuple(replace(one, blind="lost") for one in HOSTS[0].devices)
    blind = replace(HOSTS[0], devices=devices)
    assert "<b>3 problems</b>" in answers.as_chooser((blind,), {}, chosen="box1")
