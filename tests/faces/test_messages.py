"""The memory of a parked kernel returns before a message can read it, even if no cell runs. A
parked kernel's memory is in RAM.

The kernel of these tests is a stand-in that calls the hooks as ipykernel does.
tests/stories/test_kernel_versions.py tests real kernels of two versions.
"""

import ast
import asyncio
import contextlib
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import ipywidgets
import pytest
import torch
from gpu import obstacles, parking
from gpu.obstacles import Own
from gpu.parking import Parking
from IPython.core.error import InputRejected
from IPython.core.events import EventManager, available_events
from panel.io.notebook import JupyterCommJSBinary

from gpu_runtime import Busy


class Lease:
    """Records when the kernel's memory is requested and when it may leave again."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.refusal, self.away = None, False
        self.raises: type[BaseException] | None = None
        self.looks_at_cap = 0
        self.cap_is_enforced, self.runs_above_cap = False, False

    def hold(self):
        self.story.append("back")
        if self.raises:
            raise self.raises
        return _Held(self.story)

    def refuses_above_cap(self):
        return self.cap_is_enforced

    def news_of_cap(self):
        self.looks_at_cap += 1
        return ""

    def begin(self, text, outermost=True, frees=False):
        self.runs_above_cap = frees
        self.story.append(f"cell {text}" if outermost else "inside")
        return ""

    def end(self, text):
        self.story.append("end")


class _Held:
    def __init__(self, story):
        self.story = story

    def __del__(self):
        self.story.append("free")


class Kernel:
    """Handles a message between the two hooks, as ipykernel does."""

    def __init__(self, story) -> None:
        self.story = story
        self.control_handlers = {"debug_request": self.debug}
        closes, unheard = (SimpleNamespace(_close_callback=one) for one in (print, None))
        targets = {"probe": lambda comm, message: None}
        self.comm_manager = SimpleNamespace(targets=targets, comms={"1": closes, "2": unheard})
        self.message: dict = {}
        self.io_loop = None

    def pre_handler_hook(self):
        self.story.append("hook")

    def post_handler_hook(self):
        self.story.append("hook after")

    def get_parent(self, channel):
        return self.message

    def handle(self, kind, act=lambda: None, **content):
        self.message = {"header": {"msg_type": kind}, "content": content}
        self.pre_handler_hook()
        self.story.append("handled")
        act()
        self.post_handler_hook()

    async def debug(self, stream, ident, message):
        self.story.append("handled")


@pytest.fixture
def follows():
    """A kernel that is followed, its shell and the story of its lease."""
    lease = Lease()
    kernel = Kernel(lease.story)
    shell = SimpleNamespace(kernel=kernel, ast_transformers=[])
    shell.events = EventManager(shell, available_events)
    parking = Parking(
        shell, lambda: SimpleNamespace(attach_kernel=lambda _: lease, _closed=False), print
    )
    parking._attach()

    def callback():
        """A callback of a comm, between the hooks of IPython."""
        shell.events.trigger("pre_execute")
        shell.events.trigger("post_execute")

    yield SimpleNamespace(
        kernel=kernel, shell=shell, lease=lease, story=lease.story, parking=parking,
        trigger=shell.events.trigger, callback=callback,
    )  # fmt: skip
    parking.remove()
    assert kernel.pre_handler_hook.__func__ is Kernel.pre_handler_hook
    assert kernel.control_handlers["debug_request"] == kernel.debug


@pytest.fixture
def handled(monkeypatch):
    """The handlers of two signals, which note in `story` that they run. `works` are the repetitions."""
    story, works, at_exit = [], [], []
    monkeypatch.setattr(parking.threads, "start", works.append)
    unregister = lambda one: at_exit.remove(one) if one in at_exit else None
    fake = SimpleNamespace(register=at_exit.append, unregister=unregister)
    monkeypatch.setattr(parking, "atexit", fake)

    def with_memory(handler, number, frame):
        story.append("back")
        handler(number, frame)

    def theirs(number, frame):
        story.append(signal.Signals(number).name)

    before = {one: signal.signal(one, theirs) for one in (signal.SIGUSR1, signal.SIGUSR2)}
    ours = parking.Handlers(with_memory, lambda: None, lambda: 0.0)
    ours.precede()
    yield SimpleNamespace(ours=ours, story=story, works=works, at_exit=at_exit, theirs=theirs)
    ours.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


ONE, TWO = ["back", "SIGUSR1"], ["back", "SIGUSR2"]


def test_a_signal_of_the_users_waits_for_a_block_of_ours_and_is_then_handled_once(handled):
    """The memory is back for each handler. The first signal is handled first."""
    signal.raise_signal(signal.SIGUSR1)
    assert handled.story == ONE
    with handled.ours.postponed():
        with handled.ours.postponed():
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
                signal.raise_signal(number)
        assert handled.story == ONE, "the outer block still runs"
    assert handled.story == [*ONE, *ONE, *TWO]
    for repeats in handled.works:  # the time is over, and nothing is left to repeat
        repeats()
    assert handled.story == [*ONE, *ONE, *TWO]


def test_a_signal_that_has_waited_too_long_is_handled_inside_the_block(handled):
    with handled.ours.postponed():
        signal.raise_signal(signal.SIGUSR1)
        assert handled.story == []
        [repeats] = handled.works
        repeats()
        assert handled.story == ONE
    assert handled.story == ONE


def test_the_users_handlers_are_theirs_again_unless_they_have_set_others(handled):
    def other(number, frame):
        """A handler that the user sets while the memory is away."""

    assert len(handled.at_exit) == 1
    signal.signal(signal.SIGUSR2, other)
    handled.ours.restore()
    assert signal.getsignal(signal.SIGUSR1) is handled.theirs
    assert signal.getsignal(signal.SIGUSR2) is other and handled.at_exit == []


def test_a_notebook_that_held_nothing_yet_gets_room_after_it_ran_out_of_memory():
    """An error of another kind opens no runtime."""
    story: list[str] = []
    lease = SimpleNamespace(cell_failed=lambda error: f"room after {error}")
    shell = SimpleNamespace(kernel=Kernel(story), ast_transformers=[])
    shell.events = EventManager(shell, available_events)
    opened = SimpleNamespace(attach_kernel=lambda _: lease, _closed=False)
    parking = Parking(shell, lambda: story.append("opened") or opened, story.append)
    parking.after_error(ValueError("a bug"))
    assert story == []
    parking.after_error(MemoryError("the first tensor"))
    assert story == ["opened", "room after the first tensor"]
    parking.after_error(ValueError("no CUDA"))
    assert story[2:] == ["room after no CUDA"]
    parking.remove()


@pytest.mark.parametrize(("text", "opens"), [
    ("%gpu park", True), ("x = rt.park()", True), ("%gpu unpark", True), ("%gpu hibernate", True),
    ("from pyspark.sql import SparkSession as spark", False), ("parking = parked = 1", False),
])  # fmt: skip
def test_a_first_cell_opens_the_runtime_only_if_it_parks_its_own_notebook(text, opens):
    """Else a notebook that never uses a card would be an owner in the ledger."""
    opened: list[str] = []
    shell = SimpleNamespace(kernel=Kernel([]), ast_transformers=[])
    shell.events = EventManager(shell, available_events)
    lease = Lease()
    rt = SimpleNamespace(attach_kernel=lambda _: lease, _closed=False)
    parking = Parking(shell, lambda: opened.append(text) or rt, print)
    shell.kernel.message = {"header": {"msg_type": "execute_request"}, "content": {"code": text}}
    shell.events.trigger("pre_execute")
    assert opened == ([text] if opens else [])
    parking.remove()


HELD = ["hook", "back", "handled", "hook after", "free"]
NOT_HELD = ["hook", "handled", "hook after"]
MESSAGES = {
    "completion": ("complete_request", {"code": "x.su"}, HELD),
    "inspection": ("inspect_request", {"code": "x"}, HELD),
    "expressions": ("execute_request", {"code": " \n", "user_expressions": {"a": "x"}}, HELD),
    "an empty cell": ("execute_request", {"code": "", "user_expressions": {}}, NOT_HELD),
    "a cell": ("execute_request", {"code": "x", "user_expressions": {"a": "x"}}, NOT_HELD),
    "a comm is opened": ("comm_open", {"target_name": "probe"}, HELD),
    "a comm is closed": ("comm_close", {"comm_id": "1"}, HELD),
    "a comm is closed unheard": ("comm_close", {"comm_id": "2"}, NOT_HELD),
    "a comm without a receiver": ("comm_open", {"target_name": "none"}, NOT_HELD),
    "an unknown comm": ("comm_close", {"comm_id": "none"}, NOT_HELD),
    "is complete": ("is_complete_request", {"code": "x"}, NOT_HELD),
    "kernel info": ("kernel_info_request", {}, NOT_HELD),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_memory_is_there_while_a_message_may_read_it(follows, name):
    """For a cell or a message of a comm, `pre_execute` brings it back, and shows the wait."""
    kind, content, story = MESSAGES[name]
    follows.kernel.handle(kind, **content)
    assert follows.story == story


@pytest.mark.parametrize(("code", "runs"), [("[1, 2]", True), ("%time 1", False)])
def test_what_a_cell_may_do_above_a_cap_is_said_before_the_notebook_is_counted(follows, code, runs):
    """The lease counts when the cell begins: only then is it known whether more is held than the cap."""
    follows.lease.cap_is_enforced = True
    follows.kernel.handle("execute_request", lambda: follows.trigger("pre_execute"), code=code)
    assert follows.lease.runs_above_cap is runs


def test_the_end_of_a_cell_ends_no_cell_of_a_subshell(follows):
    """A subshell runs its cells in a thread of its own, and uses the memory until they end."""
    with ThreadPoolExecutor(1) as subshell:

        def cell():
            follows.trigger("pre_execute")
            subshell.submit(follows.trigger, "pre_execute").result()

        follows.kernel.handle("execute_request", cell, code="x")
        assert follows.parking.why_not() == "a cell runs" and follows.story.count("end") == 1
        assert not follows.lease.looks_at_cap, "it is told at the end of the last cell"
        subshell.submit(follows.trigger, "post_execute").result()
        assert follows.parking.why_not() != "a cell runs" and follows.story.count("end") == 2
        assert follows.lease.looks_at_cap == 1


def test_a_click_in_a_subshell_ends_no_cell_of_the_main_thread(follows, monkeypatch):
    """The console's callback begins before the cell, and ends while the cell runs."""
    monkeypatch.setattr(parking, "reads_nothing", lambda *_: threading.get_ident() != main)
    main = threading.get_ident()
    events = follows.shell.events
    with ThreadPoolExecutor(1) as subshell:
        subshell.submit(events.trigger, "pre_execute").result()
        events.trigger("pre_execute")
        subshell.submit(events.trigger, "post_execute").result()
        assert follows.parking.why_not() == "a cell runs" and "end" not in follows.story
        events.trigger("post_execute")
        assert follows.story.count("end") == 1


def test_an_empty_cell_inside_a_cell_ends_no_cell(follows):
    """IPython calls `post_execute` alone for it. `%run` of a notebook that ends with one ended the cell around it."""
    trigger = follows.trigger

    def run_cell_async():
        trigger("pre_execute")
        run_empty_cell()
        follows.callback()
        assert follows.parking.why_not() == "a cell runs"
        assert follows.story == ["cell ", "inside", "end"]

    def run_empty_cell():
        trigger("post_execute")

    run_cell_async()
    trigger("post_execute")
    assert follows.parking.why_not() != "a cell runs"
    assert follows.story == ["cell ", "inside", "end", "end"]


def test_a_message_during_a_cell_requests_nothing(follows):
    """While a cell runs, the memory is on the card already. A cell that awaits something lets other messages in."""
    follows.trigger("pre_execute")
    follows.story.clear()
    follows.kernel.handle("complete_request", code="x.")
    assert follows.story == NOT_HELD
    follows.trigger("post_execute")


@pytest.mark.parametrize(("command", "in_cell", "story"), [
    ("inspectVariables", False, ["back", "handled", "free"]),
    ("richInspectVariables", False, ["back", "handled", "free"]),
    ("debugInfo", False, ["handled"]),
    ("setBreakpoints", False, ["handled"]),
    ("evaluate", True, ["handled"]),
])  # fmt: skip
def test_the_memory_is_there_while_the_debugger_shows_variables(follows, command, in_cell, story):
    """At a breakpoint, the debugger may have stopped the thread that would request it."""
    if in_cell:
        follows.trigger("pre_execute")
        follows.story.clear()
    message = {"content": {"command": command}}
    asyncio.run(follows.kernel.control_handlers["debug_request"](None, None, message))
    assert follows.story == story
    follows.trigger("post_execute")


def test_a_comm_whose_callback_failed_is_over_with_its_message(follows):
    """IPython calls `post_execute` only after success: the kernel would never be idle again."""
    follows.kernel.handle("comm_msg", lambda: follows.trigger("pre_execute"))
    assert follows.story == ["hook", "handled", "cell ", "hook after", "end"]


def test_an_interrupt_of_the_wait_does_not_leave_the_hook(follows):
    """ipykernel 6 would end, if a hook raised a KeyboardInterrupt."""
    follows.lease.raises = KeyboardInterrupt
    follows.kernel.handle("complete_request", code="x.")
    assert follows.story == ["hook", "back", "handled", "hook after"]


def test_an_interrupt_at_any_line_of_ours_before_a_message_does_not_leave_the_hook(
    follows, monkeypatch
):
    """From the kernel's own hook on, the stop button raises KeyboardInterrupt. It would end the kernel."""
    monkeypatch.setattr(follows.parking, "_bytes_are_away", lambda: True)
    follows.shell.input_transformers_post = []
    line = left = 0

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename == parking.__file__ and event == "line":
            left -= follows.story[-1] in ("hook", "back")
            if not left:
                raise KeyboardInterrupt
        return trace

    while left <= 0:
        line = left = line + 1
        follows.story[:] = ["hook after"]
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            follows.kernel.handle("complete_request", code="x.")
        finally:
            sys.settrace(before)
        assert "handled" in follows.story and follows.story.count("hook after") == 2, line
    assert line > 5


def test_what_a_cell_in_ram_has_bound_ends_with_its_message(follows):
    """An interrupt may come before `post_execute` ends: the name stayed bound to a copy in RAM."""
    follows.lease.away, x = True, torch.ones(2)
    follows.lease.readable = lambda saves: contextlib.nullcontext(lambda value: value.clone())
    follows.lease.forget_deleted = str
    follows.shell.user_ns = {"x": x}

    def cell():
        follows.trigger("pre_execute")
        assert follows.shell.user_ns["x"] is not x

    follows.kernel.handle("execute_request", cell, code="print(x)")
    assert follows.shell.user_ns["x"] is x


@pytest.mark.parametrize(("package", "added", "cells"), [
    ("gpu_panels.inline", False, []), ("gpu_panels.inline", True, ["cell ", "end"]),
    ("panel", False, ["cell ", "end"]),
])  # fmt: skip
def test_a_click_on_our_own_console_does_not_bring_the_memory_back(
    follows, package, added, cells, monkeypatch
):
    """The callback of another page, or of a button that the user added, may read a tensor."""
    members = {"__module__": package, "_on_msg": lambda *_: None, "has_objects_of_the_user": added}
    view = type("View", (), members)()
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=Mock()))
    callback = JupyterCommJSBinary(on_msg=partial(view._on_msg, "ref", None))._handle_msg
    manager = follows.kernel.comm_manager
    manager.targets["page"] = callback
    manager.comms["1"] = SimpleNamespace(_msg_callback=callback)

    mark = follows.parking.mark()
    follows.kernel.handle("comm_msg", follows.callback, comm_id="1")
    assert follows.story == ["hook", "handled", *cells, "hook after"]
    assert (follows.parking.mark() != mark) is bool(cells), "a copy that was begun stays valid"
    follows.story.clear()
    follows.kernel.handle("comm_open", target_name="page")
    assert ("back" in follows.story) is bool(cells)


class Slider(ipywidgets.IntSlider):
    def get_state(self, *args, **options):
        """What a page asks for when it is loaded; the user's version may read a tensor."""
        return super().get_state(*args, **options)


@pytest.mark.parametrize("kind", [ipywidgets.IntSlider, Slider])
def test_a_page_that_is_loaded_again_does_not_bring_the_memory_back(follows, kind, monkeypatch):
    """JupyterLab asks for the state of all widgets: each reload unparked every notebook with tqdm."""
    widget = ipywidgets.Widget
    monkeypatch.setattr(ipywidgets.widgets.widget, "_instances", {"1": kind()})
    manager = follows.kernel.comm_manager
    manager.targets["jupyter.widget.control"] = widget.handle_control_comm_opened
    manager.comms["page"] = SimpleNamespace(_msg_callback=widget._handle_control_comm_msg)
    [shown] = ipywidgets.widgets.widget._instances.values()
    manager.comms["one"] = SimpleNamespace(_msg_callback=shown._handle_msg)

    mark = follows.parking.mark()
    follows.kernel.handle("comm_open", target_name="jupyter.widget.control")
    assert follows.story == NOT_HELD
    cells = [] if kind is ipywidgets.IntSlider else ["cell ", "end"]
    for comm, method in (("page", "request_states"), ("one", "request_state")):
        follows.story.clear()
        follows.kernel.handle("comm_msg", follows.callback, comm_id=comm, data={"method": method})
        assert follows.story == ["hook", "handled", *cells, "hook after"]
    assert (follows.parking.mark() != mark) is bool(cells)
    follows.story.clear()
    follows.kernel.handle("comm_msg", follows.callback, comm_id="one", data={"method": "update"})
    assert follows.story == ["hook", "handled", "cell ", "end", "hook after"]


def test_a_hook_of_the_user_has_the_memory_also_when_a_page_is_loaded(follows, monkeypatch):
    """IPython calls the hook before each message of a comm."""
    monkeypatch.setattr(parking, "reads_nothing", lambda *_: True)
    follows.shell.events.register("pre_execute", lambda: follows.story.append("the user's hook"))
    follows.kernel.handle("comm_msg", lambda: follows.trigger("pre_execute"))
    assert follows.story[:4] == ["hook", "handled", "cell ", "the user's hook"]


@pytest.mark.parametrize(("away", "cells"), [(True, []), (False, ["cell 1+1", "end"])])
def test_a_cell_of_constants_leaves_a_parked_kernel_parked(follows, away, cells):
    """It also runs after a refused cell. A kernel on its card is in use while any cell runs."""
    follows.lease.away, follows.lease.refusal = away, Busy("no room", name="kernel")

    def call():
        follows.trigger("pre_execute")
        assert bool(follows.parking.refusal) is not away
        follows.trigger("post_execute")
        assert str(follows.parking.refusal) == "no room"

    follows.kernel.handle("execute_request", call, code="1+1")
    assert follows.story == ["hook", "handled", *cells, "hook after"]


def test_a_refused_cell_raises_the_public_error_and_stays_refused(follows):
    """IPython accepts a refusal only as an InputRejected: the notebook showed `_Refused`."""
    [refusing] = follows.shell.ast_transformers
    follows.lease.refusal = Busy("no room", name="kernel", waited_seconds=7.0)
    for _ in range(2):
        with pytest.raises(Busy, match="^no room$") as caught:
            refusing.visit(ast.parse("x"))
        assert isinstance(caught.value, InputRejected) and caught.value.waited_seconds == 7.0
        assert caught.type.__name__ == "Busy" and caught.value.name == "kernel"
        assert caught.value._render_traceback_()[0] == "Busy: no room"
        assert caught.value._render_traceback_()[-1] == "More:  %gpu help Busy"


def test_a_thread_of_the_kernels_that_runs_for_a_moment_is_waited_for(follows, monkeypatch):
    """ZeroMQ's `send` of an output was reported to the user. A thread that goes on is named at last."""
    moving, story = ["send in socket.py"] * 2, []
    monkeypatch.setattr(obstacles, "not_at_rest", lambda *_: moving.pop() if moving else "")
    mark = follows.parking.mark()
    assert follows.parking.change(mark, lambda: story.append("moved")) == ""
    assert story == ["moved"] and moving == []
    monkeypatch.setattr(parking, "LOOP_SECONDS", 0.02)
    monkeypatch.setattr(obstacles, "not_at_rest", lambda *_: "send in socket.py")
    why = follows.parking.change(follows.parking.mark(), Mock())
    assert why == "a thread runs (send in socket.py)"


def test_a_reason_that_ends_by_itself_is_waited_for_outside_the_kernels_loop(follows, monkeypatch):
    """`%gpu park` was given up for a minute where a callback of ZeroMQ's was due at the end of its cell."""
    due = ["a callback is due (call_soon): f"]

    def why_not_loop(*_):
        return obstacles.EndsByItself(due.pop()) if due else ""

    monkeypatch.setattr(obstacles, "why_not_loop", why_not_loop)
    assert "is due" in follows.parking.why_not() and due == [], "the loop must run the callback"
    due += ["a callback is due (call_soon): f"] * 2
    with ThreadPoolExecutor(1) as other:
        assert "is due" not in other.submit(follows.parking.why_not).result() and due == []
        monkeypatch.setattr(parking, "MOMENT_SECONDS", 0.02)
        due += ["a callback is due (call_soon): f"] * 1_000_000
        assert "is due" in other.submit(follows.parking.why_not).result(), "it repeats itself"


def test_what_ends_the_chance_to_move_is_not_waited_for(follows, monkeypatch):
    """A cell ran while a thread did not rest, so the copies are old."""
    mark = follows.parking.mark()

    def used_meanwhile(*_):
        follows.kernel.handle("execute_request", code="x")
        return "send in socket.py"

    monkeypatch.setattr(obstacles, "not_at_rest", used_meanwhile)
    assert follows.parking.change(mark, Mock()) == "the kernel was used meanwhile"


def test_a_task_that_ipykernel_wraps_is_the_kernels_and_the_users_task_is_not():
    """ipykernel 7 wraps the methods of the kernel. The wrapper and its name prove nothing about what it calls."""
    utils = pytest.importorskip("ipykernel.utils")
    if not hasattr(utils, "_async_in_context"):
        pytest.skip("this ipykernel wraps no tasks")

    class OneKernel:
        io_loop = None

        async def shell_main(self):
            await asyncio.sleep(60)

    async def users():
        await asyncio.sleep(60)

    async def run_in_context():
        await asyncio.sleep(60)

    kernel = OneKernel()
    own = Own(kernel)

    async def found() -> dict[str, bool]:
        wrapped = utils._async_in_context
        coroutines = {
            "the kernel's": kernel.shell_main(),
            "another kernel's": OneKernel().shell_main(),
            "wrapped": wrapped(partial(kernel.shell_main))(),
            "wrapped by the user": wrapped(users)(),
            "named like it": run_in_context(),
            "users": users(),
        }
        tasks = [asyncio.create_task(one) for one in coroutines.values()]
        await asyncio.sleep(0)
        said = {name: own.runs(one) for name, one in coroutines.items()}
        for task in tasks:
            task.cancel()
        return said

    assert asyncio.run(found()) == {
        "the kernel's": True, "another kernel's": False, "wrapped": True,
        "wrapped by the user": False, "named like it": False, "users": False,
    }  # fmt: skip
