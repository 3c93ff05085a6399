"""Servers that were started so that no gate could help: they show no console, and say which option to leave out."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.faces import served
from tests.faces.served import free_port, panel_serve, serving

PLUGIN = """
from tornado.web import RequestHandler

class Telling(RequestHandler):
    def get(self):
        self.write("told")

ROUTES = [("/told", Telling, {})]
"""
AUTH = "def get_user(handler):\n    return 'ann'\n\nlogin_url = '/login'\n"
REFUSED = {
    ("--admin",): "--admin opens a route that is not guarded",
    (
        "--rest-provider",
        "param",
    ): "--rest-provider or --rest-session-info opens a route that is not guarded",
    (
        "--rest-session-info",
        "--session-history",
        "9",
    ): "--rest-provider or --rest-session-info opens a route",
    ("--plugins", "plugin"): "--plugins (plugin.Telling) opens a route that is not guarded",
    ("--static-dirs", "files=."): "--static-dirs opens a route that is not guarded",
    ("--liveness",): "--liveness opens a route that is not guarded",
    ("--reuse-sessions",): "--reuse-sessions would show one visitor's page to another",
    ("--auth-module", "auth.py"): "--auth-module tells no names",
    ("--basic-auth", "sesame"): "--basic-auth with one password for all proves nobody's name",
    ("--basic-auth", "people.json"): "Nobody has a role. Set GPU_CONSOLE_OPERATORS",
    (
        "--basic-auth",
        "people.json",
        "--cookie-secret",
        "s",
    ): "--cookie-secret on a command line can be read by",
    ("another.py",): "shares its process with no other application",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("flags")
    (place / "plugin.py").write_text(PLUGIN)
    (place / "auth.py").write_text(AUTH)
    (place / "another.py").write_text("import panel as pn\npn.panel('another').servable()\n")
    (place / "people.json").write_text(json.dumps({"ann": "anns", "bob": "bobs"}))
    return place


@pytest.fixture(scope="module")
def ended(place):
    """What each server said with `--warm`, and how it ended. They start together, which takes two cores 20 s."""
    environ = served.environ(place) | {"PANEL_COOKIE_SECRET": "a" * 32}
    running = {}
    for flags in REFUSED:
        words = panel_serve(place, *flags, "--warm", "--port", str(free_port()))
        env = {
            name: value
            for name, value in environ.items()
            if "--cookie-secret" not in flags or "COOKIE" not in name
        }
        running[flags] = subprocess.Popen(
            words,
            cwd=place,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    said = {}
    for flags, process in running.items():
        try:
            said[flags] = process.communicate(timeout=100)[0], process.returncode
        except subprocess.TimeoutExpired:
            said[flags] = "it went on", None
        finally:
            served.end(process)
    return said


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_such_a_server_does_not_start(ended, flags):
    """With `--warm` the script runs at the start, and ends it."""
    said, code = ended[flags]
    assert code == 1 and REFUSED[flags] in said, said
    assert "token=" not in said


def test_without_warm_it_refuses_everything_from_the_first_page_on(place):
    """The script runs then only; what was open before is shut too."""
    port = free_port()
    words = panel_serve(place, "--port", str(port), "--plugins", "plugin")
    with serving(words, place, port=port, path="/console") as one:
        assert one.get("/told").body == "told"  # it knew nothing of the console yet
        assert one.get().status == 302
        for path in ("/console", "/told", "/", "/static/js/bokeh.js"):
            answer = one.get(path)
            assert answer.status == 503 and "--plugins (plugin.Telling)" in answer.body, answer
        assert "gpu: no console is served. --plugins" in one.output and "token=" not in one.output


def test_more_than_one_process_is_refused(place):
    """Each would have a token of its own, and a visitor's requests go to any of them."""
    port = free_port()
    words = panel_serve(place, "--port", str(port), "--num-procs", "2")
    with serving(words, place, port=port, path="/console") as one:
        assert {one.get().status for _ in range(20)} <= {
            302,
            503,
        }  # each process learns of its first page
        assert "gpu: no console is served. --num-procs" in one.output and "token=" not in one.output


def test_a_token_that_is_too_short_serves_nothing(place):
    """A setting that cannot be used is no reason to serve without it."""
    port = free_port()
    words = panel_serve(place, "--port", str(port), "--warm")
    environ = served.environ(place) | {"GPU_CONSOLE_TOKEN": "short"}
    said = subprocess.run(
        words, cwd=place, env=environ, capture_output=True, text=True, timeout=100
    )
    assert (
        said.returncode == 1
        and "text of 16 characters or more" in said.stderr
        and "'short'" not in said.stderr
    )
