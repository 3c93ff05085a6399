"""Some options of a server make it unsafe in spite of the gate. Such a server shows no console and
names the option to remove.
"""

import json
import subprocess
import sys

import pytest

from tests.clock import scaled
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
REST = "--rest-provider or --rest-session-info opens a route that is not guarded"
PEOPLE = ("--basic-auth", "people.json")
REFUSED = {
    ("--admin",): "--admin opens a route that is not guarded",
    ("--rest-provider", "param"): REST,
    ("--rest-session-info", "--session-history", "9"): REST,
    ("--plugins", "plugin"): "--plugins (plugin.Telling) opens a route that is not guarded",
    ("--static-dirs", "files=."): "--static-dirs opens a route that is not guarded",
    ("--liveness",): "--liveness opens a route that is not guarded",
    ("--reuse-sessions",): "--reuse-sessions would show one visitor's page to another",
    ("--auth-module", "auth.py"): "--auth-module tells no names",
    ("--basic-auth", "sesame"): "--basic-auth with one password for all proves nobody's name",
    PEOPLE: "Nobody has a role. Set GPU_CONSOLE_OPERATORS",
    (*PEOPLE, "--cookie-secret", "s"): "--cookie-secret on a command line can be read by",
    ("another.py",): "shares its process with no other application",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "auth.py").write_text(AUTH)
    (folder / "another.py").write_text("import panel as pn\npn.panel('another').servable()\n")
    (folder / "people.json").write_text(json.dumps({"ann": "anns", "bob": "bobs"}))
    return folder


# Each line of its input is the words of one `panel serve`, which runs in a fork: Panel is imported only once.
EACH = """
import json, os, sys
from panel.command import main
import bokeh.command.subcommands.serve, panel.command.serve, panel.io.server, panel.template
import gpu_panels.server

running = {}
for line in sys.stdin:
    words = json.loads(line)
    child = os.fork()
    if child == 0:
        with open(f"{len(running)}.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if "--cookie-secret" in words:
            del os.environ["PANEL_COOKIE_SECRET"]
        sys.orig_argv[1:] = words
        sys.argv[1:] = words[2:]
        sys.exit(main())
    running[child] = len(running)
for _ in running:
    child, status = os.wait()
    print(running[child], os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def ended(folder):
    """What each server printed with `--warm`, and its exit status. All servers run at the same time."""
    environ = served.environ(folder) | {"PANEL_COOKIE_SECRET": "a" * 32}
    words = [
        panel_serve(folder, *flags, "--warm", "--port", str(free_port()))[1:] for flags in REFUSED
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", EACH], cwd=folder, env=environ, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        codes, _ = process.communicate("\n".join(map(json.dumps, words)), timeout=scaled(100))
    finally:
        served.end(process)
    by_number = dict(map(int, line.split()) for line in codes.splitlines())
    return {
        flags: ((folder / f"{number}.txt").read_text(), by_number[number])
        for number, flags in enumerate(REFUSED)
    }


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_a_server_with_an_unsafe_option_does_not_start(ended, flags):
    output, code = ended[flags]
    assert code == 1 and REFUSED[flags] in output, output
    assert "token=" not in output


def test_without_warm_every_request_after_the_first_page_is_refused(folder):
    """The script runs only at the first page: routes that were open are closed from then on."""
    port = free_port()
    words = panel_serve(folder, "--port", str(port), "--plugins", "plugin")
    with serving(words, folder, port=port, path="/console") as server:
        assert server.get("/told").body == "told"  # the script has not run yet
        assert server.get().status == 302
        for path in ("/console", "/told", "/", "/static/js/bokeh.js"):
            answer = server.get(path)
            assert answer.status == 503 and "--plugins (plugin.Telling)" in answer.body, answer
        assert "gpu: no console is served. --plugins" in server.output
        assert "token=" not in server.output


def test_more_than_one_process_is_refused(folder):
    """Each process would have a token of its own, but a visitor's request may reach any of them."""
    port = free_port()
    words = panel_serve(folder, "--port", str(port), "--num-procs", "2")
    with serving(words, folder, port=port, path="/console") as server:
        assert {server.get().status for _ in range(20)} <= {
            302,
            503,
        }  # the script runs in each process at its first page
        assert "gpu: no console is served. --num-procs" in server.output
        assert "token=" not in server.output


def test_with_a_token_that_is_too_short_nothing_is_served(folder):
    port = free_port()
    words = panel_serve(folder, "--port", str(port), "--warm")
    environ = served.environ(folder) | {"GPU_CONSOLE_TOKEN": "short"}
    output = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=scaled(100)
    )
    assert output.returncode == 1 and "text of 16 characters or more" in output.stderr
    assert "'short'" not in output.stderr
