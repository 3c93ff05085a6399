"""Who gets in, tried on real servers with real clients: other users of the box, other pages, and viewers that forge."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat

import pytest
from bokeh.util.token import get_session_id, get_token_payload
from tornado.httpclient import HTTPClientError

from tests.faces.served import (
    OPERATORS,
    VIEWERS,
    Conversation,
    console,
    free_port,
    panel_serve,
    serving,
)

TOKENS = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CONSOLE_VIEWER_TOKEN": VIEWERS}
# Every flag that is typed to be rid of an error, and that a gate can bear.
HOSTILE = (
    "--allow-websocket-origin=*",
    "--address",
    "0.0.0.0",
    "--index",
    "console",
    "--dev",
    "--oauth-optional",
    "--use-xheaders",
    "--global-loading-spinner",
    "--log-level",
    "debug",
    "--session-history",
    "10",
    "--unused-session-lifetime",
    "2000000",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("console")


@pytest.fixture(scope="module", params=["gpu console", "panel serve"])
def one(request, tmp_path_factory):
    """A console with a token for operators and one for viewers, served either way, `panel serve` with hostile flags."""
    place, port = tmp_path_factory.mktemp("console"), free_port()
    if request.param == "gpu console":
        with serving(console(place, port=port), place, TOKENS, port=port) as server:
            yield server
    else:
        words = panel_serve(place, "--port", str(port), *HOSTILE)
        with serving(words, place, TOKENS, port=port, path="/console") as server:
            yield server


async def speak(server, path, subprotocol, *, click=False, **brought):
    """The document that the server sends over a websocket; after a click, where one is forged."""
    async with Conversation(server, path, subprotocol, **brought) as said:
        document = await said.document()
        if click:
            await said.forge("button_click", said.ids(document, "panel.models.widgets.Button")[0])
            document = await said.document()
        return document


def talk(server, *words, **more):
    return asyncio.run(speak(server, *words, **more))


def refused(server, *words, **more):
    """The status with which a websocket is refused before it is opened."""
    with pytest.raises(HTTPClientError) as error:
        talk(server, *words, **more)
    return error.value.code


def opened(server, token=OPERATORS):
    """A page as a browser has it: where it lies, its cookie, and the token of its session."""
    path, cookie = server.enter(token)
    page = server.get(path, Cookie=cookie)
    assert page.status == 200
    return path, cookie, page.session_token


def websocket_of(path):
    return path.rstrip("/") + "/ws"


FORGED = "eyJzZXNzaW9uX2lkIjogIm1pbmUiLCAic2Vzc2lvbl9leHBpcnkiOiA5OTk5OTk5OTk5fQ"  # session "mine", for ever
ROUTES = [
    "",
    "/",
    "/console",
    "/metadata",
    "/console/metadata",
    "/autoload.js?bokeh-autoload-element=1",
    "/console/autoload.js?bokeh-autoload-element=1",
    "/static/js/bokeh.js",
    "/static/extensions/panel/p.js",
    "/components/gpu_runtime.settings/Settings/x/y",
    "/favicon.ico",
    "/admin",
    "/rest/session_info",
    "/login",
    "/console?bokeh-session-id=mine",
    f"/console?bokeh-token={FORGED}",
    "//",
    "/../console",
    "/%2e%2e/console",
]


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_tells_anything_without_a_token(one, route):
    """Loopback is no boundary: any process of the box can ask. What it hears is the same everywhere."""
    one.get()  # under `panel serve` it is the first page that puts up the gate
    for method in ("GET", "HEAD", "PUT", "OPTIONS"):
        answer = one.get(route, method=method, Cookie=f"gpu-console={OPERATORS}")
        assert answer.status == 403 and "SECRET" not in answer.body, (method, answer)


def test_a_program_without_the_token_is_told_so_in_json(one):
    """As clients of OpenAI's and HTTP's know it; a page with a form would be of no use to it."""
    one.get()
    for token in ({}, {"Authorization": "Bearer wrong"}):
        answer = one.get(one.path, Accept="application/json", **token)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "token" in json.loads(answer.body)["error"]["message"] and "<" not in answer.body
    assert one.get(one.path, Accept="*/*", Origin="http://evil.example").status == 403, (
        "no token would help"
    )
    assert one.get(one.path, Accept="text/html,*/*").body.startswith("<!doctype html>")


def test_the_token_leads_to_the_page_and_leaves_the_url(one):
    """It is in no history that way; the cookie is not for scripts, and for a path that nobody can guess."""
    one.get()
    first = one.get(f"{one.path}?token={OPERATORS}&theme=dark")
    assert first.status == 302 and first.headers["location"].endswith("?theme=dark")
    assert OPERATORS not in str(first.headers)
    kept = first.headers["set-cookie"]
    assert "HttpOnly" in kept and "SameSite=Lax" in kept and re.search(r"Path=/[\w-]{20,}/", kept)
    path, cookie = one.enter()
    page = one.get(path, Cookie=cookie)
    assert page.status == 200 and page.headers["referrer-policy"] == "no-referrer"
    assert one.get(one.path, Cookie=cookie).status == 403  # elsewhere the cookie is worth nothing


def test_what_the_page_knows_holds_no_credential(one):
    """Bokeh writes a request's headers and cookies into the page. HttpOnly would be worth nothing."""
    one.get()
    path, cookie = one.enter()
    page = one.get(
        path,
        Cookie=f"{cookie}; username-127-0-0-1-8888=jupyters",
        Authorization=f"token {OPERATORS}",
    )
    inside = str(get_token_payload(page.session_token))
    assert "headers" in inside
    for secret in (cookie.partition("=")[2], OPERATORS, "jupyters", path.split("/")[1]):
        assert secret not in page.body and secret not in inside


def test_a_page_shows_itself_to_whom_it_was_made_for(one):
    """The way in works, and the name is that of whoever started the server."""
    one.get()
    path, cookie, token = opened(one)
    document = talk(
        one, websocket_of(path), token, cookie=cookie, origin=f"http://127.0.0.1:{one.port}"
    )
    assert "may act: True" in document
    path, cookie, token = opened(one, VIEWERS)
    assert "SECRET of viewer, may act: False" in talk(one, websocket_of(path), token, cookie=cookie)


def test_programs_bring_the_token_in_a_header(one):
    """As Jupyter's clients do; they need neither cookie nor lane."""
    one.get()
    for scheme in ("Bearer", "token"):
        page = one.get(Authorization=f"{scheme} {OPERATORS}")
        assert page.status == 200
        assert "may act: True" in talk(
            one, websocket_of(one.path), page.session_token, Authorization=f"{scheme} {OPERATORS}"
        )


def test_a_websocket_needs_what_a_page_needs(one):
    """Nobody gets in by leaving the page out: neither with a made-up session nor with the token of a real one."""
    one.get()
    path, cookie, token = opened(one)
    for words in (FORGED, token, "", "nonsense"):
        for where in (websocket_of(one.path), websocket_of(path)):
            assert refused(one, where, words) == 403
    assert refused(one, websocket_of(path), token, cookie="gpu-console=wrong") == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null"])
def test_a_foreign_page_opens_no_websocket(one, origin):
    """Though the browser may send the cookie along: another port of the same host is the same site to it."""
    one.get()
    path, cookie, token = opened(one)
    assert refused(one, websocket_of(path), token, cookie=cookie, origin=origin) == 403
    assert one.get(path, Cookie=cookie, Origin=origin).status == 403


def test_a_viewers_forged_click_does_nothing(one):
    """Whatever is sent, what is done is checked when it is done."""
    one.get()
    path, cookie, token = opened(one, VIEWERS)
    assert "done by nobody" in talk(one, websocket_of(path), token, cookie=cookie, click=True)
    path, cookie, token = opened(one)
    assert "an operator" in talk(one, websocket_of(path), token, cookie=cookie, click=True)


def test_a_viewer_cannot_join_an_operators_session(one):
    """Its page would act with the operator's rights, if its id became known."""
    one.get()
    path, cookie, token = opened(one)
    viewers_path, viewers_cookie, _ = opened(one, VIEWERS)
    assert refused(one, websocket_of(viewers_path), token, cookie=viewers_cookie) == 403
    assert "may act: True" in talk(one, websocket_of(path), token, cookie=cookie)


def test_nobody_chooses_the_session_of_somebody_else(one):
    """A link with `?bokeh-session-id=` would put its reader's page into a session that its sender knows."""
    one.get()
    path, cookie = one.enter()
    for more in (
        {"path": f"{path}?bokeh-session-id=mine"},
        {"path": f"{path}?bokeh-token={FORGED}"},
        {"path": path, "Bokeh_Session_Id": "mine"},
    ):
        page = one.get(**more, Cookie=cookie)
        assert get_session_id(page.session_token) != "mine"


def test_a_token_is_typed_where_the_url_was_lost(one):
    """The form sends it in its body; a URL of the start before this one leads to the page as well."""
    one.get()
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    for where, up in ((one.path, "./"), ("/an-older-lane/console", "../")):
        answer = one.get(where, method="POST", body=f"token={VIEWERS}", **form)
        assert answer.status == 302 and answer.headers["location"].startswith(up), answer
        page = one.get(
            "/" + answer.headers["location"].replace("../", "").replace("./", ""),
            Cookie=answer.cookie,
        )
        assert page.status == 200
    assert one.get(one.path, method="POST", body="token=wrong", **form).status in (403, 429)
    assert (
        one.get(one.path, method="POST", body="x" * 5000, **form).status == 400
    )  # a stranger's body is short


def test_a_cookie_of_the_same_name_does_not_shut_anybody_out(one):
    """Any server of the same host can set one for all paths, and browsers send both."""
    one.get()
    path, cookie = one.enter()
    for cookies in (f"{cookie}; gpu-console=tossed", f"gpu-console=tossed; {cookie}"):
        assert one.get(path, Cookie=cookies).status == 200


def test_guesses_are_slowed_and_those_inside_go_on(one):
    """After a few wrong tokens each waits, then none is looked at; whoever is in stays in."""
    one.get()
    path, cookie = one.enter()
    guesses = [one.get(f"{one.path}?token=wrong{guess}") for guess in range(7)]
    assert {guess.status for guess in guesses} == {403}
    assert max(guess.seconds for guess in guesses) > 0.5
    assert one.get(path, Cookie=cookie).status == 200


def test_a_prefix_and_an_origin_that_was_named_are_kept_to(place):
    """Behind a proxy: its host name is let in, and the cookie is for a path below the prefix."""
    port = free_port()
    words = panel_serve(
        place,
        "--warm",
        "--port",
        str(port),
        "--prefix",
        "/gpu",
        "--allow-websocket-origin",
        "good.example",
    )
    with serving(words, place, TOKENS, port=port, path="/gpu/console") as one:
        entered = one.get(f"/gpu/console?token={OPERATORS}")
        way = entered.headers["location"].removeprefix(".")
        assert f"Path=/gpu{way.removesuffix('/console')}/;" in entered.headers["set-cookie"] + ";"
        page = one.get(f"/gpu{way}", Cookie=entered.cookie)
        for origin in ("https://good.example", f"http://127.0.0.1:{port}"):
            assert "SECRET" in talk(
                one, f"/gpu{way}/ws", page.session_token, cookie=entered.cookie, origin=origin
            )
        assert (
            refused(
                one,
                f"/gpu{way}/ws",
                page.session_token,
                cookie=entered.cookie,
                origin="https://not.good.example",
            )
            == 403
        )
        assert one.get(f"/gpu?token={OPERATORS}").headers["location"].startswith("gpu/")


def test_tokens_are_in_no_log_and_on_no_command_line(one):
    """Other users read command lines, and logs are copied. The one URL that is printed is meant to be."""
    one.get()
    for path in (
        f"{one.path}?token={OPERATORS}",
        f"/nowhere?token={OPERATORS}",
        f"/static/x?a=1&token={OPERATORS}",
    ):
        one.get(path)
        one.get(path, method="PUT")
    path, cookie = one.enter()
    one.get(path, Cookie=cookie)
    said = one.output
    assert said.count(OPERATORS) == 1 and f"?token={OPERATORS}\n" in said and VIEWERS not in said
    assert cookie.partition("=")[2] not in said and path.split("/")[1] not in said
    with open(f"/proc/{one.process.pid}/cmdline") as words:
        assert OPERATORS not in words.read()
    ours = os.stat(f"/proc/{one.process.pid}/environ")
    assert stat.S_IMODE(ours.st_mode) == 0o400 and ours.st_uid == os.getuid()
    for folder in one.said.parent.rglob("*"):
        if folder.is_file() and folder != one.said:
            assert OPERATORS.encode() not in folder.read_bytes(), folder
