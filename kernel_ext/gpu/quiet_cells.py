"""Finds cells that touch no object of the user's. Such cells run at once while the notebook is parked.

Two kinds of cells touch no object of the user's: cells of `%gpu` lines that only read, and cells of constants and
operators. Before every other cell the notebook's memory returns to the card, because a name, a call or an import may
run any code.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from .cell_scan import MAGICS

# These verbs call no function of the user's, and bind no name. All but `park` only read; `park` finds this notebook
# parked already, and sends a request to another one.
READS = frozenset(
    (
        "status", "models", "leases", "evictions", "fragmentation", "health", "plan", "backtest",
        "why", "next", "who", "catalog", "inspect", "doctor", "config", "console", "help", "park",
    )
)  # fmt: skip
HOOKS = ("pre_execute", "pre_run_cell", "post_execute", "post_run_cell")
HOOK_PACKAGES = frozenset(("gpu", "IPython", "ipykernel", "matplotlib", "matplotlib_inline"))
CONSTANT = (
    ast.Module, ast.Expr, ast.Constant, ast.Tuple, ast.List, ast.Load,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def touches_nothing(shell: Any, content: Mapping[str, Any]) -> bool:
    """Whether the cell in `content` of an execute request touches no object of the user of `shell`."""
    code = content.get("code", "")
    if not code.strip() or content.get("user_expressions") or _has_hooks(shell):
        return False
    lines = [line.strip() for line in code.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return all(_reads(shell, line) for line in lines) or _is_constant(code)


def _reads(shell: Any, line: str) -> bool:
    """Whether the `line` is a `%gpu` line that only reads, and `%gpu` is gpu-console's magic in this `shell`."""
    magic, _, rest = line.partition(" ")
    # IPython replaces `{x}` and `$x` by the user's values, and reads `x?` as a question about x. A
    # final backslash continues the line.
    if magic[:1] != "%" or magic[1:] not in MAGICS or set("{$?\\") & set(rest):
        return False
    if _package(shell.find_line_magic(magic[1:])) != "gpu":
        return False
    try:
        words = shlex.split(rest.removesuffix(";"))
    except ValueError:  # a quote is not closed
        return False
    if any(word.startswith(("-o", "--output")) for word in words):  # it binds a name
        return False
    if "never" in words[1:]:  # `park never` brings the memory back
        return False
    return not words or words[0] in READS or words[0].startswith("-")


def _is_constant(code: str) -> bool:
    """Whether the `code` is Python, and consists of constants and operators only."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # IPython may still accept the cell, so the memory returns before it runs
    return all(isinstance(node, CONSTANT) for node in ast.walk(tree))


def _has_hooks(shell: Any) -> bool:
    """Whether code of the user runs before or after each cell, or changes each cell."""
    hooks = [hook for name in HOOKS for hook in shell.events.callbacks[name]]
    changes = [type(one).visit for one in shell.ast_transformers]
    return not {*map(_package, [*hooks, *changes])} <= HOOK_PACKAGES


def _package(function: Any) -> str:
    """The top-level package of the loaded module in which `function` is defined, or "" without such a module."""
    function = getattr(function, "__func__", function)
    variables = getattr(function, "__globals__", {})
    name = str(variables.get("__name__"))
    module = sys.modules.get(name)
    is_there = module is not None and vars(module) is variables
    return name.partition(".")[0] if is_there else ""
