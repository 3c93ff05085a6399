"""Other ways in than a token: Panel's own login, with roles for names; and a Unix socket of one's own."""

from __future__ import annotations

import doctest
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
from bokeh.util.token import get_token_payload

from gpu_runtime.errors import GpuError
from gpu_runtime.web import http_server, sockets
from tests.faces.served import OPERATORS, console, free_port, panel_serve, serving
from tests.faces.test_gate import opened, refused, talk, websocket_of

PEOPLE = {
    "ann": "anns-password",
    "bob": "bobs-password",
    "eve": "eves-password",
    "guest": "guests-password",
}
FORM = {"Content_Type": "application/x-www-form-urlencoded"}


# -- Panel's login


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A console that asks for names and passwords: ann may act, bob may look, eve has an account and no role."""
    place, port = tmp_path_factory.mktemp("login"), free_port()
    (place / "people.json").write_text(json.dumps(PEOPLE))
    environ = {
        "PANEL_COOKIE_SECRET": "c" * 32,
        "GPU_CONSOLE_OPERATORS": "ann, guest",
        "GPU_CONSOLE_VIEWERS": "bob",
    }
    words = panel_serve(
        place,
        "--warm",
        "--port",
        str(port),
        "--basic-auth",
        "people.json",
        "--oauth-optional",
        "--allow-websocket-origin=*",
    )
    with serving(words, place, environ, port=port, path="/console") as one:
        yield one


def cookies_of(one, name):
    """The cookies of somebody who has typed their password."""
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    connection.request(
        "POST",
        "/login",
        urlencode({"username": name, "password": PEOPLE[name]}),
        {"Content-Type": FORM["Content_Type"]},
    )
    answer = connection.getresponse()
    kept = [
        value.partition(";")[0]
        for header, value in answer.getheaders()
        if header.lower() == "set-cookie"
    ]
    connection.close()
    return "; ".join(cookie for cookie in kept if not cookie.endswith('=""'))


def test_a_login_gives_the_role_of_its_name(asking):
    """And the page is theirs: what they do is done in their name."""
    for name, may_act in (("ann", True), ("bob", False)):
        cookies = cookies_of(asking, name)
        page = asking.get(Cookie=cookies)
        assert page.status == 200
        document = talk(asking, "/console/ws", page.session_token, cookie=cookies)
        assert f"SECRET of {name}, may act: {may_act}" in document


def test_an_account_without_a_role_is_told_so(asking):
    """With OAuth everybody has an account somewhere. A guest is nobody, though an account be called so."""
    cookies = cookies_of(asking, "eve")
    answer = asking.get(Cookie=cookies)
    assert answer.status == 403 and "eve has logged in, and has no role here" in answer.body
    guest = asking.get(Cookie=cookies_of(asking, "guest"))
    assert guest.status == 403 and "SECRET" not in guest.body
    bobs = asking.get(Cookie=cookies_of(asking, "bob")).session_token
    assert refused(asking, "/console/ws", bobs, cookie=cookies) == 403


def test_who_has_not_logged_in_sees_the_way_to_the_login_and_no_more(asking):
    """`--oauth-optional` would let guests in: they come to a page of Panel's, and nothing of ours is on it."""
    for path in (
        "/console/metadata",
        "/console/autoload.js?bokeh-autoload-element=1",
        "/static/js/bokeh.js",
        "/x",
    ):
        answer = asking.get(path)
        assert answer.status == 403 and "SECRET" not in answer.body, (path, answer)
    page = asking.get()
    assert page.status == 200
    for cookie in ("is_guest=1", "is_guest=1; user=ann"):
        assert refused(asking, "/console/ws", page.session_token, cookie=cookie) == 403
    assert refused(asking, "/console/ws", "anything.at-all") == 403


def test_a_forged_login_is_no_login(asking):
    """The cookie is signed; a token has no place here."""
    page = asking.get(Cookie=cookies_of(asking, "bob")).session_token
    for forged in (
        "user=ann",
        "user=2|1:0|10:1|4:user|4:YW5u|00",
        "is_guest=1",
        f"gpu-console={OPERATORS}",
    ):
        assert refused(asking, "/console/ws", page, cookie=forged) == 403
        assert asking.get("/static/js/bokeh.min.js", Cookie=forged).status == 403
    assert refused(asking, "/console/ws", page, Authorization=f"Bearer {OPERATORS}") == 403


def test_a_viewer_does_not_join_the_session_of_an_operator_who_logged_in(asking):
    anns = asking.get(Cookie=cookies_of(asking, "ann")).session_token
    assert refused(asking, "/console/ws", anns, cookie=cookies_of(asking, "bob")) == 403


def test_a_foreign_page_opens_no_websocket_with_a_logins_cookie(asking):
    cookies = cookies_of(asking, "ann")
    page = asking.get(Cookie=cookies).session_token
    assert refused(asking, "/console/ws", page, cookie=cookies, origin="http://evil.example") == 403


def test_passwords_are_not_tried_as_fast_as_they_can_be_typed(asking):
    """A head start, then one a second; whoever is logged in goes on."""
    cookies = cookies_of(asking, "ann")
    body = urlencode({"username": "ann", "password": "guess"})
    answers = [asking.get("/login", method="POST", body=body, **FORM).status for _ in range(20)]
    assert answers.count(302) <= 8 and answers.count(429) >= 12
    assert asking.get(Cookie=cookies).status == 200


# -- OAuth


class Provider(BaseHTTPRequestHandler):
    """The least of an OAuth provider: the code that it was sent is the token, and the token the name."""

    def do_POST(self):
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self._answer({"access_token": body["code"][0], "token_type": "bearer"})

    def do_GET(self):
        self._answer(
            {"login": self.headers["Authorization"].removeprefix("Bearer "), "email": "ann"}
        )

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
    """A console that sends people to a provider, by Panel's own options. Its cookie secret is in the environment."""
    place, port = tmp_path_factory.mktemp("oauth"), free_port()
    provider = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=provider.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{provider.server_port}"
    environ = {
        "PANEL_COOKIE_SECRET": "c" * 32,
        "PANEL_OAUTH_KEY": "key",
        "PANEL_OAUTH_SECRET": "secret",
        "PANEL_OAUTH_AUTHORIZE_URL": f"{at}/authorize",
        "PANEL_OAUTH_TOKEN_URL": f"{at}/token",
        "PANEL_OAUTH_USER_URL": f"{at}/user",
        "GPU_CONSOLE_OPERATORS": "ann",
        "GPU_CONSOLE_VIEWERS": "bob",
    }
    words = panel_serve(
        place,
        "--warm",
        "--port",
        str(port),
        "--oauth-provider",
        "generic",
        "--oauth-jwt-user",
        "login",
    )
    with serving(words, place, environ, port=port, path="/console") as one:
        yield one
    provider.shutdown()
    provider.server_close()


def by_oauth(one, name):
    """The cookies of somebody whom the provider calls so, got as a browser gets them."""
    asked = one.get("/login?next=/console")
    assert asked.status == 302 and "/authorize?" in asked.headers["location"]
    state = parse_qs(urlsplit(asked.headers["location"]).query)["state"][0]
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    connection.request(
        "GET",
        "/login?" + urlencode({"code": name, "state": state}),
        headers={"Cookie": asked.cookie},
    )
    answer = connection.getresponse()
    kept = [
        value.partition(";")[0]
        for header, value in answer.getheaders()
        if header.lower() == "set-cookie"
    ]
    connection.close()
    assert answer.status == 302, one.output
    return "; ".join(cookie for cookie in kept if not cookie.endswith('=""'))


def test_a_provider_proves_names_and_the_settings_give_them_roles(oauth):
    """Everybody has an account at the provider. By which field they are known is the operator's to say."""
    assert oauth.get().status == 302 and "/login" in oauth.get().headers["location"]
    for name, may_act in (("ann", True), ("bob", False)):
        cookies = by_oauth(oauth, name)
        page = oauth.get(Cookie=cookies)
        assert page.status == 200, page
        document = talk(oauth, "/console/ws", page.session_token, cookie=cookies)
        assert f"SECRET of {name}, may act: {may_act}" in document
    eve = oauth.get(Cookie=by_oauth(oauth, "eve"))  # whose email the provider tells to be ann
    assert eve.status == 403 and "eve has logged in, and has no role here" in eve.body


def test_a_name_that_the_provider_tells_is_shown_as_text(oauth):
    """Whoever may choose it there might choose markup."""
    answer = oauth.get(Cookie=by_oauth(oauth, "<img src=x onerror=alert(1)>"))
    assert answer.status == 403 and "&lt;img src=x" in answer.body and "<img" not in answer.body


# -- a Unix socket


@pytest.fixture(scope="module", params=["gpu console", "panel serve"])
def private(request, tmp_path_factory):
    """A console on a socket in a directory of one's own, as JupyterLab's launcher starts it."""
    place = tmp_path_factory.mktemp("socket")
    place.chmod(0o700)
    path = str(place / "s")
    if request.param == "gpu console":
        with serving(console(place, socket_path=path), place, socket_path=path) as one:
            yield one
    else:
        with serving(
            panel_serve(place, "--unix-socket", path), place, socket_path=path, path="/console"
        ) as one:
            one.get()
            yield one


def test_on_a_socket_of_ones_own_no_token_is_asked_for(private):
    """The kernel says who is at the other end; others cannot even connect."""
    assert stat.S_IMODE(os.stat(private.socket).st_mode) == 0o600
    page = private.get()
    assert page.status == 200 and page.session_token
    assert "token=" not in private.output


def test_a_foreign_page_is_refused_there_too(private):
    """Jupyter's proxy passes on what the browser says of itself."""
    assert private.get(Origin="http://evil.example", Host="localhost:8888").status == 403
    assert private.get(Origin="http://localhost:8888", Host="localhost:8888").status == 200


def test_what_the_proxy_sends_along_is_not_written_into_the_page(private):
    """It passes on Jupyter's own cookies and token; a script in the page could read them there."""
    page = private.get(
        f"{private.path}?token=jupyters",
        Cookie="username-localhost-8888=jupyters",
        Authorization="token jupyters",
    )
    inside = str(get_token_payload(page.session_token))
    assert page.status == 200 and "headers" in inside
    assert (
        "jupyters" not in inside
        and "jupyters" not in page.body
        and "jupyters" not in private.output
    )


def status_for_nobody(path):
    """What a process of the user nobody is answered on that socket."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as theirs:
                theirs.settimeout(20)
                theirs.connect(path)
                theirs.sendall(b"GET / HTTP/1.0\r\n\r\n")
                os.write(writes, theirs.recv(99).split()[1])
        except OSError as error:
            os.write(writes, error.strerror.encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as told:
        return told.read()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_another_user_is_asked_for_the_token_though_the_socket_was_opened_to_them(tmp_path):
    """They cannot connect; and where a mode or a directory was changed, who is there is asked of the kernel."""
    place = Path(tempfile.mkdtemp(prefix="gpu-"))
    path = str(place / "s")
    try:
        with serving(console(tmp_path, socket_path=path), tmp_path, socket_path=path) as one:
            assert status_for_nobody(path) == "Permission denied"
            place.chmod(0o755)
            assert status_for_nobody(path) == "Permission denied"
            os.chmod(path, 0o666)
            assert status_for_nobody(path) == "403"
            assert one.get().status == 200
    finally:
        shutil.rmtree(place)


# -- where a socket may lie


@pytest.fixture
def mine(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_directory_is_made_for_nobody_else(mine):
    """Whatever the umask is."""
    before = os.umask(0)
    try:
        assert sockets.prepare(str(mine / "new" / "s")) == mine / "new" / "s"
    finally:
        os.umask(before)
    assert stat.S_IMODE((mine / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(mine, mode):
    (mine / "open").mkdir()
    (mine / "open").chmod(mode)
    with pytest.raises(GpuError, match=r"yours alone \(mode 0700\)"):
        sockets.prepare(str(mine / "open" / "s"))


def test_a_directory_that_others_could_replace_is_refused(mine):
    """Whoever may rename a step of the way puts a server of theirs at its end, and is sent Jupyter's cookies."""
    inner = mine / "shared" / "mine"
    inner.mkdir(parents=True)
    inner.chmod(0o700)
    (mine / "shared").chmod(0o777)
    with pytest.raises(GpuError, match="could be replaced by others: .*shared is not yours alone"):
        sockets.prepare(str(inner / "s"))
    (mine / "link").symlink_to(inner)
    with pytest.raises(GpuError, match="could be replaced by others"):
        sockets.prepare(str(mine / "link" / "s"))
    (mine / "shared").chmod(0o1777)  # as /tmp: nobody renames what is another's
    assert sockets.prepare(str(inner / "s"))


def test_what_exists_there_is_not_overwritten(mine):
    """A file stays, a link is not followed, a server that listens is not pushed aside; what a dead one left goes."""
    (mine / "file").write_text("precious")
    (mine / "link").symlink_to(mine / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(GpuError, match="exists and is no socket"):
            sockets.prepare(str(mine / name))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(mine / "live"))
        listening.listen()
        with pytest.raises(GpuError, match="a server listens on .*live already"):
            sockets.prepare(str(mine / "live"))
    assert sockets.prepare(str(mine / "live")) and not (mine / "live").exists()
    assert (mine / "file").read_text() == "precious"


def test_a_path_that_is_too_long_for_a_socket_is_refused_in_words(mine):
    with pytest.raises(GpuError, match="107 are the most"):
        sockets.prepare(str(mine / ("x" * 120)))


# -- the port, and the end


def test_the_first_free_port_is_taken_unless_one_was_asked_for():
    """On a shared box the first ones are others' consoles."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert sockets.free_port("127.0.0.1", port, tries=50) > port
        with pytest.raises(
            GpuError,
            match=f"port {port} of 127.0.0.1 is in use. Take another:  gpu console --port N",
        ):
            sockets.free_port("127.0.0.1", port, tries=1)


def test_a_console_ends_when_it_is_interrupted_and_leaves_nothing(tmp_path):
    """No traceback, and the socket is gone."""
    tmp_path.chmod(0o700)
    path = str(tmp_path / "s")
    with serving(console(tmp_path, socket_path=path), tmp_path, socket_path=path) as one:
        assert one.get().status == 200
        one.process.send_signal(signal.SIGINT)
        one.process.wait(20)
        assert "Traceback" not in one.output and not os.path.exists(path)


def test_read_only_makes_viewers_of_all(tmp_path):
    """The operator too: it is for a screen on the wall."""
    port = free_port()
    environ = {"GPU_CONSOLE_TOKEN": OPERATORS}
    with serving(console(tmp_path, port=port, read_only=True), tmp_path, environ, port=port) as one:
        path, cookie, token = opened(one)
        document = talk(one, websocket_of(path), token, cookie=cookie, click=True)
        assert "done by nobody" in document


def test_the_examples_of_the_server_hold():
    assert doctest.testmod(http_server).failed == 0


def test_each_start_makes_a_token_of_its_own(environment):
    """Unless one is set; and none is shown where the settings are."""
    first, second = http_server.access_rules(), http_server.access_rules()
    assert (
        len(first.operator_token) > 40
        and first.operator_token != second.operator_token
        and not first.viewer_token
    )
    environment.setenv("GPU_CONSOLE_TOKEN", OPERATORS)
    environment.setenv("GPU_CONSOLE_OPERATORS", " ann,bob ,")
    environment.setenv("GPU_CONSOLE_READ_ONLY", "true")
    told = http_server.access_rules()
    assert (told.operator_token, told.operators, told.read_only) == (
        OPERATORS,
        {"ann", "bob"},
        True,
    )


def test_a_browser_is_sent_the_token_by_a_file_and_not_on_its_command_line(environment, tmp_path):
    """What stands on a command line every user of the machine can read."""
    opened_with = []
    environment.setenv("DISPLAY", ":0")
    environment.setattr(http_server.webbrowser, "open", opened_with.append)
    left = http_server.open_browser(f"http://127.0.0.1:8211/?token={OPERATORS}")
    assert OPERATORS not in opened_with[0] and opened_with[0].startswith("file:///")
    assert stat.S_IMODE(left.stat().st_mode) == 0o600 and OPERATORS in left.read_text()
    left.unlink()
    environment.delenv("DISPLAY")
    environment.delenv("WAYLAND_DISPLAY", raising=False)
    assert http_server.open_browser("http://127.0.0.1:8211/") is None
