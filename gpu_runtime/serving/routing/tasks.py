"""`tasks.yaml`: what programs may ask for by purpose, who they are, and who answers for whom.

    tasks:                                  # addressed as  model: "task:classify"
      classify:
        candidates: [qwen-4b, phi-4, claude:haiku]
        keep_alive_s: 120                   # how long the model stays warm after a call
        pin_primary: true                   # no warm candidate takes the first one's place
        budget_s: 10                        # in which the whole answer is wanted
    clients:                                # by x_client_id
      bot: {system: "Be brief.", importance: low, thinking: false, defaults: {temperature: 0.2}, cooldown_s: 5}
    fallback:                               # who answers when a model cannot; "*" for all others
      qwen-32b: [qwen-4b, claude:sonnet]

Pure, but for reading the file. Which candidate is best is decided from what is warm, and from what loads and answers
have taken so far.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from ...errors import BadDocument
from ...facts import IMPORTANCE, Value
from ..requests import Refused, check_numbers
from .fallback import Choice, guarded, is_cloud

MOST_BYTES = 1 << 20
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Task(Value, forbid_unknown_fields=True):
    """A purpose, and who may serve it, the best first."""

    candidates: Annotated[tuple[str, ...], Meta(min_length=1)]
    keep_alive_s: Seconds | None = None
    pin_primary: bool = False
    budget_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None


class Profile(Value, forbid_unknown_fields=True):
    """What holds for the calls of one client, where they do not say otherwise."""

    system: str = ""  # put before the conversation
    model: str = ""  # for `model: "default"`
    importance: int | str | None = None
    thinking: bool | None = None
    stay_warm_s: Seconds | None = None
    cooldown_s: Seconds = 0.0
    defaults: dict[str, Any] = {}  # of the body's fields, such as temperature


class Serving(Value, forbid_unknown_fields=True):
    """All that the file says."""

    tasks: dict[str, Task] = {}
    clients: dict[str, Profile] = {}
    fallback: dict[str, tuple[str, ...]] = {}

    def stand_ins(self, model: str) -> tuple[str, ...]:
        """Who may answer when the model cannot."""
        return self.fallback.get(model, self.fallback.get("*", ()))


class Cost(Value):
    """Seconds that a model took so far; None: it has not been seen."""

    load: float | None = None
    answer: float | None = None


def read_serving(path: str | os.PathLike[str] | None) -> Serving:
    """What the file says; nothing where there is none. Raises BadDocument, which names file and field."""
    if path is None or not os.path.exists(path):
        return Serving()
    name = os.fspath(path)
    try:
        data = Path(name).read_bytes()[: MOST_BYTES + 1]
        if len(data) > MOST_BYTES:
            raise BadDocument(name, 0, "", f"it is larger than {MOST_BYTES >> 20} MiB")
        said = yaml.safe_load(data) or {}
        serving = msgspec.convert(said, Serving)
    except OSError as error:
        raise BadDocument(name, 0, "", f"it cannot be read ({error.strerror or error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise BadDocument(
            name,
            mark.line + 1 if mark else 0,
            "",
            f"it is no YAML: {getattr(error, 'problem', error)}",
        ) from None
    except msgspec.ValidationError as error:
        problem, _, field = str(error).partition(" - at ")
        raise BadDocument(name, 0, field.strip("`").removeprefix("$."), problem) from None
    for client, profile in serving.clients.items():
        _check(profile, name, f"clients.{client}")
    return serving


def _check(profile: Profile, file: str, place: str) -> None:
    """What holds for a body holds for what is put in its place. Raises BadDocument."""
    word = profile.importance
    if (
        isinstance(word, str)
        and word not in IMPORTANCE
        or isinstance(word, int)
        and not 1 <= word <= 100
    ):
        raise BadDocument(
            file,
            0,
            f"{place}.importance",
            f"{word!r} is none of {', '.join(IMPORTANCE)}, nor a number from 1 to 100",
        )
    for field in profile.defaults:
        if field in ("model", "messages", "prompt", "input", "stream") or field.startswith("x_"):
            raise BadDocument(file, 0, f"{place}.defaults.{field}", "it is the caller's to say")
    try:
        check_numbers(profile.defaults)
    except Refused as wrong:
        raise BadDocument(
            file, 0, f"{place}.defaults.{wrong.facts['param']}", wrong.message
        ) from None


def candidates(
    name: str,
    task: Task,
    *,
    warm: Callable[[str], bool],
    known: Callable[[str], bool],
    cost: Callable[[str], Cost],
    allow_cloud: bool,
    budget: float | None = None,
) -> tuple[Choice, ...]:
    """A task's candidates in the order in which they are tried.

    1. clouds leave all places but the first, where they may not stand in
    2. whoever is expected to take longer than the budget is left out; nobody left → Refused, with both numbers
    3. `pin_primary` → as written; else those that are warm first, then as written
    """
    first = task.candidates[0]
    order = guarded(
        (Choice(model, is_cloud(model, known)) for model in dict.fromkeys(task.candidates)),
        allow_cloud,
    )
    limit = task.budget_s if budget is None else budget
    fitting = [choice for choice in order if fits(choice, limit, warm, cost)]
    if not fitting:
        raise too_short(f"task:{name}", order, limit, warm, cost)
    if not task.pin_primary:
        fitting.sort(
            key=lambda choice: not (choice.model == first if choice.cloud else warm(choice.model))
        )
    return tuple(
        _told(choice, name, first, first in {choice.model for choice in fitting}, warm)
        for choice in fitting
    )


def expected_seconds(model: str, is_warm: bool, cost: Cost) -> float | None:
    """Seconds until a call of the model is answered, its load included; of what was never seen nothing, so that it may
    take longer. None: nothing was seen.

    >>> expected_seconds("a", False, Cost(load=40.0)), expected_seconds("a", True, Cost(load=40.0))
    (40.0, None)
    """
    seen = [
        seconds for seconds in (cost.answer, None if is_warm else cost.load) if seconds is not None
    ]
    return sum(seen) if seen else None


def fits(
    choice: Choice, budget: float | None, warm: Callable[[str], bool], cost: Callable[[str], Cost]
) -> bool:
    """Whether the choice is expected to answer within the budget; what was never seen may try."""
    if budget is None or choice.cloud:
        return True
    seconds = expected_seconds(choice.model, warm(choice.model), cost(choice.model))
    return seconds is None or seconds <= budget


def too_short(
    asked: str,
    choices: Iterable[Choice],
    budget: float | None,
    warm: Callable[[str], bool],
    cost: Callable[[str], Cost],
) -> Refused:
    """That the time is too short for anybody, told before it is lost, with both numbers."""
    said = []
    least = None
    for choice in choices:
        seen, is_warm = cost(choice.model), warm(choice.model)
        seconds = expected_seconds(choice.model, is_warm, seen)
        if choice.cloud or seconds is None:
            continue
        least = seconds if least is None else min(least, seconds)
        parts = ", ".join(
            f"{took:.1f} s to {what}"
            for what, took in (("load", seen.load), ("answer", seen.answer))
            if took is not None
        )
        said.append(f"{choice.model} about {seconds:.1f} s" + ("" if is_warm else f" ({parts})"))
    return Refused(
        504,
        "budget_too_short",
        f"{asked} has a budget of {budget:g} s, and would take {', '.join(said)}. "
        f"Raise the budget, or keep the model warm (keep_alive_s).",
        None,
        budget_seconds=budget,
        expected_seconds=least,
    )


def _told(
    choice: Choice, task: str, first: str, first_fits: bool, warm: Callable[[str], bool]
) -> Choice:
    if choice.model == first:
        return choice
    why = (
        f"{first} would take longer than the budget"
        if not first_fits
        else f"it is warm and {first} is not"
        if warm(choice.model) and not warm(first)
        else f"{first} could not answer"
    )
    return Choice(choice.model, choice.cloud, f"task:{task}: {why}")
