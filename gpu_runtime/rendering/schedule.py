"""Renders the schedule of a notebook as text and as HTML. This module is pure.

The schedule lists the models that the waiting cells will use, and the state of each model's load.
"""

from __future__ import annotations

from gpu_runtime.facts import Schedule, ScheduledModel

from . import elements, text

HEADERS = ("MODEL", "FIRST USE", "WHERE", "STATE")
NOTHING = "No cell waits that uses a model. Run All, then look again:  %gpu next"


def as_text(schedule: Schedule) -> str:
    """The models of the `schedule` as an aligned table, and the results of earlier predictions."""
    if not schedule.models:
        return "\n".join([NOTHING, *_notes(schedule)])
    rows = [_row(model) for model in schedule.models]
    return "\n".join([*text.table(rows, HEADERS, longest=100), *_notes(schedule)])


def as_html(schedule: Schedule) -> str:
    """The models of the `schedule` as an HTML table, and the results of earlier predictions."""
    notes = [elements.line(elements.esc(note), soft=True) for note in _notes(schedule)]
    if not schedule.models:
        return elements.page(elements.line(elements.with_code(NOTHING)), *notes)
    rows = [[elements.td(cell, "g-wrap") for cell in _row(model)] for model in schedule.models]
    return elements.page(elements.table([name.lower() for name in HEADERS], rows), *notes)


def _row(model: ScheduledModel) -> tuple[str, str, str, str]:
    return model.name, model.cell, model.where, _state(model)


def _state(model: ScheduledModel) -> str:
    """A short text on the state of `model` in the schedule, such as `loaded ahead`."""
    if model.running:
        return "used by the running cell"
    if model.ahead:
        return "loaded ahead"
    if model.where == "moving":
        return "being moved"
    if model.loading:
        return "being loaded ahead"
    if model.where not in ("disk", "host"):
        return "on its device"
    return f"not loaded ahead: {model.because}" if model.because else "not loaded yet"


def _notes(schedule: Schedule) -> list[str]:
    """Sentences on how earlier predictions ended, and on whether look-ahead is off."""
    notes = []
    if schedule.mode == "never":
        notes.append("Look-ahead is off (GPU_PREFETCH=never).")
    if schedule.loaded_ahead:
        notes.append(
            f"Loaded ahead so far: {schedule.loaded_ahead}; "
            f"{schedule.used} used, {schedule.unused} not used."
        )
    return notes
