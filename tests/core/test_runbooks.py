"""The titles, links and tables of the runbooks match the code and the docs. nbval runs the runbooks."""

import json
import re
from pathlib import Path

import pytest

from gpu_runtime.facts import Level, Rules
from gpu_runtime.scheduler.capacity import level, relief

ROOT = Path(__file__).parents[2]
RUNBOOKS = {
    path.name: json.loads(path.read_text()) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}


def prose(name: str) -> str:
    """The markdown text of a runbook."""
    return "\n\n".join(
        "".join(cell["source"])
        for cell in RUNBOOKS[name]["cells"]
        if cell["cell_type"] == "markdown"
    )


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table that follows that heading."""
    table = text[text.index(f"| {heading} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table]


def test_the_docs_list_every_runbook_by_its_title():
    """The page of runbooks has one line for each runbook, in order. A new runbook needs a line."""
    lines = [
        f"- [{prose(name).partition(chr(10))[0].removeprefix('# ')}](../notebooks/{name})"
        for name in RUNBOOKS
    ]
    page = (ROOT / "docs" / "runbooks.md").read_text().splitlines()
    assert [line for line in page if re.match(r"- \[\d\d · ", line)] == lines


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_begins_with_when_to_use_it_and_its_links_exist(name):
    """A reader in trouble decides by the first lines whether this runbook is the right one."""
    text = prose(name)
    assert re.match(r"# \d\d · .+\n\n\*\*When to use this:\*\* ", text)
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    assert [
        link for link in links if "://" not in link and not (ROOT / "notebooks" / link).exists()
    ] == []


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_ends_with_how_one_knows_that_it_is_right(name):
    """At three in the morning one must know when to go to bed."""
    last = RUNBOOKS[name]["cells"][-1]
    assert "".join(last["source"]).startswith("**You know it is right when** ")


@pytest.mark.parametrize("name", RUNBOOKS)
def test_a_runbook_is_stored_with_the_outputs_of_one_run_from_top_to_bottom(name):
    """The outputs are shown on the web, and nbval compares new ones with them. Only cells that
    demonstrate an error may fail.
    """
    code = [cell for cell in RUNBOOKS[name]["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    failed = [
        cell["id"]
        for cell in code
        if any(output["output_type"] == "error" for output in cell["outputs"])
    ]
    assert failed == [
        cell["id"] for cell in code if "raises-exception" in cell["metadata"].get("tags", ())
    ]


def test_the_table_of_the_pressure_drill_matches_the_code():
    """The table shows the level at each boundary, and how long a model must be idle to be evicted."""
    shown = rows(prose("06_pressure.ipynb"), "level")
    assert [row[0] for row in shown] == [word for word in Level if word is not Level.UNKNOWN]
    floors = [0.0, *(float(re.match(r"\d+", row[1])[0]) / 100 for row in shown[1:])]
    assert [level(floor, Rules()) for floor in floors] == [row[0] for row in shown]
    assert [level(floor - 0.001, Rules()) for floor in floors[1:]] == [row[0] for row in shown[:-1]]
    demands = [relief(Level(row[0]), Rules()) for row in shown]
    seconds = [re.search(r"(\d+) s", row[2]) for row in shown]
    assert [demand and demand.idle_seconds for demand in demands] == [
        None,
        float(seconds[1][1]),
        float(seconds[2][1]),
        0.0 if shown[3][2] == "all, at once" else -1.0,
    ]
    assert [bool(demand and demand.drop) for demand in demands] == [
        "unloaded" in row[3] and "RAM" not in row[3] for row in shown
    ]


def test_every_symptom_of_the_troubleshooting_table_has_its_section():
    """The section of each symptom reproduces, diagnoses and cures it."""
    text = prose("13_troubleshooting.ipynb")
    named = [row[-1] for row in rows(text, "you see")]
    sections = re.split(r"^## (?=\d+ · )", text, flags=re.MULTILINE)[1:]
    assert named == [section.partition(" ")[0] for section in sections]
    assert [
        section[:40]
        for section in sections
        if not all(word in section for word in ("**Diagnosis", "**Cure"))
    ] == []


def test_the_runbook_of_the_console_describes_every_tab():
    """A new tab needs a description in this runbook."""
    from gpu_panels import tabs

    described = re.findall(r"\*\*([^*]+)\*\*", prose("05_operator_console.ipynb"))
    assert [
        title
        for title in tabs.TABS
        if not any(re.search(rf"\b{title}\b", words) for words in described)
    ] == []
