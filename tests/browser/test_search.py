"""The site's search: Sphinx's own script with `docs/_ext/search_order.js`, and an index of four pages."""

from pathlib import Path

import pytest
import sphinx

STATIC = Path(sphinx.__file__).parent / "themes/basic/static"
ORDER = Path(__file__).parents[2] / "docs/_ext/search_order.js"
AROUND = """
var SPHINX_HIGHLIGHT_ENABLED = false, stopwords = new Set(["a"]), _ready = () => {};
class Stemmer { stemWord(word) { return word; } }
"""
PAGES = ["faq", "guides/box", "changelog", "security"]
INDEX = {
    "docnames": PAGES,
    "filenames": [f"{name}.md" for name in PAGES],
    "titles": ["Questions", "One installation", "Changes", "Security"],
    "alltitles": {
        "Questions": [[0, None]],
        "Can I reserve a card?": [[0, "reserve"]],
        "Limits for a user": [[1, "limits"]],
    },
    "terms": {"limit": [1, 3], "user": [0, 1, 2, 3], "webhook": [2], "card": [0, 1, 2], "rare": 3},
    "titleterms": {"reserve": 0, "limits": 1},
    "indexentries": {},
    "objects": {},
    "objtypes": {},
    "objnames": {},
}
FIND = "query => Search._performSearch(...Search._parseQuery(query)).reverse().map(one => one[0] + one[2])"


@pytest.fixture
def found(chromium):
    """Returns the addresses that the search finds for a query, the best first."""
    page = chromium.new_page()
    page.set_content('<div id="search-progress"></div>')
    page.add_script_tag(content=AROUND)
    page.add_script_tag(path=STATIC / "searchtools.js")
    page.add_script_tag(path=ORDER)
    page.evaluate("index => { Search._index = index; }", INDEX)
    yield lambda query: page.evaluate(FIND, query)
    page.close()


def test_pages_with_all_words_are_found_before_others_and_answers_come_first(found):
    assert found("user card") == ["faq", "guides/box", "changelog", "security"]


def test_without_a_page_that_has_all_words_the_rare_word_decides(found):
    """`user` is on each page. Sphinx alone finds nothing here."""
    assert found("user rare nonsense")[0] == "security"
    assert found("nonsense") == []


def test_a_section_is_found_by_the_words_of_its_heading(found):
    assert found("reserve a card")[0] == "faq#reserve"


def test_other_words_for_the_same_thing_are_found(found):
    assert found("slack") == ["changelog"]
    assert set(found("quota")) == {"guides/box", "security"}
