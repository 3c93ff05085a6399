"""Sizes and durations as text. Text is parsed as people mean it, and text that we show can be parsed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.errors import BadSize
from gpu_runtime.units import (
    parse_bytes,
    parse_room,
    parse_seconds,
    show_bytes,
    show_rate,
    show_seconds,
)

UNITS = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "K": 2**10, "M": 2**20,
    "G": 2**30, "T": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
SIZES = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(("text", "size"), [
    ("10GB", 10_000_000_000), ("10GiB", 10 * 2**30), ("10G", 10 * 2**30), ("10g", 10 * 2**30),
    ("10 gib", 10 * 2**30), ("512", 512), (512, 512), ("512 B", 512), ("1.5 MiB", 1_572_864),
    (".5K", 512), (" 2 TiB ", 2**41), (1e3, 1000), ("16_000MB", 16 * 10**9),
    ("16,000 MiB", 16_000 * 2**20), (0, 0), ("9007199254740993", 2**53 + 1),
])  # fmt: skip
def test_gb_is_decimal_gib_and_a_bare_g_are_binary(text, size):
    """The texts are the sizes in the Kitchen Brigade document, and other ways in which people write sizes."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [
    "", " ", "GiB", "-1", "-1 GiB", -1, -0.5, "1 GiB extra", "1 XB", "1e9", "0x10", "1..5", "1,2",
    "ten", "nan", "inf", float("nan"), float("inf"), 2**63, "9000000 TiB", True, None, [1], b"1",
    "1 GiB\n2", "½ GiB",
])  # fmt: skip
def test_text_that_is_not_a_size_is_rejected_and_quoted(text):
    """A size is never guessed, never negative, and never larger than a file can be."""
    with pytest.raises(BadSize) as error:
        parse_bytes(text)
    assert str(error.value).startswith(f"{text!r} is not a size. Write it like")
    assert isinstance(error.value, ValueError)


@given(SIZES)
def test_a_number_without_a_unit_is_bytes(size):
    """Also as text, and exactly."""
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size} B") == size


@given(st.integers(0, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_unit_multiplies(number, unit, space):
    """A unit may follow the number with or without a space, in upper or lower case."""
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_bytes(f"{number}{space}{unit.upper()}") == parse_bytes(
        f"{number}{space}{unit.lower()}"
    )


@given(st.integers(0, 2**62))
def test_a_shown_size_can_be_parsed_within_its_digits(size):
    """Rounding loses at most half a unit of the last digit."""
    assert parse_bytes(show_bytes(size)) == pytest.approx(size, rel=0.051, abs=0)


@pytest.mark.parametrize(("size", "shown"), [
    (1023, "1023 B"), (1024, "1.0 KiB"), (99.94 * 2**20, "99.9 MiB"), (99.96 * 2**20, "100 MiB"),
    (2**30 - 1, "1024 MiB"), (2**30, "1.0 GiB"), (2**40, "1.0 TiB"), (5000 * 2**40, "5000 TiB"),
])  # fmt: skip
def test_the_unit_and_the_decimal_of_a_shown_size(size, shown):
    assert show_bytes(int(size)) == shown


@pytest.mark.parametrize(("seconds", "shown"), [
    (-1, "0 ms"), (0.9994, "999 ms"), (1, "1.0 s"), (9.9, "9.9 s"), (10, "10 s"), (119, "119 s"),
    (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (172799, "48 h"), (172800, "2 d"),
])  # fmt: skip
def test_the_unit_of_a_shown_duration(seconds, shown):
    assert show_seconds(seconds) == shown


@given(SIZES)
def test_a_shown_size_is_short(size):
    """The text has three digits, or a whole number if that has more digits. The sign is in front."""
    number = show_bytes(size).split()[0]
    assert len(number.replace(".", "")) <= 3 or number.isdigit()
    assert len(number) <= 4 or size >= 2**50  # there is no unit larger than TiB
    assert show_bytes(-size) == (f"-{show_bytes(size)}" if size else "0 B")


@given(st.text())
def test_any_text_is_a_size_or_is_rejected(text):
    """Any text is a size of 0 or more, or raises the error for bad sizes."""
    try:
        assert parse_bytes(text) >= 0
    except BadSize as error:
        assert error.value == text


@pytest.mark.parametrize(("text", "size"), [
    (1, 1), (2**20 - 1, 2**20 - 1), ("1 B", 1), ("1048576", 2**20), ("14GiB", 14 * 2**30),
])  # fmt: skip
def test_room_is_a_size_above_zero(text, size):
    assert parse_room(text) == size


@pytest.mark.parametrize(("text", "advice"), [
    (0, "above zero"), ("0", "above zero"), ("0 GiB", "above zero"), ("14", "14 GiB"),
    (" 14 ", "'14 B' if you mean bytes"), ("1048575", "1048575 GiB"), ("0.5", "0.5 GiB"),
    ("x", "is not a size"),
])  # fmt: skip
def test_no_room_and_room_without_its_unit_are_rejected(text, advice):
    """Who types `14` wants 14 GiB. From 1 MiB on, a number alone can only be bytes."""
    with pytest.raises(BadSize, match=advice):
        parse_room(text)


@pytest.mark.parametrize(("size", "seconds", "shown"), [
    (10**9, 1.0, "1.0 GB/s"), (10**9 - 1, 1.0, "1000 MB/s"), (10**6, 0.1, "10 MB/s"),
    (10**9, 0.0999, ""), (0, 1.0, ""), (-1, 1.0, ""), (10**9, 0.0, ""),
])  # fmt: skip
def test_a_rate_is_shown_where_the_time_is_long_enough(size, seconds, shown):
    assert show_rate(size, seconds) == shown


@pytest.mark.parametrize(("text", "seconds"), [
    ("30", 30.0), (30, 30.0), (0.5, 0.5), ("250ms", 0.25), ("10m", 600.0), ("10 min", 600.0),
    ("1.5h", 5400.0), ("2d", 172800.0), (36500 * 86400, 36500 * 86400.0), ("36500d", 36500 * 86400.0),
])  # fmt: skip
def test_durations_are_parsed_as_written(text, seconds):
    """A duration without a unit is in seconds."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-1", -1, "1 y", float("nan"), float("inf"), True, None, [5], "5 GiB", "36501d"],
)
def test_text_that_is_not_a_duration_is_rejected_and_quoted(text):
    """The error for a bad duration is about durations, not about sizes."""
    with pytest.raises(BadSize, match="is not a duration. Write it like 30, '10m' or '2h'"):
        parse_seconds(text)


@given(st.floats(0, 10**7))
def test_a_shown_duration_can_be_parsed(seconds):
    """The parsed value differs by at most half a unit of the last digit that is shown."""
    shown = show_seconds(seconds)
    number = float(shown.split()[0])
    unit = parse_seconds(f"1 {shown.split()[1]}")
    assert number * unit == pytest.approx(seconds, abs=(0.051 if "." in shown else 0.501) * unit)
