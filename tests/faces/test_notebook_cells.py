"""The cells that come next, as read from the notebook's file and from the command line of the program that runs it."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from gpu import look_ahead
from gpu.look_ahead import (
    PEOPLE_SECONDS,
    CellQueue,
    CellSchedule,
    Position,
    WaitingCell,
    code_cells,
    notebook_file,
)
from hypothesis import example, given
from hypothesis import strategies as st
from jupyter_client.session import Session

CELLS = [WaitingCell(f"id{n}", f"x = {n}") for n in range(4)]


def test_a_file_that_nests_too_deep_is_no_notebook(tmp_path):
    """Each cell that began printed a RecursionError."""
    path = tmp_path / "a.ipynb"
    path.write_text('{"cells": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert code_cells(str(path)) == []


def test_code_cells_of_a_file_that_are_not_empty(tmp_path):
    """A program that runs a notebook never sends empty cells, so they are not counted."""
    path = tmp_path / "n.ipynb"
    cells = [
        {"cell_type": "markdown", "source": "# x"},
        {"cell_type": "code", "source": ["a\n", "b"], "id": "one"},
        {"cell_type": "code", "source": "  \n"},
        {"cell_type": "code", "source": "c"},
    ]
    path.write_text(json.dumps({"cells": cells}))
    assert code_cells(str(path)) == [WaitingCell("one", "a\nb"), WaitingCell("", "c")]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{}]}', "é"]
)
def test_a_file_that_is_no_notebook_has_no_cells(tmp_path, text):
    path = tmp_path / "n.ipynb"
    path.write_text(text)
    assert code_cells(str(path)) == [] and code_cells(str(tmp_path / "none")) == []


def test_with_a_program_every_later_cell_follows_also_an_equal_one():
    position = Position()
    assert position.after(CELLS, "x = 0", "", 0.0, True) == CELLS[1:]
    assert position.after(CELLS, " x = 2\n", "", 99.0, True) == CELLS[3:]
    position = Position()
    cells = [WaitingCell("", text) for text in ("go()", "y", "go()", "z")]
    assert position.after(cells, "go()", "", 0.0, True) == cells[1:]
    assert position.after(cells, "y", "", 0.0, True) == cells[2:]
    assert position.after(cells, "go()", "", 0.0, True) == cells[3:]
    twice = [WaitingCell("", "go()")] * 3
    assert [len(position.after(twice, "go()", "", 0.0, True)) for _ in range(2)] == [2, 1]


def test_a_person_who_runs_one_cell_after_another_is_no_schedule():
    position = Position()
    assert position.after(CELLS, "x = 0", "id0", 0.0, False) == []
    position.ended(1.0)
    assert position.after(CELLS, "x = 1", "id1", 3.0, False) == []
    position.ended(4.0)
    assert position.after(CELLS, "x = 2", "id2", 4.05, False) == CELLS[3:], "started at once"
    soonest = Position()
    soonest.after(CELLS, "x = 0", "id0", 0.0, False)
    soonest.ended(0.0)
    next_one = soonest.after(CELLS, "x = 1", "id1", PEOPLE_SECONDS, False)
    assert next_one == [], "a person may be so quick"


def test_cells_out_of_order_and_cells_after_an_error_are_no_schedule():
    position = Position()
    position.after(CELLS, "x = 0", "id0", 0.0, False)
    position.ended(1.0)
    assert position.after(CELLS, "x = 2", "id2", 1.01, False) == []
    assert position.after(CELLS, "x = 9", "id9", 1.02, False) == [], "it is not in the file"
    position.after(CELLS, "x = 0", "id0", 1.03, False)
    position.ended(2.0)
    position.failed()
    assert position.after(CELLS, "x = 1", "id1", 2.01, False) == []
    position.ended(3.0)
    assert position.after(CELLS, "x = 2", "id2", 3.01, False) == CELLS[3:]


def test_the_notebook_is_where_its_executor_or_its_front_end_has_it(tmp_path, monkeypatch):
    (tmp_path / "in.ipynb").write_text("{}")
    wait = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", wait, "papermill", "in.ipynb", "out.ipynb"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        process.stdout.readline()
        found = notebook_file({}, process.pid)
        process.stdin.close()
    assert found == (str(tmp_path / "in.ipynb"), True)
    path = tmp_path / "n.ipynb"
    path.write_text("{}")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert notebook_file({}, os.getpid()) == ("", False)
    assert notebook_file({"__vsc_ipynb_file__": str(path)}, os.getpid()) == (str(path), False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    assert notebook_file({}, os.getpid()) == (str(path), False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "none.ipynb"))
    assert notebook_file({}, os.getpid()) == ("", False)


USES = [WaitingCell(name, f"rt.use('{name}')") for name in "abc"]


@pytest.fixture
def schedule(monkeypatch):
    """The cells of a notebook whose file has USES. `waits` are those in the queue."""
    waits, begun, now = [], [], [0.0]
    began = lambda: begun.append(1)
    queue = SimpleNamespace(waiting=lambda: list(waits), began=began, failed=waits.clear)
    monkeypatch.setattr(look_ahead, "CellQueue", lambda *_: queue)
    monkeypatch.setattr(look_ahead, "notebook_file", lambda _: ("n.ipynb", one.by_program))
    monkeypatch.setattr(look_ahead, "code_cells", lambda _: USES)
    history = SimpleNamespace(input_hist_raw=[""] * 7)
    shell = SimpleNamespace(kernel=object(), user_ns={}, history_manager=history)
    cells = CellSchedule(shell, lambda: now[0])

    def ahead():
        found = cells.read(["a", "b", "c"], lambda _: "")
        return [(cell.cell, *cell.uses, cell.running) for cell in found]

    def ends(info, success=True):
        cells.after_cell(SimpleNamespace(info=info, success=success))

    one = SimpleNamespace(
        begins=cells.before_cell, ends=ends, ahead=ahead, waits=waits, begun=begun, now=now,
        by_program=True, infos=[SimpleNamespace(raw_cell=cell.code) for cell in USES],
    )  # fmt: skip
    return one


def test_the_cells_ahead_are_those_of_the_queue_else_of_the_file(schedule):
    """A cell that runs inside another one, as with `%run`, ends nothing. An error ends the whole row."""
    outer, _, inner = schedule.infos
    schedule.begins(outer)
    running = ("cell 7", "a", True)
    assert schedule.ahead() == [running, ("cell 8", "b", False), ("cell 9", "c", False)]
    schedule.waits.append(WaitingCell("9", USES[2].code))
    assert schedule.ahead() == [running, ("cell 8", "c", False)]
    schedule.begins(inner)
    assert len(schedule.begun) == 1 and schedule.ahead()[:2] == [running, ("cell 7", "c", True)]
    schedule.ends(inner)
    assert schedule.ahead() == [running, ("cell 8", "c", False)]
    schedule.ends(outer, success=False)
    assert schedule.ahead() == schedule.waits == []


def test_a_cell_whose_request_has_arrived_is_about_to_run_and_loads_its_own_models(schedule):
    schedule.waits += [WaitingCell("1", USES[0].code), WaitingCell("2", USES[1].code)]
    assert [cell[1:] for cell in schedule.ahead()] == [("a", True), ("b", False)]
    del schedule.waits[0]
    schedule.begins(schedule.infos[0])
    assert schedule.ahead() == [("cell 7", "a", True), ("cell 8", "b", False)]


def test_a_request_that_arrives_before_its_cell_begins_hides_no_later_cell(schedule):
    """A program sends one cell at a time. A model that was loaded for a later one counted as loaded for nothing."""
    schedule.begins(schedule.infos[0])
    schedule.ends(schedule.infos[0])
    schedule.waits.append(WaitingCell("9", USES[1].code))
    assert schedule.ahead() == [("cell 8", "b", True), ("cell 9", "c", False)]


def test_a_cell_that_begins_while_the_cells_are_read_is_among_them(schedule, monkeypatch):
    """The one that began counted neither as running nor as waiting, and its model as loaded for nothing."""
    first, second, _ = schedule.infos
    schedule.begins(first)
    seen = []

    class Scan(look_ahead.Scan):
        """Reads a cell; meanwhile the next one begins."""

        def read(self, code):
            if not seen:
                schedule.ends(first)
                schedule.begins(second)
            seen.append(code)
            return super().read(code)

    monkeypatch.setattr(look_ahead, "Scan", Scan)
    schedule.ahead()
    assert seen == [cell.code for cell in USES]


def test_two_cells_of_a_person_at_once_are_a_row(schedule):
    schedule.by_program = False
    for info, expected in zip(schedule.infos, ([], [("cell 8", "c", False)]), strict=False):
        schedule.begins(info)
        assert schedule.ahead()[1:] == expected
        schedule.now[0] += 5.0
        schedule.ends(info)


class Kernel:
    """The parts of a kernel that CellQueue reads. With ipykernel 7 a thread receives the messages."""

    def __init__(self, version: int) -> None:
        self.session, self.queued, self.current = Session(key=b"k"), [], ""
        self.shell_stream = self
        if version == 7:
            self.shell_channel_thread = SimpleNamespace(io_loop=self)
            self.shell_channel_thread_main = self._receive
        else:
            self.msg_queue = SimpleNamespace(_queue=self.queued)

    async def _receive(self, message) -> None:
        """ipykernel's own receiver."""

    def receiving(self) -> bool:
        return True

    def on_recv(self, receiver, copy) -> None:
        self.receiver = receiver

    def add_callback(self, act) -> None:
        act()

    def flush(self, flag) -> None:
        """All messages are in the queue already."""

    def get_parent(self, channel):
        return {"header": {"msg_id": self.current}}

    def arrive(self, code: str, kind: str = "execute_request", **more: Any) -> str:
        request = self.session.msg(kind, {"code": code, **more.pop("content", {})})
        request["header"].update(more.pop("header", {}))
        request["metadata"] = more
        frames = [zmq.Frame(part) for part in self.session.serialize(request)]
        self.queued.append((0, 0, (frames,)))
        if hasattr(self, "shell_channel_thread"):
            asyncio.run(self.receiver(frames))
        return request["header"]["msg_id"]


@pytest.mark.parametrize(("code", "more", "waits"), [
    ("x", {}, True), ("x", {"cellId": "c1"}, True), (" \n", {}, False),
    ("x", {"content": {"silent": True}}, False), ("x", {"kind": "complete_request"}, False),
    ("x", {"header": {"subshell_id": "s"}}, False), ("long", {}, False),
])  # fmt: skip
def test_only_a_cell_of_this_shell_is_listed_and_reported(monkeypatch, code, more, waits):
    """Every message reaches the kernel. A request that is too long to be read quickly is not listed."""
    limit = len(Session(key=b"k").pack({"code": "x" * 99}))
    monkeypatch.setattr(look_ahead, "MOST_REQUEST_BYTES", limit)
    kernel, changed, passed_on = Kernel(7), [], []
    receiver = kernel.receiver = kernel.shell_channel_thread_main

    async def receive(message) -> None:
        passed_on.append(message)

    kernel.shell_channel_thread_main = receive
    queue = CellQueue(kernel, lambda: changed.append(len(passed_on)))
    code = code if code != "long" else "x" * 100
    id = kernel.arrive(code, **more)
    assert queue.waiting() == [WaitingCell(id, code)] * waits
    assert len(passed_on) == 1 and changed == [1] * waits, "the kernel has it first"
    kernel.arrive("x" * 99)
    assert len(queue.waiting()) == waits + 1, "as long as is allowed"
    queue.remove()
    assert queue.waiting() == [] and kernel.receiver is receive is not receiver


def test_of_too_many_cells_the_last_are_listed(monkeypatch):
    monkeypatch.setattr(look_ahead, "MOST_WAITING", 3)
    kernel = Kernel(7)
    queue = CellQueue(kernel, lambda: None)
    ids = [kernel.arrive(f"x = {n}") for n in range(5)]
    assert [cell.id for cell in queue.waiting()] == ids[2:]


@pytest.mark.parametrize("version", [6, 7])
@example(deeds=["arrives", "arrives", "begins", "is aborted", "arrives", "begins"])
@given(deeds=st.lists(st.sampled_from(["arrives", "begins", "fails", "is aborted"]), max_size=12))
def test_the_cells_that_wait_are_those_that_have_arrived_and_not_begun(version, deeds):
    """A cell that fails aborts all that wait. ipykernel 6 shows its queue only when a cell begins."""
    kernel = Kernel(version)
    queue, waiting = CellQueue(kernel, lambda: None), []
    for number, deed in enumerate(deeds):
        if deed == "arrives":
            waiting.append(kernel.arrive(f"x = {number}"))
        elif deed == "begins" and waiting:
            kernel.current = waiting.pop(0)
            kernel.queued.pop(0)
            queue.began()
        elif deed == "is aborted" and waiting and version == 6:  # by a message to the kernel
            waiting.pop()
            kernel.queued.pop()
        elif deed == "fails":
            waiting.clear()
            kernel.queued.clear()
            queue.failed()
        else:
            continue
        if version == 7 or deed in ("begins", "fails"):
            assert [cell.id for cell in queue.waiting()] == waiting
