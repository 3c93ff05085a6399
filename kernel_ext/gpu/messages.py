"""Finds the messages to a kernel that may read the memory of its tensors although no cell runs.

IPython calls the hook `pre_execute` before a cell, and before it handles a message of a comm (the channel of a
widget). The messages that are found here run code of the user, such as a property or `__repr__`, without this hook.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from gpu_runtime import threads

from . import obstacles

# Messages that run no code of the user's.
QUIET = frozenset(
    (
        "kernel_info_request", "history_request", "is_complete_request", "comm_info_request",
        "connect_request", "usage_request",
    )
)  # fmt: skip
READING = frozenset(("complete_request", "inspect_request"))
# Requests to the debugger that show or set variables. The debugger answers them in a thread of its own. For
# `initialize` the debugger runs a cell, and its thread does nothing else until the cell ends. This cell must
# not wait for the memory, so the memory is brought back before the request is handled.
DEBUGGER_READS = frozenset(
    (
        "initialize", "inspectVariables", "richInspectVariables", "variables", "evaluate",
        "setVariable", "setExpression", "copyToGlobals",
    )
)  # fmt: skip


def current(kernel: Any) -> tuple[str, dict[str, Any]]:
    """The type and the content of the message that `kernel` handles now; empty if it cannot be read."""
    try:
        message = kernel.get_parent("shell")
        return message["header"]["msg_type"], dict(message["content"])
    except Exception:  # no message is being handled, or it has no header
        return "", {}


def may_read(kernel: Any, kind: str, content: dict[str, Any]) -> bool:
    """Whether a message may read the memory of `kernel` without the hook `pre_execute`."""
    if kind == "execute_request":  # an empty cell is not run, but its expressions are evaluated
        return bool(content.get("user_expressions")) and not content.get("code", "").strip()
    if kind in ("comm_open", "comm_close"):
        callback = _comm_callback(kernel, kind, content)
        return callback is not None and not reads_nothing(kernel, kind, content)
    return kind in READING


def reads_nothing(kernel: Any, kind: str, content: dict[str, Any]) -> bool:
    """Whether a comm's message is for a console that this notebook shows, which reads no tensor, or is sent by
    each page that is loaded, which asks ipywidgets for the state of all widgets.
    """
    callback = _comm_callback(kernel, kind, content) if kind.startswith("comm_") else None
    return _is_of_console(callback) or _is_of_page(callback, content)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Calls `work` in a thread of `gpu_runtime.threads`, since another would be an obstacle to a move.

    Returns its result, or None if `work` raises.
    """
    loop = asyncio.get_running_loop()
    result = loop.create_future()
    waiting = [result]

    def run() -> None:
        done: list[Any] = [None]
        try:
            done[0] = work()
        finally:  # without a result the caller would wait for ever
            # `pop` empties both lists: the thread may end after the caller continues, and must not keep the
            # result alive.
            loop.call_soon_threadsafe(lambda: waiting.pop().set_result(done.pop()))

    threads.start(run)
    return await result


def _comm_callback(kernel: Any, kind: str, content: dict[str, Any]) -> Any:
    """The function of `kernel` that handles a message of a comm; None if there is no such function."""
    manager = getattr(kernel, "comm_manager", None)
    if kind == "comm_open":
        return getattr(manager, "targets", {}).get(content.get("target_name"))
    comm = getattr(manager, "comms", {}).get(content.get("comm_id"))
    return getattr(comm, "_close_callback" if kind == "comm_close" else "_msg_callback", None)


def _is_of_page(callback: Any, content: dict[str, Any]) -> bool:
    """Whether `callback` only reports the state of ipywidgets, none of the user's, as when a page is loaded."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    if module is None or not isinstance(callback, (MethodType, FunctionType)):
        return False
    widget, function = module.Widget, getattr(callback, "__func__", callback)
    if function is widget.handle_control_comm_opened.__func__:
        return True
    asked = content.get("data", {}).get("method")
    if function is widget._handle_control_comm_msg.__func__ and asked == "request_states":
        shown = list(module._instances.values())
    elif function is widget._handle_msg and asked == "request_state":
        shown = [callback.__self__]
    else:
        return False
    kinds = {kind for one in shown for kind in type(one).__mro__}
    return not any(map(obstacles.is_users_class, kinds))


def _is_of_console(callback: Any) -> bool:
    """Whether `callback` belongs to a view of gpu-console: Panel's comm calls a method of that view."""
    comm = getattr(callback, "__self__", None)
    # Panel has a class of its own for comms, which is derived from one of pyviz_comms.
    if not any(kind.__module__.startswith("pyviz_comms") for kind in type(comm).__mro__):
        return False
    view = getattr(getattr(comm._on_msg, "func", None), "__self__", None)
    return type(view).__module__.startswith("gpu_panels.") and not view.has_objects_of_the_user
