"""Errors of the system and of other packages become one sentence; errors of the user's code stay."""

import _thread
import errno
import runpy

import pytest

from gpu_runtime import GpuError, threads
from gpu_runtime.errors import in_one_sentence


def no_thread(*_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("error", "says"), [
    (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
    (OSError(errno.ENOSPC, "No space left on device"), "df -h"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (ImportError("no", name="pandas"), "pip install 'pandas>="),
    (ImportError("no", name="pydantic"), "pip install 'pydantic>="),
    (ImportError("no", name="yaml"), "pip install 'pyyaml>="),
    (ImportError("no", name="IPython.core.completer"), "pip install 'ipython>="),
    (ImportError("no", name="gpu_runtime.owner.who"), "restart the kernel"),
    (ImportError("no", name="somebodys"), ""),
    (OSError(errno.ENOENT, "No such file"), ""),
    (RuntimeError("no"), ""),
    (GpuError("said already"), ""),
])  # fmt: skip
def test_an_error_that_is_known_says_what_to_type(error, says):
    told = in_one_sentence(error)
    assert says in str(told) if says else told is None


def test_an_error_of_the_user_s_code_is_not_reworded(tmp_path):
    """Code that the user wrote raises what it raised."""
    (tmp_path / "mine.py").write_text("def act():\n    raise OSError(24, 'mine')\n")
    scope = runpy.run_path(str(tmp_path / "mine.py"))
    with pytest.raises(OSError, match="mine") as raised:
        scope["act"]()
    assert in_one_sentence(raised.value) is None


def test_work_that_must_not_be_interrupted_needs_no_thread(monkeypatch):
    """Where the system starts no more threads, an eviction that has begun is completed."""
    monkeypatch.setattr(_thread, "start_new_thread", no_thread)
    assert threads.uninterrupted(lambda: 7) == 7


def test_without_proc_one_sentence_says_what_to_type(monkeypatch):
    """Neither the machine's memory nor the life of a process can be read: nothing is guessed."""
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/meminfo")
    assert in_one_sentence(gone) is None, "here one file is missing, not the whole directory"
    monkeypatch.setattr("os.path.exists", lambda path: path != "/proc/self")
    assert "mount -t proc proc /proc" in str(in_one_sentence(gone))
    mine = FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/weights")
    assert in_one_sentence(mine) is None
