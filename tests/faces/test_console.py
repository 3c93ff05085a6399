"""One session's page, without a browser: what it shows, what a click does, what it costs, and that it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import panel as pn
import pytest
from bokeh.application.handlers.document_lifecycle import _on_session_destroyed
from bokeh.document import Document
from bokeh.models import ImportedStyleSheet
from bokeh.server.session import ServerSession
from gpu_panels import console
from gpu_panels.actions import DONE_SECONDS, MOST_REPORTS
from gpu_panels.console import Console
from gpu_panels.data.confirmations import propose
from gpu_panels.poller import Poller
from gpu_panels.tabs import registry
from gpu_panels.tabs.base import Tab
from gpu_panels.widgets import header
from msgspec.structs import replace
from panel.io.state import set_curdoc, state
from tornado.ioloop import IOLoop

from gpu_runtime import Runtime
from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.web.auth import Visitor

from . import samples


@pytest.fixture(autouse=True)
def light():
    """A page that was toggled leaves Panel's theme so, where there is no session to keep it."""
    yield
    pn.config.theme = "default"


OPERATOR, VIEWER = Visitor("ann", True), Visitor("eve", False)


@pytest.fixture
def poller(rt):
    """Its thread never starts: the test polls."""
    rt.register("qwen", backend="fake", size="14GiB")
    rt.preload("qwen")
    poller = Poller(rt, start=lambda work: None)
    poller.poll()
    poller._answered.set()
    return poller


@pytest.fixture
def waiting_threads():
    """What would run in threads, to be run when the test says so."""
    return []


@pytest.fixture
def page(poller, waiting_threads, monkeypatch):
    only(monkeypatch, "Models")
    made = Console(poller, OPERATOR)
    made.actions._start = waiting_threads.append
    return made


def only(monkeypatch, *titles):
    monkeypatch.setattr(registry, "titles", lambda: list(titles))


def target(poller, name="qwen"):
    return next(lease.id for lease in poller.result.snapshot.leases() if lease.name == name)


def click(page, answer):
    """An answer in the dialog, as a browser sends it."""
    page.actions._form._handle_msg({"answer": answer, "question": page.actions._form.question})


# -- tabs ---------------------------------------------------------------------------------------------------------


class Counted(Tab):
    """A tab that counts what is asked of it."""

    title = "Counted"
    made = updates = 0
    themes: list[bool] = []

    def __init__(self, poller, actions):
        super().__init__(poller, actions)
        type(self).made += 1
        self.panel = pn.pane.HTML("counted")

    def update(self, snapshot):
        type(self).updates += 1

    def dark(self, on):
        self.themes.append(on)


class Failing(Counted):
    title = "Failing"

    def update(self, snapshot):
        raise ZeroDivisionError("division by zero")


@pytest.fixture
def two(poller, monkeypatch):
    Counted.made = Counted.updates = 0
    Counted.themes = []
    only(monkeypatch, "Models", "Counted")
    monkeypatch.setattr(
        registry, "kind", {"Counted": Counted, "Failing": Failing, "Models": Counted}.__getitem__
    )
    monkeypatch.setattr(
        registry,
        "kind",
        lambda title, known=registry.kind: known(title) if title != "Models" else Other,
    )
    return Console(poller, VIEWER)


class Other(Tab):
    title = "Models"

    def __init__(self, poller, actions):
        super().__init__(poller, actions)
        self.panel = pn.pane.HTML("other")


def test_a_tab_that_nobody_looks_at_is_not_even_made(two, poller):
    poller.poll()
    two.tick()
    assert Counted.made == 0
    two._tabs.active = 1
    assert (Counted.made, Counted.updates) == (1, 1)
    two._tabs.active = 0
    updates = Counted.updates
    renew(poller)
    two.tick()
    assert (Counted.made, Counted.updates) == (1, updates), "hidden again, it is left alone"


def test_nothing_is_done_while_nothing_is_new(two, poller):
    two._tabs.active = 1
    updates = Counted.updates
    for _ in range(10):
        two.tick()
    assert Counted.updates == updates


def test_a_tab_takes_the_theme_when_it_is_made_and_when_it_is_toggled(two):
    two._tabs.active = 1
    two.page.dark_theme = True
    assert Counted.themes == [False, True]


def test_a_served_page_takes_the_theme_that_its_browser_wants_and_a_notebooks_does_not_ask(poller):
    """A notebook's page follows the notebook. What a browser says may be anything."""
    served = Console(poller, VIEWER)
    for said, dark in (("dark", True), ({"dark": 1}, True), ("light", False)):
        served.status_bar._handle_msg(said)
        assert served.page.dark_theme is served.status_bar.dark is dark
    assert (
        served.status_bar.chooses
        and not Console(poller, VIEWER, theme_toggle=False).status_bar.chooses
    )


def test_a_tab_that_fails_says_so_and_the_others_go_on(poller, monkeypatch, caplog):
    only(monkeypatch, "Failing", "Counted")
    monkeypatch.setattr(registry, "kind", {"Counted": Counted, "Failing": Failing}.__getitem__)
    made = Console(poller, VIEWER)
    assert (
        "division by zero" in made._holders["Failing"].objects[0].object
        and "Traceback" in caplog.text
    )
    made._tabs.active = 1
    assert Counted.made


def test_every_tab_of_the_table_can_be_made_and_shows_a_busy_an_empty_and_a_strange_box(poller):
    """Whatever the snapshot says: no tab fails on a world that it did not expect."""
    made = Console(poller, OPERATOR)
    for n, title in enumerate(made._titles):
        made._tabs.active = n
        for world in (
            samples.empty,
            samples.busy,
            samples.waiting,
            samples.eight,
            samples.overdraft,
            samples.hostile,
            samples.unmeasured,
            samples.drained,
        ):
            made._update(world)
            assert title in made._made, f"{title} failed: {made._holders[title].objects}"


def renew(poller):
    poller._published_at = -1e9
    poller.poll()


# -- the strip and the banner -------------------------------------------------------------------------------------


def test_the_strip_says_level_box_ledger_and_who_looks():
    said = header.status_html(samples.busy, OPERATOR)
    for words in ("HIGH", "1 simulated GPU", "memory:", "ann · operator"):
        assert words in said
    assert "viewer, read only" in header.status_html(samples.busy, VIEWER)
    assert ">viewer, read only<" in header.status_html(samples.busy, Visitor("viewer", False)), (
        "not: viewer · viewer"
    )


def test_names_in_the_strip_are_escaped():
    said = header.status_html(
        replace(samples.busy, ledger="sqlite:///<img src=x>"), Visitor("<script>", True)
    )
    assert "<img" not in said and "<script>" not in said


def test_a_ledger_that_fails_is_told_above_the_last_figures(page, poller, rt, monkeypatch):
    def fails():
        raise LedgerUnavailable("the disk is full", path="/x")

    monkeypatch.setattr(rt, "status", fails)
    beat = page.status_bar.beat
    poller.poll()
    page.tick()
    assert (
        page._banner.visible
        and "the disk is full" in page._banner.object
        and "No new figures since " in page._banner.object
    )
    assert page.status_bar.beat == beat, (
        "the strip's own clock goes on, and says how old the figures are"
    )
    monkeypatch.undo()
    poller.poll()
    page.tick()
    assert not page._banner.visible and page.status_bar.beat != beat


# -- acting -------------------------------------------------------------------------------------------------------


def test_confirming_does_it_in_a_thread_and_says_what_came_of_it(page, poller, rt, waiting_threads):
    page.actions.propose("evict", target(poller))
    assert page.actions.dialog.open and page.actions.dialog.title == "Evict qwen?"
    click(page, "confirm")
    assert not page.actions.dialog.open and "waiting for" in page.actions.outcomes.object
    assert where(rt) == "sim:0", "the page's own thread does nothing"
    waiting_threads.pop()()
    page.actions.update(None)
    assert (
        where(rt) == "host"
        and "qwen was offloaded to host memory; 14.0 GiB came free" in page.actions.outcomes.object
    )


def test_what_went_well_is_told_for_a_while(page, poller, waiting_threads):
    now = [1000.0]
    page.actions._wall = lambda: now[0]
    page.actions.propose("pin", target(poller))
    click(page, "confirm")
    waiting_threads.pop()()
    page.actions.update(None)
    assert "qwen is kept" in page.actions.outcomes.object
    now[0] += DONE_SECONDS
    page.actions.update(None)
    assert not page.actions.outcomes.visible


def test_what_is_still_waited_for_is_not_pushed_out_by_what_was_asked_since(
    page, poller, waiting_threads
):
    """Its outcome would never be told; a process that does not answer is what an operator must not lose sight of."""
    page.actions.propose("evict", target(poller))
    click(page, "confirm")
    for n in range(MOST_REPORTS + 1):
        page.actions._report(
            propose("pin", target(poller), poller.result.snapshot), "failed", f"no {n}"
        )
    assert (
        "waiting for" in page.actions.outcomes.object and "no 1" not in page.actions.outcomes.object
    )
    waiting_threads.pop()()
    page.actions.update(None)
    assert "14.0 GiB came free" in page.actions.outcomes.object


def where(rt, name="qwen"):
    return next(lease.where for lease in rt.status().leases() if lease.name == name)


def test_evict_on_a_row_evicts_the_model_of_that_row(tmp_path, waiting_threads, monkeypatch):
    """Two runtimes of one process have the same pid, so `qwen@4121` would name both models."""
    only(monkeypatch, "Models")
    ledger = f"sqlite://{tmp_path}/ledger"
    runtimes = [Runtime(devices="sim:24GiB,host:64GiB", ledger=ledger) for _ in range(2)]
    try:
        for each in runtimes:
            each.register("qwen", backend="fake", size="8GiB")
            each.preload("qwen")
        first, second = (each.status().owner.id for each in runtimes)
        poller = Poller(runtimes[0], start=lambda work: None)
        poller.poll()
        poller._answered.set()
        page = Console(poller, OPERATOR)
        page.actions._start = waiting_threads.append
        page.actions.propose("evict", f"{second}/qwen")
        click(page, "confirm")
        waiting_threads.pop()()
        places = {lease.owner: lease.where for lease in runtimes[0].status().leases()}
        assert places == {first: "sim:0", second: "host"}
    finally:
        for each in runtimes:
            each.close()


@pytest.mark.parametrize("answer", ["cancel", "escape"])
def test_cancel_and_escape_change_nothing(page, poller, rt, waiting_threads, answer):
    page.actions.propose("evict", target(poller))
    if answer == "cancel":
        click(page, "cancel")
    else:
        page.actions.dialog.open = False  # as the browser closes it
        click(page, "confirm")
    assert waiting_threads == [] and where(rt) == "sim:0"


def test_a_question_is_answered_once(page, poller, waiting_threads):
    page.actions.propose("evict", target(poller))
    click(page, "confirm")
    click(page, "confirm")
    assert len(waiting_threads) == 1


def test_an_answer_to_another_question_does_nothing(page, poller, waiting_threads):
    """A click that was on its way while the dialog changed."""
    page.actions.propose("pin", target(poller))
    late = page.actions._form.question
    page.actions.propose("evict", target(poller))
    page.actions._form._handle_msg({"answer": "confirm", "question": late})
    assert waiting_threads == [] and page.actions.dialog.open


def test_what_was_confirmed_is_looked_at_once_more_before_it_is_done(
    page, poller, rt, waiting_threads
):
    """Between the click and the confirmation somebody has begun to use it."""
    page.actions.propose("evict", target(poller))
    with rt.use("qwen"):
        click(page, "confirm")
        waiting_threads.pop()()
    page.actions.update(None)
    assert where(rt) == "sim:0" and "is in use now" in page.actions.outcomes.object


def test_what_the_runtime_refuses_is_told_in_its_words(
    page, poller, rt, waiting_threads, monkeypatch
):
    page.actions.propose("evict", target(poller))
    click(page, "confirm")
    monkeypatch.setattr(
        rt,
        "evict",
        lambda *_, **__: (_ for _ in ()).throw(LedgerUnavailable("<b>full</b>", path="x")),
    )
    waiting_threads.pop()()
    page.actions.update(None)
    assert "&lt;b&gt;full" in page.actions.outcomes.object


def test_who_did_it_is_in_the_journal(page, poller, rt, waiting_threads):
    page.actions.propose("evict", target(poller))
    click(page, "confirm")
    waiting_threads.pop()()
    assert rt.why("qwen")[0].by.startswith("ann, console")


def test_a_viewer_has_no_buttons_and_no_dialog_and_a_forged_click_does_nothing(
    poller, rt, waiting_threads, monkeypatch
):
    only(monkeypatch, "Models")
    page = Console(poller, VIEWER)
    assert '"Evict"' not in page._made["Models"].table.rows
    page._made["Models"].table._handle_msg({"verb": "evict", "id": target(poller)})
    click(page, "confirm")
    assert not page.actions.dialog.open and waiting_threads == [] and where(rt) == "sim:0"
    assert page.actions.dialog not in page.actions.panel.objects


def test_whether_they_may_act_is_asked_when_it_is_done(poller, rt, waiting_threads, monkeypatch):
    """A role that was taken away between the question and the answer is no role."""

    class Fickle:
        name, may_act = "ann", True

    only(monkeypatch, "Models")
    visitor = Fickle()
    page = Console(poller, visitor)
    page.actions._start = waiting_threads.append
    page.actions.propose("evict", target(poller))
    visitor.may_act = False
    click(page, "confirm")
    assert waiting_threads == []


def test_an_unknown_verb_is_none(page, poller):
    page.actions.propose("__class__", target(poller))
    assert not page.actions.dialog.open


# -- the end ------------------------------------------------------------------------------------------------------


def test_a_session_that_ends_leaves_nothing_behind(poller, monkeypatch):
    """A thousand of them would."""
    only(monkeypatch, "Models", "Leases", "Queue")
    made = Console(poller, OPERATOR)
    for n in range(3):
        made._tabs.active = n
    gone = weakref.ref(made)
    made.close()
    del made
    gc.collect()
    assert gone() is None and len(poller._sessions) == 0


class Context(SimpleNamespace):
    """What a server keeps of one session."""


@pytest.mark.parametrize("first", ["destroyed", "told"])
def test_a_served_session_leaves_nothing_behind_when_its_browser_has_gone(
    poller, monkeypatch, caplog, first
):
    """Its page with all that was drawn, its callbacks and its place in the poller; also what Panel would keep."""
    only(monkeypatch, "Now", "Models", "Leases", "Queue")
    made = []
    monkeypatch.setattr(console, "Console", lambda *given: made.append(Console(*given)) or made[-1])
    doc, request = Document(), SimpleNamespace(arguments={}, path="/", headers={})
    context = Context(
        id="1",
        _document=doc,
        session=SimpleNamespace(token=""),
        destroyed=False,
        server_context=None,
        request=request,
    )
    doc._session_context = weakref.ref(context)
    with set_curdoc(doc):
        console.page(OPERATOR, poller).server_doc(doc, location=False)
        for n in range(4):
            made[0]._tabs.active = n
    gone = weakref.ref(made.pop())
    loop = IOLoop()  # and the thread's current one: its sleeps are futures of that
    session = ServerSession("1", doc, io_loop=loop)
    assert len(poller._sessions) == 1
    if first == "destroyed":  # as Bokeh's server does; or it shuts down
        session.destroy()
    _on_session_destroyed(context)
    state._destroy_session(context)
    if first == "told":
        session.destroy()
    loop.close()  # a tick that was under way would have let go by itself
    del doc, context, session, loop
    gc.collect()
    assert (
        gone() is None
        and len(poller._sessions) == 0
        and "failed with following error" not in caplog.text
    )


def test_importing_the_package_imports_neither_panel_nor_bokeh(child_environment):
    code = (
        "import sys, gpu_panels, gpu_runtime; print({'panel', 'bokeh', 'torch'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.strip() == "set()", found


def test_the_page_is_the_material_one(page):
    assert type(page.page).__name__ == "Page" and console.TICK_MILLISECONDS <= 500


def test_a_browser_that_took_long_gets_its_styles_from_here_too(poller):
    """Its session is made anew, without a page; Panel would send it to the CDN."""
    from bokeh.document import Document
    from panel.io.resources import LOCAL_DIST
    from panel.io.state import set_curdoc

    document = Document()
    with set_curdoc(document):
        made = console.page(VIEWER, poller)
        root = made.get_root(document)
    assert document.template_variables["dist_url"] == LOCAL_DIST
    sheets = {str(sheet.url) for sheet in root.select({"type": ImportedStyleSheet})}
    assert sheets and not any(url.startswith("http") for url in sheets)
