"""The gate on real servers with real clients: other users of the machine, foreign pages, and
viewers who forge messages.
"""

import asyncio
import json
import os
import re
import stat
from pathlib import Path

import pytest
from bokeh.util.token import get_token_payload
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
# Options that people type to get rid of an error, and that the gate can make safe.
HOSTILE = (
    "--allow-websocket-origin=* --address 0.0.0.0 --index console --dev --oauth-optional --use-xheaders "
    "--global-loading-spinner --log-level debug --session-history 10 --unused-session-lifetime 2000000"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("console")


@pytest.fixture(scope="module", params=["gpu console", "panel serve"])
def server(request, tmp_path_factory):
    """A console with tokens for operators and viewers, served in two ways. `panel serve` has hostile options."""
    folder, port = tmp_path_factory.mktemp("console"), free_port()
    if request.param == "gpu console":
        words, path = console(folder, port=port), "/"
    else:
        words, path = panel_serve(folder, "--port", str(port), *HOSTILE.split()), "/console"
    with serving(words, folder, TOKENS, port=port, path=path) as server:
        server.get()  # under `panel serve` the first page installs the gate
        yield server


async def _document_from(server, path, subprotocol, *, click=False, **headers):
    """The document that the server sends over a websocket. With `click`, a forged click is sent first."""
    async with Conversation(server, path, subprotocol, **headers) as client:
        document = await client.document()
        if click:
            await client.click(client.ids(document, "panel.models.widgets.Button")[0])
            document = await client.document()
        return document


def document_from(server, *words, **more):
    return asyncio.run(_document_from(server, *words, **more))


def refused_status(server, *words, **more):
    with pytest.raises(HTTPClientError) as error:
        document_from(server, *words, **more)
    return error.value.code


def open_page(server, token=OPERATORS):
    """Opens a page as a browser does. Returns the page's path, its cookie, and the token of its session."""
    path, cookie = server.enter(token)
    page = server.get(path, Cookie=cookie)
    assert page.status == 200
    return path, cookie, page.session_token


def websocket_of(path):
    return path.rstrip("/") + "/ws"


FORGED = "eyJzZXNzaW9uX2lkIjogIm1pbmUiLCAic2Vzc2lvbl9leHBpcnkiOiA5OTk5OTk5OTk5fQ"  # session "mine", never expires
ROUTES = [
    "", "/", "/console", "/metadata", "/console/metadata", "/autoload.js?bokeh-autoload-element=1",
    "/console/autoload.js?bokeh-autoload-element=1", "/static/js/bokeh.js",
    "/static/extensions/panel/p.js", "/components/gpu_runtime.settings/Settings/x/y",
    "/favicon.ico", "/admin", "/rest/session_info", "/login", "/console?bokeh-session-id=mine",
    f"/console?bokeh-token={FORGED}", "//", "/../console", "/%2e%2e/console",
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_without_a_token(server, route):
    """A loopback address is no protection: any process of the machine can send requests."""
    for method in ("GET", "HEAD", "PUT", "OPTIONS"):
        answer = server.get(route, method=method, Cookie=f"gpu-console={OPERATORS}")
        assert answer.status == 403 and "SECRET" not in answer.body, (method, answer)


def test_head_and_options_are_answered_as_get_is(server):
    """The reference says so. Bokeh's pages answered 405 and 500."""
    token = {"Authorization": f"Bearer {OPERATORS}"}
    page, head = (server.get(server.path, method=one, **token) for one in ("GET", "HEAD"))
    assert (head.status, head.body) == (page.status, "") == (200, "")
    assert head.headers["content-type"] == page.headers["content-type"]
    for route in ("/autoload.js", f"{server.path}/autoload.js"):
        answer = server.get(route, method="OPTIONS", **token)
        assert answer.status in (204, 404) and "access-control-allow-origin" not in answer.headers


def test_a_program_without_the_token_gets_json(server):
    """In the shape of OpenAI's errors. A program could not use a page with a form."""
    for token in ({}, {"Authorization": "Bearer wrong"}):
        answer = server.get(server.path, Accept="application/json", **token)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "token" in json.loads(answer.body)["error"]["message"] and "<" not in answer.body
    foreign = server.get(server.path, Accept="*/*", Origin="http://evil.example")
    assert foreign.status == 403, "no token would help"
    assert server.get(server.path, Accept="text/html,*/*").body.startswith("<!doctype html>")


def test_the_token_opens_the_page_and_leaves_the_url(server):
    """So it is in no browser history. Scripts cannot read the cookie, or guess its path."""
    first = server.get(f"{server.path}?token={OPERATORS}&theme=dark")
    assert first.status == 302 and first.headers["location"].endswith("?theme=dark")
    assert OPERATORS not in str(first.headers)
    kept = first.headers["set-cookie"]
    assert "HttpOnly" in kept and "SameSite=Lax" in kept and re.search(r"Path=/[\w-]{20,}/", kept)
    path, cookie = server.enter()
    page = server.get(path, Cookie=cookie)
    assert page.status == 200 and page.headers["referrer-policy"] == "no-referrer"
    assert server.get(server.path, Cookie=cookie).status == 403, "a cookie of another path"


def test_the_page_contains_no_credential(server):
    """Bokeh writes a request's headers and cookies into the page, in spite of HttpOnly."""
    path, cookie = server.enter()
    sent = f"{cookie}; username-127-0-0-1-8888=jupyters"
    page = server.get(path, Cookie=sent, Authorization=f"token {OPERATORS}")
    inside = str(get_token_payload(page.session_token))
    assert "headers" in inside
    for secret in (cookie.partition("=")[2], OPERATORS, "jupyters", path.split("/")[1]):
        assert secret not in page.body and secret not in inside


def test_a_websocket_needs_the_same_credentials_as_a_page(server):
    """An invented session token opens no websocket. The token of a real session without the cookie does not either."""
    path, cookie, token = open_page(server)
    for words in (FORGED, token, "", "nonsense"):
        for where in (websocket_of(server.path), websocket_of(path)):
            assert refused_status(server, where, words) == 403
    assert refused_status(server, websocket_of(path), token, cookie="gpu-console=wrong") == 403


@pytest.mark.parametrize(("token", "visitor", "done"), [
    (VIEWERS, "SECRET of viewer, may act: False", "done by nobody"),
    (OPERATORS, "may act: True", "an operator"),
])  # fmt: skip
def test_a_viewers_forged_click_does_nothing(server, token, visitor, done):
    """The page is made for the holder of the token. The right to act is checked when the action runs."""
    path, cookie, session = open_page(server, token)
    place = (server, websocket_of(path), session)
    assert visitor in document_from(*place, cookie=cookie, origin=f"http://127.0.0.1:{server.port}")
    assert done in document_from(*place, cookie=cookie, click=True)


def test_a_token_can_be_typed_into_the_form(server):
    """It also works at a URL from an earlier start of the server."""
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    for where, up in ((server.path, "./"), ("/an-older-lane/console", "../")):
        answer = server.get(where, method="POST", body=f"token={VIEWERS}", **form)
        assert answer.status == 302 and answer.headers["location"].startswith(up), answer
        path = "/" + answer.headers["location"].replace("../", "").replace("./", "")
        assert server.get(path, Cookie=answer.cookie).status == 200
    typed = {"token=wrong": (403, 429), "x" * 5000: (400,)}  # such a body is limited
    for body, statuses in typed.items():
        assert server.get(server.path, method="POST", body=body, **form).status in statuses


def test_a_url_prefix_and_a_named_origin_are_respected(folder):
    """The server is behind a proxy."""
    port = free_port()
    flags = f"--warm --port {port} --prefix /gpu --allow-websocket-origin good.example"
    words = panel_serve(folder, *flags.split())
    with serving(words, folder, TOKENS, port=port, path="/gpu/console") as server:
        entered = server.get(f"/gpu/console?token={OPERATORS}")
        way = entered.headers["location"].removeprefix(".")
        assert f"Path=/gpu{way.removesuffix('/console')}/;" in entered.headers["set-cookie"] + ";"
        page = server.get(f"/gpu{way}", Cookie=entered.cookie)
        place = (server, f"/gpu{way}/ws", page.session_token)
        for origin in ("https://good.example", f"http://127.0.0.1:{port}"):
            assert "SECRET" in document_from(*place, cookie=entered.cookie, origin=origin)
        foreign = "https://not.good.example"
        assert refused_status(*place, cookie=entered.cookie, origin=foreign) == 403
        assert server.get(f"/gpu?token={OPERATORS}").headers["location"].startswith("gpu/")


def test_tokens_are_in_no_log_and_on_no_command_line(server):
    """Other users can read command lines, and logs are copied. Here the output is a file, so it has no token either."""
    for path in (f"{server.path}?", "/nowhere?", "/static/x?a=1&"):
        server.get(f"{path}token={OPERATORS}")
        server.get(f"{path}token={OPERATORS}", method="PUT")
    path, cookie = server.enter()
    server.get(path, Cookie=cookie)
    output = server.output
    assert OPERATORS not in output and VIEWERS not in output
    url_file = Path(re.search(r"The URL with its token:  cat (\S+)", output)[1])
    assert stat.S_IMODE(url_file.stat().st_mode) == 0o600
    assert url_file.read_text().endswith(f"?token={OPERATORS}\n")
    assert cookie.partition("=")[2] not in output and path.split("/")[1] not in output
    with open(f"/proc/{server.process.pid}/cmdline") as words:
        assert OPERATORS not in words.read()
    ours = os.stat(f"/proc/{server.process.pid}/environ")
    assert stat.S_IMODE(ours.st_mode) == 0o400 and ours.st_uid == os.getuid()
    for file in server.output_file.parent.rglob("*"):
        if file.is_file() and file not in (server.output_file, url_file):
            assert OPERATORS.encode() not in file.read_bytes(), file
