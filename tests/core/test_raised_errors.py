"""No function of the runtime raises an error that one of its own names still refers to.

The error's traceback has the function's frame, the frame has the name, and the name has the error. This
cycle keeps the user's frames, with the tensors in them, until the next garbage collection.
"""

import _thread
import ast
import errno
import pickle
import runpy
from pathlib import Path

import pytest

from gpu_runtime import GpuError, errors, threads
from gpu_runtime.errors import in_one_sentence

ROOT = Path(__file__).parents[2]
FILES = [
    path for part in ("gpu_runtime", "kernel_ext") for path in sorted((ROOT / part).rglob("*.py"))
]


def cycles(source: str) -> list[int]:
    """The lines of `source` that raise an error by a name that is not deleted afterwards."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(ast.walk(function))
        caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
        deleted = {
            name.id
            for node in nodes
            if isinstance(node, ast.Try)
            for line in node.finalbody
            if isinstance(line, ast.Delete)
            for name in line.targets
            if isinstance(name, ast.Name)
        }
        for node in nodes:
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            raised = node.exc.values if isinstance(node.exc, ast.BoolOp) else [node.exc]
            named = [one for one in raised if not isinstance(one, ast.Call)]
            names = {
                name.id for one in named for name in ast.walk(one) if isinstance(name, ast.Name)
            }
            is_class = any(name.lstrip("_")[:1].isupper() for name in names)
            if not is_class and not names <= caught | deleted:
                found.append(node.lineno)
    return found


@pytest.mark.thorough
def test_no_error_is_raised_by_a_name_that_stays():
    found = {str(path.relative_to(ROOT)): cycles(path.read_text()) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(("body", "lines"), [
    ("    found = work()\n    raise found", [3]), ("    raise found[0]", [2]),
    ("    raise found.pop()", []), ("    raise ValueError", []),
    ("    try:\n        work()\n    except ValueError as error:\n        raise error", []),
    ("    try:\n        raise found\n    finally:\n        del found", []),
])  # fmt: skip
def test_such_a_line_is_found(body, lines):
    assert cycles(f"def f(found):\n{body}\n") == lines


KINDS = pytest.mark.parametrize(
    "kind",
    [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)],
    ids=lambda one: one.__name__,
)


@KINDS
def test_an_error_of_each_class_is_the_same_after_pickling(kind):
    """`OutOfMemory`, which is a MemoryError too, could not be made again."""
    error = errors.rebuilt(kind, "no room", {"cell": "In [7]"})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.cell) == (kind, "no room", "In [7]")


@KINDS
def test_an_error_of_a_dataloaders_worker_keeps_its_class_and_its_text(kind):
    """torch makes it again from one text, which became the name of the model in UnknownModel."""
    wrapper = pytest.importorskip("torch._utils", reason="torch is not installed").ExceptionWrapper
    try:
        raise errors.rebuilt(kind, "no room\n  Type this", {"cell": "In [7]"})
    except errors.GpuError:
        caught = wrapper(where="in DataLoader worker process 0")
    with pytest.raises(kind) as again:
        caught.reraise()
    assert type(again.value) is kind
    assert str(again.value).startswith(f"Caught {kind.__name__} in DataLoader worker process 0.\n")
    assert str(again.value).rstrip().endswith("no room\n  Type this")
    assert again.value.message == str(again.value)


# -- errors of the system and of other packages become one sentence --------------------------------
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
