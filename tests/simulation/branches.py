"""Counts how often each branch of the decisions is met: a day that is too tame shows as a branch that is never met."""

import ast
import sys
from collections import Counter
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any

# What decides: `admit` and whom it evicts, why it refuses, what other owners request, and the keeper.
DECIDING = ("admission", "victims", "feasibility", "caps", "recall")
MODULES = (
    *[f"gpu_runtime.scheduler.{name}" for name in DECIDING],
    "gpu_runtime.ledgers.keeper.core",
)
MOST_UNMET = 134  # of 565, in 100 days from 20005 on; README.md says what they need

met: Counter[tuple[str, int]] = Counter()
lines: dict[tuple[str, int], str] = {}  # each branch: its first line


class _Marks(ast.NodeTransformer):
    """Adds to the body of each function, condition and loop a call that counts it."""

    def __init__(self, module: str, text: list[str]) -> None:
        self.module, self.text = module, text

    def _marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        line = body[0].lineno
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            return body  # a docstring: the function's first condition shows whether it is called
        lines[self.module, line] = self.text[line - 1].strip()
        mark = ast.parse(f"_met[{self.module!r}, {line}] += 1").body
        return [
            *(ast.copy_location(ast.fix_missing_locations(one), body[0]) for one in mark),
            *body,
        ]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.If, ast.For, ast.While, ast.FunctionDef)):
            node.body = self._marked(node.body)
            if isinstance(node, ast.If) and node.orelse and not isinstance(node.orelse[0], ast.If):
                node.orelse = self._marked(node.orelse)
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        text = self.get_data(self.path).decode()
        marks = _Marks(fullname.rpartition(".")[2], text.splitlines())
        return compile(ast.fix_missing_locations(marks.visit(ast.parse(text))), self.path, "exec")

    def exec_module(self, module: Any) -> None:
        module._met = met
        super().exec_module(module)


class _Finder:
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """Marks the modules when they are imported. Call it before the product is."""
    sys.meta_path.insert(0, _Finder())


def never_met() -> list[str]:
    """The branches that no day has met."""
    found = []
    for (module, line), text in sorted(lines.items()):
        if not met[module, line]:
            found.append(f"{module}.py:{line}: {text}")
    return found
