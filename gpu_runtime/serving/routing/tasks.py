"""The content of `tasks.yaml`, and the choice of the candidates of a task. `tasks_file` reads the file.

`tasks.yaml` has tasks, clients' profiles and stand-ins:

    tasks:                                  # addressed as  model: "task:classify"
      classify:
        candidates: [qwen-4b, phi-4, claude:haiku]
        keep_alive_s: 120                   # how long the model stays warm after a call
        pin_primary: true                   # a warm candidate does not go before the first one
        budget_s: 10                        # seconds for the whole answer
    clients:                                # by x_client_id
      bot: {system: "Be brief.", importance: low, thinking: false, defaults: {temperature: 0.2}, cooldown_s: 5}
    fallback:                               # which models answer when one cannot; "*": for any other model
      qwen-32b: [qwen-4b, claude:sonnet]
    aliases: {gpt-4o: qwen-32b}             # further names of models and tasks
    preload: [qwen-4b]                      # loaded when the server starts

Candidates are chosen by which models are warm, and by how long the loads and answers of each model took before. This
module is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

from msgspec import Meta

from ...facts import Value
from ..requests import Refused
from .fallback import Choice, guarded, is_cloud

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
TOO_SHORT = "budget_too_short"  # the code of a refusal for a budget that is too short


class Task(Value, forbid_unknown_fields=True):
    """A purpose such as `classify`, and the models that may serve it. The best model is first."""

    candidates: Annotated[tuple[str, ...], Meta(min_length=1)]
    keep_alive_s: Seconds | None = None
    pin_primary: bool = False
    budget_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    replicas: bool = False  # if true, the candidates are equal: the shortest queue goes first


class Profile(Value, forbid_unknown_fields=True):
    """Default values for the calls of one client. A value in the call itself overrides them."""

    system: str = ""  # put before the conversation
    model: str = ""  # for `model: "default"`
    importance: int | str | None = None
    thinking: bool | None = None
    stay_warm_s: Seconds | None = None
    cooldown_s: Seconds = 0.0
    defaults: dict[str, Any] = {}  # values of other fields of the body, such as temperature


class ServingConfig(Value, forbid_unknown_fields=True):
    """The content of `tasks.yaml`."""

    tasks: dict[str, Task] = {}
    clients: dict[str, Profile] = {}
    fallback: dict[str, tuple[str, ...]] = {}
    aliases: dict[str, str] = {}
    preload: tuple[str, ...] = ()

    def stand_ins(self, model: str) -> tuple[str, ...]:
        """The models that may answer when `model` cannot."""
        return self.fallback.get(model, self.fallback.get("*", ()))

    def named_models(self) -> Iterator[tuple[str, str]]:
        """Yields the field and the name, for each name of a model, a cloud or a task in the file."""
        for name, task in self.tasks.items():
            yield from ((f"tasks.{name}.candidates", model) for model in task.candidates)
        for name, profile in self.clients.items():
            if profile.model:
                yield f"clients.{name}.model", profile.model
        for name, models in self.fallback.items():
            own = () if name == "*" else (name,)
            yield from ((f"fallback.{name}", model) for model in (*own, *models))
        yield from ((f"aliases.{name}", model) for name, model in self.aliases.items())
        yield from (("preload", model) for model in self.preload)


class Cost(Value):
    """The measured seconds of a model's load and answer. None means that a part was not measured yet."""

    load: float | None = None
    answer: float | None = None


def candidates(
    name: str,
    task: Task,
    *,
    warm: Callable[[str], bool],
    known: Callable[[str], bool],
    cost: Callable[[str], Cost],
    allow_cloud: bool,
    budget: float | None = None,
    load: Callable[[str], int] = lambda model: 0,
) -> tuple[Choice, ...]:
    """The candidates of the `task` called `name`, in the order in which they are tried.

    1. If `allow_cloud` is false, clouds are removed from all places but the first.
    2. Models that are expected to take longer than the budget are removed. If none is left, Refused is raised.
    3. With `pin_primary` the order is that of the file. With `replicas` the model with the fewest calls comes first.
       Else, and among equal replicas, warm models come first, in the order of the file. A cloud counts as warm only if
       it is the first candidate.

    `warm(model)` is whether a model is on its device, `known(model)` whether a name is a local model, and `load(model)`
    the number of a model's calls that wait or run. `budget` (seconds) overrides the task's own budget.
    """
    first = task.candidates[0]
    names = dict.fromkeys(task.candidates)
    choices = guarded((Choice(model, is_cloud(model, known)) for model in names), allow_cloud)  # 1
    limit = task.budget_s if budget is None else budget
    fitting = [choice for choice in choices if fits(choice, limit, warm, cost)]  # 2
    if not fitting:
        raise too_short(f"task:{name}", choices, limit, warm, cost)

    def goes_first(choice: Choice) -> bool:
        return choice.model == first if choice.cloud else warm(choice.model)

    def calls(choice: Choice) -> int:
        return load(choice.model) if task.replicas else 0

    if not task.pin_primary:  # 3
        fitting.sort(key=lambda choice: (calls(choice), not goes_first(choice)))
    first_fits = any(choice.model == first for choice in fitting)

    def explained(choice: Choice) -> Choice:
        if choice.model == first:
            return choice
        if not first_fits:
            reason = f"{first} would take longer than the budget"
        elif task.replicas:
            reason = f"it had the shortest queue of {len(fitting)} replicas"
        elif warm(choice.model) and not warm(first):
            reason = f"it is warm and {first} is not"
        else:
            reason = f"{first} could not answer"
        return Choice(choice.model, choice.cloud, f"task:{name}: {reason}")

    return tuple(map(explained, fitting))


def expected_seconds(is_warm: bool, cost: Cost) -> float | None:
    """The expected seconds until a call of a model is answered, with the model's load unless it `is_warm`.

    A part of `cost` that was never measured counts as 0 s; the result is None if no part was measured.

    >>> expected_seconds(False, Cost(load=40.0)), expected_seconds(True, Cost(load=40.0))
    (40.0, None)
    """
    parts = (cost.answer, None if is_warm else cost.load)
    measured = [seconds for seconds in parts if seconds is not None]
    return sum(measured) if measured else None


def fits(
    choice: Choice, budget: float | None, warm: Callable[[str], bool], cost: Callable[[str], Cost]
) -> bool:
    """Whether `choice` is expected to answer within the `budget` (seconds; None means no limit).

    A cloud fits, and so does a model that was never measured. `warm(model)` is whether the model is on its device.
    """
    if budget is None or choice.cloud:
        return True
    seconds = expected_seconds(warm(choice.model), cost(choice.model))
    return seconds is None or seconds <= budget


def too_short(
    asked: str,
    choices: Iterable[Choice],
    budget: float | None,
    warm: Callable[[str], bool],
    cost: Callable[[str], Cost],
) -> Refused:
    """The refusal (504) of a call of `asked` whose `budget` in seconds is too short for all `choices`."""
    estimates: dict[str, float] = {}  # in words -> seconds
    for choice in choices:
        measured, is_warm = cost(choice.model), warm(choice.model)
        seconds = expected_seconds(is_warm, measured)
        if not choice.cloud and seconds is not None:
            parts = "" if is_warm else f" ({measured_parts(measured, ', ')})"
            estimates[f"{choice.model} about {seconds:.1f} s{parts}"] = seconds
    text = (
        f"{asked} has a budget of {budget:g} s, and would take {', '.join(estimates)}. "
        "Raise the budget, or keep the model warm (keep_alive_s)."
    )
    shortest = min(estimates.values(), default=None)
    return Refused(504, TOO_SHORT, text, budget_seconds=budget, expected_seconds=shortest)


def measured_parts(cost: Cost, separator: str) -> str:
    """The measured parts of `cost` in words, joined by `separator`, or "" if no part was measured.

    >>> measured_parts(Cost(load=40.0, answer=2.0), " and ")
    '40.0 s to load and 2.0 s to answer'
    """
    parts = (("load", cost.load), ("answer", cost.answer))
    known = [f"{seconds:.1f} s to {name}" for name, seconds in parts if seconds is not None]
    return separator.join(known)
