"""Runs the cell of a `%%gpu` magic in the user's namespace, as IPython would run it.

`shell.run_cell` is not used: it shows tracebacks itself, so each traceback would be shown twice.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from types import CodeType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell

from gpu_runtime.errors import GpuError
from gpu_runtime.user_frames import running_cell

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class CellSyntaxError(GpuError):
    """Raised, not printed, when a cell is not valid Python, so that nbval and other programs notice it."""


class Compiled:
    """A cell that is ready to run: the code of its statements, and of its last expression, which is displayed."""

    def __init__(self, shell: InteractiveShell, cell: str) -> None:
        """Compiles the `cell`. Raises CellSyntaxError, and GpuError if the cell uses `await` at its top level."""
        self._shell = shell
        # An empty line replaces the magic's line, so that tracebacks have the notebook's line numbers.
        source = "\n" + shell.transform_cell(cell)
        # Some versions of the shell increase `execution_count` before a cell runs, others after it. So the
        # cell's number is read from the file name under which IPython compiled the running cell.
        number = running_cell(shell.execution_count)
        name = shell.compile.cache(source, number, raw_code="%%gpu\n" + cell)
        try:
            self._code = self._compile_all(source, name, cell)
        except SyntaxError as error:
            raise _not_python(shell, error) from None

    def _compile_all(self, source: str, name: str, cell: str) -> list[CodeType]:
        tree = self._shell.transform_ast(self._shell.compile.ast_parse(source, name))
        ends_in_expression = tree.body and isinstance(tree.body[-1], ast.Expr)
        last = tree.body.pop() if ends_in_expression else None
        code = [self._compile(tree, name, "exec")]
        if last is None:
            return code
        if DisplayHook.semicolon_at_end_of_expression(cell):
            return [*code, self._compile(ast.Module([last], []), name, "exec")]
        return [*code, self._compile(ast.Interactive([last]), name, "single")]

    def _compile(self, tree: ast.AST, name: str, mode: str) -> CodeType:
        with self._shell.compile.extra_flags(_AWAIT):
            code = self._shell.compile(tree, name, mode)
        if code.co_flags & inspect.CO_COROUTINE:
            raise GpuError(
                "%%gpu cannot run a cell that awaits at its top level.\n"
                '  In a plain cell it works:  with rt.lease("8GiB", purpose="…"): await …'
            )
        return code

    def run(self) -> None:
        """Runs the cell. If the cell raises an error, the traceback begins at the cell's own line."""
        try:
            for code in self._code:
                exec(code, self._shell.user_ns)
        except BaseException as error:
            if not hasattr(error, "_render_traceback_"):
                _show_own_lines(self._shell, error, tuple(self._code))
            raise


def _show_own_lines(
    shell: InteractiveShell, error: BaseException, codes: tuple[CodeType, ...]
) -> None:
    """Removes the frames before the cell's own frame from the traceback that IPython shows."""

    def render() -> list[str]:
        """The lines of the traceback, from the cell's own frame on."""
        # `error` stores this function. If this function used `error` too, the two would form a
        # reference cycle, and the traceback would keep the user's tensors alive.
        shown = sys.exc_info()[1] or sys.last_value
        trace = shown.__traceback__
        while trace is not None and trace.tb_frame.f_code not in codes:
            trace = trace.tb_next
        return shell.InteractiveTB.structured_traceback(
            type(shown), shown, trace or shown.__traceback__, tb_offset=0
        )

    with contextlib.suppress(AttributeError):  # an exception with __slots__ is shown in full
        error._render_traceback_ = render  # type: ignore[attr-defined]


def _not_python(shell: InteractiveShell, error: SyntaxError) -> CellSyntaxError:
    lines: Any = shell.SyntaxTB.structured_traceback(type(error), error, [])
    failure = CellSyntaxError(str(error), lineno=error.lineno)
    failure._render_traceback_ = lambda: lines  # type: ignore[method-assign]
    return failure
