"""Ways to log in without a token: Panel's own login, with roles for names, and a private Unix socket."""

import http.client
import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

from tests.clock import PATIENCE
from tests.faces.served import OPERATORS, console, free_port, panel_serve, serving
from tests.faces.test_gate import document_from, open_page, refused_status, websocket_of

PEOPLE = {name: f"{name}s-password" for name in ("ann", "bob", "eve", "guest")}
FORM = {"Content_Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A console with names and passwords. ann may act, bob may read, and eve has an account but no role."""
    folder, port = tmp_path_factory.mktemp("login"), free_port()
    (folder / "people.json").write_text(json.dumps(PEOPLE))
    environ = {"GPU_CONSOLE_OPERATORS": "ann, guest", "GPU_CONSOLE_VIEWERS": "bob"}
    environ["PANEL_COOKIE_SECRET"] = "c" * 32
    flags = f"--port {port} --basic-auth people.json --oauth-optional --allow-websocket-origin=*"
    words = panel_serve(folder, "--warm", *flags.split())
    with serving(words, folder, environ, port=port, path="/console") as server:
        yield server


def kept_cookies(answer):
    """The cookies that a browser keeps after this answer."""
    kept = [value for name, value in answer.getheaders() if name.lower() == "set-cookie"]
    cookies = [value.partition(";")[0] for value in kept]
    return "; ".join(cookie for cookie in cookies if not cookie.endswith('=""'))


def cookies_of(server, name):
    """Logs in as a browser does, with the person's password. Returns the cookies."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = urlencode({"username": name, "password": PEOPLE[name]})
    connection.request("POST", "/login", body, {"Content-Type": FORM["Content_Type"]})
    cookies = kept_cookies(connection.getresponse())
    connection.close()
    return cookies


def roles_of_ann_and_bob(server, log_in):
    for name, may_act in (("ann", True), ("bob", False)):
        cookies = log_in(server, name)
        page = server.get(Cookie=cookies)
        assert page.status == 200, page
        document = document_from(server, "/console/ws", page.session_token, cookie=cookies)
        assert f"SECRET of {name}, may act: {may_act}" in document


def test_a_login_gives_the_role_of_its_name(asking):
    roles_of_ann_and_bob(asking, cookies_of)


def test_an_account_without_a_role_is_refused(asking):
    """With OAuth everybody has an account somewhere. A guest has no role, even if an account has that name."""
    cookies = cookies_of(asking, "eve")
    answer = asking.get(Cookie=cookies)
    assert answer.status == 403 and "eve has logged in, and has no role here" in answer.body
    guest = asking.get(Cookie=cookies_of(asking, "guest"))
    assert guest.status == 403 and "SECRET" not in guest.body
    bobs = asking.get(Cookie=cookies_of(asking, "bob")).session_token
    assert refused_status(asking, "/console/ws", bobs, cookie=cookies) == 403


def test_without_a_login_only_the_login_page_answers(asking):
    """`--oauth-optional` would admit guests. They get a page of Panel without any content of the console."""
    script = "/console/autoload.js?bokeh-autoload-element=1"
    for path in ("/console/metadata", script, "/static/js/bokeh.js", "/x"):
        answer = asking.get(path)
        assert answer.status == 403 and "SECRET" not in answer.body, (path, answer)
    page = asking.get()
    assert page.status == 200
    for cookie in ("is_guest=1", "is_guest=1; user=ann"):
        assert refused_status(asking, "/console/ws", page.session_token, cookie=cookie) == 403
    assert refused_status(asking, "/console/ws", "anything.at-all") == 403


def test_a_forged_login_is_no_login(asking):
    """The login cookie is signed. On this console tokens do not count."""
    page = asking.get(Cookie=cookies_of(asking, "bob")).session_token
    signed = "user=2|1:0|10:1|4:user|4:YW5u|00"
    for forged in ("user=ann", signed, "is_guest=1", f"gpu-console={OPERATORS}"):
        assert refused_status(asking, "/console/ws", page, cookie=forged) == 403
        assert asking.get("/static/js/bokeh.min.js", Cookie=forged).status == 403
    assert refused_status(asking, "/console/ws", page, Authorization=f"Bearer {OPERATORS}") == 403


def test_the_session_of_an_operator_who_logged_in_is_joined_by_nobody_else(asking):
    """Neither a viewer nor a foreign page, which sends the operator's own cookie, can join."""
    cookie = cookies_of(asking, "ann")
    anns = asking.get(Cookie=cookie).session_token
    assert refused_status(asking, "/console/ws", anns, cookie=cookies_of(asking, "bob")) == 403
    foreign = {"cookie": cookie, "origin": "http://evil.example"}
    assert refused_status(asking, "/console/ws", anns, **foreign) == 403


def test_passwords_are_slowed(asking):
    """A few passwords are checked at once, then one a second. Visitors who are logged in continue."""
    cookies = cookies_of(asking, "ann")
    body = urlencode({"username": "ann", "password": "guess"})
    answers = [asking.get("/login", method="POST", body=body, **FORM).status for _ in range(20)]
    assert answers.count(302) <= 8 and answers.count(429) >= 12
    assert asking.get(Cookie=cookies).status == 200


class Provider(BaseHTTPRequestHandler):
    """A minimal OAuth provider. The code that it receives is the token, and the token is the name."""

    def do_POST(self):
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self._answer({"access_token": body["code"][0], "token_type": "bearer"})

    def do_GET(self):
        name = self.headers["Authorization"].removeprefix("Bearer ")
        self._answer({"login": name, "email": "ann"})

    def _answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def oauth(tmp_path_factory):
    """A console that uses a provider through Panel's own options. The cookie secret is in the environment."""
    folder, port = tmp_path_factory.mktemp("oauth"), free_port()
    provider = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=provider.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{provider.server_port}"
    environ = {
        "PANEL_COOKIE_SECRET": "c" * 32, "PANEL_OAUTH_KEY": "key", "PANEL_OAUTH_SECRET": "secret",
        "PANEL_OAUTH_AUTHORIZE_URL": f"{at}/authorize", "PANEL_OAUTH_TOKEN_URL": f"{at}/token",
        "PANEL_OAUTH_USER_URL": f"{at}/user", "GPU_CONSOLE_OPERATORS": "ann",
        "GPU_CONSOLE_VIEWERS": "bob",
    }  # fmt: skip
    flags = f"--warm --port {port} --oauth-provider generic --oauth-jwt-user login"
    words = panel_serve(folder, *flags.split())
    with serving(words, folder, environ, port=port, path="/console") as server:
        yield server
    provider.shutdown()
    provider.server_close()


def by_oauth(server, name):
    """Logs in through the provider as a browser does, as the person `name`. Returns the cookies."""
    asked = server.get("/login?next=/console")
    assert asked.status == 302 and "/authorize?" in asked.headers["location"]
    state = parse_qs(urlsplit(asked.headers["location"]).query)["state"][0]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    proof = urlencode({"code": name, "state": state})
    connection.request("GET", f"/login?{proof}", headers={"Cookie": asked.cookie})
    answer = connection.getresponse()
    connection.close()
    assert answer.status == 302, server.output
    return kept_cookies(answer)


def test_a_provider_proves_names_and_the_settings_give_them_roles(oauth):
    """Everybody has an account at the provider, and chooses the own name, which might be markup."""
    assert oauth.get().status == 302 and "/login" in oauth.get().headers["location"]
    roles_of_ann_and_bob(oauth, by_oauth)
    eve = oauth.get(Cookie=by_oauth(oauth, "eve"))  # whose email at the provider is "ann"
    assert eve.status == 403 and "eve has logged in, and has no role here" in eve.body
    answer = oauth.get(Cookie=by_oauth(oauth, "<img src=x onerror=alert(1)>"))
    assert answer.status == 403 and "&lt;img src=x" in answer.body and "<img" not in answer.body


@pytest.fixture(scope="module", params=["gpu console", "panel serve"])
def private(request, tmp_path_factory):
    """A console on a socket in a private directory, as JupyterLab's launcher starts it."""
    folder = tmp_path_factory.mktemp("socket")
    folder.chmod(0o700)
    path = str(folder / "s")
    if request.param == "gpu console":
        words, page = console(folder, socket_path=path), "/"
    else:
        words, page = panel_serve(folder, "--unix-socket", path), "/console"
    with serving(words, folder, socket_path=path, path=page) as server:
        server.get()
        yield server


def test_a_private_socket_needs_no_token_and_refuses_foreign_pages(private):
    """The kernel reports the user of a connection. Jupyter's proxy passes on the browser's `Origin`."""
    assert stat.S_IMODE(os.stat(private.socket).st_mode) == 0o600
    page = private.get(Origin="http://localhost:8888", Host="localhost:8888")
    assert page.status == 200 and page.session_token
    assert "token=" not in private.output
    assert private.get(Origin="http://evil.example", Host="localhost:8888").status == 403


def status_for_nobody(path):
    """The status that a process of the user `nobody` receives on the socket, or its error."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as theirs:
                theirs.settimeout(PATIENCE)
                theirs.connect(path)
                theirs.sendall(b"GET / HTTP/1.0\r\n\r\n")
                os.write(writes, theirs.recv(99).split()[1])
        except OSError as error:
            os.write(writes, error.strerror.encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as rules:
        return rules.read()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_another_user_needs_the_token_even_if_the_socket_is_open_to_them(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="gpu-"))
    path = str(folder / "s")
    try:
        with serving(console(tmp_path, socket_path=path), tmp_path, socket_path=path) as server:
            assert status_for_nobody(path) == "Permission denied"
            folder.chmod(0o755)
            assert status_for_nobody(path) == "Permission denied"
            os.chmod(path, 0o666)
            assert status_for_nobody(path) == "403"
            assert server.get().status == 200
    finally:
        shutil.rmtree(folder)


def test_an_interrupted_console_leaves_nothing(tmp_path):
    tmp_path.chmod(0o700)
    path = str(tmp_path / "s")
    with serving(console(tmp_path, socket_path=path), tmp_path, socket_path=path) as server:
        assert server.get().status == 200
        server.process.send_signal(signal.SIGINT)
        server.process.wait(PATIENCE)
        assert "Traceback" not in server.output and not os.path.exists(path)


def test_read_only_makes_every_visitor_a_viewer(tmp_path):
    """The operator becomes a viewer, too. The option is meant for a screen on the wall."""
    port = free_port()
    environ = {"GPU_CONSOLE_TOKEN": OPERATORS}
    words = console(tmp_path, port=port, read_only=True)
    with serving(words, tmp_path, environ, port=port) as server:
        path, cookie, token = open_page(server)
        document = document_from(server, websocket_of(path), token, cookie=cookie, click=True)
        assert "done by nobody" in document
