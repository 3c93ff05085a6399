"""Finds cells that run at once while the notebook is parked.

Two kinds of cells touch no object of the user's: cells of `%gpu` lines that only read, and cells of constants and
operators. Some more cells need only the bytes in host memory, and so need no card: they delete, save or free, or print
something small. Before every other cell the notebook's memory returns to the card, because a name, a call or an import
may run any code.
"""

from __future__ import annotations

import ast
import builtins
import gc
import io
import shlex
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import PosixPath
from types import ModuleType, NoneType
from typing import Any, NamedTuple

from gpu_runtime import verbs

from . import obstacles
from .look_ahead import MAGICS

READS = frozenset(verb.name for verb in verbs.VERBS.values() if verb.reads)
# Verbs that need no card either, but change something. One of them may end the wait for a card that others fill.
WITH_RAM = READS | {"cancel", "drain", "evict", "free", "hibernate", "pin", "unpark", "unpin"}
# Methods of tensors that give the same value on every device. A sum on the CPU may round otherwise.
METHODS = frozenset(("item", "min", "max", "numel", "size"))
MOST_SHOWN = 1000  # the most entries of a list that is printed
MOST_SAVED = 100_000  # the most objects, tensors included, that are looked at before they are saved
VALUES = frozenset((int, float, complex, bool, str, bytes, NoneType))
# What `Module.state_dict` calls of each module.
STATE_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
INDEX = (ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
FUNCTIONS = frozenset((float, int, len, round, str, repr, bool, abs))
_PRINT = print  # as it was when this module was imported
HOOKS = ("pre_execute", "pre_run_cell", "post_execute", "post_run_cell")
HOOK_PACKAGES = frozenset(
    ("gpu", "gpu_runtime", "IPython", "ipykernel", "matplotlib", "matplotlib_inline")
)
CONSTANT = (
    ast.Module, ast.Expr, ast.Constant, ast.Tuple, ast.List, ast.Load,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def touches_nothing(shell: Any, content: Mapping[str, Any]) -> bool:
    """Whether the cell in `content` of an execute request touches no object of the user of `shell`."""
    code = content.get("code", "")
    if not code.strip() or content.get("user_expressions"):
        return False
    lines = [line.strip() for line in code.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    quiet = all(_reads(shell, line) for line in lines) or _is_constant(code)
    return quiet and not has_hooks(shell)  # last: it looks at some 150 functions


class InRam(NamedTuple):
    """A cell that needs the bytes in host memory, and no card."""

    printed: frozenset[str] = frozenset()  # the names of the tensors that the cell prints
    returns: bool = False  # whether a `%gpu` line of the cell brings the memory back
    saves: bool = False  # whether the cell calls `torch.save`


def in_ram(shell: Any, content: Mapping[str, Any]) -> InRam | None:
    """What the cell in `content` needs, if it runs while the memory is parked; None for every other cell.

    Such a cell has `%gpu` lines, and statements that delete names, bind them to constants, call
    `torch.save`, `print`, `gc.collect` or `torch.cuda.empty_cache`. Nothing else runs but the finalizers of what is
    deleted. On a card, a finalizer that reads parked bytes gets an error.
    """
    code = content.get("code", "")
    if not code.strip() or content.get("user_expressions"):
        return None
    lines = code.splitlines()
    ours = [line for line in lines if _reads(shell, line.strip(), WITH_RAM)]
    returns = any(_returns(line) for line in ours)
    rest = "\n".join(["" if line in ours else line for line in lines])
    try:
        tree = ast.parse(rest)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # IPython may still accept the cell, so the memory returns before it runs
    cell = _Statements(shell.user_ns)
    if returns and tree.body or not all(map(cell.allows, tree.body)) or has_hooks(shell):
        return None
    if cell.printed and cell.saves:  # what is printed is a copy on the CPU, which must not be saved
        return None
    return InRam(frozenset(cell.printed), returns, cell.saves)


def frees(shell: Any, content: Mapping[str, Any]) -> bool:
    """Whether the cell in `content` takes no memory: it touches nothing, or only deletes, saves, frees or prints."""
    return touches_nothing(shell, content) or in_ram(shell, content) is not None


def _returns(line: str) -> bool:
    words = line.split()
    return "unpark" in words or "never" in words


class _Statements:
    """Judges the statements of one cell by the values in `names`, the user's variables. Runs no code of the user's."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._torch = sys.modules.get("torch")
        self.printed: set[str] = set()
        self.saves = False

    def allows(self, node: ast.stmt) -> bool:
        """Whether the statement `node` needs only the bytes in host memory."""
        if isinstance(node, ast.Delete):
            known = (isinstance(name, ast.Name) and name.id in self._names for name in node.targets)
            return all(known) and all(map(self._may_end, node.targets))
        if isinstance(node, ast.Assign):
            return isinstance(node.value, ast.Constant) and all(map(self._may_end, node.targets))
        if isinstance(node, ast.Import):  # only what was imported before, so no code runs
            return all(
                alias.name in ("gc", "torch") and alias.name in sys.modules for alias in node.names
            )
        return (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and self._may_call(node.value)
        )

    def _may_end(self, node: ast.expr) -> bool:
        """Whether `node` is a name, and its value, if any, has no method `__del__`, which its end would call."""
        return isinstance(node, ast.Name) and not hasattr(type(self._names.get(node.id)), "__del__")

    def _may_call(self, call: ast.Call) -> bool:
        function = self._function(call.func)
        options = [keyword.value for keyword in call.keywords if keyword.arg]
        if len(options) < len(call.keywords):
            return False
        torch = self._torch
        if function is gc.collect or (torch and function is torch.cuda.empty_cache):
            return not (call.args or options)
        if function is _PRINT:
            shows = all(map(self._is_small, call.args)) and all(map(_is_text, options))
            return shows and not obstacles.is_users(type(sys.stdout))
        if torch and function is torch.save and function.__module__ == "torch.serialization":
            self.saves = True
            names = {keyword.arg for keyword in call.keywords}
            return (  # an older format, or another module that pickles, reads the bytes in its own way
                len(call.args) in (1, 2)
                and names <= {"f"}
                and self._may_save(call.args[0])
                and all(map(self._is_path, [*call.args[1:], *options]))
            )
        return False

    def _function(self, node: ast.expr) -> Any:
        """The function of that name: one of Python's, or an attribute of the module `torch` or `gc`."""
        words = ast.unparse(node).split(".")
        known: Any = self._names.get(words[0], vars(builtins).get(words[0]))
        if len(words) == 1:
            return known
        if not isinstance(known, ModuleType) or known is not sys.modules.get(words[0]):
            return None
        for word in words[1:]:
            known = vars(known).get(word) if isinstance(known, ModuleType) else None
        return known

    def _may_save(self, node: ast.expr) -> bool:
        """Whether `node` is data, a `state_dict()`, or a container of those. Any code may pickle other objects."""
        if isinstance(node, ast.Name):
            return node.id in self._names and self._is_data(self._names[node.id])
        if isinstance(node, ast.Dict):
            keys = all(isinstance(key, ast.Constant) for key in node.keys)
            return keys and all(map(self._may_save, node.values))
        if isinstance(node, (ast.List, ast.Tuple)):
            return all(map(self._may_save, node.elts))
        if isinstance(node, ast.Call):
            return not (node.args or node.keywords) and self._is_state_dict(node.func)
        return isinstance(node, ast.Constant)

    def _is_data(self, value: Any) -> bool:
        """Whether `value` is a number, a text, a tensor, or a container of Python's with nothing else in it."""
        torch, waiting, seen = self._torch, [value], set[int]()
        while waiting and len(waiting) + len(seen) < MOST_SAVED:
            value = waiting.pop()
            kind = type(value)
            if kind in VALUES or id(value) in seen:
                continue
            seen.add(id(value))
            if kind in (dict, OrderedDict, defaultdict):
                waiting += [*value, *value.values()]
            elif kind in (list, tuple):
                waiting += value
            elif torch is None or kind not in (torch.Tensor, torch.nn.Parameter):
                return False
            waiting += getattr(value, "__dict__", {}).values()
        return not waiting

    def _is_state_dict(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr != "state_dict" or not self._torch:
            return False
        value = self._names.get(node.value.id) if isinstance(node.value, ast.Name) else None
        optimizer = self._torch.optim.Optimizer
        if getattr(type(value), "state_dict", None) is optimizer.state_dict:
            hooks = value._optimizer_state_dict_pre_hooks, value._optimizer_state_dict_post_hooks
            return not any(hooks) and self._is_data([*value.state.values(), value.param_groups])
        modules = [value]
        return all(self._is_plain_module(module, modules) for module in modules)

    def _is_plain_module(self, module: Any, further: list[Any]) -> bool:
        """Whether the state of `module` is its tensors, and no code of the user's runs for it.

        Its submodules are added to `further`.
        """
        usual = self._torch.nn.Module
        if any(
            getattr(type(module), name, None) is not getattr(usual, name) for name in STATE_METHODS
        ):
            return False
        if module._state_dict_hooks or module._state_dict_pre_hooks:
            return False
        further += [below for below in module._modules.values() if below is not None]
        return self._is_data([*module._parameters.values(), *module._buffers.values()])

    def _is_path(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return type(self._names.get(node.id)) in (str, PosixPath, bool, int, io.BytesIO)
        return _is_text(node) or self._is_formatted(node)

    def _is_small(self, node: ast.expr) -> bool:
        """Whether `node` is a number, a text, a tensor or a part of it, or a method of METHODS of those."""
        if isinstance(node, ast.Name):
            value = self._names.get(node.id)
            if self._is_tensor(node):
                self.printed.add(node.id)
                return True
            return node.id in self._names and _is_plain(value)
        if isinstance(node, ast.Subscript):
            return self._is_small(node.value) and all(
                isinstance(part, INDEX) for part in ast.walk(node.slice)
            )
        if isinstance(node, ast.Call):
            method = node.func
            if node.keywords:
                return False
            if isinstance(method, ast.Name):
                return self._function(method) in FUNCTIONS and all(map(self._is_small, node.args))
            if node.args or not isinstance(method, ast.Attribute):
                return False
            return method.attr in METHODS and self._is_part(method.value)
        if isinstance(node, ast.Attribute):
            return node.attr in ("shape", "dtype", "ndim") and self._is_part(node.value)
        return isinstance(node, ast.Constant) or self._is_formatted(node)

    def _is_part(self, node: ast.expr) -> bool:
        """Whether `node` is a tensor, a part of one, or the result of a method in METHODS."""
        while isinstance(node, (ast.Subscript, ast.Call, ast.Attribute)):
            if not self._is_small(node):
                return False
            node = node.func.value if isinstance(node, ast.Call) else node.value  # type: ignore[attr-defined]
        return self._is_small(node) and self._is_tensor(node)

    def _is_tensor(self, node: ast.expr) -> bool:
        """Whether `node` is a tensor with all its values in one storage. A sparse or a nested one has others."""
        value = self._names.get(node.id) if isinstance(node, ast.Name) else None
        torch = self._torch
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return False
        return torch._C._has_storage(value) and not (value.is_nested or value.is_quantized)

    def _is_formatted(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.JoinedStr):
            return False
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return all(map(self._is_small, parts))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _is_plain(value: Any, depth: int = 2) -> bool:
    """Whether Python itself shows `value`: a number, a text, or a small container of those."""
    if type(value) in (int, float, complex, bool, str, NoneType):
        return True
    if depth and type(value) in (list, tuple) and len(value) <= MOST_SHOWN:
        return all(_is_plain(item, depth - 1) for item in value)
    return False


def _reads(shell: Any, line: str, verbs: frozenset[str] = READS) -> bool:
    """Whether the `line` is one of gpu-console's magic `%gpu` in this `shell`, with one of these `verbs`.

    `park never` is no such line with the verbs READS, because it brings the memory back.
    """
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
    if "never" in words[1:] and verbs is READS:
        return False
    return not words or words[0] in verbs or words[0].startswith("-")


def _is_constant(code: str) -> bool:
    """Whether the `code` is Python, and consists of constants and operators only."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # IPython may still accept the cell, so the memory returns before it runs
    return all(isinstance(node, CONSTANT) for node in ast.walk(tree))


def has_hooks(shell: Any) -> bool:
    """Whether code of the user runs before or after each cell, or changes each cell."""
    hooks = [hook for name in HOOKS for hook in shell.events.callbacks[name]]
    changes = [type(transformer).visit for transformer in shell.ast_transformers]
    if not {*map(_package, [*hooks, *changes])} <= HOOK_PACKAGES:
        return True
    shown = [type(getattr(shell, name, None)) for name in ("displayhook", "display_pub")]
    for formatter in getattr(getattr(shell, "display_formatter", None), "formatters", {}).values():
        printers = (
            formatter.type_printers,
            formatter.singleton_printers,
            formatter.deferred_printers,
        )
        shown += [function for group in printers for function in group.values()]
    return any(map(obstacles.is_users, shown)) or runs_before_hooks(shell)


def runs_before_hooks(shell: Any) -> bool:
    """Whether code of the user transforms the text of each cell, or observes a trait of the shell."""
    manager = getattr(shell, "input_transformer_manager", None)
    names = ("cleanup_transforms", "line_transforms", "token_transformers")
    found = [function for name in names for function in getattr(manager, name, ())]
    found += getattr(shell, "input_transformers_post", ())
    for observers in getattr(shell, "_trait_notifiers", {}).values():
        found += [function for functions in observers.values() for function in functions]
    return any(map(obstacles.is_users, found))


def _package(function: Any) -> str:
    """The top-level package of the loaded module in which `function` is defined, or "" without such a module."""
    function = getattr(function, "__func__", function)
    variables = getattr(function, "__globals__", {})
    name = str(variables.get("__name__"))
    module = sys.modules.get(name)
    is_there = module is not None and vars(module) is variables
    return name.partition(".")[0] if is_there else ""
