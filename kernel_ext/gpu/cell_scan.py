"""Finds the models that a cell uses, from the text of the cell.

This module is pure: it runs no code of the cell. If the scan misses a model, the cell loads the model at its first use,
as without a scan. If the scan finds a model that the cell does not use, the cost is a load into free memory.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import shlex
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from IPython.core.inputtransformer2 import TransformerManager

METHODS = (
    "use",
    "load",
    "preload",
    "restore",
)  # methods of the runtime that bring a model onto its device
VERBS = ("load", "preload", "restore")  # the verbs of `%gpu` that do the same
MAGICS = ("gpu", "gpuctl")
RUN_THEIR_TEXT = ("time", "timeit", "prun", "capture")  # magics whose text is Python
# Functions that return the items of their arguments.
PASS_ON = ("enumerate", "list", "reversed", "sorted", "tuple", "zip", "set")
MOST_CHARACTERS = 100_000  # a longer cell is data, and is not read
MOST_PARSED = 512  # cells whose trees are kept
MOST_VALUES = 50  # the values that are kept of one variable
DEEPEST_CALL = 3  # calls within calls that are followed
# Calls that are followed in one cell; 27,000 calls took 50 s beside the running cell
MOST_CALLS = 200


class ScannedModels(NamedTuple):
    """The models of one cell."""

    uses: tuple[str, ...] = ()  # the models that the cell brings onto a device, in order
    mentions: frozenset[str] = frozenset()  # every known model that the cell names in any way


class Scan:
    """Reads cells in the order in which they will run.

    Assignments and definitions in one cell are known when later cells are read.

    >>> scan = Scan(known=["a", "b"], names={"B": "b"})
    >>> scan.read('with rt.use("a") as m: m(1)\\nwith rt.use(B): pass').uses
    ('a', 'b')
    """

    def __init__(
        self,
        known: Collection[str],
        names: Mapping[str, Any],
        governed: Callable[[Any], str] = lambda value: "",
    ) -> None:
        """`known` are the names of models, `names` the variables of the notebook.

        `governed(value)` returns the name of the model that `value` is, or "".
        """
        self.known, self.names, self.governed = frozenset(known), names, governed
        self.bound: dict[str, tuple[Any, ...]] = {}  # variable -> the constants it may have
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}

    def read(self, code: str) -> ScannedModels:
        """The models of the cell `code`; none if it is not Python, is too long, or is nested too deeply."""
        if len(code) > MOST_CHARACTERS:
            return ScannedModels()
        tree, cell = _parsed(code), _Cell(self)
        if tree is None:
            return ScannedModels()
        try:
            cell.visit(tree)
        except RecursionError:  # nested too deeply: nothing is known about it
            return ScannedModels()
        return ScannedModels(tuple(cell.uses), frozenset([*cell.mentions, *cell.uses]))

    def values(self, node: ast.AST | None) -> Iterator[Any]:
        """Yields the constants that may be the value of `node`, by the cells and the notebook's variables."""
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Name):
            yield from self._values_of(node.id)
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            for item in node.elts:
                yield from self.values(item)
        elif isinstance(node, ast.Dict):
            for item in (*node.keys, *node.values):
                yield from self.values(item)
        elif isinstance(node, ast.IfExp):
            yield from self.values(node.body)
            yield from self.values(node.orelse)
        elif isinstance(node, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            yield from self.values(node.value)
        elif isinstance(node, ast.Call):
            yield from self._values_of_call(node)

    def _values_of(self, name: str) -> Iterator[Any]:
        if name in self.bound:
            yield from self.bound[name]
            return
        value = self.names.get(name)
        if type(value) is dict and len(value) <= MOST_VALUES:
            yield from [*value.keys(), *value.values()]
        elif type(value) in (list, tuple, set) and len(value) <= MOST_VALUES:
            yield from list(value)
        else:
            yield value

    def _values_of_call(self, node: ast.Call) -> Iterator[Any]:
        """Yields the constants of `names` for calls such as `enumerate(names)` and `names.items()`."""
        function = node.func
        if isinstance(function, ast.Name) and function.id in PASS_ON:
            for item in node.args:
                yield from self.values(item)
        elif isinstance(function, ast.Attribute) and function.attr in ("items", "keys", "values"):
            yield from self.values(function.value)


class _Cell(ast.NodeVisitor):
    """The models of one cell: `uses`, which it brings onto a device, in order; and `mentions`, which it names."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.uses: list[str] = []
        self.mentions: set[str] = set()
        self.depth = 0
        self.followed = 0  # calls

    def use(self, names: Iterable[Any]) -> None:
        for name in names:
            if type(name) is str and name in self.scan.known and name not in self.uses:
                self.uses.append(name)

    def mention(self, names: Iterable[Any]) -> None:
        """Adds each model among `names` to the models that the cell mentions. A used model may be among them."""
        self.mentions |= {name for name in names if type(name) is str and name in self.scan.known}

    # -- assignments

    def bind(self, target: ast.AST, value: ast.AST | None) -> None:
        """Records that each name in `target` may now have one of the constants of `value`."""
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else None
        given = value.elts if isinstance(value, (ast.Tuple, ast.List)) else None
        if parts is not None and given is not None and len(parts) == len(given):
            for part, item in zip(parts, given, strict=True):
                self.bind(part, item)
            return
        found = tuple(self.scan.values(value))[:MOST_VALUES]
        for part in parts if parts is not None else [target]:
            if isinstance(part, ast.Name):
                self.scan.bound[part.id] = found
                self.scan.functions.pop(part.id, None)
            elif isinstance(part, (ast.Tuple, ast.List)):
                self.bind(part, value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.bind(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target, node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.bind_items(node.target, node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_AsyncFor = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node, node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, node.key, node.value)

    def _comprehension(self, node: Any, *results: ast.AST) -> None:
        for generator in node.generators:
            self.visit(generator.iter)
            self.bind_items(generator.target, generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for result in results:
            self.visit(result)

    def bind_items(self, target: ast.AST, items: ast.AST) -> None:
        """Records that each name in a loop's `target` may have any of the constants of `items`."""
        found = tuple(self.scan.values(items))[:MOST_VALUES]
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.scan.bound[node.id] = found

    # -- functions: the models in a function count as used when the function is called

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scan.functions[node.name] = node
        self.scan.bound.pop(node.name, None)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Does nothing: the models inside a lambda do not count as used."""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Does nothing: the models inside a class do not count as used."""

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        self.visit(function)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        if isinstance(function, ast.Attribute):
            if function.attr in METHODS:
                given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
                for item in given:
                    self.use(self.scan.values(item))
            elif function.attr in ("run_line_magic", "run_cell_magic"):
                self._magic([a.value for a in node.args if isinstance(a, ast.Constant)])
        elif isinstance(function, ast.Name) and self.depth < DEEPEST_CALL:
            self._follow(function.id, node)

    def _follow(self, name: str, call: ast.Call) -> None:
        """Adds the models that the function `name` uses if it is called as in `call`."""
        if self.followed >= MOST_CALLS:
            return
        if body := self.scan.functions.get(name):
            self._follow_text(body, call)
        elif name not in self.scan.bound:
            value = self.scan.names.get(name)
            if type(value) is types.FunctionType:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                self._follow_code(value, [v for item in given for v in self.scan.values(item)])

    def _follow_text(self, body: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> None:
        self.followed += 1
        outside = self.scan.bound
        parameters = [*body.args.posonlyargs, *body.args.args]
        given: dict[str, ast.AST] = {}
        defaults = parameters[len(parameters) - len(body.args.defaults) :]
        given |= {one.arg: value for one, value in zip(defaults, body.args.defaults, strict=True)}
        given |= {one.arg: value for one, value in zip(parameters, call.args, strict=False)}
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        inside = {name: tuple(self.scan.values(value)) for name, value in given.items()}
        self.scan.bound, self.depth = {**outside, **inside}, self.depth + 1
        try:
            for statement in body.body:
                self.visit(statement)
        finally:
            self.scan.bound, self.depth = outside, self.depth - 1

    def _follow_code(self, function: types.FunctionType, given: list[Any], depth: int = 0) -> None:
        """Adds the models that the existing `function` uses when it is called.

        If `function` calls one of METHODS, the names of models are taken from its constants, from the arguments
        `given`, and from the variables that it reads. The functions that it calls are followed too, to a `depth`.
        """
        self.followed += 1
        codes = [function.__code__]
        for code in codes:
            codes += [item for item in code.co_consts if isinstance(item, types.CodeType)]
        attributes = {name for code in codes for name in code.co_names}
        if attributes & set(METHODS):
            texts = [text for code in codes for item in code.co_consts for text in _parts(item)]
            variables = [v for name in sorted(attributes) for v in self.scan._values_of(name)]
            self.use([*texts, *given, *(v for v in variables if type(v) is str)])
        if depth < DEEPEST_CALL:
            for name in sorted(attributes):
                called = self.scan.names.get(name)
                if self.followed >= MOST_CALLS:
                    return
                if type(called) is types.FunctionType and called is not function:
                    self._follow_code(called, given, depth + 1)

    # -- names, texts, magics

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.mention(self.scan._values_of(node.id))
            if (
                node.id not in self.scan.bound
                and (value := self.scan.names.get(node.id)) is not None
            ):
                self.use([self.scan.governed(value)])

    def visit_Constant(self, node: ast.Constant) -> None:
        self.mention([node.value])

    def _magic(self, texts: list[Any]) -> None:
        """Reads a call of a magic. Its `texts` are the name of the magic, its line, and its cell."""
        if not texts or not all(isinstance(text, str) for text in texts):
            return
        name, rest = texts[0], texts[1:]
        if name in MAGICS:
            self._gpu_magic(rest[0] if rest else "")
        if name in RUN_THEIR_TEXT or (name in MAGICS and len(rest) == 2):
            reading = self.scan.read(rest[-1])
            self.use(reading.uses)
            self.mention(reading.mentions)

    def _gpu_magic(self, line: str) -> None:
        words: list[str] = []
        with contextlib.suppress(ValueError):  # a quote that is not closed
            words = shlex.split(line)
        self.mention(words)
        if len(words) > 1 and words[0] in VERBS:
            self.use(words[1:2])
        for option, value in zip(words, words[1:], strict=False):
            if option == "--model":
                self.use([value])
        self.use(word.partition("=")[2] for word in words if word.startswith("--model="))


@functools.lru_cache(maxsize=MOST_PARSED)
def _parsed(code: str) -> ast.AST | None:
    """The syntax tree of the cell, or None. A waiting cell is read many times, so the result is cached.

    Plain Python is parsed without IPython's transformation, which takes ten times as long as the parsing.
    """
    try:
        return ast.parse(code)
    except SyntaxError:  # perhaps it has magics, which the code below transforms
        pass
    except (ValueError, RecursionError, MemoryError):  # no parser could read it
        return None
    try:
        return ast.parse(TransformerManager().transform_cell(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # no Python, with or without magics


def _parts(constant: Any) -> tuple[Any, ...]:
    """The items of a constant tuple or set. Any other constant is the only item of the result."""
    return tuple(constant) if isinstance(constant, (tuple, frozenset)) else (constant,)
