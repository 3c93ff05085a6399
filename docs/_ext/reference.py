"""The reference tables, made from the code when the site is built.

A page lists names (or groups of names) in a directive and so decides their order and their group; the texts come from
the code. `tests/core/test_docs.py` compares the names on the pages with those in the code, so that
nothing can be left out. Each `*_table` function returns Markdown.

    ```{settings}
    GPU_DEVICES
    GPU_LEDGER
    ```
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Line(NamedTuple):
    """One line of a directive: `NAME = a note by the page's author`."""

    name: str
    note: str


def lines_of(content: Iterable[str]) -> list[Line]:
    """The lines of a directive, without blank ones."""
    split = (text.partition(" = ") for text in content if text.strip())
    return [Line(name.strip(), note.strip()) for name, _, note in split]


def lines_in(page: str, directive: str) -> list[Line]:
    """The lines of every such directive in a page's Markdown."""
    blocks = re.findall(rf"^```{{{directive}}}[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in lines_of(block.splitlines())]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def cell(text: str) -> str:
    """Text of the code as the cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("*", r"\*")


# -- settings, verbs, catalogue fields, errors -----------------------------------------------------


@cache
def settings() -> dict[str, Any]:
    """Every setting by its name, as `gpu config` lists it."""
    from gpu_runtime.settings import Settings

    return {row.name: row for row in Settings().sources()}


def settings_table(lines: Iterable[Line]) -> str:
    """Name, default and meaning of the settings."""
    rows = (settings()[line.name] for line in lines)
    return table(
        ("Setting", "Default", "Meaning"),
        ((f"`{row.name}`", f"`{row.default}`", cell(row.doc)) for row in rows),
    )


def verbs_table(lines: Iterable[Line]) -> str:
    """How each verb is typed, the same in Python (the line's note), and what it does."""
    from gpu_runtime.verbs import CLI, MAGIC, VERBS

    rows = []
    for line in lines:
        verb = VERBS[line.name]
        place = verb.places[0]
        typed = verb.synopsis(place, short=True)
        where = {(MAGIC,): "notebook", (CLI,): "terminal"}.get(verb.places, "both")
        python = f"`{line.note}`" if line.note else ""
        rows.append((f"`{cell(typed)}`", where, python, cell(verb.doc)))
    return table(("Verb", "Where", "In Python", "What it does"), rows)


def verb_help(lines: Iterable[Line]) -> str:
    """The help of every verb, as `gpu help VERB` prints it."""
    from gpu_runtime.verbs import VERBS, details

    texts = (details(verb, verb.places[0]) for verb in VERBS.values())
    return "\n".join(f"```text\n{text}\n```\n" for text in texts)


def fields_table(lines: Iterable[Line]) -> str:
    """Name and meaning of the catalogue's fields in a group."""
    from gpu_runtime.arguments import GROUPS

    fields = {name: field for line in lines for name, field in GROUPS[line.name].items()}
    rows = ((f"`{name}`", cell(field.meaning)) for name, field in fields.items())
    return table(("Field", "Meaning"), rows)


@cache
def errors() -> dict[str, type[Exception]]:
    """Every error class of the package, by its name."""
    from gpu_runtime import errors as module

    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    return {kind.__name__: kind for kind in kinds if issubclass(kind, module.GpuError)}


def errors_table(lines: Iterable[Line]) -> str:
    """Each error's meaning with its attributes, and what to do."""
    from gpu_runtime.error_pages import WHAT_TO_DO

    rows = []
    for line in lines:
        doc = inspect.getdoc(errors()[line.name]) or ""
        meaning, label, attributes = cell(doc).partition("Attributes:")
        names = re.sub(r"(?<=[:,;] )([a-z_]+)(?=[,.;:])", r"`\1`", label + attributes)
        text = meaning + names
        rows.append((f"`{line.name}`", text, cell(WHAT_TO_DO[line.name])))
    return table(("Error", "Meaning", "What to do"), rows)


# -- HTTP -----------------------------------------------------------------------------------------


@cache
def application() -> Any:
    """The HTTP application over a runtime on a simulated card, for its description only."""
    from gpu_runtime import Runtime
    from gpu_runtime.serving.api.app import application as make

    with Runtime(devices="sim:1GiB", ledger="memory:") as rt:
        return make(rt, lambda: None, "docs")


@cache
def route_descriptions() -> dict[str, dict[str, Any]]:
    """The descriptions of all routes by path and method: of one host, and of a fleet's server."""
    from gpu_runtime.serving.fleet_server import fleet_application

    fleet = fleet_application(None, lambda: None, "docs").openapi()["paths"]
    return {**fleet, **application().openapi()["paths"]}


def routes() -> set[str]:
    """Every route of the servers as `GET /health`, the console's page left out."""
    found = set()
    for path, methods in route_descriptions().items():
        found.update(f"{method.upper()} {path}" for method in methods)
    return found


def routes_table(lines: Iterable[Line]) -> str:
    """Each route and what it answers, as its own description has it."""
    rows = []
    for line in lines:
        method, path = line.name.split()
        said = route_descriptions()[path][method.lower()]
        text = said.get("description") or said.get("summary") or ""
        rows.append((f"`{line.name}`", cell(text)))
    return table(("Route", "What it does"), rows)


def body_fields() -> dict[str, Any]:
    """The described fields of the body of a chat completion, by name."""
    body = route_descriptions()["/v1/chat/completions"]["post"]["requestBody"]
    fields: dict[str, Any] = body["content"]["application/json"]["schema"]["properties"]
    return fields


def body_table(lines: Iterable[Line]) -> str:
    """The fields that the body of a chat completion may have besides the engine's own."""
    fields = body_fields()
    rows = (
        (f"`{line.name}`", line.note or cell(fields[line.name].get("description", "")))
        for line in lines
    )
    return table(("Field", "Meaning"), rows)


def statuses_table(lines: Iterable[Line]) -> str:
    """The HTTP statuses of refusals."""
    from gpu_runtime.serving.api.openai import REFUSALS

    known = {str(status): said["description"] for status, said in REFUSALS.items()}
    rows = ((f"`{line.name}`", line.note or cell(known[line.name])) for line in lines)
    return table(("Status", "Meaning"), rows)


# -- Python ---------------------------------------------------------------------------------------


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def thing(path: str) -> Any:
    """The object of a dotted path such as `gpu_runtime.Runtime.use`."""
    first, *names = path.split(".")
    found, module = importlib.import_module(first), first
    for position, name in enumerate(names):
        module = f"{module}.{name}"
        is_last = position == len(names) - 1
        if not hasattr(found, name) or (not is_last and _is_module(module)):
            # A function of the package, such as gpu_runtime.fleet, may have the name of a folder.
            found = importlib.import_module(module)
        else:
            found = getattr(found, name)
    return found


def markdown_of(doc: str | None) -> str:
    """A docstring as Markdown: examples and indented blocks become code blocks."""
    out: list[str] = []
    for block in re.split(r"\n[ \t]*\n", inspect.cleandoc(doc or "")):
        first = next(iter(block.splitlines()), "")
        if first.lstrip().startswith(">>>"):
            out.append(f"```pycon\n{textwrap.dedent(block)}\n```")
        elif first.startswith("    "):
            out.append(f"```python\n{textwrap.dedent(block)}\n```")
        else:
            out.append(block)
    return "\n\n".join(out)


class _Words:
    """An annotation as it is written in the source."""

    def __init__(self, text: Any) -> None:
        self.text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self.text


def signature_of(function: Any) -> str:
    """The parameters of a function as they are written, without `self`."""
    found = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [
        each if each.annotation is empty else each.replace(annotation=_Words(each.annotation))
        for name, each in found.parameters.items()
        if name not in ("self", "cls")
    ]
    returns = found.return_annotation
    returns = returns if returns is inspect.Signature.empty else _Words(returns)
    return str(found.replace(parameters=parameters, return_annotation=returns))


def functions(lines: Iterable[Line], owner: str) -> str:
    """The functions or methods of `owner`, each with its signature and docstring."""
    parts = []
    for line in lines:
        function = thing(f"{owner}.{line.name}")
        doc = markdown_of(
            function.fget.__doc__ if isinstance(function, property) else function.__doc__
        )
        if isinstance(function, property):
            head = f"{{py:property}} {owner}.{line.name}"
        else:
            kind = "method" if isinstance(thing(owner), type) else "function"
            head = f"{{py:{kind}}} {owner}.{line.name}{signature_of(function)}"
        parts.append(f"`````{head}\n\n{doc}\n`````\n")
    return "\n".join(parts)


def fields_of(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and comment of each field of a value class, in order."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = [_comment(lines[at]) for at in range(node.lineno - 1, node.end_lineno or 0)]
            above = list(_comments_above(lines, node.lineno - 2))
            comment = " ".join(filter(None, beside)) or " ".join(above)
            yield node.target.id, ast.unparse(node.annotation), comment


def _comment(line: str) -> str:
    """The comment at the end of a line of code."""
    found = re.search(r"#\s*(.*)$", line)
    return found[1] if found else ""


def _comments_above(lines: list[str], at: int) -> Iterator[str]:
    block = []
    while at >= 0 and lines[at].lstrip().startswith("#"):
        block.append(_comment(lines[at]))
        at -= 1
    yield from reversed(block)


def values(lines: Iterable[Line]) -> str:
    """The value classes, each with its docstring and a table of its fields."""
    parts = []
    for line in lines:
        kind = thing(line.name)
        rows = [
            (f"`{name}`", f"`{cell(annotation)}`", cell(comment))
            for name, annotation, comment in fields_of(kind)
        ]
        body = markdown_of(kind.__doc__ or "")
        shown = table(("Field", "Type", "Meaning"), rows) if rows else ""
        parts.append(f"`````{{py:class}} {line.name}\n\n{body}\n\n{shown}\n`````\n")
    return "\n".join(parts)


# -- directives -----------------------------------------------------------------------------------

TABLES: dict[str, Callable[[list[Line]], str]] = {
    "settings": settings_table,
    "verbs": verbs_table,
    "verb-help": verb_help,
    "catalogue-fields": fields_table,
    "errors": errors_table,
    "routes": routes_table,
    "body-fields": body_table,
    "statuses": statuses_table,
    "values": values,
}


class Generated(SphinxDirective):
    """A part of a page that is made from the code."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = False

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(Path(__file__)))
        lines = lines_of(self.content)
        if self.name == "functions":
            text = functions(lines, self.arguments[0])
        else:
            text = TABLES[self.name](lines)
        return self.parse_text_to_nodes(text)


def setup(app: Sphinx) -> dict[str, bool]:
    for name in (*TABLES, "functions"):
        app.add_directive(name, Generated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
