"""The role of a request follows from its credentials, and from nothing else."""

import secrets
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.errors import NotAllowed
from gpu_runtime.web import auth
from gpu_runtime.web.auth import (
    OPERATOR,
    VIEWER,
    AccessRules,
    GuessLimiter,
    Visitor,
    role_of_name,
    role_of_tokens,
    same_origin,
)

OPERATORS, VIEWERS = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
RULES = AccessRules("ann", operator_token=OPERATORS, viewer_token=VIEWERS)
PLACES = ("authorization", "cookie", "query")


def credentials(place: str, token: str) -> dict[str, str]:
    return {place: f"Bearer {token}" if place == "authorization" else token}


@pytest.mark.parametrize("place", PLACES)
def test_a_token_gives_its_role_in_every_place(place):
    """Programs send the token in a header, browsers in a cookie. The first click has it in the query."""
    assert role_of_tokens(RULES, **credentials(place, OPERATORS)) == OPERATOR
    assert role_of_tokens(RULES, **credentials(place, VIEWERS)) == VIEWER


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("second", PLACES)
def test_of_two_tokens_the_higher_counts(first, second):
    """An operator may have followed a viewer's link before. With their own link they are an operator again."""
    if first != second:
        assert (
            role_of_tokens(RULES, **credentials(first, OPERATORS), **credentials(second, VIEWERS))
            == OPERATOR
        )


NEARLY = [OPERATORS[:-1], OPERATORS + "a", OPERATORS.swapcase(), "\ud800"]


@given(st.one_of(st.text(max_size=60), st.sampled_from(NEARLY)), st.sampled_from(PLACES))
def test_nothing_else_gives_a_role(text, place):
    """Not the empty text, though no viewer's token is set, not a part of a token, and no invalid text."""
    for rules in (RULES, AccessRules("ann", operator_token=OPERATORS)):
        assert role_of_tokens(rules, **credentials(place, text)) is None
    assert role_of_tokens(AccessRules("ann", operator_token=""), **credentials(place, text)) is None


def test_tokens_are_compared_in_constant_time_and_none_is_skipped(monkeypatch):
    compared = []
    monkeypatch.setattr(
        auth.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b
    )
    role_of_tokens(RULES, authorization=f"Bearer {OPERATORS}", query="x")
    assert compared == [(32, 32)] * 6


def test_tokens_are_in_no_repr():
    """A traceback can show the values of a frame, so a token must not be in a repr."""
    assert OPERATORS not in repr(RULES) and VIEWERS not in repr(RULES)


def test_a_role_decides_who_may_act_and_under_which_name():
    """A token acts under the name of the user who started the server. A login acts under its own name."""
    assert RULES.visitor(OPERATOR) == Visitor("ann", may_act=True)
    assert RULES.visitor(OPERATOR, "bob") == Visitor("bob", may_act=True)
    assert RULES.visitor(VIEWER) == Visitor("viewer", may_act=False)
    read_only = AccessRules("ann", OPERATORS, read_only=True)
    assert read_only.visitor(OPERATOR) == Visitor("ann", may_act=False)


def test_a_login_gives_no_role_by_itself():
    """Everybody has an account at the provider. Only names in the settings have a role; guests have none."""
    named = AccessRules(
        "ann", "", operators=frozenset({"bob", "guest"}), viewers=frozenset({"eve"})
    )
    assert [role_of_name(name, named) for name in ("bob", "eve")] == [OPERATOR, VIEWER]
    assert [role_of_name(name, named) for name in ("mallory", "guest", "")] == [None] * 3


@pytest.mark.parametrize("origin", [
    "http://evil.example", "http://box:9999", "https://box.evil.example:8211", "null", "",
    "http://", "file://box:8211", "http://box:8211@evil.example", "http://[box:8211", "//box:8211",
])  # fmt: skip
@pytest.mark.parametrize("also", [(), ("*",), ("*:8211",), ("good.example",)])
def test_no_wildcard_admits_a_foreign_origin(origin, also):
    """People type `--allow-websocket-origin=*` to get rid of an error, not to admit every page."""
    assert not same_origin(origin, "box:8211", also)


def test_an_origin_named_in_the_options_is_admitted():
    for named in ("good.example", "Good.example:80"):  # as it is typed, and as Bokeh stores it
        assert same_origin("https://good.example", "box:8211", [named])
    assert same_origin("http://BOX:8211", "box:8211")


def test_guesses_are_slowed_and_a_flood_is_not_checked():
    """Six guesses are free. Each further one waits a second longer, and at most nine wait."""
    now = 100.0
    guesses = GuessLimiter(lambda: now)
    waits = []
    while (wait := guesses.wait_seconds()) is not None:
        waits.append(wait)
        guesses.count()
    assert waits == [0.0] * 6 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    now += 1.0
    assert guesses.wait_seconds() == 9.0
    now += 60.0
    assert guesses.wait_seconds() == 0.0


@given(
    st.lists(st.tuples(st.sampled_from((0.0, 0.5, 5.0, 3600.0)), st.integers(1, 40)), max_size=8)
)
def test_in_any_window_one_guess_a_second_is_checked(bursts):
    """A quiet night is no credit for the morning."""
    now, checked = 0.0, []
    guesses = GuessLimiter(lambda: now)
    for gap, count in bursts:
        now += gap
        for _ in range(count):
            if guesses.wait_seconds() is not None:
                guesses.count()
                checked.append(now)
    for first, began in enumerate(checked):
        for last, ended in enumerate(checked[first:], 1):
            assert last <= 16 + ended - began


@pytest.mark.parametrize(
    "owners, may", [("ann", True), ("bob", False), ("ann bob", False), ("", True)]
)
def test_a_page_joins_no_session_of_another_visitor(owners, may):
    """Two applications of one server may have sessions of one id. Bokeh refuses an unknown id itself."""
    panel_gate = pytest.importorskip("gpu_panels.panel_gate")
    token = pytest.importorskip("bokeh.util.token").generate_jwt_token("s")
    sessions = []
    for name in owners.split():
        request = SimpleNamespace(visitor=Visitor(name, True))
        document = SimpleNamespace(session_context=SimpleNamespace(request=request))
        sessions.append(SimpleNamespace(id="s", document=document))
    app = SimpleNamespace(
        prefix="", default_router=None, applications={"/": SimpleNamespace(sessions=sessions)}
    )
    request = SimpleNamespace(headers={"Sec-WebSocket-Protocol": f"bokeh, {token}"})
    gate = panel_gate.PanelGate(app, RULES)
    assert gate.may_join(request, Visitor("ann", True)) is may


def test_outside_a_page_there_is_no_visitor():
    """So code outside a page cannot act."""
    panel_gate = pytest.importorskip("gpu_panels.panel_gate")
    with pytest.raises(NotAllowed, match="token"):
        panel_gate.visitor()
