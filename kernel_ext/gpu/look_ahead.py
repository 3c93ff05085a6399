"""The running and waiting cells of this notebook. The runtime loads the models of these cells before they run.

The waiting cells are read from the kernel's queue, without taking them out of it. ipykernel 7 reads the shell socket in
a separate thread and passes each message on at once to a function, the receiver of the stream. This module puts another
function, the tap, in front of the receiver. The tap sees every request when the request arrives, also while a cell
runs. ipykernel 6 reads the socket only between cells. With that version, this module calls `flush` of the stream at the
start of a cell. `flush` puts the arrived messages into `msg_queue`, as the stream itself would do a moment later.

Messages are read with `session.unpack`. `session.deserialize` would record the signatures of the messages as used, and
the kernel would then reject the messages.

If the queue is empty, the next cells are read from the notebook's file, because some front ends send the next cell only
when the running cell has ended. For papermill, nbconvert and nbclient the file is always used. For other front ends,
such as VS Code, the file is used only while cells follow each other faster than a person could start them.

The runtime calls this module in a thread of its own. This module loads no model. It finds the models of a
cell from the cell's text.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import logging
import os
import shlex
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from IPython.core.inputtransformer2 import TransformerManager

from gpu_runtime.facts import CellModels
from gpu_runtime.notebook import Governed, upcoming

log = logging.getLogger("gpu_runtime")

MOST_REQUEST_BYTES = 1 << 20  # a longer request is not read
MOST_WAITING = 1000  # cells that are remembered
_RECEIVER = "shell_channel_thread_main"  # the kernel's method that receives every message


class WaitingCell(NamedTuple):
    """A cell that has not begun: a request to run it, or a code cell of the notebook's file."""

    id: str  # of the message, or of the cell
    code: str


class CellQueue:
    """The requests that wait in one kernel, in the order in which they will run."""

    def __init__(self, kernel: Any, changed: Callable[[], None]) -> None:
        """Watches `kernel`. With ipykernel 7, `changed` is called in any thread when a request has arrived."""
        self._kernel, self._changed = kernel, changed
        self._seen: dict[str, WaitingCell] = {}
        self._lock = threading.Lock()
        self._stream = getattr(kernel, "shell_stream", None)
        thread = getattr(kernel, "shell_channel_thread", None)
        self._original = getattr(kernel, _RECEIVER, None)
        self._loop = getattr(thread, "io_loop", None)
        self._taps = None not in (thread, self._stream, self._original, self._loop)
        if self._taps:
            self._begin()

    def waiting(self) -> list[WaitingCell]:
        """The requests that wait now, in the order in which they will run."""
        with self._lock:
            return list(self._seen.values())

    def began(self) -> None:
        """Called when a cell begins. The request of that cell and all earlier requests wait no longer."""
        if not self._taps:
            self._look()
        try:
            current = self._kernel.get_parent("shell")["header"]["msg_id"]
        except (AttributeError, LookupError, TypeError):  # not a kernel of ipykernel
            return
        with self._lock:
            if current in self._seen:
                ids = list(self._seen)
                for id in ids[: ids.index(current) + 1]:
                    del self._seen[id]

    def failed(self) -> None:
        """Called when a cell failed. The kernel then aborts all requests that wait."""
        with self._lock:
            self._seen.clear()

    def remove(self) -> None:
        """Stops watching the kernel, and restores the original receiver of messages."""
        if self._taps:
            vars(self._kernel).pop(_RECEIVER, None)
            if self._stream.receiving():  # type: ignore[union-attr]
                self._receive_by(self._original)
        self.failed()

    def _begin(self) -> None:
        """Puts the tap in front of the receiver of the stream. Before the kernel has started, there is none:
        the tap then replaces the kernel's method that becomes the receiver.
        """
        if self._stream.receiving():  # type: ignore[union-attr]
            self._receive_by(self._tap)
        else:
            vars(self._kernel)[_RECEIVER] = self._tap

    def _receive_by(self, receiver: Any) -> None:
        """The change is made in the thread of the stream."""
        stream = self._stream
        self._loop.add_callback(lambda: stream.on_recv(receiver, copy=False))  # type: ignore[union-attr]

    async def _tap(self, message: Any) -> None:
        is_cell = self._note(message)
        await self._original(message)  # type: ignore[misc]
        if is_cell:
            self._changed()

    def _note(self, message: Any) -> bool:
        """Remembers the request in `message`. Returns whether it is one to run a cell."""
        cell = self._read(message)
        if cell is None:
            return False
        with self._lock:
            self._seen[cell.id] = cell
            while len(self._seen) > MOST_WAITING:
                del self._seen[next(iter(self._seen))]
        return True

    def _look(self) -> None:
        """With ipykernel 6, reads the messages that have arrived, and leaves them in the kernel's queue."""
        import zmq

        if self._stream is None or not hasattr(self._kernel, "msg_queue"):
            return
        self._stream.flush(zmq.POLLIN)
        with self._lock:
            self._seen.clear()
        for entry in list(self._kernel.msg_queue._queue):
            if entry[-1]:
                self._note(entry[-1][0])

    def _read(self, message: Any) -> WaitingCell | None:
        """The request in `message`; None if it is of another kind or cannot be read."""
        try:
            session = self._kernel.session
            _, frames = session.feed_identities(message, copy=False)
            header = session.unpack(frames[1].bytes)
            if header["msg_type"] != "execute_request" or header.get("subshell_id"):
                return None
            if len(frames[4].buffer) > MOST_REQUEST_BYTES:
                return None
            content = session.unpack(frames[4].bytes)
            if content.get("silent") or not content["code"].strip():
                return None
            return WaitingCell(header["msg_id"], content["code"])
        except Exception as error:  # a message of any kind must reach the kernel
            log.debug("a message was not read: %s", error)
            return None


PEOPLE_SECONDS = 0.2  # a person cannot start the next cell sooner than this after a cell's end
MOST_BYTES = 50 << 20  # the largest file of a notebook that is read
EXECUTORS = ("papermill", "nbconvert", "nbclient", "jupyter-execute", "jupyter-nbconvert")


def notebook_file(names: dict[str, Any], parent: int | None = None) -> tuple[str, bool]:
    """The path of this kernel's notebook or "", and whether a program runs its cells one after another.

    `names` are the notebook's variables, in which VS Code stores the path. `parent` is the pid of the kernel's parent.
    """
    arguments = _arguments(os.getppid() if parent is None else parent)
    words = {os.path.basename(word) for word in arguments[:3]}
    if words.intersection(EXECUTORS) or any(word in arguments[:5] for word in EXECUTORS):
        files = [word for word in arguments if word.endswith(".ipynb") and os.path.exists(word)]
        return (files[0], True) if files else ("", False)
    path = names.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or ""
    return (path, False) if isinstance(path, str) and os.path.exists(path) else ("", False)


def _arguments(process: int) -> list[str]:
    """The words of a process's command line, with absolute paths of notebooks; none for another user's process."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        folder = os.readlink(f"/proc/{process}/cwd")
    except OSError:  # the process has ended, or is another user's
        return []
    words = text.split("\0")
    return [os.path.join(folder, word) if word.endswith(".ipynb") else word for word in words]


def code_cells(path: str) -> list[WaitingCell]:
    """The code cells of the notebook at `path`, without empty cells; none if it cannot be read."""
    try:
        if os.path.getsize(path) > MOST_BYTES:
            return []
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        found = []
        for cell in cells:
            source = cell["source"]
            code = source if isinstance(source, str) else "".join(source)
            if cell["cell_type"] == "code" and code.strip():
                found.append(WaitingCell(str(cell.get("id") or ""), code))
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []  # the file cannot be read, or is no notebook


class Position:
    """Follows the running cell's place in a notebook's file, and predicts which cells will run after it."""

    def __init__(self) -> None:
        self._last = -1
        self._ended_at: float | None = None

    def after(
        self, cells: list[WaitingCell], code: str, cell_id: str, now: float, by_program: bool
    ) -> list[WaitingCell]:
        """The cells of the file after the cell with this `code` and `cell_id`; none if it is not in the file.

        If not `by_program`, a person may have started only this cell. Then later cells are expected only if this
        cell began within PEOPLE_SECONDS after the end of the previous cell, and is the next cell in the file.
        """
        here = self._find(cells, code, cell_id)
        if here is None:
            return []
        at_once = self._ended_at is not None and now - self._ended_at < PEOPLE_SECONDS
        is_next = self._last in (-1, here - 1)
        follows = by_program or (is_next and at_once)
        self._last = here
        return cells[here + 1 :] if follows else []

    def ended(self, now: float) -> None:
        """Records that the running cell ended at the time `now`."""
        self._ended_at = now

    def failed(self) -> None:
        """Called when a cell failed. The next cell then counts as started by a person."""
        self._ended_at = None

    def _find(self, cells: list[WaitingCell], code: str, cell_id: str) -> int | None:
        """The index of the cell with this `cell_id`, or without an id, with this `code`; else None.

        Of several cells with this text it is the first after the cell found last, or else the first in the file.
        """
        if cell_id:
            return next((i for i, cell in enumerate(cells) if cell.id == cell_id), None)
        same = [i for i, cell in enumerate(cells) if cell.code.strip() == code.strip()]
        later = [i for i in same if i > self._last]
        return next(iter([*later, *same]), None)


MOST_READ = 50  # cells ahead


class CellSchedule:
    """The running and waiting cells of one shell. The shell reports when each cell begins and ends."""

    def __init__(self, shell: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._shell, self._clock = shell, clock
        kernel = getattr(shell, "kernel", None)
        self._queue = CellQueue(kernel, upcoming.changed) if kernel is not None else None
        self._position = Position()
        self._running: list[tuple[Any, str]] = []  # the cells that run, each with its text
        self._from_file: list[WaitingCell] = []
        self._number = 0
        self._lock = threading.Lock()  # a cell that begins changes all of these at once
        if self._queue is not None:
            upcoming.read_by(self.read)

    def before_cell(self, info: Any) -> None:
        """Called by IPython with its `info` when a cell begins."""
        if self._queue is None:
            return
        with self._lock:
            self._running.append((info, info.raw_cell or ""))
            if len(self._running) == 1:
                # Some versions of IPython increase `execution_count` before this function is called, and others after
                # it. Every version stores the cell's input after this call, so the stored inputs are counted.
                history = self._shell.history_manager
                stored = history.input_hist_raw if history else ()
                self._number = len(stored) or self._shell.execution_count
                self._queue.began()
                waits_in_queue = bool(self._queue.waiting())
                self._from_file = [] if waits_in_queue else self._read_file(info)
        upcoming.changed()

    def after_cell(self, result: Any) -> None:
        """Called when a cell ended. After an error or an interrupt, no further cell is expected."""
        if self._queue is None:
            return
        self._running = [cell for cell in self._running if cell[0] is not result.info]
        self._position.ended(self._clock())
        if not result.success:
            self._queue.failed()
            self._position.failed()
            self._from_file = []
        upcoming.changed()

    def remove(self) -> None:
        """Stops watching the cells of the shell."""
        if self._queue is not None:
            self._queue.remove()
            upcoming.read_by(None)

    def _read_file(self, info: Any) -> list[WaitingCell]:
        path, by_program = notebook_file(self._shell.user_ns)
        if not path:
            return []
        cell_id, now = _sent_cell_id(self._shell.kernel), self._clock()
        cells = code_cells(path)
        return self._position.after(cells, info.raw_cell or "", cell_id, now, by_program)

    def read(self, known: Collection[str], governed: Governed) -> tuple[CellModels, ...]:
        """The running cell and the waiting cells, each with its models; the runtime calls it through `upcoming`.

        If no cell runs, the first cell of the queue is about to begin, and counts as running: it loads its own models.
        `governed(value)` returns the name of the model that `value` is, or "".
        """
        assert self._queue is not None
        with self._lock:
            number, running = self._number, list(self._running)
            queued = self._queue.waiting()
            waiting = self._after(queued)[:MOST_READ]
        scan = Scan(known, self._shell.user_ns, governed)
        found = [_models_of(scan, code, f"cell {number}", running=True) for _, code in running]
        begins = bool(queued) and not found
        for place, cell in enumerate(waiting, number + 1):
            found.append(_models_of(scan, cell.code, f"cell {place}", running=begins))
            begins = False
        return tuple(found)

    def _after(self, queued: list[WaitingCell]) -> list[WaitingCell]:
        """The cells that wait: those of the file if the `queued` ones are the next of them, else the queued ones."""
        expected = self._from_file[: len(queued)]
        follows = [cell.code.strip() for cell in queued] == [cell.code.strip() for cell in expected]
        return self._from_file if follows else queued


def _models_of(scan: Scan, code: str, cell: str, running: bool = False) -> CellModels:
    reading = scan.read(code)
    return CellModels(cell, reading.uses, tuple(sorted(reading.mentions)), running)


def _sent_cell_id(kernel: Any) -> str:
    try:
        return kernel.get_parent("shell")["metadata"].get("cellId") or ""
    except (AttributeError, LookupError, TypeError):  # not ipykernel, or an old front end
        return ""


# -- the models that a cell uses
#
# This is pure: it runs no code of the cell. If the scan misses a model, the cell loads the model at its first use, as
# without a scan. If the scan finds a model that the cell does not use, the cost is a load into free memory.

METHODS = (
    "use",
    "load",
    "preload",
    "restore",
)  # methods of the runtime that bring a model onto its device
VERBS = ("load", "preload", "restore")  # the verbs of `%gpu` that do the same
MAGICS = ("gpu", "gpuctl")
RUN_THEIR_TEXT = ("time", "timeit", "prun", "capture")  # magics whose text is Python
# Functions that return the items of their arguments.
PASS_ON = ("enumerate", "list", "reversed", "sorted", "tuple", "zip", "set")
MOST_CHARACTERS = 100_000  # a longer cell is data, and is not read
MOST_PARSED = 512  # cells whose trees are kept
MOST_VALUES = 50  # the values that are kept of one variable
DEEPEST_CALL = 3  # calls within calls that are followed
# Calls that are followed in one cell; 27,000 calls took 50 s beside the running cell
MOST_CALLS = 200


class ScannedModels(NamedTuple):
    """The models of one cell."""

    uses: tuple[str, ...] = ()  # the models that the cell brings onto a device, in order
    mentions: frozenset[str] = frozenset()  # every known model that the cell names in any way


class Scan:
    """Reads cells in the order in which they will run.

    Assignments and definitions in one cell are known when later cells are read.

    >>> scan = Scan(known=["a", "b"], names={"B": "b"})
    >>> scan.read('with rt.use("a") as m: m(1)\\nwith rt.use(B): pass').uses
    ('a', 'b')
    """

    def __init__(
        self,
        known: Collection[str],
        names: Mapping[str, Any],
        governed: Callable[[Any], str] = lambda value: "",
    ) -> None:
        """`known` are the names of models, `names` the variables of the notebook.

        `governed(value)` returns the name of the model that `value` is, or "".
        """
        self.known, self.names, self.governed = frozenset(known), names, governed
        self.bound: dict[str, tuple[Any, ...]] = {}  # variable -> the constants it may have
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}

    def read(self, code: str) -> ScannedModels:
        """The models of the cell `code`; none if it is not Python, is too long, or is nested too deeply."""
        if len(code) > MOST_CHARACTERS:
            return ScannedModels()
        tree, cell = _parsed(code), _Cell(self)
        if tree is None:
            return ScannedModels()
        try:
            cell.visit(tree)
        except RecursionError:  # nested too deeply: nothing is known about it
            return ScannedModels()
        return ScannedModels(tuple(cell.uses), frozenset([*cell.mentions, *cell.uses]))

    def values(self, node: ast.AST | None) -> Iterator[Any]:
        """Yields the constants that may be the value of `node`, by the cells and the notebook's variables."""
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Name):
            yield from self._values_of(node.id)
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            for item in node.elts:
                yield from self.values(item)
        elif isinstance(node, ast.Dict):
            for item in (*node.keys, *node.values):
                yield from self.values(item)
        elif isinstance(node, ast.IfExp):
            yield from self.values(node.body)
            yield from self.values(node.orelse)
        elif isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            yield from self.values(node.value)
        elif isinstance(node, ast.Call):
            yield from self._values_of_call(node)

    def _values_of(self, name: str) -> Iterator[Any]:
        if name in self.bound:
            yield from self.bound[name]
            return
        value = self.names.get(name)
        if type(value) is dict and len(value) <= MOST_VALUES:
            yield from [*value.keys(), *value.values()]
        elif type(value) in (list, tuple, set) and len(value) <= MOST_VALUES:
            yield from list(value)
        else:
            yield value

    def _values_of_call(self, node: ast.Call) -> Iterator[Any]:
        """Yields the constants of `names` for calls such as `enumerate(names)` and `names.items()`."""
        function = node.func
        if isinstance(function, ast.Name) and function.id in PASS_ON:
            for item in node.args:
                yield from self.values(item)
        elif isinstance(function, ast.Attribute) and function.attr in ("items", "keys", "values"):
            yield from self.values(function.value)


class _Cell(ast.NodeVisitor):
    """The models of one cell: `uses`, which it brings onto a device, in order; and `mentions`, which it names."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.uses: list[str] = []
        self.mentions: set[str] = set()
        self.depth = 0
        self.followed = 0  # calls

    def use(self, names: Iterable[Any]) -> None:
        for name in names:
            if type(name) is str and name in self.scan.known and name not in self.uses:
                self.uses.append(name)

    def mention(self, names: Iterable[Any]) -> None:
        """Adds each model among `names` to the models that the cell mentions. A used model may be among them."""
        self.mentions |= {name for name in names if type(name) is str and name in self.scan.known}

    # -- assignments

    def bind(self, target: ast.AST, value: ast.AST | None) -> None:
        """Records that each name in `target` may now have one of the constants of `value`."""
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else None
        given = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
        if parts is not None and given is not None and len(parts) == len(given):
            for part, item in zip(parts, given, strict=True):
                self.bind(part, item)
            return
        found = tuple(self.scan.values(value))[:MOST_VALUES]
        for part in parts if parts is not None else [target]:
            if isinstance(part, ast.Name):
                self.scan.bound[part.id] = found
                self.scan.functions.pop(part.id, None)
            elif isinstance(part, (ast.Tuple, ast.List)):
                self.bind(part, value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.bind(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target, node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.bind_items(node.target, node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_AsyncFor = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node, node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, node.key, node.value)

    def _comprehension(self, node: Any, *results: ast.AST) -> None:
        for generator in node.generators:
            self.visit(generator.iter)
            self.bind_items(generator.target, generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for result in results:
            self.visit(result)

    def bind_items(self, target: ast.AST, items: ast.AST) -> None:
        """Records that each name in a loop's `target` may have any of the constants of `items`."""
        found = tuple(self.scan.values(items))[:MOST_VALUES]
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.scan.bound[node.id] = found

    # -- functions: the models in a function count as used when the function is called

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scan.functions[node.name] = node
        self.scan.bound.pop(node.name, None)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Does nothing: the models inside a lambda do not count as used."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Does nothing: the models inside a class do not count as used."""

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        self.visit(function)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        if isinstance(function, ast.Attribute):
            if function.attr in METHODS:
                given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
                for item in given:
                    self.use(self.scan.values(item))
            elif function.attr in ("run_line_magic", "run_cell_magic"):
                self._magic([a.value for a in node.args if isinstance(a, ast.Constant)])
        elif isinstance(function, ast.Name) and self.depth < DEEPEST_CALL:
            self._follow(function.id, node)

    def _follow(self, name: str, call: ast.Call) -> None:
        """Adds the models that the function `name` uses if it is called as in `call`."""
        if self.followed >= MOST_CALLS:
            return
        if body := self.scan.functions.get(name):
            self._follow_text(body, call)
        elif name not in self.scan.bound:
            value = self.scan.names.get(name)
            if type(value) is types.FunctionType:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                self._follow_code(value, [v for item in given for v in self.scan.values(item)])

    def _follow_text(self, body: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> None:
        self.followed += 1
        outside = self.scan.bound
        parameters = [*body.args.posonlyargs, *body.args.args]
        given: dict[str, ast.AST] = {}
        defaults = parameters[len(parameters) - len(body.args.defaults) :]
        given |= {slot.arg: value for slot, value in zip(defaults, body.args.defaults, strict=True)}
        given |= {slot.arg: value for slot, value in zip(parameters, call.args, strict=False)}
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        inside = {name: tuple(self.scan.values(value)) for name, value in given.items()}
        self.scan.bound, self.depth = {**outside, **inside}, self.depth + 1
        try:
            for statement in body.body:
                self.visit(statement)
        finally:
            self.scan.bound, self.depth = outside, self.depth - 1

    def _follow_code(self, function: types.FunctionType, given: list[Any], depth: int = 0) -> None:
        """Adds the models that the existing `function` uses when it is called.

        If `function` calls one of METHODS, the names of models are taken from its constants, from the arguments
        `given`, and from the variables that it reads. The functions that it calls are followed too, to a `depth`.
        """
        self.followed += 1
        codes = [function.__code__]
        for code in codes:
            codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
        attributes = {name for code in codes for name in code.co_names}
        if attributes & set(METHODS):
            texts = [text for code in codes for item in code.co_consts for text in _parts(item)]
            variables = [v for name in sorted(attributes) for v in self.scan._values_of(name)]
            self.use([*texts, *given, *(v for v in variables if type(v) is str)])
        if depth < DEEPEST_CALL:
            for name in sorted(attributes):
                called = self.scan.names.get(name)
                if self.followed >= MOST_CALLS:
                    return
                if type(called) is types.FunctionType and called is not function:
                    self._follow_code(called, given, depth + 1)

    # -- names, texts, magics

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.mention(self.scan._values_of(node.id))
            if (
                node.id not in self.scan.bound
                and (value := self.scan.names.get(node.id)) is not None
            ):
                self.use([self.scan.governed(value)])

    def visit_Constant(self, node: ast.Constant) -> None:
        self.mention([node.value])

    def _magic(self, texts: list[Any]) -> None:
        """Reads a call of a magic. Its `texts` are the name of the magic, its line, and its cell."""
        if not texts or not all(isinstance(text, str) for text in texts):
            return
        name, rest = texts[0], texts[1:]
        if name in MAGICS:
            self._gpu_magic(rest[0] if rest else "")
        if name in RUN_THEIR_TEXT or (name in MAGICS and len(rest) == 2):
            reading = self.scan.read(rest[-1])
            self.use(reading.uses)
            self.mention(reading.mentions)

    def _gpu_magic(self, line: str) -> None:
        words: list[str] = []
        with contextlib.suppress(ValueError):  # a quote that is not closed
            words = shlex.split(line)
        self.mention(words)
        if len(words) > 1 and words[0] in VERBS:
            self.use(words[1:2])
        for option, value in zip(words, words[1:], strict=False):
            if option == "--model":
                self.use([value])
        self.use(word.partition("=")[2] for word in words if word.startswith("--model="))


@functools.lru_cache(maxsize=MOST_PARSED)
def _parsed(code: str) -> ast.AST | None:
    """The syntax tree of the cell, or None. A waiting cell is read many times, so the result is cached.

    Plain Python is parsed without IPython's transformation, which takes ten times as long as the parsing.
    """
    try:
        return ast.parse(code)
    except SyntaxError:  # perhaps it has magics, which the code below transforms
        pass
    except (ValueError, RecursionError, MemoryError):  # no parser could read it
        return None
    try:
        return ast.parse(TransformerManager().transform_cell(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # no Python, with or without magics


def _parts(constant: Any) -> tuple[Any, ...]:
    """The items of a constant tuple or set. Any other constant is the only item of the result."""
    return tuple(constant) if isinstance(constant, (tuple, frozenset)) else (constant,)
