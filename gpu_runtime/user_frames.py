"""Finds the lines of the user's own code that an error came through, for a notebook to show.

Frames of this package, of IPython and of installed libraries are left out. `%tb` shows all frames.
Nothing here imports IPython. If IPython is not loaded, there are no cells.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from functools import cache
from types import FrameType
from typing import Any

from .safe_text import printable

MOST_LINES = 8  # of the user's lines under one error
LONGEST_LINE = 100  # characters of one line of code
_OURS = frozenset("gpu gpu_runtime gpu_panels IPython ipykernel".split())
_MAGIC = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(\w+)', (['\"])(.*?)\3[,)].*")


def rendered(error: BaseException, report: list[str]) -> list[str]:
    """The lines that IPython shows for `error`: `report`, or every frame if `%tb` was typed."""
    shell = _shell()
    is_handled = sys.exc_info()[1] is error  # False in a later cell, which calls `%tb`
    if shell is None or is_handled or getattr(sys, "last_value", None) is not error:
        return report
    return shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)


def user_lines(error: BaseException) -> list[str]:
    """The user's lines that `error` came through, such as `Cell In[7], line 10: c = step(model, 3)`.

    The line that failed is the last. If `error` was raised from another error (its cause), the
    lines of the cause are added. If both errors came through one function, the line of the cause is
    shown. An example is an out-of-memory report that is raised at the end of a `with` block.
    """
    at: dict[FrameType, int] = {}  # frame -> line; if two errors share a frame, the cause's line
    link: BaseException | None = error
    for _ in range(MOST_LINES):  # a chain may be a cycle
        if link is None:
            break
        frames = traceback.walk_tb(link.__traceback__)
        at |= {frame: line for frame, line in frames if _is_users(frame)}
        link = link.__cause__
    lines = [_line(frame, number) for frame, number in at.items()]
    # The line of a cell's magic, such as `%%gpu`, is left out, unless it is the line that failed.
    lines = [line for line in lines[:-1] if ": %%" not in line] + lines[-1:]
    if len(lines) <= MOST_LINES:
        return lines
    kept = MOST_LINES // 2
    return [*lines[:kept], f"… {len(lines) - 2 * kept} more (%tb) …", *lines[-kept:]]


def came_through_user_code(error: BaseException) -> bool:
    """Whether a frame of the traceback of `error`, below the frame that caught it, is the user's."""
    return any(_is_users(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def shorten_interrupt(error: KeyboardInterrupt, sentence: str) -> None:
    """Lets IPython show `error` as the line `sentence`. A second call for `error` does nothing."""
    if hasattr(error, "_render_traceback_"):
        return

    def render() -> list[str]:
        """The sentence as a single line, or every frame if the user typed `%tb`."""
        # This function must not refer to `error`, because `error` refers to this function.
        shown = sys.exc_info()[1] or getattr(sys, "last_value", None)
        return [sentence] if shown is None else rendered(shown, [sentence])

    error._render_traceback_ = render  # type: ignore[attr-defined]


def _shell() -> Any:
    """The IPython shell of this process, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if hasattr(ipython, "get_ipython") else None


def _cell(path: str) -> str:
    """The name of the cell whose code has the file name `path`, such as `In[7]`; else empty."""
    compiler = getattr(_shell(), "compile", None)
    named = compiler.format_code_name(path) if hasattr(compiler, "format_code_name") else None
    return named[1] if named else ""


def running_cell(most: int = 0) -> int:
    """The number of the cell that called this function, as in `In[7]`; without a cell, `most`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        cell = _cell(frame.f_code.co_filename)
        if cell:
            return int(cell.strip("In[]"))
        frame = frame.f_back
    return most


def _is_users(frame: FrameType) -> bool:
    """Whether the code of `frame` is a cell, or a file outside of Python and its libraries."""
    if str(frame.f_globals.get("__name__", "")).split(".")[0] in _OURS:
        return False
    return runs_users_code(frame.f_code.co_filename)


def runs_users_code(path: str) -> bool:
    """Whether code from the file `path` is a cell, or in a file outside of Python and its libraries."""
    return bool(_cell(path)) or not path.startswith(("<", *_libraries()))


@cache
def _libraries() -> tuple[str, ...]:
    """The folders of Python and of installed libraries, without sysconfig, whose import opens a file."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple(f"{folder}/" for folder in (os.path.dirname(os.__file__), *installed))


def _line(frame: FrameType, number: int) -> str:
    code = frame.f_code
    return line_of(code.co_filename, number, code.co_name, frame.f_globals)


def line_of(path: str, number: int, function: str, names: dict[str, Any] | None = None) -> str:
    """The line with this `number` of the file `path`, with its place in front, as `user_lines` has it.

    `names` are the global variables of the module, if they are known: a module may have no file.
    """
    cell = _cell(path)
    place = f"Cell {cell}" if cell else f"File {path}"
    within = "" if function.startswith("<") else f", in {function}"
    code = linecache.getline(path, number, names).strip()
    typed = printable(_as_typed(code), LONGEST_LINE)
    return f"{place}, line {number}{within}" + (f": {typed}" if typed else "")


def _as_typed(code: str) -> str:
    """The `code` of a line, with a magic as it was typed: `%gpu plan qwen`."""
    percents = {"cell": "%%", "line": "%"}
    return _MAGIC.sub(lambda found: f"{percents[found[1]]}{found[2]} {found[4]}".rstrip(), code)
