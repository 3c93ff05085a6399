"""No error is ignored without a comment that gives the reason."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for part in ("gpu_runtime", "kernel_ext", "panels")
    for path in sorted((ROOT / part).rglob("*.py"))
]


def ignored(source: str) -> list[int]:
    """The lines of `source` where an error is ignored and no comment gives the reason."""
    lines = source.split("\n")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and _ignores(node):
            last = node.end_lineno
        elif isinstance(node, ast.With) and _suppresses(node):
            last = node.body[0].lineno
        else:
            continue
        if "#" not in "".join(lines[max(0, node.lineno - 2) : last]):
            found.append(node.lineno)
    return found


def _ignores(handler: ast.ExceptHandler) -> bool:
    if len(handler.body) != 1:
        return False
    [only] = handler.body
    if isinstance(only, (ast.Return, ast.Assign)):
        return not only.value or not any(map(_reports, ast.walk(only.value)))
    return isinstance(only, (ast.Pass, ast.Continue, ast.Break))


def _reports(node: ast.AST) -> bool:
    """Whether the value may report the error: it contains a call, a name or a text."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
    return bool(is_text) or isinstance(node, (ast.Call, ast.Name, ast.JoinedStr))


def _suppresses(block: ast.With) -> bool:
    return any("suppress(" in ast.unparse(item.context_expr) for item in block.items)


@pytest.mark.thorough
def test_every_ignored_error_has_a_reason():
    """A comment on the handler explains why the error needs no attention."""
    found = {str(path.relative_to(ROOT)): ignored(path.read_text()) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "handler", ["pass", "return", "return None", "return []", "continue", "found = None"]
)
def test_a_handler_without_a_reason_is_found(handler):
    source = f"def f():\n  for _ in x:\n    try: g()\n    except OSError:\n      {handler}\n"
    assert ignored(source) == [4]
    assert ignored(source.replace("OSError:", "OSError:  # no such file")) == []


def test_a_suppressed_error_without_a_reason_is_found():
    source = "with suppress(OSError):\n    f()\n"
    assert ignored(source) == [1]
    assert ignored(source.replace(":\n", ":  # no such file\n")) == []
