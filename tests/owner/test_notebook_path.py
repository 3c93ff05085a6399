"""Which notebook a kernel runs: each front end says it in its own way, some only after the kernel has started."""

from __future__ import annotations

from types import SimpleNamespace

import IPython
import pytest

from gpu_runtime.runtime import notebook_path


@pytest.fixture
def names(monkeypatch):
    """The names of a notebook's own; empty at first."""
    shell = SimpleNamespace(user_ns={})
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    return shell.user_ns


def test_jupyter_says_it_in_the_environment(names, monkeypatch):
    names["__session__"] = "other.ipynb"
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/train.ipynb")
    assert notebook_path() == "/home/ann/train.ipynb"


@pytest.mark.parametrize("name", ["__vsc_ipynb_file__", "__session__"])
def test_others_say_it_among_the_notebooks_own_names(names, name):
    assert notebook_path() == ""
    names[name] = "/home/ann/train.ipynb"
    assert notebook_path() == "/home/ann/train.ipynb"


def test_what_is_no_path_is_not_taken_for_one(names):
    names["__session__"] = object()
    assert notebook_path() == ""


def test_a_path_that_comes_late_is_taken_up(names, runtime):
    """Within a second, by the monitor; everybody sees it then."""
    rt = runtime(monitor=False)
    rt.register("a", backend="fake", size="1GiB")
    rt.preload("a")
    names["__vsc_ipynb_file__"] = "/home/ann/train.ipynb"
    rt.tick()
    assert rt.status().owner.label.startswith("train.ipynb (pid ")
    assert list(rt.leases()["notebook"]) == ["/home/ann/train.ipynb"]
    assert rt.status().sections[rt.status().owner.id].owner.notebook == "/home/ann/train.ipynb"
