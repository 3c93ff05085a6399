"""GPU_SERVE_CORS: pages of the named origins may call the server, with a token in a header."""

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

TOKEN = "o" * 32
APP = "https://app.example"


async def hello(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def ask(
    setting: str | None, method: str = "GET", path: str = "/v1/models", **headers: str
) -> HTTPResponse:
    """The answer of a server with this GPU_SERVE_CORS."""
    settings = Settings.load(gpu_serve_cors=setting)
    app = Application([(r"/v1/.*", Asgi, {"app": hello})])
    installed = gate.install(
        app, AccessRules("ann", TOKEN, cors=origins_of(settings.gpu_serve_cors))
    )
    path = path.replace("LANE", installed.lane)
    valid = f"{gate.COOKIE}={installed._cookie_rules.operator_token}"
    socket, port = bind_unused_port()
    server = HTTPServer(app)
    server.add_socket(socket)
    try:
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
    finally:
        server.stop()
        await server.close_all_connections()


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
    assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
    refused = await ask(APP, Origin=APP, Authorization="Bearer wrong", Accept="*/*")
    assert (refused.code, allowed(refused)) == (401, APP)
    anyone = await ask("*", Origin="http://b.example", X_Api_Key=TOKEN)
    assert (anyone.code, allowed(anyone)) == (200, "http://b.example")


@pytest.mark.parametrize("setting", ["app.example", "https://a.example/", "ftp://a", "https://a,b"])
def test_a_wrong_origin_is_a_mistake_in_the_setting(setting):
    with pytest.raises(BadSetting, match="GPU_SERVE_CORS"):
        origins_of(setting)
