"""The page of one session, without a browser: what it shows, what a click does, and how it ends."""

import gc
import json
import threading
import weakref
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import parse_qsl

import panel as pn
import pytest
from bokeh.application.handlers.document_lifecycle import _on_session_destroyed
from bokeh.document import Document
from bokeh.document.events import ModelChangedEvent
from bokeh.models import ImportedStyleSheet
from bokeh.server import session as bokeh_session
from bokeh.server.session import ServerSession
from gpu_panels import console, tabs
from gpu_panels.actions import DONE_SECONDS, FAILED_SECONDS, MOST_REPORTS
from gpu_panels.console import Console
from gpu_panels.data.confirmations import propose
from gpu_panels.data.rows import FirstSeen, problem_rows
from gpu_panels.poller import Poller
from gpu_panels.tabs import Tab
from gpu_panels.widgets import Prose, status_html
from msgspec.structs import replace
from panel.io.resources import LOCAL_DIST
from panel.io.state import set_curdoc, state
from tornado.ioloop import IOLoop

from gpu_runtime import alerts
from gpu_runtime.errors import DoesNotFit, LedgerUnavailable
from gpu_runtime.facts import problems
from gpu_runtime.web.auth import Visitor

from . import samples


@pytest.fixture(autouse=True)
def reset_theme():
    """Outside a session, a changed theme would stay for the next test."""
    yield
    pn.config.theme = "default"


OPERATOR, VIEWER = Visitor("ann", True), Visitor("eve", False)


@pytest.fixture
def poller(rt):
    """A poller whose thread never starts. The test calls its polls itself."""
    rt.register("qwen", backend="fake", size="14GiB")
    rt.preload("qwen")
    poller = Poller(rt, start=lambda work: None)
    poller.poll()
    poller._answered.set()
    return poller


@pytest.fixture
def waiting_threads():
    """The functions that the console would run in threads. The test runs them itself."""
    return []


@pytest.fixture
def page_of(poller, waiting_threads, monkeypatch):
    """A function that returns the page of a visitor, with the single tab Models."""
    only_tabs(monkeypatch, "Models")

    def page_of(visitor):
        made = Console(poller, visitor)
        made.actions._start = waiting_threads.append
        return made

    return page_of


@pytest.fixture
def page(page_of):
    """The page of an operator."""
    return page_of(OPERATOR)


def only_tabs(monkeypatch, *titles):
    """Limits the console to the tabs with these titles."""
    monkeypatch.setattr(tabs, "titles", lambda member="": list(titles))


def target(poller, name="qwen"):
    """The id of a model's row in the table."""
    return next(lease.id for lease in poller.result.snapshot.leases() if lease.name == name)


def click(page, answer, question=0):
    """Answers the open dialog or an earlier question, as a browser does."""
    form = page.actions._form
    form._handle_msg({"answer": answer, "question": question or form.question})


def confirmed(page, poller, verb="evict"):
    page.actions.propose(verb, target(poller))
    click(page, "confirm")


def carried_out(page, waiting_threads):
    """Runs the thread of the action, and shows its outcome."""
    waiting_threads.pop()()
    page.actions.update(None)
    return page.actions.outcomes.object


class CountingTab(Tab):
    """A tab that counts its calls."""

    title = "Counted"
    made = updates = 0

    def __init__(self, poller, actions):
        super().__init__(poller, actions)
        type(self).made += 1
        self.panel = pn.pane.HTML("counted")

    def update(self, snapshot):
        type(self).updates += 1


class FailingTab(CountingTab):
    """A tab whose update fails."""

    title = "Failing"

    def update(self, snapshot):
        raise ZeroDivisionError("division by zero")


@pytest.fixture
def two_tabs(poller, monkeypatch):
    """A console with an empty tab in front and a CountingTab behind it."""
    CountingTab.made = CountingTab.updates = 0
    only_tabs(monkeypatch, "Models", "Counted")
    kinds = {"Counted": CountingTab, "Models": EmptyTab}
    monkeypatch.setattr(tabs, "TABS", kinds)
    return Console(poller, VIEWER)


class EmptyTab(Tab):
    """A tab that shows nothing."""

    title = "Models"

    def __init__(self, poller, actions):
        super().__init__(poller, actions)
        self.panel = pn.pane.HTML("other")


def test_a_tab_is_made_when_it_is_first_opened_and_updated_with_news_while_in_front(
    two_tabs, poller
):
    """Other tabs cost nothing."""
    poller.poll()
    two_tabs.tick()
    assert CountingTab.made == 0
    two_tabs._tabs.active = 1
    for _ in range(10):
        two_tabs.tick()
    assert (CountingTab.made, CountingTab.updates) == (1, 1), "nothing is new"
    two_tabs._tabs.active = 0
    poll_again(poller)
    two_tabs.tick()
    assert (CountingTab.made, CountingTab.updates) == (1, 1), "it is not in front"


def test_a_served_page_takes_the_theme_of_its_browser_and_one_in_a_notebook_does_not(poller):
    """A browser may send any message as its theme."""
    served = Console(poller, VIEWER)
    for text, dark in (("dark", True), ({"dark": 1}, True), ("light", False)):
        served.status_bar._handle_msg(text)
        assert served.page.dark_theme is served.status_bar.dark is dark
    assert served.status_bar.chooses
    assert not Console(poller, VIEWER, theme_toggle=False).status_bar.chooses


def test_the_failure_of_one_tab_is_shown_there_and_the_others_work(poller, monkeypatch, caplog):
    only_tabs(monkeypatch, "Failing", "Counted")
    kinds = {"Counted": CountingTab, "Failing": FailingTab}
    monkeypatch.setattr(tabs, "TABS", kinds)
    made = Console(poller, VIEWER)
    assert "division by zero" in made._holders["Failing"].objects[0].object
    assert "Traceback" in caplog.text
    made._tabs.active = 1
    assert CountingTab.made


def test_every_tab_can_show_every_sample_snapshot(poller):
    made = Console(poller, OPERATOR)
    for n, title in enumerate(made._titles):
        made._tabs.active = n
        assert tabs.TABS[title].title == title
        for world in (
            samples.empty, samples.busy, samples.waiting, samples.eight, samples.overdraft, samples.hostile,
            samples.unmeasured, samples.drained,
        ):  # fmt: skip
            made._update(world)
            assert title in made._made, f"{title} failed: {made._holders[title].objects}"


def poll_again(poller):
    """Polls once and publishes the result even if nothing changed."""
    poller._published_at = -1e9
    poller.poll()


def in_a_session():
    """A document whose browser has not drawn the page yet, and the changes that are sent to it."""
    document, sent = Document(), []
    session = SimpleNamespace(_subscribed_connections=[])
    request = SimpleNamespace(arguments={}, cookies={}, headers={})
    document._session_context = lambda: SimpleNamespace(session=session, id="1", request=request)
    document.on_change(sent.append)
    state._thread_id_[document] = threading.get_ident()
    return document, sent


@pytest.mark.parametrize("delivered", [True, False])
def test_a_change_before_the_browser_has_drawn_the_page_is_sent(delivered):
    """Panel discards it. If Panel sends it one day, `deliver_early_changes` can be removed."""
    document, sent = in_a_session()
    with set_curdoc(document):
        words = Prose("before")
        document.add_root(words.get_root(document))
        if delivered:
            console.deliver_early_changes(document)
        sent.clear()
        words.show("after")
    assert any(isinstance(event, ModelChangedEvent) for event in sent) is delivered


def test_a_tick_changes_nothing_while_the_browser_still_draws_the_page(two_tabs, poller):
    """The first tick after the page is drawn shows the newest figures."""
    document, _ = in_a_session()
    poll_again(poller)
    with set_curdoc(document):
        two_tabs.tick()
        before = two_tabs.status_bar.beat
        state._loaded[document] = True
        two_tabs.tick()
    assert before != two_tabs.status_bar.beat == poller.result.revision


def test_the_url_leads_to_the_tab_and_what_is_chosen_there(poller):
    """The URL that the page sets opens the same view again. Default values are not in the URL."""
    first = Console(poller, VIEWER)
    first._tabs.active = first._titles.index("Timeline")
    first._made["Timeline"].chart._handle_msg({"start": 1_763_640_000, "end": 1_763_640_900.4})
    assert first.status_bar.address == "tab=Timeline&range=Custom&span=1763640000-1763640900"
    again = Console(poller, VIEWER, address=dict(parse_qsl(first.status_bar.address)))
    assert list(again._made) == ["Timeline"], "no other tab is made"
    tab = again._made["Timeline"]
    assert (tab.window.value, tab.span.value) == ("Custom", "1763640000-1763640900")
    tab.window.value = "2 h"
    assert again.status_bar.address == "tab=Timeline&range=2+h&span=1763640000-1763640900"
    again._tabs.active = 0
    assert again.status_bar.address == ""


@pytest.mark.parametrize(
    "address", [{"tab": "<script>"}, {"tab": "Timeline", "range": "x"}, {"range": "1e9 y"}]
)
def test_an_unknown_value_in_the_url_is_ignored(poller, address):
    page = Console(poller, VIEWER, address=address)
    [(title, tab)] = page._made.items()
    assert title == ("Timeline" if address.get("range") == "x" else "Now") and tab.address() == {}


def test_the_status_bar_shows_problems_devices_ledger_and_visitor():
    text = status_html(samples.busy, OPERATOR)
    for words in ("No problems", "1 simulated GPU", "memory:", "ann · operator"):
        assert words in text
    assert "viewer, read only" in status_html(samples.busy, VIEWER)
    role = status_html(samples.busy, Visitor("viewer", False))
    assert ">viewer, read only<" in role, "the role is not written twice"
    hostile = replace(samples.busy, ledger="keeper:///<img src=x>")
    text = status_html(hostile, Visitor("<script>", True))
    assert "<img" not in text and "<script>" not in text


def test_a_problem_is_shown_above_the_tabs_until_it_is_untrue(page, poller, rt):
    assert not page._problems.visible
    rt.pin("qwen")  # 14 of 24 GiB
    rt.register("giant", backend="fake", size="20GiB")
    with pytest.raises(DoesNotFit):
        rt.preload("giant")
    poller.poll()
    page.tick()
    assert page._problems.visible and "giant needs" in page._problems.rows
    assert "1 problem" in page.status_bar.words
    rt.forget("giant")
    poller.result = poller.result._replace(snapshot=samples.busy, revision=99)
    page.tick()
    assert not page._problems.visible


def test_a_button_of_a_problem_opens_the_dialog_of_its_lease(page, poller):
    """The button's text names the verb and the lease. A browser may send any text, so the text is checked."""
    page._problems._handle_msg({"verb": f"pin {target(poller)}", "id": "swapping sim:0"})
    assert page.actions.dialog.open and page.actions.dialog.title == "Pin qwen?"
    page.actions.dialog.open = False
    for forged in ("", "exec x", f"delete {target(poller)}"):
        page._problems._handle_msg({"verb": forged, "id": "x"})
    assert not page.actions.dialog.open


def test_a_problem_is_acknowledged_and_silenced_if_somebody_is_told(
    page, poller, rt, tmp_path, monkeypatch
):
    """Without destinations there are no such buttons. What a browser sends is checked."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    full = replace(poller.result.snapshot, full_disks=("/var",))
    [name] = map(alerts.name_of, problems(full))

    def shown():
        full_again = replace(full)
        poller.result = poller.result._replace(
            snapshot=full_again, revision=poller.result.revision + 1
        )
        page.tick()
        [row] = json.loads(page._problems.rows)
        return row[1][0][0], [label for _, label, _ in row[2]]

    assert shown()[1] == []
    (tmp_path / "gpu-console").mkdir()
    (tmp_path / "gpu-console/alerts.txt").touch()
    assert shown()[1] == ["Acknowledge", "Silence 1 h"]
    page._problems._handle_msg({"verb": f"ack {name}", "id": "x"})
    page._problems._handle_msg({"verb": f"silence {name}", "id": "x"})
    text, labels = shown()
    assert "Acknowledged by ann at" in text and "Silenced by ann until" in text
    assert labels == ["End silence"] and not page.actions.dialog.open
    page._problems._handle_msg({"verb": f"end {name}", "id": "x"})
    assert shown()[1] == ["Silence 1 h"]
    for forged in ("ack ../x", "silence <b>", "end nothing"):
        page._problems._handle_msg({"verb": forged, "id": "x"})
    assert "no problem is called" in page.actions.outcomes.object
    page.actions.visitor = VIEWER
    page._problems._handle_msg({"verb": f"silence {name}", "id": "x"})
    assert not alerts.read_state().silenced, "a viewer may not"


def test_a_problem_without_a_known_begin_is_shown_since_it_was_first_seen():
    seen = samples.overdraft
    first = FirstSeen()
    rows = problem_rows(seen, first)
    later = problem_rows(replace(seen, wall=seen.wall + 60), first)
    assert [row.cells[1] for row in rows] == [row.cells[1] for row in later]
    problem_rows(samples.empty, first)
    assert first.times == {}, "a problem that is over is forgotten"


@pytest.mark.parametrize(
    ("seconds_before", "word"), [(None, "before"), (3600.0, "before"), (2.0, "")]
)
def test_a_beginning_that_no_snapshot_saw_is_shown_as_before(seconds_before, word):
    """The page may be opened an hour after a process was stopped."""
    seen, first = samples.overdraft, FirstSeen()
    if seconds_before is not None:
        problem_rows(replace(samples.empty, wall=seen.wall - seconds_before), first)
    assert {row.cells[1].text for row in problem_rows(seen, first)} == {word}


def test_a_failing_ledger_is_reported_above_the_last_figures(page, poller, rt, monkeypatch):
    """The browser's clock goes on and shows the age of the figures."""
    full = Mock(side_effect=LedgerUnavailable("the disk is full", path="/x"))
    monkeypatch.setattr(rt, "status", full)
    beat = page.status_bar.beat
    poller.poll()
    page.tick()
    assert page._banner.visible and "the disk is full" in page._banner.object
    assert "No new figures since " in page._banner.object and page.status_bar.beat == beat
    monkeypatch.undo()
    poller.poll()
    page.tick()
    assert not page._banner.visible and page.status_bar.beat != beat


def test_a_confirmed_action_runs_in_a_thread_and_its_outcome_is_shown(
    page, poller, rt, waiting_threads
):
    """The journal names the visitor."""
    page.actions.propose("__class__", target(poller))
    assert not page.actions.dialog.open, "an unknown verb opens no dialog"
    page.actions.propose("evict", target(poller))
    assert page.actions.dialog.open and page.actions.dialog.title == "Evict qwen?"
    click(page, "confirm")
    assert not page.actions.dialog.open and "waiting for" in page.actions.outcomes.object
    assert where(rt) == "sim:0", "the thread of the page does not act"
    outcome = carried_out(page, waiting_threads)
    assert "qwen was offloaded to RAM; 14.0 GiB came free" in outcome
    assert where(rt) == "host" and rt.why("qwen")[0].by.startswith("ann, console")


def test_a_successful_outcome_is_shown_for_some_seconds(page, poller, waiting_threads):
    now = [1000.0]
    page.actions._wall = lambda: now[0]
    confirmed(page, poller, "pin")
    carried_out(page, waiting_threads)
    assert "qwen is pinned" in page.actions.outcomes.object
    now[0] += DONE_SECONDS
    page.actions.update(None)
    assert not page.actions.outcomes.visible


def test_an_action_in_progress_stays_on_the_page_after_newer_ones(page, poller, waiting_threads):
    """Its outcome would never be shown, and an owner that does not answer overlooked."""
    confirmed(page, poller)
    pin = propose("pin", target(poller), poller.result.snapshot)
    for n in range(MOST_REPORTS + 1):
        page.actions._report(pin, "failed", f"no {n}")
    assert "waiting for" in page.actions.outcomes.object
    assert "no 1" not in page.actions.outcomes.object
    carried_out(page, waiting_threads)
    assert "14.0 GiB came free" in page.actions.outcomes.object


def test_a_failed_outcome_is_closed_or_leaves_by_itself(page, poller):
    now = [1000.0]
    page.actions._wall = lambda: now[0]
    pin = propose("pin", target(poller), poller.result.snapshot)
    for closed in (True, False):
        page.actions._report(pin, "failed", "no such model")
        assert page.actions.outcomes.visible and page.actions.close.visible
        if closed:
            page.actions.close.clicks += 1
        else:
            now[0] += FAILED_SECONDS
            page.actions.update(None)
        assert not page.actions.outcomes.visible and not page.actions.close.visible


def where(rt, name="qwen"):
    """The place of the model, as the runtime reports it."""
    return next(lease.where for lease in rt.status().leases() if lease.name == name)


def test_only_the_first_confirmation_of_the_open_question_acts(page, poller, rt, waiting_threads):
    """A click may arrive when the dialog is closed, or already shows another question."""
    page.actions.propose("evict", target(poller))
    click(page, "cancel")
    page.actions.propose("evict", target(poller))
    page.actions.dialog.open = False  # by Escape
    click(page, "confirm")
    page.actions.propose("pin", target(poller))
    late = page.actions._form.question
    page.actions.propose("evict", target(poller))
    click(page, "confirm", late)
    assert waiting_threads == [] and page.actions.dialog.open
    for _ in range(2):
        click(page, "confirm")
    assert len(waiting_threads) == 1


def test_the_situation_is_checked_again_before_a_confirmed_action(
    page, poller, rt, waiting_threads
):
    """The model comes into use between the click and the confirmation."""
    page.actions.propose("evict", target(poller))
    with rt.use("qwen"):
        click(page, "confirm")
        carried_out(page, waiting_threads)
    assert where(rt) == "sim:0" and "is in use now" in page.actions.outcomes.object


def test_an_error_of_the_runtime_is_shown_with_its_own_text(
    page, poller, rt, waiting_threads, monkeypatch
):
    confirmed(page, poller)
    full = Mock(side_effect=LedgerUnavailable("<b>full</b>", path="x"))
    monkeypatch.setattr(rt, "evict", full)
    assert "&lt;b&gt;full" in carried_out(page, waiting_threads)


def test_a_viewer_has_no_buttons_and_no_dialog_and_a_forged_click_does_nothing(
    page_of, poller, waiting_threads
):
    """Nor does the same click of an operator who loses the role while the dialog is open."""
    visitor = SimpleNamespace(name="ann", may_act=False)
    page = page_of(visitor)
    assert '"Evict"' not in page._made["Models"].table.rows
    for may_act in (False, True):
        visitor.may_act = may_act
        page._made["Models"].table._handle_msg({"verb": "evict", "id": target(poller)})
        assert page.actions.dialog.open is may_act
        visitor.may_act = False
        click(page, "confirm")
        assert waiting_threads == []
    assert page.actions.dialog not in page.actions.panel.objects


@pytest.mark.parametrize("end", ["connects", "left", "late"])
def test_a_session_waits_for_its_browser(monkeypatch, end):
    """Bokeh ends a session after 15 s. On a busy machine a page needs longer to connect."""
    clock = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(bokeh_session, "current_time", lambda: 1e3 * clock[0])
    document = Document()
    loop = IOLoop()
    context = SimpleNamespace(session=ServerSession("1", document, io_loop=loop))
    document._session_context = lambda: context
    console.wait_for_browser(document)
    [looking] = document.session_callbacks
    look, session = looking.callback, context.session

    clock[0] += 1
    look()
    clock[0] += console.CONNECTS_SECONDS - 2
    look()
    assert session.expiration_blocked and session.milliseconds_since_last_unsubscribe > 15_000
    if end == "late":
        clock[0] += 2
    else:
        browser = object()
        session.subscribe(browser)
        if end == "left":
            session.unsubscribe(browser)
    look()
    assert not session.expiration_blocked and document.session_callbacks == []
    loop.close()


class Context(SimpleNamespace):
    """The part of a session that Bokeh's server keeps. The document refers to it weakly."""


@pytest.mark.parametrize("first", ["destroyed", "notified"])
def test_a_served_session_is_freed_after_its_browser_has_gone(poller, monkeypatch, caplog, first):
    """So are its place in the poller and Panel's own entries."""
    only_tabs(monkeypatch, "Now", "Models", "Leases", "Timeline")
    made = []
    monkeypatch.setattr(
        console, "Console", lambda *given, **more: made.append(Console(*given, **more)) or made[-1]
    )
    doc, request = Document(), SimpleNamespace(arguments={}, path="/", headers={})
    context = Context(
        id="1", _document=doc, session=SimpleNamespace(token=""), destroyed=False,
        server_context=None, request=request,
    )  # fmt: skip
    doc._session_context = weakref.ref(context)
    with set_curdoc(doc):
        console.page(OPERATOR, poller).server_doc(doc, location=False)
        for n in range(4):
            made[0]._tabs.active = n
    gone = weakref.ref(made.pop())
    loop = IOLoop()  # also the thread's current loop, whose futures the sleeps are
    session = ServerSession("1", doc, io_loop=loop)
    assert len(poller._sessions) == 1
    if first == "destroyed":  # by Bokeh's server, or at its shutdown
        session.destroy()
    _on_session_destroyed(context)
    state._destroy_session(context)
    if first == "notified":
        session.destroy()
    loop.close()  # a tick in progress would have released the session by itself
    del doc, context, session, loop
    gc.collect()
    assert gone() is None and len(poller._sessions) == 0
    assert "failed with following error" not in caplog.text


def test_a_slow_browser_gets_its_style_sheets_from_this_server_too(poller):
    """Panel makes its session again, without a page, and would use its CDN."""
    document = Document()
    with set_curdoc(document):
        root = console.page(VIEWER, poller).get_root(document)
    assert document.template_variables["dist_url"] == LOCAL_DIST
    sheets = {str(sheet.url) for sheet in root.select({"type": ImportedStyleSheet})}
    assert sheets and not any(url.startswith("http") for url in sheets)
