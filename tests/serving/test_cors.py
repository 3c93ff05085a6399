"""GPU_SERVE_CORS: pages of the named origins may call the server, with a token in a header."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application

from gpu_runtime.errors import BadSetting
from gpu_runtime.serving.server import Asgi
from gpu_runtime.settings import Settings
from gpu_runtime.web import gate
from gpu_runtime.web.auth import AccessRules
from gpu_runtime.web.gate import origins_of
from tests.browser.chromium import CHROMIUM

TOKEN = "o" * 32
APP = "https://app.example"


async def hello(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@asynccontextmanager
async def server(setting: str | None, app) -> AsyncIterator[tuple[int, gate.Gate]]:
    """A server of the ASGI application `app` with this GPU_SERVE_CORS: its port, and its gate."""
    settings = Settings.load(gpu_serve_cors=setting)
    application = Application([(r"/v1/.*", Asgi, {"app": app})])
    rules = AccessRules("ann", TOKEN, cors=origins_of(settings.gpu_serve_cors))
    installed = gate.install(application, rules)
    socket, port = bind_unused_port()
    http = HTTPServer(application)
    http.add_socket(socket)
    try:
        yield port, installed
    finally:
        http.stop()
        await http.close_all_connections()


@asynccontextmanager
async def chromium_page():
    """A page of a real Chromium. Without one the test is skipped."""
    playwright = pytest.importorskip("playwright.async_api")
    if not shutil.which(CHROMIUM):
        pytest.skip("needs Chromium")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield await browser.new_page()
        await browser.close()


async def ask(
    setting: str | None, method: str = "GET", path: str = "/v1/models", **headers: str
) -> HTTPResponse:
    """The answer of a server with this GPU_SERVE_CORS."""
    async with server(setting, hello) as (port, installed):
        path = path.replace("LANE", installed.lane)
        valid = f"{gate.COOKIE}={installed._cookie_rules.operator_token}"
        return await AsyncHTTPClient().fetch(
            f"http://127.0.0.1:{port}{path}",
            method=method,
            headers={
                name.replace("_", "-"): value.replace("VALID", valid)
                for name, value in headers.items()
            },
            raise_error=False,
            follow_redirects=False,
        )


def allowed(answer: HTTPResponse) -> str | None:
    return answer.headers.get("Access-Control-Allow-Origin")


async def test_a_page_of_a_named_origin_reads_answers_and_errors():
    """Before the request, the browser sends a preflight request without a token. The page may read an error, too."""
    asked = {"Origin": APP, "Access_Control_Request_Headers": "authorization, x-stainless-os"}
    preflight = await ask(APP, "OPTIONS", **asked)
    assert (preflight.code, allowed(preflight)) == (204, APP)
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    answer = await ask(APP, Origin=APP, Authorization=f"Bearer {TOKEN}")
    assert (answer.code, answer.body, allowed(answer)) == (200, b"/v1/models", APP)
    assert "Origin" in answer.headers["Vary"]
    assert answer.headers["Access-Control-Expose-Headers"] == "*"
    assert "Access-Control-Allow-Credentials" not in answer.headers, "else * is no pattern"
    refused = await ask(APP, Origin=APP, Authorization="Bearer wrong", Accept="*/*")
    assert (refused.code, allowed(refused)) == (401, APP)
    anyone = await ask("*", Origin="http://b.example", X_Api_Key=TOKEN)
    assert (anyone.code, allowed(anyone)) == (200, "http://b.example")


async def test_a_page_reads_every_header_that_the_server_sends():
    """Of an answer and of an error: those of the API, of the gate, and one that does not exist yet."""
    ours = ["Retry-After", "X-GPU-Max-Tokens", "X-GPU-Log-Next", "Request-Id", "X-New", "Location"]

    async def app(scope, receive, send) -> None:
        headers = [(name.lower().encode(), b"1") for name in ours]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    socket, elsewhere = bind_unused_port()
    other = HTTPServer(
        Application([])
    )  # the page is its 404: Chromium lets only pages of this machine call it
    other.add_socket(socket)
    origin = f"http://127.0.0.1:{elsewhere}"
    async with server(origin, app) as (port, _), chromium_page() as page:
        await page.goto(origin)
        read = """async ([url, Authorization]) => [...(await fetch(url, {headers: {Authorization}})).headers.keys()]"""
        url = f"http://127.0.0.1:{port}/v1/models"
        seen = await page.evaluate(read, [url, f"Bearer {TOKEN}"])
        refused = await page.evaluate(read, [url, "Bearer wrong"])
    other.stop()
    assert {name.lower() for name in ours} <= set(seen)
    assert "www-authenticate" in refused


@pytest.mark.parametrize(
    "setting", ["app.example", "https://a.example/", "ftp://a", "https://a,b", "http://[a"]
)
def test_a_wrong_origin_is_a_mistake_in_the_setting(setting):
    with pytest.raises(BadSetting, match="GPU_SERVE_CORS"):
        origins_of(setting)
