"""The console as a Panel object over a notebook's own runtime: where nothing can be live, and what it leaves."""

from __future__ import annotations

import base64
import gc
import json
import weakref
from types import SimpleNamespace

import panel as pn
import pytest
from bokeh.document import Document
from gpu_panels import inline, inline_assets
from gpu_panels.inline import Inline
from panel.io.resources import CDN_DIST

from gpu_runtime import GpuError, NotAllowed
from gpu_runtime.owner import console_hook
from gpu_runtime.rendering import render

from .test_magics import run


@pytest.fixture
def installed(monkeypatch):
    """As the package's metadata has it."""
    entry = SimpleNamespace(load=lambda: Inline)
    monkeypatch.setattr(
        console_hook,
        "entry_points",
        lambda **group: [entry] if group == {"group": "gpu_runtime", "name": "console"} else [],
    )


@pytest.fixture
def shown(rt):
    made = Inline(rt)
    yield made
    made._console.close()


def test_the_runtime_gives_its_console_as_a_panel_object(rt, installed):
    found = rt.console()
    assert isinstance(found, pn.viewable.Viewable)
    found._console.close()


def test_without_a_console_it_says_what_to_install(rt, monkeypatch):
    monkeypatch.setattr(console_hook, "entry_points", lambda **_: [])
    with pytest.raises(GpuError, match=r"pip install 'gpu-console\[console\]'"):
        rt.console()


def test_where_panel_is_missing_it_names_what_is_missing(rt, monkeypatch):
    def load():
        raise ImportError("No module named 'panel'", name="panel")

    monkeypatch.setattr(console_hook, "entry_points", lambda **_: [SimpleNamespace(load=load)])
    with pytest.raises(GpuError, match="the console needs panel, which is not installed"):
        rt.console()


def test_the_magic_gives_the_same(shell, rt, installed):
    found = run(shell, "%gpu console")
    assert isinstance(found, Inline) and found._rt is rt
    found._console.close()


def test_a_front_end_without_comms_is_shown_a_picture_of_the_moment(shown, rt):
    """A terminal, nbconvert, papermill: text, and HTML without a script."""
    bundle = shown._repr_mimebundle_()
    assert bundle == render.shown("status", rt.status())._repr_mimebundle_()
    assert "<script" not in bundle["text/html"]


@pytest.mark.parametrize(
    ("header", "live"),
    [
        ({"username": ""}, True),
        ({"username": "username"}, False),
        ({"username": "ann"}, False),
        ({}, False),
    ],
)
def test_only_a_browser_is_shown_it_live(monkeypatch, header, live):
    """Jupyter's pages name no user in their requests; whoever runs notebooks from Python does."""
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: {"header": header}))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert (inline._browser() is shell) == live


def test_it_is_served_to_nobody_without_asking_who_they_are(shown):
    """`rt.console().show()` would open the kernel's own console to everybody on the machine."""
    with pytest.raises(NotAllowed, match="gpu console"):
        doc = Document()
        doc._session_context = lambda: object()
        shown.get_root(doc)


def test_what_was_never_shown_leaves_nothing_behind(rt):
    made = Inline(rt)
    gone = weakref.ref(made), weakref.ref(made._console)
    made._console.close()
    del made
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# -- what stays in the notebook's file ----------------------------------------------------------------------------

PAGE = (
    '<div id="x" data-root-id="y"></div>\n<script type="application/javascript">(function(root) {\n  var docs_json = {document};\n'
    "  root.embed(docs_json)\n})(window);</script>"
)
LONG = "x" * (inline_assets.LONG + 1) + '</script><!--"'


def page(document):
    return PAGE.replace("{document}", json.dumps(document).replace("</", "<\\/"))


def test_a_long_text_is_said_once_and_outside_the_page():
    found, texts = inline_assets.split(
        page({"a": [LONG, "short"], "b": {"esm": LONG}}), "<p>still</p>"
    )
    (key,) = (key for key, text in texts.items() if text == LONG)
    assert found.count(f'root.gpuc["{key}"]') == 2 and LONG[:50] not in found and '"short"' in found
    assert found.startswith("<div data-gpuc="), "the picture is there until the page is"
    assert 'document.getElementById("x")' in found, "and that is not before its place is there"
    assert len(found) < 1500


def test_texts_cannot_end_the_script_that_they_are_in():
    shown = []
    publisher = SimpleNamespace(publish=lambda data, *_, **__: shown.append(data))
    resources = inline_assets.Resources(SimpleNamespace(display_pub=publisher))
    resources.publish_texts({"k": LONG})
    assert (
        "</script>" not in shown[0][inline_assets.LOAD]
        and "<!--" not in shown[0][inline_assets.LOAD]
    )


def test_a_page_that_is_made_otherwise_is_left_as_it_is():
    """A later Panel may write it in another way: then it is large, and works."""
    assert inline_assets.split("<div>something else</div>", "still") == (
        "<div>something else</div>",
        {},
    )


def test_what_a_browser_has_taken_is_taken_out_of_the_output():
    published = []
    shell = SimpleNamespace(
        display_pub=SimpleNamespace(
            publish=lambda data, metadata, transient, update: published.append(
                (transient["display_id"], update, data)
            )
        )
    )
    resources = inline_assets.Resources(shell)
    resources.publish_texts({"k": "text"})
    resources.clear()
    (id, update, _), (again, updated, data) = published
    assert id == again and (update, updated) == (False, True) and data == {"text/plain": ""}


def test_panels_own_styles_come_with_the_page():
    """Panel names its CDN where a part of the page changes later: without internet a page without style."""
    styles = inline_assets.LocalStyles()
    url = f"{CDN_DIST}css/loading.css?v=1"
    assert (
        url in styles
        and "https://elsewhere/x.css" not in styles
        and f"{CDN_DIST}../../secret.css" not in styles
    )
    found = styles[url].url
    assert found.startswith("data:text/css;base64,") and b":host" in base64.b64decode(
        found.partition(",")[2]
    )
    assert styles[url] is styles[url]
