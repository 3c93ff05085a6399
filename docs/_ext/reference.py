"""The reference tables: made from the code, and committed as plain Markdown.

    python docs/_ext/reference.py

writes every page of `docs/` anew that has a block of the following form. A comment lists names (or groups of names) and
so decides their order and their group; the texts come from the code. `tests/core/test_docs.py` compares the
pages with what would be written, and the names with those in the code, so that nothing can be left out.

    <!-- settings
    GPU_DEVICES
    GPU_LEDGER
    -->
    (the table)
    <!-- end -->
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

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^(?P<head><!-- (?P<kind>[a-z-]+)(?: (?P<of>[\w.]+))?\n(?P<lines>.*?)-->\n).*?^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)


class Line(NamedTuple):
    """One line of a block: `NAME = a note by the page's author`."""

    name: str
    note: str


def lines_of(text: str) -> list[Line]:
    """The lines of a block's comment, without blank ones."""
    split = (line.partition(" = ") for line in text.splitlines() if line.strip())
    return [Line(name.strip(), note.strip()) for name, _, note in split]


def lines_in(page: str, kind: str) -> list[Line]:
    """The lines of every block of this `kind` in a page's Markdown."""
    blocks = (found for found in BLOCK.finditer(page) if found["kind"] == kind)
    return [line for found in blocks for line in lines_of(found["lines"])]


def written(page: str) -> str:
    """The page's Markdown with every block made anew."""

    def made(found: re.Match[str]) -> str:
        lines = lines_of(found["lines"])
        if found["kind"] == "functions":
            text = functions(lines, found["of"], _level(page[: found.start()]))
        elif found["kind"] == "values":
            text = values(lines, _level(page[: found.start()]))
        else:
            text = TABLES[found["kind"]](lines)
        return f"{found['head']}\n{text.strip()}\n\n<!-- end -->"

    return BLOCK.sub(made, page)


def _level(before: str) -> str:
    """The mark of a heading below the last heading of a page's text `before`."""
    text = BLOCK.sub("", before)
    return "#" + re.findall(r"^(#+) ", text, re.MULTILINE)[-1]


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
        place = CLI if verb.plain_in_notebook else verb.places[0]
        typed = verb.synopsis(place, short=True)
        where = {(MAGIC,): "notebook", (CLI,): "terminal"}.get(verb.places, "both")
        python = f"`{line.note}`" if line.note else ""
        rows.append((f"`{cell(typed)}`", where, python, cell(verb.doc)))
    return table(("Verb", "Where", "In Python", "What it does"), rows)


def verb_help(lines: Iterable[Line]) -> str:
    """The help of every verb, as `%gpu help VERB` or `gpu help VERB` prints it: where it takes all its options."""
    from gpu_runtime.verbs import CLI, VERBS, details

    texts = (
        details(verb, CLI if verb.plain_in_notebook else verb.places[0]) for verb in VERBS.values()
    )
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
    from gpu_runtime.error_help import WHAT_TO_DO

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
        return make(rt, lambda: None)


@cache
def route_descriptions() -> dict[str, dict[str, Any]]:
    """The descriptions of all routes by path and method: of one host, and of a fleet's server."""
    from gpu_runtime.serving.fleet_server import fleet_application

    fleet = fleet_application(None, lambda: None, None).openapi()["paths"]
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
            out.append(f"```py\n{textwrap.dedent(block)}\n```")
        else:
            out.append(block)
    return "\n\n".join(out)


class _Words:
    """An annotation as it is written in the source."""

    def __init__(self, text: Any) -> None:
        self.text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self.text


def signature_of(name: str, function: Any) -> str:
    """How a function is called: its parameters as they are written, without `self`."""
    found = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [
        each if each.annotation is empty else each.replace(annotation=_Words(each.annotation))
        for each in found.parameters.values()
        if each.name not in ("self", "cls")
    ]
    returns = found.return_annotation
    returns = returns if returns is inspect.Signature.empty else _Words(returns)
    found = found.replace(parameters=parameters, return_annotation=returns)
    if len(name + str(found)) <= MOST_SIGNATURE:
        return f"{name}{found}"
    alone = [str(found.replace(parameters=[each]))[1:].rpartition(")")[0] for each in parameters]
    named = [each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters]
    if True in named and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        alone[named.index(True)] = alone[named.index(True)].removeprefix("*, ")
        alone = [text.removeprefix("*, ") for text in alone]
        alone.insert(named.index(True), "*")
    listed = "".join(f"    {text},\n" for text in alone)
    return f"{name}(\n{listed}{str(found.replace(parameters=[]))[1:]}"


def functions(lines: Iterable[Line], owner: str, level: str) -> str:
    """The functions or methods of `owner`, each with how it is called, and its docstring."""
    short = owner.rpartition(".")[2]
    called = {"Runtime": "rt", "Fleet": "fleet"}.get(short, short)
    parts = []
    for line in lines:
        function = thing(f"{owner}.{line.name}")
        name = f"{called}.{line.name}"
        if isinstance(function, property):
            parts.append(f"{level} {name}\n\n{markdown_of(function.fget.__doc__)}\n")
            continue
        typed = signature_of(name, function)
        doc = markdown_of(function.__doc__)
        parts.append(f"{level} {name}\n\n```py\n{typed}\n```\n\n{doc}\n")
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


def values(lines: Iterable[Line], level: str) -> str:
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
        parts.append(f"{level} {line.name.rpartition('.')[2]}\n\n{body}\n\n{shown}")
    return "\n".join(parts)


# -- figures ---------------------------------------------------------------------------------------


def measured_table(lines: Iterable[Line]) -> str:
    """The tables of files of `tests/bench`, which the benchmarks write."""
    texts = ((DOCS.parent / line.name).read_text() for line in lines)
    tables = (re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) for text in texts)
    return "\n".join(table for found in tables for table in found)


# -- the pages ------------------------------------------------------------------------------------

MOST_SIGNATURE = 100  # characters in a line
TABLES: dict[str, Callable[[list[Line]], str]] = {
    "settings": settings_table,
    "verbs": verbs_table,
    "verb-help": verb_help,
    "catalogue-fields": fields_table,
    "errors": errors_table,
    "routes": routes_table,
    "body-fields": body_table,
    "statuses": statuses_table,
    "measured": measured_table,
}


def main() -> None:
    """Writes the pages whose blocks differ from the code."""
    for path in sorted(DOCS.rglob("*.md")):
        if "_build" in path.parts:
            continue
        text = path.read_text()
        if text != written(text):
            path.write_text(written(text))
            print("written:", path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
