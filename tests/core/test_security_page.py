"""The page on security names a test for each sentence, and each of these tests exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
PEOPLE = (
    "Another user of the machine, outside the group of a shared ledger",
    "A member of a shared ledger", "Someone who can reach the port, without a token",
    "Someone with a token", "The code of a notebook", "Root",
)  # fmt: skip


def existing_tests() -> set[str]:
    """The names of all test functions below `tests/`."""
    files = (ROOT / "tests").rglob("test_*.py")
    function = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.M)
    return {name for path in files for name in function.findall(path.read_text())}


def claims(page: str) -> list[tuple[str, str]]:
    """The rows of the two tables, of what people can do and cannot do: each sentence with its tests."""
    rows = re.findall(r"^\| (.+?) \| (.*?) \|$", page[page.index("## Who can do what") :], re.M)
    return [(claim, tests) for claim, tests in rows if tests != "test"]


def test_each_kind_of_person_has_a_table_of_what_they_can_and_cannot_do():
    for person in PEOPLE:
        section = PAGE.partition(f"\n### {person}\n")[2].partition("\n### ")[0]
        assert "| can | test |" in section and "| cannot | test |" in section, person


def test_each_sentence_names_tests_that_exist():
    known = existing_tests()
    assert len(claims(PAGE)) > 40
    for claim, tests in claims(PAGE):
        names = re.findall(r"`(test_\w+)`", tests)
        assert names and not set(names) - known, (claim, tests)


def test_a_sentence_without_a_test_is_noticed():
    page = (
        "## Who can do what\n| can | test |\n|---|---|\n| fly |  |\n| read | `test_of_reading` |\n"
    )
    assert claims(page) == [("fly", ""), ("read", "`test_of_reading`")]
