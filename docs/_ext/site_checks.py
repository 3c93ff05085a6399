"""Before the build: plain Markdown and the notebooks, as pages of the site. After it: what the site promises.

The pages are Markdown that reads well without a build; `read_source` adds what only Sphinx knows. The
notebooks stay in `notebooks/`; copies of them are built as pages, with links that lead to the
site. A finished site fails the build where a page is more than two clicks from another, or where a
page loads something from another host.
"""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)

DOCS = Path(__file__).parents[1]
NOTEBOOKS = DOCS.parent / "notebooks"
COPIES = DOCS / "_notebooks"
CLICKS = 2
SUMMARY = "> Notebooks share the GPUs of a machine: idle memory moves to RAM, and is back before the next cell runs."
CONTENTS = "```{toctree}\n:hidden:\n:glob:\n\n\\1```"
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "video": "src"}


def on_the_site(markdown: str) -> str:
    """The Markdown of a notebook's cell, with links that lead to pages of the site."""
    return markdown.replace("](../docs/", "](../").replace("](../README.md", "](../index.md")


def copy_notebooks(app: Sphinx, config: Any) -> None:
    """Puts a copy of each notebook where Sphinx finds it; copies that are as they were stay untouched."""
    COPIES.mkdir(exist_ok=True)
    shutil.copytree(NOTEBOOKS / "images", COPIES / "images", dirs_exist_ok=True)
    for file in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(file.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = on_the_site(_pictures("".join(cell["source"])))
        copy, text = COPIES / file.name, json.dumps(notebook, indent=1)
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


def _pictures(markdown: str) -> str:
    """A `<picture>` for two themes as the two images of which the theme of the site shows one."""

    def shown(found: re.Match[str]) -> str:
        dark = re.search(r'srcset="([^"]+)"', found[0])
        light = re.search(r'src="([^"]+)"', found[0])
        alt = re.search(r'alt="([^"]*)"', found[0])
        words = " ".join(alt[1].split()) if alt else ""
        if not dark or not light:
            return found[0]
        return f"![{words}]({light[1]}){{.only-light}}\n![{words}]({dark[1]}){{.only-dark}}"

    return re.sub(r"<picture>.*?</picture>", shown, markdown, flags=re.DOTALL)


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turns the plain Markdown of a page into that of the site.

    Links to notebooks and to files of the root lead to their pages. A comment `contents` is the table of
    contents. A page that begins with a link to a file of the root is that file.
    """
    text = source[0]
    if root_file := re.match(r"# .*\n\n\[[\w.]+\]\(\.\./(\w+\.md)\)", text):
        text = (DOCS.parent / root_file[1]).read_text().replace("](docs/", "](")
    text = re.sub(r"((?:\.\./)*)\.\./notebooks/", r"\1_notebooks/", text)
    text = re.sub(r"\]\((\.\./)*\.\./(CHANGELOG|CONTRIBUTING)\.md", _root_page, text)
    text = re.sub(r"^<!-- contents\n(.*?)-->$", CONTENTS, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(!\[.*\]\(.*\.svg\))$", r"\1{.dark-light}", text, flags=re.MULTILINE)
    source[0] = _pictures(text)


def _root_page(found: re.Match[str]) -> str:
    """A link to a file of the root as the link to its page."""
    return f"]({found[1] or ''}{found[2].lower()}.md"


class _Page(HTMLParser):
    """The links of one page, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if tag == "link" and "canonical" not in (given.get("rel") or ""):
            self.loads.append(given.get("href") or "")
        if tag in LOADS:
            self.loads.append(given.get(LOADS[tag]) or "")


def check_site(app: Sphinx, error: Exception | None) -> None:
    """Warns of pages that are too far apart and of requests to other hosts."""
    if error is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    links: dict[str, set[str]] = {}
    for name in sorted(app.env.found_docs):
        file = out / f"{name}.html"
        page = _Page()
        page.feed(file.read_text())
        links[name] = {_target(file, link, out) for link in page.links}
        for load in page.loads:
            if re.match(r"(https?:)?//", load):
                log.warning("%s loads %s from another host", name, load)
    for name in links:
        near = reached(name, links, CLICKS)
        for missing in sorted(set(links) - near):
            log.warning("%s is more than %d clicks from %s", missing, CLICKS, name)


def write_for_machines(app: Sphinx, error: Exception | None) -> None:
    """Writes each page as Markdown beside its HTML, and `llms.txt`, which lists them."""
    if error is not None or app.builder.name != "html":
        return
    out, listed = Path(app.outdir), ["# gpu-console", "", SUMMARY, ""]
    for name in sorted(app.env.found_docs):
        source = [Path(app.env.doc2path(name)).read_text()]
        if app.env.doc2path(name).suffix == ".ipynb":
            source = [cells_as_markdown(json.loads(source[0]))]
        else:
            read_source(app, name, source)
        (out / f"{name}.md").write_text(for_machines(source[0]))
        listed.append(f"- [{app.env.titles[name].astext()}]({name}.md)")
    (out / "llms.txt").write_text("\n".join([*listed, ""]))
    shutil.copytree(DOCS / "grafana", out / "grafana", dirs_exist_ok=True)
    for file in (*(out / f"{name}.md" for name in app.env.found_docs), out / "llms.txt"):
        for missing in broken(file):
            log.warning("%s leads to %s, which is not there", file.relative_to(out), missing)


def broken(file: Path) -> list[str]:
    """The relative links in the Markdown `file` that lead to no file."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", text)
    return [link for link in links if not (file.parent / urldefrag(link)[0]).exists()]


def for_machines(markdown: str) -> str:
    """A page's `markdown` without the marks that only Sphinx reads, and with links that lead to Markdown.

    A picture is left out; its words stay.
    """
    text = re.sub(r"^```\{toctree\}\n.*?^```\n?", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^:{3,}.*\n(?::[\w-]+:.*\n)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"^!\[.*\]\(.*\)\{\.only-dark\}\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^!\[(.*)\]\(.*\)(\{\.[\w-]+\})?$", r"Picture: \1", text, flags=re.MULTILINE)
    return re.sub(r"(\]\((?!https?:)[^)\s]*)\.ipynb", r"\1.md", text)


def cells_as_markdown(notebook: dict[str, Any]) -> str:
    """The texts and the code of a `notebook`, without its outputs."""
    texts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        texts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join([*texts, ""])


def _target(file: Path, link: str, out: Path) -> str:
    """The page that a link leads to; empty for another place."""
    path = urldefrag(link)[0]
    if not path or "//" in path:
        return ""
    target = (file.parent / path).resolve()
    return str(target.relative_to(out).with_suffix("")) if target.is_relative_to(out) else ""


def reached(start: str, links: dict[str, set[str]], clicks: int) -> set[str]:
    """The pages at most so many clicks from the first."""
    found = {start}
    for _ in range(clicks):
        found |= {page for name in found for page in links.get(name, ()) if page in links}
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", copy_notebooks)
    app.connect("source-read", read_source)
    app.connect("build-finished", check_site)
    app.connect("build-finished", write_for_machines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
