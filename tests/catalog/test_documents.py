"""Reading YAML and JSON of unknown authors. The result is plain values with their lines, or one clear error."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.catalog import documents
from gpu_runtime.catalog.documents import DEEPEST, MOST_BYTES, read
from gpu_runtime.errors import BadDocument


def values(text: str, file: str = "f.yaml") -> list:
    return [document.value for document in read(text.encode(), file)]


def wrong(text: str | bytes, file: str = "f.yaml") -> BadDocument:
    with pytest.raises(BadDocument) as caught:
        read(text.encode() if isinstance(text, str) else text, file)
    assert caught.value.file == file
    return caught.value


def test_a_file_has_several_documents_and_empty_ones_are_left_out():
    assert values("a: 1\n---\n---\nb: [x, 2.5, true, null]\n...\n") == [
        {"a": 1},
        {"b": ["x", 2.5, True, None]},
    ]
    assert values("# nothing\n") == values("") == []
    assert values("\ufeffa: 1") == [{"a": 1}], "with the mark of an editor"


def test_every_value_has_its_line():
    (document,) = read(b"models:\n  - name: a\n    memory: 1\n  - name: b\n", "f.yaml")
    places = ("models", 0, "memory"), ("models", 1, "name"), ("models", 1, "no such")
    assert [document.line(place) for place in places] == [3, 4, 4]


def test_names_and_dates_remain_text():
    """Plain YAML would read 10:30 as a number, 2024-01-02 as a date, and the key `on` as true."""
    assert values("released: 2024-01-02\n10:30: x\non: y\n1: z\n") == [
        {"released": "2024-01-02", "10:30": "x", "on": "y", "1": "z"}
    ]


def test_aliases_are_resolved_and_written_fields_override_merged_ones():
    text = "base: &b {memory: 1, keep: true}\none: {<<: *b, memory: 2}\ntwo: *b\nthree: {<<: *b, memory: 3}\n"
    (value,) = values(text)
    assert [value[name]["memory"] for name in ("one", "two", "three")] == [2, 1, 3]
    assert value["one"]["keep"] is True
    (value,) = values("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc: {<<: [*a, *b]}\n")
    assert value["c"] == {"x": 1, "y": 2}, "the first of several counts"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", 4, "appears here twice; the first time in line 3"),
        ("a: [1, 2\nb: 3\n", 2, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "not YAML"),
        ("a: !!python/object/apply:os.system [true]\n", 1, "is not supported"),
        ("a: 1\nb: !!binary aGk=\n", 2, "is not supported"),
        ("a: .inf\n", 1, "not a number that can be used"),
        (f"a: 1\nb: {'9' * 5000}\n", 2, "not a number"),
        ("a: 99999999999999999999\n", 1, "too large a number"),
        ("? [x]\n: 1\n", 1, "must be text"),
        ("a: 1\n<<: 3\n", 2, "<< needs a mapping"),
        ("a: *nobody\n", 1, "not YAML"),
    ],
)
def test_an_error_names_the_line(text, line, message):
    error = wrong(text)
    assert error.line == line and message in str(error)


@pytest.mark.parametrize(
    "text", ["[" * 50_000 + "]" * 50_000, "{a: " * 5000 + "1" + "}" * 5000, "- " * 20_000 + "x"]
)
def test_deep_nesting_is_refused_and_does_not_crash(text):
    """PyYAML's fast parser crashes on such a text with a segmentation fault."""
    assert f"deeper than {DEEPEST}" in str(wrong(text))


def test_json_documents_in_a_row_count_together(monkeypatch):
    """A file of half a million empty ones took minutes."""
    monkeypatch.setattr(documents, "MOST_VALUES", 4)
    assert len(values('{}\n{"a": 1},\n{}', "f.json")) == 3
    error = wrong('{}\n{"a": 1},\n\n{"b": 1}', "f.json")
    assert error.line == 4 and "more than 4 values" in str(error)


def test_an_alias_to_a_value_around_it_is_refused():
    assert "deeper than" in str(wrong("a: &a [*a]\n"))
    assert "deeper than" in str(wrong("a: &a\n  <<: *a\n")), "found by tests/core/test_fuzz.py"


@pytest.mark.parametrize(
    "use",
    [
        "[*{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}]",
        "{{<<: [*{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}]}}",
    ],
)
def test_a_file_that_grows_through_its_aliases_is_refused(use):
    """In the attack called "billion laughs", each value has nine aliases of the value before it."""
    first = "{x: 1}" if "<<" in use else "[lol]"
    lines = [f"a0: &a0 {first}"] + [f"a{n}: &a{n} {use.format(f'a{n - 1}')}" for n in range(1, 12)]
    assert "more than" in str(wrong("\n".join(lines)))


def test_a_file_that_is_too_large_or_not_text_is_refused():
    assert "larger than" in str(wrong(b"a" * (MOST_BYTES + 1)))
    error = wrong(b"a: 1\nb: \xff\n")
    assert error.line == 2 and "UTF-8" in str(error)


# -- JSON ------------------------------------------------------------------------------------------


def test_json_with_tabs_and_exponents_and_several_in_a_row():
    text = '{\n\t"a": 1e3,\n\t"b": "\\/"\n}\n{"c": null}\n'
    assert values(text, "f.json") == values(text, "-") == [{"a": 1000.0, "b": "/"}, {"c": None}]
    first, second = read(text.encode(), "f.json")
    assert first.line(("b",)) == 3 and second.line(("c",)) == 5


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{"a": 1,\n "a": 2}', 2, "twice"),
        ('{"a":\n oops}', 2, "not JSON"),
        ('{"a": NaN}', 1, "not JSON that can be used"),
        ('{"a": 1}\n{"b":\n 9223372036854775808}', 2, "too large a number"),
        (r'{"a": "\ud800"}', 1, "half of a character"),
        (r'{"\ud800": 1}', 1, "half of a character"),
        ("[" * 100_000, 1, "not JSON"),
        ('{"a": ' * 40 + "1" + "}" * 40, 1, "deeper than"),
    ],
)
def test_an_error_in_json_names_the_line(text, line, message):
    error = wrong(text, "f.json")
    assert error.line == line and message in str(error)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain.filter(lambda value: value is not None))
def test_json_is_read_as_it_was_written(value):
    assert values(json.dumps(value), "f.json") == [value]
    assert values(json.dumps(value, indent="\t", ensure_ascii=False), "f.json") == [value]


@given(
    st.binary(max_size=60)
    | st.text(alphabet="{}[]:,-&*<!|>'\" \n\tab1", max_size=60).map(str.encode)
)
def test_any_bytes_at_all_are_read_or_refused(data):
    for file in ("f.yaml", "f.json"):
        try:
            read(data, file)
        except BadDocument as error:
            assert error.line >= 1
