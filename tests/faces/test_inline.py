"""The console as a Panel object in a notebook: where it is live, where it is a picture, and what the file keeps."""

import base64
import gc
import json
import re
import sys
import weakref
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import panel as pn
import pytest
from bokeh.document import Document
from gpu_panels import inline
from gpu_panels.inline import Inline
from panel.io.resources import CDN_DIST

from gpu_runtime import GpuError, NotAllowed
from gpu_runtime.owner import status
from gpu_runtime.rendering import render
from tests.clock import finished

from .test_magics import run


@pytest.fixture
def installed(monkeypatch):
    """Installs the entry point `console`, as the package's metadata declares it."""
    entry = EntryPoint("console", "gpu_panels.inline:Inline", "gpu_runtime")
    ours = {"group": "gpu_runtime", "name": "console"}
    found = lambda **group: [entry] if group == ours else []
    monkeypatch.setattr(status, "entry_points", found)


@pytest.fixture
def shown(rt):
    """A console that is closed after the test."""
    made = Inline(rt)
    yield made
    made._console.close()


def test_the_runtime_and_the_magic_return_the_console_as_a_panel_object(shell, rt, installed):
    for found in (rt.console(), run(shell, "%gpu console")):
        assert isinstance(found, pn.viewable.Viewable) and isinstance(found, Inline)
        assert found._rt is rt
        found._console.close()


def test_without_a_console_the_error_shows_what_to_install(rt, monkeypatch):
    monkeypatch.setattr(status, "entry_points", lambda **_: [])
    with pytest.raises(GpuError, match=r"pip install 'gpu-console\[console\]'"):
        rt.console()

    def load():
        raise error

    entry = SimpleNamespace(load=load, module="gpu_panels.inline")
    monkeypatch.setattr(status, "entry_points", lambda **_: [entry])
    error: ImportError = ModuleNotFoundError("No module named 'panel'", name="panel")
    with pytest.raises(GpuError, match="the console needs panel, which is not installed"):
        rt.console()
    error = ImportError("cannot import name 'push' from 'panel.io'", name="panel.io")  # an old one
    with pytest.raises(GpuError, match="the console cannot load: cannot import name 'push'"):
        rt.console()


def test_a_front_end_without_comms_gets_a_static_picture(shown, rt):
    """A terminal, nbconvert and papermill get text, and HTML without a script."""
    bundle = shown._repr_mimebundle_()
    assert bundle == render.shown("status", rt.status())._repr_mimebundle_()
    assert "<script" not in bundle["text/html"]


@pytest.mark.parametrize(("header", "live"), [
    ({"username": ""}, True), ({"username": "username"}, False), ({"username": "ann"}, False),
    ({}, False),
])  # fmt: skip
def test_only_a_browser_gets_the_live_page(monkeypatch, header, live):
    """The requests of Jupyter's pages do not name a user. The requests of programs that run notebooks do."""
    shell = SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: {"header": header}))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert (inline._browser() is shell) == live


def test_it_cannot_be_served_without_authentication(shown):
    """`rt.console().show()` would open the kernel's console to every user of the machine."""
    with pytest.raises(NotAllowed, match="gpu console"):
        doc = Document()
        doc._session_context = lambda: object()
        shown.get_root(doc)


def test_it_knows_whether_it_shows_objects_of_the_user(shown):
    """The callback of a button that the user has added may read a tensor, which may be parked."""
    assert not shown.has_objects_of_the_user
    shown.append(pn.widgets.Button(name="sum"))
    assert shown.has_objects_of_the_user


def test_a_console_that_was_never_shown_is_freed(rt):
    made = Inline(rt)
    gone = weakref.ref(made), weakref.ref(made._console)
    made._console.close()
    del made
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.processes
def test_every_widget_is_defined_before_a_page_is_shown(child_environment):
    """A notebook's browser cannot resolve a component that was defined after its page was shown."""
    scripts = Path(inline.__file__).with_name("widgets").glob("*.js")
    names = {path.name for path in scripts} - {"first_paint.js"}
    code = (
        "import gpu_panels.inline; from panel.custom import JSComponent as kind;"
        "print(*(one._esm for one in kind.__subclasses__() if one._esm))"
    )
    found = finished([sys.executable, "-c", code], env=child_environment)
    assert names and names - set(found.stdout.split()) == set(), found.stderr


PAGE = (
    '<div id="x" data-root-id="y"></div>\n<script type="application/javascript">'
    "(function(root) {\n  var docs_json = {document};\n"
    "  root.embed(docs_json)\n})(window);</script>"
)
LONG = "x" * (inline.LONG + 1) + '</script><!--"'


def page(document):
    return PAGE.replace("{document}", json.dumps(document).replace("</", "<\\/"))


def test_a_long_text_is_sent_once_and_outside_a_page_of_a_known_format():
    """A later version of Panel may write the page differently. Then the page is large, but still works."""
    long = page({"a": [LONG, "short"], "b": {"esm": LONG}})
    found, texts = inline.split(long, "<p>still</p>")
    (key,) = (key for key, text in texts.items() if text == LONG)
    assert found.count(f'root.gpuc["{key}"]') == 2 and LONG[:50] not in found and '"short"' in found
    assert found.startswith("<div data-gpuc="), "the picture is shown until the page is drawn"
    assert 'document.getElementById("x")' in found, "the page is drawn only when its place exists"
    assert len(found) < 1500
    other = "<div>something else</div>"
    assert inline.split(other, "still") == (other, {})


def test_resources_are_published_once_and_removed_from_the_output():
    """A text cannot end the script element that it is in."""
    published = []

    def publish(data, metadata, transient, update):
        published.append((transient["display_id"], update, data))

    display = SimpleNamespace(publish=publish)
    resources = inline.Resources(SimpleNamespace(display_pub=display))
    resources.publish_texts({"k": LONG})
    resources.clear()
    (id, update, script), (again, updated, data) = published
    assert id == again and (update, updated) == (False, True) and data == {"text/plain": ""}
    assert not re.search("</script>|<!--", script[inline.LOAD])


def test_panels_style_sheets_are_sent_inline():
    """For later changes Panel would use its CDN; without internet a page would have no style."""
    styles = inline.LocalStyles()
    url = f"{CDN_DIST}css/loading.css?v=1"
    assert url in styles and "https://elsewhere/x.css" not in styles
    assert f"{CDN_DIST}../../secret.css" not in styles
    found = styles[url].url
    assert found.startswith("data:text/css;base64,")
    assert b":host" in base64.b64decode(found.partition(",")[2])
    assert styles[url] is styles[url]
