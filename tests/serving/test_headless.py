"""`gpu serve` as a real process. With Panel it also serves the console; without Panel it serves all other routes."""

import asyncio
import http.client
import json
import signal
import sys

import pytest

from tests.clock import PATIENCE, until
from tests.faces.served import OPERATORS, VIEWERS, Conversation, free_port, serving

# A script that starts `gpu serve` as if Panel and Bokeh were not installed.
WITHOUT_PANEL = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("panel", "bokeh"):
            raise ImportError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from gpu_runtime import cli

sys.exit(cli.main(sys.argv[1:]))
"""
COMMANDS = {
    "without Panel": [sys.executable, "-c", WITHOUT_PANEL],
    "with Panel": [sys.executable, "-m", "gpu_runtime.cli"],
}
TOKEN = {"Authorization": f"Bearer {OPERATORS}", "Accept": "application/json"}
ROUTES = ["/health", "/v1/models", "/metrics", "/memory/stats", "/openapi.json", "/docs"]


def start(kind, folder):
    """A context manager with the running server of this kind."""
    port = free_port()
    command = [*COMMANDS[kind], "serve", "--port", str(port)]
    environment = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CATALOG": str(folder / "catalog")}
    environment["GPU_CONSOLE_VIEWER_TOKEN"] = VIEWERS
    environment["GPU_SERVE_LOG"] = str(folder / "requests.jsonl")
    return serving(command, folder, environment, port=port)


@pytest.fixture(scope="module", params=COMMANDS)
def server(request, tmp_path_factory):
    with start(request.param, tmp_path_factory.mktemp("serve")) as server:
        yield server


def is_headless(server):
    return "without the console" in server.output


def upgrade(server, path, **headers):
    """The HTTP status of a request for a websocket."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    handshake = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==",
    }
    try:
        connection.request("GET", path, headers=handshake | headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_answers_with_a_token_and_refuses_without_it(server, path):
    """Both kinds of server, with and without Panel, have the same routes and the same gate."""
    assert server.get(path, **TOKEN).status == 200
    assert server.get(path, Authorization=f"Bearer {VIEWERS}").status == 200
    assert server.get(path, Accept="application/json").status == 401
    assert server.get(path).status == 403
    wrong = {"Authorization": "Bearer wrong-0123456789abcdef"}
    assert server.get(path, Accept="application/json", **wrong).status in (401, 429)


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_a_probe_on_this_machine_needs_no_token(server, path):
    """A supervisor reads these paths. A proxy speaks for strangers, so its requests need the token."""
    answer = server.get(path)
    assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok"})
    assert server.get(path, **{"X-Forwarded-For": "192.0.2.1"}).status == 403
    assert server.get(f"{path}/more").status == 403


def test_the_request_log_is_opened_again_at_sighup(server):
    """A rotation renames the file and sends the signal. Then it expects the new file, also without a call."""
    file = server.output_file.with_name("requests.jsonl")
    file.rename(file.with_suffix(".1"))
    server.process.send_signal(signal.SIGHUP)
    until(file.exists, "the server opened its log again")
    assert server.process.poll() is None and server.get("/health", **TOKEN).status == 200


@pytest.mark.parametrize("path", ["/chat/completions", "/models"])
def test_a_path_that_lacks_v1_gets_the_right_path_from_either_server(server, path):
    """Without the token, the path is refused as every other path."""
    answer = server.get(path, **TOKEN)
    assert answer.status == 404
    assert f"did you mean /v1{path}?" in json.loads(answer.body)["error"]["message"]
    assert server.get(path, Accept="application/json").status == 401


def test_the_token_is_also_taken_as_an_api_key(server):
    """Anthropic's clients send the token as `X-Api-Key`. A wrong token is refused."""
    key = {"X-Api-Key": OPERATORS, "Accept": "application/json"}
    assert server.get("/v1/models", **key).status == 200
    assert server.get("/v1/models", **{**key, "X-Api-Key": "wrong"}).status in (401, 429)


def test_no_websocket_opens_without_the_token(server):
    for path in ("/ws", "/health", "/v1/models"):
        assert upgrade(server, path) == 403
    assert upgrade(server, "/ws", Origin="http://evil.example", **TOKEN) == 403


def test_the_token_leaves_the_url_and_the_cookie_opens_the_page(server):
    """A URL with the token redirects to a page without it. The page is the console or the routes' documentation."""
    first = server.get(f"/?token={OPERATORS}")
    assert first.status == 302 and OPERATORS not in str(first.headers)
    path = first.headers["location"].removeprefix(".")
    assert server.get(path, Cookie=first.cookie).status == 200
    assert server.get("/docs", Cookie=first.cookie).status == 403


def test_the_console_is_on_the_same_port_if_panel_is_installed(server):
    """Without Panel, a printed line names the extra to install. With it, Bokeh's websocket opens for its page."""
    url = f"gpu serve runs until you press Ctrl-C. Open:\n    http://127.0.0.1:{server.port}/\n"
    until(lambda: url in server.output, "the URL: a server listens before it prints it")
    page = server.get("/", **TOKEN)
    if is_headless(server):
        assert server.output.count("Install it: pip install 'gpu-console[console]'") == 1
        assert page.status == 404
        redirected = server.get(f"/?token={OPERATORS}").headers["location"]
        assert redirected.endswith("/docs")
        return
    assert page.status == 200 and page.session_token

    async def document():
        conversation = Conversation(server, "/ws", page.session_token, **TOKEN)
        async with conversation as client:
            return await client.document()

    assert json.loads(asyncio.run(document()))


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_server_on_a_unix_socket_needs_no_token_from_its_owner(kind, tmp_path):
    """The kernel reports which user opened the connection. The socket is removed when the server ends."""
    tmp_path.chmod(0o700)
    path = tmp_path / "s"
    command = [*COMMANDS[kind], "serve", "--socket", str(path)]
    environment = {"GPU_CATALOG": str(tmp_path / "catalog")}
    with serving(command, tmp_path, environment, socket_path=str(path)) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.get("/health").status == 200
        assert server.get("/health", Origin="http://evil.example").status == 403
        assert f"gpu serve listens on {path}, for" in server.output
    assert not path.exists() and "Traceback" not in server.output
