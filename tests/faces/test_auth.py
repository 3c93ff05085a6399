"""The role of a request follows from its credentials, and from nothing else."""

import itertools
import secrets
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler

from gpu_runtime.errors import NotAllowed
from gpu_runtime.web import auth, gate
from gpu_runtime.web.auth import (
    OPERATOR,
    VIEWER,
    AccessRules,
    GuessLimiter,
    Visitor,
    role_of_tokens,
    same_origin,
)

OPERATORS, VIEWERS = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
RULES = AccessRules("ann", operator_token=OPERATORS, viewer_token=VIEWERS)
PLACES = ("authorization", "cookie", "query")


def credentials(place: str, token: str) -> dict[str, str]:
    return {place: f"Bearer {token}" if place == "authorization" else token}


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(PLACES, 2)])
def test_of_two_tokens_the_higher_counts(first, second):
    """An operator may have followed a viewer's link before. With their own link they are an operator again."""
    sent = credentials(first, OPERATORS) | credentials(second, VIEWERS)
    assert role_of_tokens(RULES, **sent) == OPERATOR


NEARLY = [OPERATORS[:-1], OPERATORS + "a", OPERATORS.swapcase(), "\ud800"]


@given(st.one_of(st.text(max_size=60), st.sampled_from(NEARLY)), st.sampled_from(PLACES))
def test_nothing_else_gives_a_role(text, place):
    """Not the empty text, though no viewer's token is set, not a part of a token, and no invalid text."""
    for rules in (RULES, AccessRules("ann", operator_token=OPERATORS)):
        assert role_of_tokens(rules, **credentials(place, text)) is None
    assert role_of_tokens(AccessRules("ann", operator_token=""), **credentials(place, text)) is None


def test_a_token_is_in_no_repr_and_compared_in_constant_time(monkeypatch):
    """A traceback can show the values of a frame."""
    assert OPERATORS not in repr(RULES) and VIEWERS not in repr(RULES)
    compared = []
    record = lambda a, b: compared.append((len(a), len(b))) or a == b
    monkeypatch.setattr(auth.hmac, "compare_digest", record)
    role_of_tokens(RULES, authorization=f"Bearer {OPERATORS}", query="x")
    assert compared == [(32, 32)] * 6


def test_a_role_decides_who_may_act_and_under_which_name():
    """A token acts under the name of the user who started the server. Outside a page nobody acts."""
    assert RULES.visitor(OPERATOR) == Visitor("ann", may_act=True)
    assert RULES.visitor(OPERATOR, "bob") == Visitor("bob", may_act=True)
    assert RULES.visitor(VIEWER) == Visitor("viewer", may_act=False)
    read_only = AccessRules("ann", OPERATORS, read_only=True)
    assert read_only.visitor(OPERATOR) == Visitor("ann", may_act=False)
    server = pytest.importorskip("gpu_panels.server")
    with pytest.raises(NotAllowed, match="token"):
        server.current_visitor()


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
    server = pytest.importorskip("gpu_panels.server")
    token = pytest.importorskip("bokeh.util.token").generate_jwt_token("s")
    sessions = []
    for name in owners.split():
        request = SimpleNamespace(visitor=Visitor(name, True))
        document = SimpleNamespace(session_context=SimpleNamespace(request=request))
        sessions.append(SimpleNamespace(id="s", document=document))
    applications = {"/": SimpleNamespace(sessions=sessions)}
    app = SimpleNamespace(prefix="", default_router=None, applications=applications)
    request = SimpleNamespace(headers={"Sec-WebSocket-Protocol": f"bokeh, {token}"})
    gate = server.PanelGate(app, RULES)
    assert gate.may_join(request, Visitor("ann", True)) is may


KEY, LOOK = "gpu-" + "k" * 43, "gpu-" + "l" * 43
BOT = Visitor("key:bot", False, may_call=True, api_only=True)
BOTS = {KEY: BOT, LOOK: Visitor("key:look", False)}
CORS = frozenset({"https://app.example"})
KEY_RULES = AccessRules("ann", OPERATORS, VIEWERS, key_visitor=BOTS.get, cors=CORS)


class Asked(gate.Gate):
    """A gate over two pages, a websocket and a route of calls. `ask` is the answer to one request."""

    def __init__(self, now=lambda: 0.0):
        class Page(RequestHandler):
            def get(self):
                """A page."""

        class Socket(WebSocketHandler):
            """A websocket."""

        app = Application([("/page", Page), ("/v1/models", Page), ("/ws", Socket)])
        super().__init__(app, KEY_RULES, now)
        self.max_body_bytes, self.joins = 1000, True
        self.admitted = []
        self.connections = SimpleNamespace(
            stranger=lambda stream: stream, admit=self.admitted.append
        )

    def may_join(self, request, visitor):
        return self.joins

    def ask(self, path="/page", method="GET", who="uid 7", ip="10.0.0.9", **headers):
        """The visitor's name, or the status of a refusal; and the seconds by which it is delayed."""
        sent = HTTPHeaders({"Host": "box:8211"})
        for name, value in headers.items():
            sent[name.replace("_", "-")] = value
        connection = SimpleNamespace(stream=who, set_max_body_size=lambda size: None)
        connection.context = SimpleNamespace(remote_ip=ip, protocol="http")
        line = RequestStartLine(method, path, "HTTP/1.1")
        self.request = HTTPServerRequest(headers=sent, connection=connection, start_line=line)
        found = self.find_handler(self.request)
        options = found.handler_kwargs
        if "status" in options:
            return options["status"], options.get("wait", 0.0)
        visitor = self.request.visitor
        return visitor.name if visitor else found.handler_class.__name__, 0.0


TOKENS = {"ann": OPERATORS, "viewer": VIEWERS, "key:bot": KEY, "key:look": LOOK, "": "wrong"}


@pytest.mark.parametrize("lane", [True, False])
@pytest.mark.parametrize("path", ["/page", "/v1/models"])
@pytest.mark.parametrize("place", ["header", "key header", "query", "cookie"])
@pytest.mark.parametrize("name", TOKENS)
def test_the_gate_admits_whom_the_token_in_its_place_proves(name, place, path, lane):
    """A key counts in a header only, and one for calls opens no page. A cookie counts below the lane only."""
    asked, token = Asked(), TOKENS[name]
    rules = asked._cookie_rules
    kept = {"ann": rules.operator_token, "viewer": rules.viewer_token}.get(name, token)
    cookies = f"gpu-console=tossed; gpu-console={kept}"
    more = {
        "header": {"Authorization": f"Bearer {token}"}, "key header": {"X_Api_Key": token},
        "cookie": {"Bokeh_Session_Id": "mine", "Cookie": cookies}, "query": {},
    }[place]  # fmt: skip
    rest = "theme=dark&api_key=secret&bokeh-session-id=mine&bokeh-token=a"
    query = f"?token=first&token={token}&{rest}" if place == "query" else f"?{rest}"
    found, _ = asked.ask(f"/{asked.lane}{path}{query}" if lane else f"{path}{query}", **more)
    key_counts = "header" in place
    expected = {
        "ann": name, "viewer": name, "": 403,
        "key:bot": 403 if not key_counts or path == "/page" else name,
        "key:look": name if key_counts else 403,
    }[name]  # fmt: skip
    if place == "query" and name in ("ann", "viewer"):
        expected = "RedirectHandler"  # the token leaves the URL
    if place == "cookie" and not lane:
        expected = 403
    assert found == expected
    assert asked.admitted == (["uid 7"] if expected == name else [])
    assert (asked.request.path, asked.request.query) == (path, "theme=dark&api_key=%2A%2A%2A")
    hidden = {"Authorization", "X-Api-Key", "Cookie", "Bokeh-Session-Id"}
    assert not hidden & {*asked.request.headers}, "no page and no log sees a credential"
    assert not {"token"} & {*asked.request.arguments, *asked.request.query_arguments}


def test_the_header_of_openai_counts_before_that_of_anthropic():
    """Some clients send both. A program whose token is wrong there is not let in by the other."""
    both = {"Authorization": f"Bearer {VIEWERS}", "X_Api_Key": OPERATORS}
    assert Asked().ask(**both)[0] == "viewer"


def test_each_stranger_waits_for_its_own_guesses_and_the_right_token_never():
    """A request without a token is no guess. A guess that is not checked does not count.

    Two hundred requests without a token are answered without delay, then fifty a second: no page needs more.
    """
    now = [0.0]
    asked = Asked(lambda: now[0])
    wrong = {"Authorization": "Bearer wrong"}
    waits = [asked.ask(**wrong) for _ in range(20)]
    assert [wait for _, wait in waits[:8]] == [0.0] * 6 + [1.0, 2.0]
    assert waits[15:] == [(429, 10.0)] * 5
    assert asked.ask() == (403, 0.0), "without a token"
    assert asked.ask(who="uid 8", **wrong) == (403, 0.0), "another stranger"
    assert asked.ask(Authorization=f"Bearer {OPERATORS}") == ("ann", 0.0)
    assert asked.try_token(asked.request, OPERATORS) == (OPERATOR, 0.0)
    assert asked.try_token(asked.request, "wrong") == (None, None)
    now[0] += 1.0
    assert asked.ask(**wrong) == (403, 9.0), "a second later, one more is checked"
    waits = [asked.ask(who="uid 9")[1] for _ in range(451)]
    assert waits[:201] == [0.0] * 201 and waits[201] > 0
    assert waits[450] == pytest.approx(5.0)


@pytest.mark.parametrize(("more", "found"), [
    ({"ip": "127.0.0.1"}, "probe"), ({"ip": "::1"}, "probe"), ({"ip": "10.0.0.9"}, 403),
    ({"ip": "127.0.0.1", "X_Forwarded_For": "10.0.0.9"}, 403), ({"ip": ""}, 403),
    ({"ip": "127.0.0.1", "method": "POST"}, 403), ({"ip": "127.0.0.1", "path": "/page"}, 403),
    ({"ip": "127.0.0.1", "Upgrade": "websocket"}, 403),
])  # fmt: skip
def test_only_a_program_of_this_machine_reads_a_probe_without_a_token(more, found):
    asked = Asked()
    asked._app.add_handlers(".*", [("/livez", RequestHandler)])
    assert asked.ask(**{"path": "/livez", **more})[0] == found


@pytest.mark.parametrize(("origins", "found"), [
    ({"Origin": "http://box:8211"}, "ann"), ({"Origin": "http://box:9999"}, 403),
    ({"Origin": "https://app.example"}, "ann"), ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "https://app.example.evil"}, 403), ({"Origin": "http://app.example"}, 403),
    ({"Origin": "null"}, 403), ({"Origin": "http://evil.example", "method": "OPTIONS"}, 403),
    ({"Origin": "http://box:8211", "Sec_Websocket_Origin": "http://evil.example"}, 403),
    ({"Origin": "https://app.example", "Sec_Websocket_Origin": "http://evil.example"}, 403),
    ({"Origin": "https://app.example", "path": "/ws", "Upgrade": "websocket"}, 403),
    ({"Origin": "http://box:8211", "path": "/ws", "Upgrade": "websocket"}, "ann"),
    ({"Origin": "https://app.example", "method": "OPTIONS"}, "PreflightHandler"),
])  # fmt: skip
def test_a_page_of_another_origin_is_answered_only_if_the_operator_named_it(origins, found):
    asked = Asked()
    assert asked.ask(**{"Authorization": f"Bearer {OPERATORS}", **origins})[0] == found
    assert not {"Origin", "Sec-Websocket-Origin"} & {*asked.request.headers}


def test_a_page_of_another_origin_can_use_only_a_token_that_it_was_given():
    """The browser sends the cookie of this server too, if the page asks for an address below the lane."""
    asked, page = Asked(), {"Origin": "https://app.example"}
    cookie = {"Cookie": f"gpu-console={asked._cookie_rules.operator_token}"}
    assert asked.ask(f"/{asked.lane}/page", **cookie)[0] == "ann"
    assert asked.ask(f"/{asked.lane}/page", **cookie, **page)[0] == 403
    assert asked.ask(f"/page?token={OPERATORS}", **page)[0] == 403


@pytest.mark.parametrize(("length", "found"), [
    ("0", "ann"), ("1000", "ann"), ("1001", 413), (str(1 << 30), 413), (str((1 << 30) + 1), "ann"),
    ("²", 400), ("-1", 400), ("9" * 5000, 400),
])  # fmt: skip
def test_a_body_that_is_too_large_is_refused_with_its_size(length, found):
    """One that is far too large is refused by Tornado itself, which reads no more of it."""
    sent = {"Authorization": f"Bearer {OPERATORS}", "Content_Length": length}
    assert Asked().ask(**sent)[0] == found


def test_a_websocket_is_joined_only_by_its_visitor_and_a_closed_gate_admits_nobody():
    asked, sent = Asked(), {"Authorization": f"Bearer {OPERATORS}"}
    asked.joins = False
    assert asked.ask("/ws", Upgrade="websocket", **sent)[0] == 403
    assert asked.ask(**sent)[0] == "ann", "a page belongs to nobody yet"
    assert asked.ask("/nowhere", **sent)[0] == 404
    asked.closed_because = "the gate was installed late"
    assert asked.ask(**sent)[0] == 503
