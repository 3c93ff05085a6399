"""The HTML that a notebook shows. It is safe, the same each time, and readable without colours."""

import re
from html.parser import HTMLParser

import pytest

from gpu_runtime.facts import Health, Level, Outcome
from gpu_runtime.rendering import html, render

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
        ["llama", "8.0 GiB", "RAM", "this process", "", "warm, idle 3 min"],
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
    page = html.status(samples.snapshot(*leases))
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
