"""Any words may follow `%gpu`, `%%gpu` and `gpu`. The result is an answer, or one short sentence that can be printed.

People type or paste these words, and scripts make them. No verb may answer with a traceback, and none may leave a
book that other processes cannot decode.
"""

import contextlib
import io
import itertools
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

from gpu_runtime import GpuError, cli, verbs
from gpu_runtime.facts.book import decode_book, encode

from .conftest import ROOT  # noqa: F401 - this checkout's `gpu` is imported

from gpu.magics import GpuMagics, parser_for  # isort: skip

LONGEST_SENTENCE = 1500  # characters
MANY = 2**18  # 256 KiB of text
VALUES = (
    "", " ", "qwen", "llama", "new", "sim:0", "sim:0,1", "8GiB", "14", "0", "-1", "--5", "yes", "fake",
    "a@b", "qwen@1", "\udcff", "a\udce9", "a\0b", "\x1b[31mred", "a\nb", "9" * 5000, "٣", "²", "nan",
    "inf", "1e400", "/dev/null", "/no/such", "org/name", "*", "%s{}", "x" * MANY, "--", "-", "-h",
    "24GB+", "urgent", "7B", "llama-7B-Q4_K_M", "yaml",
)  # fmt: skip
WORDS = st.sampled_from(VALUES) | st.text(st.characters(exclude_categories=()), max_size=8)
# These start a server, need root or change the environment; their words are parsed, and not acted on.
PARSED_ONLY = (
    "console",
    "serve",
    "exporter",
    "mcp",
    "top",
    "keys",
    "ledger",
    "autoload",
    "uninstall",
    "box",
)


def flags(verb: verbs.Verb, place: str) -> list[str]:
    return [flag for one in verb.takes(place) for flag in one.flags if one.is_option]


def lines(place: str):
    """Draws a verb of `place` with words after it: values, options of the verb, and options with a value."""

    def after(verb: verbs.Verb):
        options = [*flags(verb, place), "--json", "-o", "--nosuch"]
        paired = st.tuples(st.sampled_from(options), WORDS)
        alone = st.tuples(WORDS | st.sampled_from(options))
        words = st.lists(paired | alone, max_size=4)
        return words.map(lambda groups: (verb.name, *(word for group in groups for word in group)))

    return st.sampled_from(list(verbs.verbs(place))).flatmap(after)


def each(place: str, stride: int) -> list[tuple[str, ...]]:
    """Every verb with each value as its last argument, and with every `stride`th value after each option."""
    found = []
    first = itertools.cycle(range(stride))
    for verb in verbs.verbs(place):
        positionals = sum(not one.is_option for one in verb.takes(place))
        found += [(verb.name, *(["qwen"] * (positionals - 1)), value) for value in VALUES]
        for flag in flags(verb, place):
            values = VALUES[next(first) :: stride]
            found += [(verb.name, *(["qwen"] * positionals), flag, value) for value in values]
    return found


@pytest.fixture
def box(rt, monkeypatch, tmp_path):
    """A function that restores the runtime of every face. A test calls it after each command that succeeded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rt, "close", lambda: None)

    def prepare():
        sys.stdin = io.TextIOWrapper(io.BytesIO(b""))
        for spec in rt.specs():
            rt.forget(spec.name)
        rt.drain("sim:0", undo=True)
        for name in ("qwen", "llama"):
            rt.register(name, backend="fake", size="1GiB")
            rt.preload(name)

    monkeypatch.setattr(sys, "stdin", sys.stdin)
    yield prepare
    monkeypatch.undo()


def require_sentence(text: str) -> None:
    assert 0 < len(text) <= LONGEST_SENTENCE
    assert text.replace("\n", "").isprintable()


def require_decodable(rt) -> None:
    rt._session.publish()
    book = rt._session.ledger.read()
    assert decode_book(encode(book)) == book


def in_terminal(words: tuple[str, ...]) -> bool:
    """Runs the `gpu` command, and returns whether it succeeded. If it writes an error, the error is one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    assert code in (cli.DONE, cli.FAILED, cli.NOT_UNDERSTOOD)
    if err.getvalue():
        (line,) = err.getvalue().splitlines()
        require_sentence(line)
    if code == cli.NOT_UNDERSTOOD:
        assert out.getvalue() == "" and err.getvalue().startswith("gpu: ")
    return code == cli.DONE


def in_notebook(magic, *given) -> bool:
    """Runs a magic, and returns whether it succeeded. An error must be a GpuError, or UsageError for bad syntax."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            magic(*given)
    except (GpuError, UsageError) as error:
        require_sentence(str(error))
        return False
    return True


def parsed_only(words: tuple[str, ...]) -> None:
    try:
        cli._parse(verbs.VERBS[words[0]], list(words[1:]))
    except cli._NotUnderstood as error:
        require_sentence(str(error))


@pytest.fixture
def typed(box, rt, fresh_shell):
    """A function that carries out words in one of the two places, and looks at the book afterwards."""

    def typed(place: str, words: tuple[str, ...]) -> None:
        if words[0] in PARSED_ONLY:
            return parsed_only(words) if place == verbs.CLI else None
        if place == verbs.CLI:
            succeeded = in_terminal(words)
        else:
            succeeded = in_notebook(GpuMagics(fresh_shell, lambda: rt).line, list(words))
        require_decodable(rt)
        if succeeded:
            box()

    box()
    return typed


places = pytest.mark.parametrize("place", [verbs.CLI, verbs.MAGIC])


# An ordinary run tries every tenth word after an option.
@pytest.mark.thorough
@pytest.mark.parametrize("stride", [10, pytest.param(1, marks=pytest.mark.soak)])
@places
def test_every_strange_word_is_answered(typed, place, stride):
    for words in each(place, stride):
        typed(place, words)


@places
@given(data=st.data())
@settings(
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture]
)
def test_any_words_are_answered(typed, place, data):
    typed(place, data.draw(lines(place)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flag", ["", *(flag for one in verbs.CELL for flag in one.flags if one.is_option)]
)
def test_every_strange_word_before_a_cell(box, rt, fresh_shell, flag):
    magics = GpuMagics(fresh_shell, lambda: rt)
    box()
    for value in VALUES:
        if in_notebook(magics.cell, [*filter(None, (flag,)), value], "pass"):
            box()
        require_decodable(rt)


@pytest.mark.parametrize("words", [("-x" * MANY,), ("qwen", "--timeout", "x" * MANY)])
def test_an_error_of_the_parser_is_bounded(words):
    """In an earlier version, a file that was pasted as an argument gave an error as long as the file."""
    with pytest.raises(UsageError) as error:
        parser_for(verbs.CELL_SYNOPSIS, verbs.CELL).parse_args(list(words))
    require_sentence(str(error.value))
