"""`gpu top`: a live view in a terminal, with problems on top, and keys that act."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

import gpu_runtime
from gpu_runtime import GpuError, cli, top, watching
from gpu_runtime.facts import KERNEL, LeaseId
from gpu_runtime.rendering import text
from gpu_runtime.settings import Settings
from gpu_runtime.top import Top
from tests.clock import PATIENCE

from . import samples
from .samples import BOB, ME, lease, snapshot

COLOUR = re.compile(r"\x1b\[[\d;]*m")
TWO = snapshot(
    lease("qwen", 14), lease("kernel", 2, kind="kernel"), lease("reranker", 4, owner=BOB)
)


def lines(seen, width=200, height=60, view=None):
    view = view or Top(None)
    return [COLOUR.sub("", line) for line in view.screen(seen, width, height, "12:00:00")]


def names(view, seen=TWO):
    """The names in the list, the chosen one with its mark."""
    shown = lines(seen, view=view)
    first = next(n for n, line in enumerate(shown) if line.startswith("  NOTEBOOK")) + 1
    return [line[:15].rstrip() for line in shown[first:-1] if line.strip()]


def test_problems_are_on_top_in_red_then_requests_that_wait_then_the_largest_holder():
    """A fault of the monitor needs a person. A request that waits may need one."""
    troubled = replace(samples.waiting, degraded="nvidia-smi hangs")
    shown = Top(None).screen(troubled, 200, 60, "12:00:00")
    assert shown[1].startswith("\x1b[31;1m! The monitor cannot see: nvidia-smi hangs")
    assert ", waiting " in shown[2] and shown[2].startswith("\x1b[33m!")
    assert not [line for line in lines(samples.empty) if line.startswith("!")]
    assert names(Top(None)) == ["> train.ipynb", "  analysis.ipyn"]


@pytest.mark.parametrize("name", ["busy", "waiting", "eight", "overdraft", "hostile", "empty"])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (60, 10), (1, 3)])
def test_a_screen_never_exceeds_the_terminal(name, width, height):
    shown = lines(getattr(samples, name), width, height)
    assert len(shown) <= height and all(text.width(line) <= max(width, 20) for line in shown)
    assert all(line.isprintable() for line in shown)


def test_a_name_in_wide_letters_is_cut_at_the_columns_of_the_terminal():
    """A line that is wider than the terminal is broken by it, and the last lines leave the screen."""
    seen = snapshot(lease("模型" * 20, 8))
    shown = lines(seen, 61, 20)
    assert max(map(text.width, shown)) in (60, 61) and any(line.endswith("…") for line in shown)


def test_keys_choose_sort_and_filter():
    view = Top(None)
    lines(TWO, view=view)
    for key in ("j", "\x1b[B", "j"):
        view.key(key)
    assert names(view) == ["  train.ipynb", "> analysis.ipyn"], "the last one stays chosen"
    view.key("k")
    for key in ("s", "s", "s"):
        view.key(key)
    assert "By user" in "".join(lines(TWO, view=view)) and names(view)[0] == "> train.ipynb"
    for key in ("/", "b", "x", "\x7f", "o"):
        view.key(key)
    assert names(view) == ["> analysis.ipyn"], "words of the row: bob"
    assert lines(TWO, view=view)[-1].startswith("Filter: bo")
    view.key("\r")
    assert len(names(view)) == 1 and view.key("\x1b") and view.key("/") and view.key("\x1b")
    assert len(names(view)) == 2
    assert not view.key("q")


@pytest.mark.parametrize(("key", "call"), [
    ("p", ("evict", (LeaseId(ME.id, KERNEL),), {"timeout": 30.0})),
    ("e", ("evict", (LeaseId(ME.id, "qwen"),), {"timeout": 30.0})),
    ("i", ("interrupt", (ME.id,), {"end": False})),
    ("x", ("interrupt", (ME.id,), {"end": True})),
])  # fmt: skip
def test_a_key_acts_on_the_chosen_notebook_after_a_y_only(key, call):
    done = []

    def act(name):
        def noted(*args, **more):
            done.append((name, args, more))
            return SimpleNamespace(because="it is done")

        return noted

    rt = SimpleNamespace(evict=act("evict"), interrupt=act("interrupt"), preload=act("preload"))
    view = Top(rt, start=lambda work: work())
    lines(TWO, view=view)
    view.key(key)
    assert "(pid 4000) of ann?" in lines(TWO, view=view)[-1]
    view.key("n")
    assert done == [] and "q quit" in lines(TWO, view=view)[-1]
    view.key(key)
    view.key("y")
    assert done == [call] and lines(TWO, view=view)[-1] == "it is done"


def test_what_may_not_be_done_is_said_in_the_last_line():
    """Only the user of a process and root may send it a signal. The system says so."""

    def interrupt(*_, **__):
        raise GpuError(
            "only bob and root may interrupt analysis.ipynb.\n  As that user: kill -INT 4121"
        )

    view = Top(SimpleNamespace(interrupt=interrupt), start=lambda work: work())
    lines(TWO, view=view)
    for key in ("j", "i", "y"):
        view.key(key)
    assert lines(TWO, view=view)[-1].startswith("only bob and root may interrupt analysis.ipynb.")


def test_without_a_terminal_the_command_for_programs_is_named(rt):
    with pytest.raises(GpuError, match="gpu status --json"):
        top.run(rt)


# -- programs that only watch ----------------------------------------------------------------------
OWNER = """
import sys, gpu_runtime
rt = gpu_runtime.Runtime(ledger=sys.argv[1], devices="sim:24GiB,host:64GiB")
rt.register("qwen", backend="fake", size="4GiB")
rt.preload("qwen")
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def default(monkeypatch, tmp_path):
    """The default runtime of this process, in a private ledger that nobody else uses."""
    ledger = f"keeper://{tmp_path}/default"
    runtime = gpu_runtime.Runtime(devices="sim:24GiB,host:64GiB", ledger=ledger, monitor=False)
    runtime.settings = Settings()
    monkeypatch.setattr(gpu_runtime, "runtime", lambda: runtime)
    yield runtime
    runtime.close()


@pytest.fixture
def owner(tmp_path, child_environment, monkeypatch):
    """Another process with a model in a ledger of its own. The tests look at no other process."""
    url = f"keeper://{tmp_path}/used"
    command = [sys.executable, "-c", OWNER, url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=child_environment, text=True, **pipes)
    assert process.stdout.readline().strip() == "ready"
    monkeypatch.setattr(watching.reader, "processes_of_this_user", lambda: [process.pid])
    yield url
    process.communicate("\n", timeout=PATIENCE)


@pytest.mark.processes
def test_the_ledger_that_a_process_uses_is_followed(default, owner):
    """A JupyterLab may not have the environment of the notebooks."""
    [active] = watching.active_ledgers()
    assert active.ledger.url == owner
    rt = watching.followed()
    try:
        assert rt.guest and [lease.name for lease in rt.status().leases()] == ["qwen"]
        assert watching.followed() is rt, "one runtime for each ledger"
    finally:
        watching.close(rt)
    assert rt._closed


@pytest.mark.processes
def test_a_ledger_that_is_set_is_never_replaced(default, owner):
    default.settings = Settings(gpu_ledger="keeper:///somewhere")
    assert watching.followed() is default


def test_the_default_ledger_stays_if_nobody_uses_another(default, monkeypatch):
    monkeypatch.setattr(watching.reader, "processes_of_this_user", lambda: [])
    assert watching.followed() is default and default.guest


@pytest.mark.processes
def test_a_process_that_only_watches_is_no_use(default, owner):
    """Consoles and commands hold no memory in the ledger that they open."""
    [active] = watching.active_ledgers()
    rt = watching.guest(active.ledger)
    try:
        directory = Path(active.ledger.directory)
        assert watching._last_use(active.ledger, frozenset({2**22 + 1})) is None
        assert watching.directory_of(rt) == directory
    finally:
        watching.close(rt)


@pytest.mark.processes
def test_a_command_shows_the_ledger_in_use_and_names_it(default, owner, capsys):
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"qwen +4\.0 GiB", shown.out)
    assert shown.err.startswith(f"gpu: this is the ledger in use, {owner}. ")
    assert default._closed
