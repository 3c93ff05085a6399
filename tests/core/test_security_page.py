"""Each sentence of the page on security has tests that show it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def existing_tests() -> set[str]:
    """The names of all test functions below `tests/`."""
    files = (ROOT / "tests").rglob("test_*.py")
    function = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.M)
    return {name for path in files for name in function.findall(path.read_text())}


def claims(page: str) -> list[tuple[str, list[str]]]:
    """The sentences of the lists, each in one line, with the names in the comment below it."""
    section = page.partition("## Who can do what\n")[2].partition("\n## ")[0]
    found = re.findall(r"^- (.+(?:\n  .+)*)", section, re.M)
    parts = [" ".join(claim.split()).partition(" <!-- ") for claim in found]
    return [(claim, names.removesuffix(" -->").split()) for claim, _, names in parts]


def test_each_kind_of_person_has_a_list_of_what_they_can_and_cannot_do():
    section = PAGE.partition("## Who can do what\n")[2].partition("\n## ")[0]
    people = re.findall(r"^### (.*)$", section, re.M)
    assert len(people) >= 7
    for person in people:
        words = section.partition(f"### {person}\n")[2].partition("\n### ")[0]
        assert "They can:" in words and "They cannot:" in words, person


def test_each_sentence_has_tests_that_exist():
    found, known = claims(PAGE), existing_tests()
    assert len(found) > 60
    assert [one for one in found if set(one[1]) - known or not one[1]] == []


def test_a_sentence_without_tests_is_noticed():
    page = "## Who can do what\n\n- fly\n  far\n  <!-- test_a\n  test_b -->\n- sit\n## More\n- x\n"
    assert claims(page) == [("fly far", ["test_a", "test_b"]), ("sit", [])]
