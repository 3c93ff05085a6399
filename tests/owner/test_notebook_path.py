"""The path of a kernel's notebook: each front end publishes it differently, some only after the start."""

import os
import pwd
from types import SimpleNamespace

import IPython
import pytest

from gpu_runtime import Busy
from gpu_runtime.attribution import name_of
from gpu_runtime.facts import Book, Section
from gpu_runtime.facts.book import decode_book, encode
from gpu_runtime.ledgers.liveness import describe_self
from gpu_runtime.notebook import notebook_path
from gpu_runtime.safe_text import LONGEST_NAME, LONGEST_PATH

from .conftest import fakes


@pytest.fixture
def names(monkeypatch):
    """The namespace of the notebook, which is empty at first."""
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


def test_the_path_of_vs_code_comes_before_the_one_that_it_invents_for_a_server(names, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/train-jvsc-1f0c7b2a.ipynb")
    names["__vsc_ipynb_file__"] = "/home/ann/train.ipynb"
    assert notebook_path() == "/home/ann/train.ipynb"
    names["__vsc_ipynb_file__"] = "c:\\Users\\ann\\train.ipynb"
    assert describe_self(notebook=notebook_path()).file == "train.ipynb"
    names["__vsc_ipynb_file__"] = "/home/ann/back\\slash.ipynb"
    assert describe_self(notebook=notebook_path()).file == "back\\slash.ipynb"


def test_what_is_no_path_is_not_taken_for_one(names):
    names["__session__"] = object()
    assert notebook_path() == ""


def test_a_path_that_comes_late_is_taken_up(names, runtime):
    """The monitor publishes a path that becomes known later within a second. Then all processes see it."""
    rt = runtime(monitor=False)
    rt.register("a", backend="fake", size="1GiB")
    rt.preload("a")
    names["__vsc_ipynb_file__"] = "/home/ann/train.ipynb"
    rt.tick()
    assert rt.status().owner.label.startswith("train.ipynb (pid ")
    assert list(rt.leases()["notebook"]) == ["/home/ann/train.ipynb"]
    assert rt.status().sections[rt.status().owner.id].owner.notebook == "/home/ann/train.ipynb"


LATIN_1 = os.fsdecode(b"/home/jos\xe9/caf\xe9.ipynb")


def require_decodable(owner):
    """Checks that every other process can read this owner's record."""
    book = Book(sections={owner.id: Section(owner)})
    assert decode_book(encode(book)) == book


@pytest.mark.parametrize("path", [LATIN_1, "/" + "d" * 5000 + "/train.ipynb", "a\0\x1b[31m\n"])
def test_any_path_enters_the_owner_record_as_bounded_text(names, path):
    """One Latin-1 byte in a path made the whole page undecodable, and all leases of the page vanished."""
    names["__session__"] = path
    assert len(notebook_path()) <= LONGEST_PATH
    require_decodable(describe_self(notebook=notebook_path()))
    require_decodable(describe_self(notebook=path))


def test_the_name_of_the_file_is_still_readable(names):
    names["__session__"] = LATIN_1
    assert notebook_path() == "/home/jos\\udce9/caf\\udce9.ipynb"
    names["__session__"] = "/" + "d" * 5000 + "/train.ipynb"
    assert notebook_path().endswith("/train.ipynb")


@pytest.mark.parametrize("name", ["jos\udce9", "j" * 5000])
def test_any_user_enters_the_owner_record_as_bounded_text(monkeypatch, name):
    """A directory service may give a user any name. The readers of the record check the user by the same name."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=name))
    owner = describe_self()
    require_decodable(owner)
    assert len(owner.user) <= LONGEST_NAME
    assert owner.user == name_of(os.geteuid())
    require_decodable(describe_self(user=name))


def test_a_program_of_any_name_may_lease(runtime, monkeypatch):
    """A block without a purpose is named after the program, which may have any name."""
    monkeypatch.setattr("sys.argv", [os.fsdecode(b"caf\xe9.py")])
    rt = runtime(monitor=False)
    with rt.lease("1GiB"):
        book = rt._session.ledger.read()
        assert decode_book(encode(book)) == book
        assert [lease.name for lease in book.leases()] == ["caf\\udce9.py#1"]


def test_a_notebook_of_any_name_keeps_its_bytes(runtime, tmp_path, monkeypatch):
    """Another process did not see this notebook's lease, and was granted the same bytes again."""
    monkeypatch.setenv("JPY_SESSION_NAME", LATIN_1)
    holder, other = (runtime(ledger=f"keeper://{tmp_path}/ledger", monitor=False) for _ in "ab")
    fakes(holder, big="20GiB")
    fakes(other, mine="10GiB")
    with holder.use("big"):
        with pytest.raises(Busy, match="big"):
            other.preload("mine", timeout=0)
        assert list(other.leases()["notebook"]) == ["/home/jos\\udce9/caf\\udce9.ipynb"]
