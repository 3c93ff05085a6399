"""All that can be used is documented in `docs/`. The links there lead to something, and the examples run.

The tables of the reference are made from the code (`docs/_ext/reference.py`) and committed. A table that differs from
the code fails a test, and so does a setting, verb, error, route or field that no page lists.
"""

import argparse
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_runtime
from gpu_runtime import Runtime
from gpu_runtime.arguments import FIELDS, GROUPS
from gpu_runtime.backtest import BacktestRow
from gpu_runtime.catalog.fields import KNOWN
from gpu_runtime.error_help import WHAT_TO_DO
from gpu_runtime.owner import status
from gpu_runtime.serving import fleet_server, requests
from gpu_runtime.serving.api import memory, openai
from gpu_runtime.settings import Settings
from gpu_runtime.telemetry import hours
from gpu_runtime.verbs import VERBS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "_ext"))
import reference  # noqa: E402
import site_checks  # noqa: E402

README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "tests/bench/README.md"]
    if not {"_build", "_notebooks"} & set(path.parts)
}
MOST_README_LINES = 200
FIRST_SCREEN_LINES = 40
MOST_WORDS = 14_050  # of README and guides together


def page(name: str) -> str:
    return PAGES[f"docs/{name}.md"]


def listed(name: str, kind: str) -> list[str]:
    """The names that the page `name` of the docs lists in the blocks of this `kind`."""
    return [line.name for line in reference.lines_in(page(name), kind)]


@pytest.mark.parametrize("name", [name for name in PAGES if reference.BLOCK.search(PAGES[name])])
def test_the_tables_on_the_pages_are_those_of_the_code(name):
    """If this fails, type `python docs/_ext/reference.py`, which writes the tables anew."""
    assert reference.written(PAGES[name]) == PAGES[name]
    assert name == "docs/figures.md" or name.startswith("docs/reference/")


def test_the_pages_read_well_as_markdown():
    """What only Sphinx understands is on the site's first page, whose Markdown is the README."""
    assert [name for name in PAGES if "```{" in PAGES[name]] == []
    assert [name for name in PAGES if ":::" in PAGES[name]] == ["docs/index.md"]


def test_the_readme_is_short_and_its_first_screen_has_the_commands_and_a_working_cell():
    assert len(README.splitlines()) <= MOST_README_LINES
    screen = "\n".join(README.splitlines()[:FIRST_SCREEN_LINES])
    assert all(
        words in screen for words in ("make run", "make test", "%load_ext gpu", "optimizer.step()")
    )
    assert README.index("<picture>") < README.index("## ")


def test_readme_and_guides_are_short():
    """What is seldom needed is in the reference, and what was asked once is in the questions."""
    guides = [name for name in PAGES if name.startswith(("docs/guides/", "README"))]
    assert sum(len(PAGES[name].split()) for name in guides) <= MOST_WORDS


@pytest.mark.parametrize("page", ["README.md", "docs/guides/index.md"])
def test_every_guide_is_offered(page):
    text = (ROOT / page).read_text()
    guides = {path.name for path in (ROOT / "docs/guides").glob("*.md")} - {"index.md"}
    assert {name for name in guides if f"{name})" not in text} == set()


def test_every_folder_of_the_package_is_in_the_table_and_in_the_picture():
    table, picture = page("architecture"), (DOCS / "images" / "layers.svg").read_text()
    for folder in (path.parent.name for path in (ROOT / "gpu_runtime").glob("*/__init__.py")):
        assert f"| `gpu_runtime/{folder}` |" in table
        assert f">{folder}</text>" in picture


def test_every_setting_and_every_field_of_the_catalogue_is_listed_once_and_has_a_meaning():
    rows = {row.name: row.doc for row in Settings.load().sources()}
    assert sorted(listed("reference/settings", "settings")) == sorted(rows)
    assert [name for name, meaning in rows.items() if not meaning] == []
    groups = listed("reference/catalogue", "catalogue-fields")
    assert [name for group in groups for name in GROUPS[group]] == list(KNOWN)
    assert [name for name, field in FIELDS.items() if not field.meaning] == []


def test_every_verb_is_listed_once_and_exists_in_python():
    assert sorted(listed("reference/verbs", "verbs")) == sorted(VERBS)
    assert [name for name, verb in VERBS.items() if not verb.doc] == []
    lines = reference.lines_in(page("reference/verbs"), "verbs")
    named = {name for line in lines for name in re.findall(r"rt\.(\w+)", line.note)}
    assert {name for name in named if not hasattr(Runtime, name)} - {"settings"} == set()


def test_every_option_of_a_verb_is_explained():
    """`console` takes options in a terminal only, and its options were missing."""
    shown = page("reference/verbs")
    for verb in VERBS.values():
        for argument in verb.arguments:
            help = argument.options["help"]
            assert help == argparse.SUPPRESS or help in shown, (verb.name, argument.flags)


def test_every_error_is_listed_once_with_what_to_do_and_its_attributes():
    lines = reference.lines_in(page("reference/errors"), "errors")
    assert sorted(line.name for line in lines) == sorted(reference.errors())
    assert sorted(WHAT_TO_DO) == sorted(reference.errors()) and all(WHAT_TO_DO.values())
    undocumented = {
        name
        for name, kind in reference.errors().items()
        if "Attributes:" not in (inspect.getdoc(kind) or "")
    }
    assert undocumented == {"GpuError"}


def test_the_code_has_the_words_of_every_message_on_the_page():
    table = page("reference/errors").partition("\n## Messages that are no errors\n")[2]
    folders = ("gpu_runtime", "kernel_ext", "panels")
    code = "".join(path.read_text() for name in folders for path in (ROOT / name).rglob("*.py"))
    messages = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert len(messages) > 15
    assert [part for part in parts if part not in code] == []


def test_every_route_is_listed_once_and_none_is_hidden():
    assert sorted(listed("reference/http", "routes")) == sorted(reference.routes())
    described = reference.routes_table(reference.lines_in(page("reference/http"), "routes"))
    assert "|  |" not in described
    sources = (ROOT / "gpu_runtime" / "serving").rglob("*.py")
    assert [path.name for path in sources if "include_in_schema" in path.read_text()] == []


def test_every_field_of_memory_is_documented():
    """The page has a table of fields for each answer of the routes below `/memory`."""
    with Runtime(devices="sim:1GiB,host:1GiB", ledger="memory:") as rt:
        rt.register("one", backend="fake", size="8 MiB")
        rt.preload("one")
        snapshot = rt.status()
        answers = {
            "stats": memory.stats(snapshot),
            "models": memory.models(snapshot)[0],
            "fragmentation": memory.fragmentation((), False),
            "health": memory.health(rt.health()),
        }
        rt.evict("one")
        answers["offloaded"] = memory.offloaded(rt.status(), rt.evictions())[0]
        answers["evictions"] = memory.evictions(rt.evictions(), {})[0]
    text = page("reference/http")
    for name, answer in answers.items():
        table = text.partition(f"### GET /memory/{name}\n")[2].partition("\n#")[0]
        rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        fields = re.findall(r"`(\w+)`", " ".join(rows))
        assert sorted(fields) == sorted(answer), name


def test_every_field_of_ours_in_a_body_and_every_status_is_documented():
    """The fields `x_…` are those in the API's description and those that the code reads."""
    ours = set(re.findall(r'"(x_\w+)"', inspect.getsource(requests)))
    ours |= {name for name in reference.body_fields() if name.startswith("x_")}
    fields = set(listed("reference/http", "body-fields"))
    assert {name for name in fields if name.startswith("x_")} == ours
    statuses = set(listed("reference/http", "statuses"))
    folders = ("serving", "web")
    sources = [path for name in folders for path in (ROOT / "gpu_runtime" / name).rglob("*.py")]
    numbers = set(re.findall(r"\b[45]\d\d\b", "".join(path.read_text() for path in sources)))
    numbers.add("405")  # FastAPI's own
    assert {str(status) for status in openai.REFUSALS} <= statuses <= numbers


def test_every_metric_of_a_fleet_is_listed_and_no_other():
    """`tests/serving/test_app.py` compares the metrics of one host with the page."""
    table = page("reference/metrics").partition("\n## Fleet\n")[2].partition("\n## ")[0]
    in_code = re.findall(r'"(gpuconsole_\w+)"', inspect.getsource(fleet_server))
    assert sorted(re.findall(r"^\| `(gpuconsole_\w+)` \|", table, re.M)) == sorted(in_code)


@pytest.mark.parametrize("name", PAGES)
def test_no_page_names_a_setting_or_a_method_that_does_not_exist(name):
    """`GPU_AUTOLOAD` is read by the start-up file of a kernel; `GPU_TOKEN` is a name in an example."""
    known = {row.name for row in Settings.load().sources()} | {
        "GPU_AUTOLOAD",
        "GPU_TOKEN",
        "GPU_ENGINE_KEY",
    }
    groups = "GPU|CPU|ENABLE|EVICTION|INFERENCE|FRACTION|DEVELOPMENT"
    named = set(re.findall(rf"\b(?:{groups})_[A-Z_]+\b", PAGES[name]))
    assert named - known == set()
    methods = set(re.findall(r"\brt\.(\w+)", PAGES[name]))
    assert {name for name in methods if not hasattr(Runtime, name)} - {"settings"} == set()


def test_every_method_and_export_is_listed():
    members = inspect.getmembers(Runtime, lambda each: callable(each) or isinstance(each, property))
    public = [name for name, _ in members if not name.startswith("_")]
    methods = [name for name in listed("reference/python", "functions") if hasattr(Runtime, name)]
    assert sorted(methods) == sorted(public)
    others = set(gpu_runtime.__all__) - set(reference.errors())
    assert {
        name for name in others if f"gpu_runtime.{name}" not in page("reference/python")
    } == set()


def test_the_columns_of_frames_are_documented():
    """The page lists the columns in the order of the code."""
    rows = re.findall(r"^\| `rt\.(\w+)\(\)`.*? \| (.*) \|$", page("reference/python"), re.MULTILINE)
    assert {name: columns.split(", ") for name, columns in rows} == {
        "models": status.MODELS, "leases": status.LEASES, "events": status.EVENTS,
        "catalog": status.CATALOG, "who": status.HOLDERS,
        "backtest": list(BacktestRow._fields), "fragmentation": status.FRAGMENTATION,
        "report": hours.columns("user"),
    }  # fmt: skip


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    """A link leads to a file of this repository and, if it has an anchor, to a section of that file."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(PAGES[name])):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_links_of_the_notebooks_into_the_docs_lead_to_a_section():
    """This test checks the anchors of the links. `test_runbooks.py` checks their files."""
    checked = 0
    for file in (ROOT / "notebooks").glob("*.ipynb"):
        for path, anchor in re.findall(r"\]\(\.\./(docs/[^)\s#]+)#?([^)\s]*)\)", file.read_text()):
            text = (ROOT / path).read_text()
            assert not anchor or anchor in anchors(text), (file.name, path, anchor)
            checked += 1
    assert checked


def test_make_run_serves_the_pages_that_the_notebooks_link_to():
    """JupyterLab opens only files below its root. With `notebooks` as root, links into docs/ were 404."""
    [root] = re.findall(r"--ServerApp\.root_dir=(\S+)", (ROOT / "Makefile").read_text())
    [page] = re.findall(r"--LabApp\.default_url=/lab/tree/(\S+)", (ROOT / "Makefile").read_text())
    served = (ROOT / root).resolve()
    assert (served / page).exists() and DOCS.is_relative_to(served)


def test_the_site_can_be_built(tmp_path):
    """Sphinx reads all pages and notebooks and resolves their links and the docstrings' references,
    as `make docs` does. It writes no pages.
    """
    options = ["-W", "--keep-going", "-q", "-b", "dummy", "-d", str(tmp_path / "doctrees")]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr


def test_every_page_is_in_the_contents():
    """A page that is in the contents can be reached from every other page by two clicks. The build
    of the docs checks the clicks themselves.
    """
    missing = []
    for name in PAGES:
        if not name.startswith("docs/") or name == "docs/index.md":
            continue
        path = Path(name).with_suffix("").relative_to("docs")
        above = path.parent if path.name != "index" else path.parent.parent
        contents = [page("index"), page("background")]
        if str(above) != ".":
            contents = [page(f"{above}/index")]
        entry = str(path.relative_to(above))
        missing += [name] if not any(re.search(rf"^{entry}$", c, re.M) for c in contents) else []
    assert missing == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_file_that_is_named_exists(name):
    """A newcomer must be able to open each file that a page of the docs names."""
    folders = ("gpu_runtime/", "kernel_ext/", "panels/", "tests/", "docs/", "notebooks/")
    paths = {path for path in re.findall(r"`([\w./]+)`", PAGES[name]) if path.startswith(folders)}
    assert paths
    made_up = ("NAME", "NN_", "_build")
    real = [path for path in sorted(paths) if not any(part in path for part in made_up)]
    assert [path for path in real if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_name_of_the_code_that_is_named_exists(name):
    """CONTRIBUTING once sent its readers to a function that had got another name."""
    code = (
        path
        for top in ("gpu_runtime", "kernel_ext", "panels", "tests", "docs/_ext")
        for path in (ROOT / top).rglob("*.py")
    )
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in code)))
    named = set(re.findall(r"`(?:\w+\.)*(\w*_\w+)`", PAGES[name]))
    assert named and named - words == set()


def typed(text: str) -> list[str]:
    """Every `gpu VERB …` and `%gpu VERB …` in the code blocks of a page."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [re.match(r"(?:\$ |%)gpu(?: (.*?))?(?:\s+#.*)?$", line.strip()) for line in lines]
    return [match[1] or "" for match in found if match]


def test_every_command_on_the_pages_can_be_typed():
    """Each command on the pages uses a verb and options that exist."""
    commands = [command for text in PAGES.values() for command in typed(text)]
    assert len(commands) > 10
    for command in filter(None, commands):
        name, *words = shlex.split(command)
        options = {flag for each in VERBS[name].arguments for flag in each.flags}
        unknown = {word for word in words if word.startswith("-")} - options - {"--json", "-o"}
        assert not unknown, command


def test_one_thing_has_one_name():
    """What users read says RAM. Messages and tables of the code may say host memory."""
    guides = [name for name in PAGES if name.startswith(("docs/guides/", "README"))]
    prose = {name: without_code(PAGES[name]).lower() for name in guides}
    assert len(guides) > 10
    assert [name for name, text in prose.items() if "RAM" in text] == []


def test_what_the_pages_lack_is_noticed():
    text = "# One\n`GPU_LEDGER`\n<!-- settings\nGPU_DEVICES\n-->\n<!-- end -->\n"
    text += "<!-- verbs\nstatus = rt.status()\n-->\n| stale |\n<!-- end -->\n"
    assert [line.name for line in reference.lines_in(text, "settings")] == ["GPU_DEVICES"]
    assert reference.lines_in(text, "verbs") == [reference.Line("status", "rt.status()")]
    written = reference.written(text)
    assert "| `GPU_DEVICES` | `auto` |" in written and "stale" not in written
    assert reference.written(written) == written
    links = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert site_checks.reached("a", links, 2) == {"a", "b", "c"}


def test_a_page_for_machines_is_plain_markdown_with_links_to_markdown(tmp_path):
    page = (
        "# One\n\n::::{grid} 1\n:gutter: 3\n\nA [b](c/d.md), an [e](_notebooks/f.ipynb#g).\n::::\n"
    )
    page += "![x](y.svg){.only-light}\n![x](z.svg){.only-dark}\n\n```{toctree}\n:hidden:\n\nc\n```\nend\n"
    plain = site_checks.for_machines(page)
    assert plain == ("# One\n\n\nA [b](c/d.md), an [e](_notebooks/f.md#g).\nPicture: x\n\nend\n")
    (tmp_path / "there.md").write_text("[a](there.md#x) [b](https://b) [c](gone.md) `[d](e.md)`")
    assert site_checks.broken(tmp_path / "there.md") == ["gone.md"]
    cells = [
        {"cell_type": "markdown", "source": ["# T\n", "words"]},
        {"cell_type": "code", "source": "%gpu"},
    ]
    assert (
        site_checks.cells_as_markdown({"cells": cells}) == "# T\nwords\n\n```python\n%gpu\n```\n\n"
    )
