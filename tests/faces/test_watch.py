"""`gpu top`: a live view in a terminal, with problems on top, and keys that act."""

import re
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gpu_runtime import GpuError, top
from gpu_runtime.facts import KERNEL, LeaseId
from gpu_runtime.top import Top

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
    assert " waits " in shown[2] and shown[2].startswith("\x1b[33m!")
    assert not [line for line in lines(samples.empty) if line.startswith("!")]
    assert names(Top(None)) == ["> train.ipynb", "  analysis.ipyn"]


@pytest.mark.parametrize("name", ["busy", "waiting", "eight", "overdraft", "hostile", "empty"])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (60, 10), (1, 3)])
def test_a_screen_never_exceeds_the_terminal(name, width, height):
    shown = lines(getattr(samples, name), width, height)
    assert len(shown) <= height and all(len(line) <= max(width, 20) for line in shown)
    assert all(line.isprintable() for line in shown)


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
    assert "train.ipynb (pid 4000) of ann? y or n" in lines(TWO, view=view)[-1]
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
