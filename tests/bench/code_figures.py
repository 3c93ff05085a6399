"""The size of the code, as figures: `python -m tests.bench.code_figures [DIRECTORY]`.

It counts the package (`gpu_runtime`, `kernel_ext`, `panels`) in a directory, without the tests. It only reads files.
The seconds of lint, check and test are measured by hand.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("gpu_runtime", "kernel_ext", "panels")
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree: ast.AST) -> set[int]:
    """The numbers of the lines that belong to docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, Function)):
            continue
        first = node.body[0] if node.body else None
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_text and isinstance(first.value.value, str):
            found.update(range(first.lineno, first.end_lineno + 1))
    return found


def code_lines(source: str, tree: ast.AST) -> int:
    """The number of lines with code. Blank lines, comment lines and docstrings do not count."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstring_lines(tree))


def node_count(tree: ast.AST) -> int:
    """The number of AST nodes in `tree`, without `Load`, `Store` and `Del`."""
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree))


def length(node: ast.AST) -> int:
    """The number of lines of a definition, without its decorators."""
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Yields a module's functions and methods with public names. The class of a method is public too."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, without `self` and `cls`."""
    given = function.args
    several = [given.vararg, given.kwarg]
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, several)]
    return [each.arg for each in named if each.arg not in ("self", "cls")]


def documented(function: Function) -> list[str]:
    """The parameters of a function whose names occur as words in its docstring."""
    words = set(re.findall(r"\w+", ast.get_docstring(function) or ""))
    return [name for name in parameters(function) if name in words]


def figures(root: Path) -> dict[str, str]:
    """The figures of the package in the directory `root`, by name."""
    paths = sorted(path for part in PARTS for path in (root / part).rglob("*.py"))
    sources = [path.read_text() for path in paths]
    trees = [ast.parse(source) for source in sources]
    every = [node for tree in trees for node in ast.walk(tree)]
    lengths = sorted(length(node) for node in every if isinstance(node, Function))
    classes = [node for node in every if isinstance(node, ast.ClassDef)]
    largest = max(classes, key=length)
    methods = sum(isinstance(node, Function) for node in largest.body)
    public = [function for tree in trees for function in public_functions(tree.body)]
    asked = sum(len(parameters(function)) for function in public)
    named = sum(len(documented(function)) for function in public)
    code = sum(code_lines(source, tree) for source, tree in zip(sources, trees, strict=True))
    nodes = sum(node_count(tree) for tree in trees)
    longest_file = max(source.count("\n") for source in sources)
    readme = (root / "README.md").read_text().count("\n")
    return {
        "files": f"{len(paths)}",
        "lines": f"{sum(source.count(chr(10)) for source in sources):,}",
        "lines of code": f"{code:,}",
        "longest file, lines": f"{longest_file:,}",
        "function length, median": f"{statistics.median(lengths):g}",
        "function length, 90th percentile": f"{lengths[int(len(lengths) * 0.9)]}",
        "longest function, lines": f"{lengths[-1]}",
        "AST nodes a line of code": f"{nodes / code:.2f}",
        "largest class": f"{largest.name}: {length(largest):,} lines, {methods} methods",
        "documented parameters of public functions": f"{named / asked:.0%}",
        "README, lines": f"{readme}",
    }


def main(directory: str = "") -> None:
    """Prints the figures as a table."""
    for name, value in figures(Path(directory) if directory else ROOT).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main(*sys.argv[1:2])
