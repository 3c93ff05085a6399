"""The tab Hours: the bars of the chart, the table, and what is shown without an account."""

import datetime
import json
import re

import pytest
from gpu_panels.data.hours import (
    FREE,
    IN_USE,
    ON_CARD,
    calendar,
    chart,
    report_columns,
    report_rows,
)
from gpu_panels.tabs import HoursTab

from gpu_runtime.tables import Table
from gpu_runtime.telemetry import hours

from . import samples
from .polling import opened, refresh


def test_the_columns_are_those_of_the_account():
    assert hours.columns("time") == ["time", *ON_CARD]


def bar(day, **figures):
    time = datetime.datetime(2026, 11, day, tzinfo=datetime.UTC)
    return {"time": time} | {state: figures.get(state, 0.0) for state in ON_CARD}


def test_a_bar_has_the_states_as_parts_of_the_fullest_time():
    """A day that was recorded for half of the time is half as high."""
    drawn = chart([bar(1, **{IN_USE: 30.0, FREE: 10.0}), bar(2, **{IN_USE: 5.0, FREE: 15.0})])
    heights = [float(height) for height in re.findall(r"height:([\d.]+)%", drawn)]
    assert [height for height in heights if height] == [75.0, 12.5]
    assert "75 % in use, 25 % free" in drawn and "25 % in use, 75 % free" in drawn
    assert "58 % in use, 42 % free" in drawn, "of all days"
    assert chart([]) == ""


def test_the_calendar_has_the_idle_hours_of_each_day(utc):
    """Idle, and idle while another waited, of all cards; the hour with the most has the strongest colour."""
    records = [bar(1, idle_gib_h=1.0, in_use_gib_h=9.0), bar(2, blocking_gib_h=4.0)]
    records[1]["time"] = records[1]["time"].replace(hour=13)
    drawn = calendar(records)
    cells = re.findall(r'title="(\w+ \d+), (\d+):00: ([\d.]+) GiB.*?,([\d.]+)\)', drawn)
    assert len(cells) == 2 * 24
    shown = {cell[:2]: cell[2:] for cell in cells if float(cell[2])}
    assert shown == {("Sun 01", "0"): ("1.0", "0.25"), ("Mon 02", "13"): ("4.0", "1.00")}
    assert calendar([]) == calendar([bar(1, in_use_gib_h=9.0)]) == ""


def test_of_the_hours_of_a_week_the_chart_has_days_and_the_calendar_hours(utc):
    """The calendar of a week had each day's sum at its first hour."""
    began, hour = (
        datetime.datetime(2026, 11, 2, 0, tzinfo=datetime.UTC),
        datetime.timedelta(hours=1),
    )
    records = [
        bar(1, **{IN_USE: 1.0, FREE: 1.0, "idle_gib_h": float(n % 24 == 9)})
        | {"time": began + n * hour}
        for n in range(7 * 24)
    ]
    drawn = chart(records)
    assert drawn.count('title="') == 7 and 'title="Mon 02: 49 % in use' in drawn
    assert len(re.findall(r"\w+ \d+, 9:00: 1.0 GiB-hours idle", calendar(records))) == 7
    assert hours.stretch_of(28 * 86400) == 3600


@pytest.mark.parametrize(("days", "labels"), [(1, 1), (7, 7), (8, 4), (28, 7)])
def test_many_days_have_few_labels(days, labels):
    drawn = chart([bar(day + 1, **{IN_USE: 1.0}) for day in range(days)])
    assert len(re.findall(r'style="flex:\d+ 0 0;min-width:0">', drawn)) == labels


def test_a_row_shows_hours_for_people_and_names_as_text():
    record = {
        "user": "ann\x1b",
        "notebook": "",
        "card_h": 0.01,
        "in_use_gib_h": 1234.5,
        "waited_h": 0.5,
    }
    [[_, cells, _]] = json.loads(report_rows([record]))
    assert [cell[0] for cell in cells][1:] == ["no notebook", "< 0.1", "1,234.5", "30 min"]
    assert "\x1b" not in cells[0][0]
    assert len(report_columns([record])) == len(cells)


def answers(since, by):
    if by == "time":
        return Table([bar(1, **{IN_USE: 1.0})])
    if by == "waits":
        rows = [{"user": "ann", "waited_for": who, "waited_h": 1.0} for who in ("bob", "ann")]
        return Table(rows)
    return Table([{by: f"{since} {by}", "card_h": 2.0}])


def test_the_tab_follows_its_choices():
    """Who waited for his own models is not listed."""
    tab = opened(HoursTab, samples.busy, report=answers)
    assert "7d user" in tab.table.rows and "100 % in use" in tab.chart.html
    assert "bob" in tab.waits.rows and '"ann",null' in tab.waits.rows and tab.waits.visible
    assert len(json.loads(tab.waits.rows)) == 1
    tab.since.value, tab.by.value = "Day", "Card"
    refresh(tab)
    assert "1d card" in tab.table.rows and tab.address() == {"since": "Day", "by": "Card"}


def test_without_hours_the_tab_says_why():
    tab = opened(HoursTab, samples.busy, report=lambda since, by: Table([]))
    assert tab.chart.html == "" and "Nothing was recorded" in tab.table.empty
