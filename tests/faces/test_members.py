"""The console of a member: own processes, one sum for every other user, and actions on own processes only."""

import itertools
from types import SimpleNamespace

import msgspec
import pytest
from gpu_panels import acting, tabs
from gpu_panels.actions import Actions
from gpu_panels.data.confirmations import VERBS, propose
from gpu_panels.data.devices import device_rows
from gpu_panels.data.members import may_act_on, refusal, seen_by
from gpu_panels.data.rows import FirstSeen, leases, models, notebooks, problem_rows, queue
from gpu_panels.poller import MemberPoller, Poller
from gpu_panels.widgets import status_html
from msgspec.structs import replace

from gpu_runtime.facts import Presence, ProcessState, Share, Stranger, Ticket
from gpu_runtime.settings import Settings
from gpu_runtime.tables import Table
from gpu_runtime.web.auth import Visitor

from .samples import BOB, GIB, ME, NOW, lease, snapshot

SECRETS = ("secret", "theirs", str(BOB.pid), BOB.id)
WAITS = Ticket(
    "their-key",
    BOB.id,
    "use",
    "secret-wish",
    NOW - 9,
    NOW,
    need=(Share("sim:0", GIB),),
    because="secret",
)
BOBS = replace(BOB, user="bob", notebook="/home/bob/theirs.ipynb")
ME_ANN = replace(ME, user="ann")


def everything():
    """Two users, both with memory, a request of bob, and his stopped process."""
    seen = snapshot(
        lease("qwen", 4),
        lease("secret-model", 3, owner=BOB),
        lease("kernel", 2, owner=BOB, kind="kernel"),
        tickets=[WAITS],
        presences={BOB.id: Presence(ProcessState.STOPPED)},
        names={BOB.id: ("secret-2",), ME.id: ("mine-2",)},
        strangers=1.0,
    )
    sections = {
        ME.id: replace(seen.sections[ME.id], owner=ME_ANN),
        BOB.id: replace(seen.sections[BOB.id], owner=BOBS, residue={"sim:0": GIB}),
    }
    strangers = (Stranger("sim:0", 77, GIB, "bob", "secret-command"),)
    return replace(
        seen, sections=sections, strangers=strangers, owner=replace(ME, pid=1, user="root")
    )


def test_no_name_of_another_user_is_on_the_page_of_a_member():
    """The whole data of the page is searched, as the browser gets it."""
    seen = seen_by(everything(), "ann")
    page = [seen.sections, seen.tickets, seen.events, seen.names, seen.presences, seen.strangers]
    page += [device_rows(seen), queue(seen), models(seen), leases(seen), notebooks(seen)]
    page += [problem_rows(seen, FirstSeen()), status_html(seen, Visitor("ann", True, member="ann"))]
    text = msgspec.json.encode(page).decode()
    assert "qwen" in text and "mine-2" in text and "bob" in text
    for word in SECRETS:
        assert word not in text, word


def test_a_member_sees_the_sum_of_each_user_and_the_totals_of_the_devices():
    whole = everything()
    seen = seen_by(whole, "ann")
    assert seen.devices == whole.devices
    row = device_rows(seen).rows[0]
    assert [(part.title, part.notebook) for part in row.parts][:2] == [
        ("bob", ""),
        ("qwen", "train.ipynb"),
    ]
    assert "6.0 GiB" in row.parts[0].lines, "two leases and what is beyond leases"
    waiting = queue(seen)
    assert [cell.text for cell in waiting[0].cells[1:4]] == ["a request", "bob", "1.0 GiB on sim:0"]
    rows = {row.cells[1].text: row for row in notebooks(seen)}
    assert rows["bob"].cells[0].text == "all notebooks" and rows["bob"].cells[4].text == "6.0 GiB"
    assert rows["ann"].cells[0].text == "train.ipynb"


def test_buttons_are_at_own_processes_only():
    seen = seen_by(everything(), "ann")
    row = device_rows(seen).rows[0]
    assert row.buttons == () and {
        bool(part.buttons) for part in row.parts if part.title == "bob"
    } == {False}
    assert queue(seen)[0].buttons == ()
    with_buttons = [row for row in (*notebooks(seen), *leases(seen), *models(seen)) if row.buttons]
    assert with_buttons and all(row.id.startswith(ME.id) for row in with_buttons)


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_of_a_member_reaches_another_users_process(verb):
    """Also if the browser sends what no button has: a real id, or a card."""
    whole = everything()
    targets = (f"{BOB.id}/secret-model", f"{BOB.id}/", "/qwen", "/sim:0", "their-key", "nonsense")
    for target, seen in itertools.product(targets, (whole, seen_by(whole, "ann"))):
        asked = propose("move sim:0" if verb == "move" else verb, target, seen)
        assert refusal(asked, whole, "ann").startswith("ann may act on processes of ann only.")
        outcome = acting.attempt(Stand(whole), asked, "ann, console", "ann")
        assert outcome[0] == "failed" and "processes of ann only" in outcome[1]


class Stand:
    """A runtime that must not act."""

    host = ""

    def __init__(self, seen):
        self.status = lambda: seen

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


def test_a_member_acts_on_own_processes_and_an_operator_on_all():
    whole = everything()
    assert may_act_on(ME.id, whole, "ann") and not may_act_on(BOB.id, whole, "ann")
    assert may_act_on(BOB.id, whole, "")
    assert not refusal(propose("evict", f"{ME.id}/qwen", whole), whole, "ann")


def test_a_forged_click_of_a_member_opens_no_dialog():
    visitor = Visitor("ann", True, member="ann")
    poller = Poller(Stand(everything()), everything, start=lambda work: work())
    poller._reap = lambda: None
    poller.poll()
    actions = Actions(MemberPoller(poller, "ann"), visitor)
    for verb, target in (
        ("evict", f"{BOB.id}/secret-model"),
        ("drain", "/sim:0"),
        ("cancel", "their-key"),
    ):
        actions.propose(verb, target)
        assert not actions.dialog.open and "processes of ann only" in actions.outcomes.object
    actions.propose("evict", f"{ME.id}/qwen")
    assert actions.dialog.open


def test_data_with_names_is_not_fetched_for_a_member():
    poller = MemberPoller(Poller(Stand(everything()), everything), "ann")
    assert poller.latest("catalogue", lambda rt: 1 / 0, 1.0) is None
    assert tabs.titles("ann") == ["Now", "Models", "Leases", "Hours"]


REPORTS = {
    "time": [{"time": 0, "in_use_gib_h": 3.0}],
    "card": [{"card": "sim:0", "card_h": 3.0}],
    "user": [{"user": "bob", "card_h": 2.0}, {"user": "ann", "card_h": 1.0}],
    "notebook": [
        {"user": "bob", "notebook": "theirs.ipynb"},
        {"user": "ann", "notebook": "mine.ipynb"},
    ],
    "model": [{"user": "bob", "model": "secret-model"}, {"user": "ann", "model": "qwen"}],
    "waits": [{"user": "ann", "waited_for": "bob", "waited_h": 0.5}],
}
OWN = {by: [one for one in REPORTS[by] if one["user"] == "ann"] for by in ("notebook", "model")}
TOTALS = {by: REPORTS[by] for by in ("time", "card")}


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [
        ("own", {**TOTALS, **OWN, "user": REPORTS["user"][1:], "waits": []}),
        ("all", {**TOTALS, **OWN, "user": REPORTS["user"], "waits": REPORTS["waits"]}),
    ],
)
def test_a_member_sees_the_own_hours_and_those_of_others_as_sums_if_the_operator_allows_it(
    allowed, seen
):
    """`GPU_CONSOLE_HOURS`. Names of notebooks and models of others are never among them."""
    rt = SimpleNamespace(
        settings=Settings(gpu_console_hours=allowed),
        status=everything,
        report=lambda since, by: Table(REPORTS[by], [*REPORTS[by][0]]),
    )
    poller = Poller(rt, everything, start=lambda work: None)
    poller._reap = lambda: None
    member = MemberPoller(poller, "ann")
    assert {member.report("7d", by, 30.0) for by in REPORTS} == {None}, "not read yet"
    poller.poll()
    assert {by: member.report("7d", by, 30.0) for by in REPORTS} == seen
    assert {by: poller.report("7d", by, 30.0) for by in REPORTS} == REPORTS, "an operator"


@pytest.mark.parametrize(
    ("visitor", "operates", "expected"),
    [
        (Visitor("ann", True), True, "ann · operator"),
        (Visitor("ann", True), False, "ann · member"),
        (Visitor("ann", True, member="ann"), True, "ann · member"),
        (Visitor("ann", False), False, "ann · viewer, read only"),
    ],
)
def test_nobody_is_called_operator_who_is_none(visitor, operates, expected):
    """A member of a shared ledger has the tile too."""
    seen = replace(snapshot(), operates=operates)
    if visitor.member:
        seen = seen_by(seen, visitor.member)
    assert expected in status_html(seen, visitor)
