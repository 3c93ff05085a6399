"""The rows of the tab Serving: models with their calls and breakers, clients, usage, and jobs. Pure."""

from __future__ import annotations

from typing import Any

from gpu_runtime.safe_text import clean
from gpu_runtime.units import show_seconds

from .cells import NOTHING, Cell, Column, Row, lasting, natural

MODELS = (
    Column("Model"),
    Column("Running", True, "Calls that the model answers now"),
    Column("Waiting", True, "Calls that wait for their turn"),
    Column("Answered", True, "Calls since the server began"),
    Column("Queue time", True, "How long an answered call waited for its model, on average"),
    Column("First token", True, "From the call to the first piece of its stream, on average"),
    Column("Tokens/s", True, "Of a stream, after the first token, on average"),
    Column("Prompt tokens", True),
    Column("Answer tokens", True),
    Column("Breaker", hint="open: the model keeps failing and is not called"),
)
CLIENTS = (
    Column("Client", hint="A visitor, and the name that the program gives itself"),
    Column("Calls", True),
    Column("Running", True),
    Column("Every", True, "The average time between two calls, the newest counting most"),
    Column("Refused", True, "Calls during a cooldown"),
    Column("Cooldown", True, "How long the client is not served, as it requested"),
    Column("Models"),
)
USAGE = (
    Column("Visitor", hint="A user, or key:NAME for a key of the file of keys"),
    Column("Model"),
    Column("Calls", True),
    Column("Prompt tokens", True),
    Column("Answer tokens", True),
)
JOBS = (
    Column("Begun"),
    Column("Endpoint"),
    Column("Client"),
    Column("Status"),
    Column("Took", True),
)
MOST_MODELS = 3  # named for one client; the others are counted


def model_rows(served: Any) -> tuple[Row, ...]:
    """A row for each model that was called. `served` has the figures of the server."""
    state = served.state
    names = {*served.models, *state.waiting, *state.running, *state.breakers}
    return tuple(_model_row(name, served) for name in sorted(names, key=natural))


def _model_row(name: str, served: Any) -> Row:
    state, calls = served.state, served.models.get(name)
    breaker = state.breakers.get(name)
    known = (
        (
            _count(calls.calls),
            _seconds(calls.queue_seconds),
            _seconds(calls.first_token_seconds),
            _rate(calls.tokens_per_second),
            _count(calls.prompt_tokens),
            _count(calls.answer_tokens),
        )
        if calls
        else (NOTHING,) * 6
    )
    cells = (
        Cell(clean(name), kind="strong"),
        _count(state.running.get(name, 0)),
        _count(state.waiting.get(name, 0)),
        *known,
        _breaker(breaker),
    )
    return Row(name, cells)


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", number)


def _seconds(seconds: float | None) -> Cell:
    return NOTHING if seconds is None else Cell(show_seconds(seconds), seconds)


def _rate(rate: float | None) -> Cell:
    return NOTHING if rate is None else Cell(f"{rate:.1f}" if rate < 100 else f"{rate:.0f}", rate)


def _breaker(breaker: Any) -> Cell:
    if breaker is None or (breaker.state == "closed" and not breaker.failures):
        return Cell("closed", 0, kind="soft")
    if breaker.state == "closed":
        return Cell(f"closed, {breaker.failures} failed in a row", 1, clean(breaker.last), "short")
    again = f", tried again in {lasting(breaker.retry_after)}" if breaker.retry_after else ""
    text = f"{breaker.state}{again}: {clean(breaker.last)}".rstrip(": ")
    return Cell(text, 2, clean(breaker.last), "short alarm")


def client_rows(served: Any) -> tuple[Row, ...]:
    """A row for each client. The client with the most recent call is first."""
    return tuple(
        _client_row(name, pattern, served.now)
        for name, pattern in reversed(served.state.clients.items())
    )


def _client_row(name: str, pattern: Any, now: float) -> Row:
    left = pattern.cooldown_until - now
    models = sorted(pattern.models, key=lambda model: -pattern.models[model])
    named = ", ".join(f"{clean(model)} {pattern.models[model]}×" for model in models[:MOST_MODELS])
    more = f" and {len(models) - MOST_MODELS} more" if len(models) > MOST_MODELS else ""
    cells = (
        Cell(clean(name) or "without a name", kind="strong" if name else "soft"),
        _count(pattern.calls),
        _count(pattern.running),
        _seconds(pattern.every_seconds),
        _count(pattern.refused),
        Cell(lasting(left), left) if left > 0 else NOTHING,
        Cell(named + more),
    )
    return Row(name or "?", cells)


def usage_rows(served: Any) -> tuple[Row, ...]:
    """A row for each visitor and model of the last 30 days. The row with the most answer tokens is first."""
    rows = []
    for row in sorted(served.usage, key=lambda row: (-row["answer_tokens"], -row["calls"])):
        counts = [_count(row[name]) for name in ("calls", "prompt_tokens", "answer_tokens")]
        cells = (Cell(clean(row["client"]), kind="strong"), Cell(clean(row["model"])), *counts)
        rows.append(Row(f"{row['client']} {row['model']}", cells))
    return tuple(rows)


def job_rows(served: Any) -> tuple[Row, ...]:
    """A row for each job, the newest first. Ids are not shown: anybody who knows an id can fetch the job's result."""
    rows = []
    for number, job in enumerate(served.jobs):
        cells = (
            Cell("", job.created, kind="time"),
            Cell(clean(job.endpoint)),
            Cell(clean(job.client)),
            Cell(job.status, kind={"failed": "alarm", "running": "strong"}.get(job.status, "")),
            _seconds(job.ended - job.created if job.ended else None),
        )
        rows.append(Row(f"{job.created:.6f}.{number}", cells))
    return tuple(rows)


def summary(served: Any) -> str:
    """One line about the whole server: the answered, failed and refused calls, and the loads for calls."""
    counts = served.state.counts
    refused = sum(number for name, number in counts.items() if name.startswith("refused"))
    parts = [f"{counts.get('answered', 0):,} answered"]
    named = (
        ("failed", counts.get("failed", 0)),
        ("refused", refused),
        ("cancelled", counts.get("cancelled", 0)),
        ("answered by another model", counts.get("stood_in", 0)),
    )
    parts += [f"{number:,} {words}" for words, number in named if number]
    parts.append(f"{served.state.loads:,} load{'' if served.state.loads == 1 else 's'} for calls")
    cloud = "allowed" if served.state.allow_cloud else "not allowed"
    return " · ".join([*parts, f"clouds are {cloud}"])
