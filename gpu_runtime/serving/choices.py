"""Chooses the models that may answer a call, and their order.

A call names a model or a task. For a model, the order is: first the requested model, then the local fallbacks that
`tasks.yaml` names for it, then the clouds that `tasks.yaml` names for it. If none can answer, the call is refused with
503. Local fallbacks with smaller contexts are tried first, since they need less memory. If `tasks.yaml` has no line for
the model, no other model answers. The candidates of a task are chosen by which models are warm, and by how long the
loads and answers of each model took before. The last part looks up what these decisions need.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import BadSetting, GpuError, UnknownModel
from ..facts import Evidence, ModelSpec, Value
from ..files import make_directory, replace_file
from ..safe_text import quoted
from .engines import chat_template
from .records import Cost, Costs
from .requests import Call, Json, Refused
from .tasks import ServingConfig, Task

if TYPE_CHECKING:
    from ..runtime import Runtime

# The OpenAI-compatible address of each provider. An address in the environment overrides it.
KNOWN_CLOUDS = {
    "openai": "https://api.openai.com/v1",
    "claude": "https://api.anthropic.com/v1",
    "google": "https://generativelanguage.googleapis.com/v1beta/openai",
}
_PROVIDER = re.compile(r"([a-z][a-z0-9_-]{0,31}):(?=.)")


class Choice(Value):
    """A model that may answer a call. If it is not the requested model, `because` tells the caller why it answers."""

    model: str
    cloud: bool = False
    because: str = ""


class Cloud(Value):
    """The address, the name and the key with which a cloud's model is called."""

    provider: str
    base_url: str
    key: str
    model: str  # the provider's own name of the model

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request, with the key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def __repr__(self) -> str:
        return f"<{self.provider}:{self.model} at {self.base_url}>"  # never with its key


def is_cloud(name: str, known: Callable[[str], bool]) -> bool:
    """Whether `name` is a cloud's model: it has the form `provider:model` and is not `known` as a local model.

    >>> is_cloud("claude:sonnet", lambda name: False), is_cloud("llama3:8b", lambda name: True), is_cloud("qwen", bool)
    (True, False, False)
    """
    return _PROVIDER.match(name) is not None and not name.startswith("task:") and not known(name)


def address_variable(provider: str) -> str:
    """The environment variable with the address of this `provider`.

    >>> address_variable("my-host")
    'MY_HOST_BASE_URL'
    """
    return f"{provider.upper().replace('-', '_')}_BASE_URL"


def is_configured_cloud(name: str, environment: Mapping[str, str]) -> bool:
    """Whether `name` is a model of a provider whose address is known, from KNOWN_CLOUDS or the `environment`.

    >>> is_configured_cloud("claude:sonnet", {}), is_configured_cloud("qwen3:8b", {})
    (True, False)
    """
    provider, colon, model = name.partition(":")
    if not colon or not model:
        return False
    return provider in KNOWN_CLOUDS or bool(environment.get(address_variable(provider)))


def cloud_of(name: str, environment: Mapping[str, str]) -> Cloud | str:
    """The cloud of the model `name` (`provider:model`) in the `environment`, or a sentence on what is missing."""
    provider, _, model = name.partition(":")
    variable = address_variable(provider)
    key_variable = variable.replace("_BASE_URL", "_API_KEY")
    url = environment.get(variable) or KNOWN_CLOUDS.get(provider, "")
    key = environment.get(key_variable, "")
    if not url:
        return f"no {variable} is set"
    if not url.startswith(("https://", "http://")):
        return f"{variable} is no http address"
    if not key and not environment.get(variable):
        return f"no {key_variable} is set"
    return Cloud(provider, url.rstrip("/"), key, model)


def guarded(choices: Iterable[Choice], allow_cloud: bool) -> tuple[Choice, ...]:
    """The `choices`; without clouds after the first, if `allow_cloud` is false.

    The first choice is the requested model. If it is a cloud's, the caller wants that cloud. Source: Model Boss,
    Cloud-fallback guard.
    """
    first, *others = choices
    return (first, *(choice for choice in others if allow_cloud or not choice.cloud))


def chain(
    asked: str,
    others: Iterable[str],
    context: Callable[[str], int | None],
    known: Callable[[str], bool],
    allow_cloud: Callable[[], bool],
) -> tuple[Choice, ...]:
    """The models that may answer a call of `asked`, in the order in which they are tried.

    `others` are the fallbacks of `tasks.yaml`. `context(name)` is a model's context length in tokens, and `known(name)`
    is whether a name is a local model. `allow_cloud()`, which reads a file, is called only if a fallback is a cloud.

    >>> contexts = {"big": 32768, "small": 4096}
    >>> others = ["claude:haiku", "big", "small"]
    >>> [c.model for c in chain("qwen", others, contexts.get, contexts.__contains__, lambda: True)]
    ['qwen', 'small', 'big', 'claude:haiku']
    """
    names = [name for name in dict.fromkeys(others) if name != asked]
    local = [name for name in names if not is_cloud(name, known)]
    local.sort(key=lambda name: context(name) or float("inf"))
    clouds = [name for name in names if is_cloud(name, known)]
    reason = f"{asked} could not answer"
    choices = [Choice(asked, is_cloud(asked, known))]
    choices += [Choice(name, because=reason) for name in local]
    choices += [Choice(name, True, reason) for name in clouds]
    return guarded(choices, not clouds or allow_cloud())


class CloudGuard:
    """Whether a cloud may stand in for a local model. The value is in a file, which survives restarts."""

    def __init__(self, path: Path, seed: bool) -> None:
        """The value is in the file `path`; it is `seed` until `allow` is called."""
        self._path, self._seed = path, seed

    @property
    def allowed(self) -> bool:
        """The value. False if the file has no readable value, so that no data leaves this machine."""
        try:
            value = json.loads(self._path.read_text())["allowCloudFallback"]
        except FileNotFoundError:  # `allow` was never called
            return self._seed
        except (OSError, ValueError, KeyError, TypeError):  # unknown: no data may leave
            return False
        return value is True

    def allow(self, allowed: bool) -> None:
        """Sets the value. Raises BadSetting if `allowed` is not a bool, or the file cannot be written."""
        if not isinstance(allowed, bool):
            raise BadSetting("allowCloudFallback", allowed, "true or false")
        try:
            make_directory(self._path.parent)
            replace_file(self._path, f"{json.dumps({'allowCloudFallback': allowed})}\n".encode())
        except OSError as error:
            why = f"kept in {self._path}, which cannot be written ({error.strerror or error})"
            raise BadSetting("allowCloudFallback", allowed, why) from None


# -- the candidates of a task, and budgets

TOO_SHORT = "budget_too_short"  # the code of a refusal for a budget that is too short


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


# -- what the choice depends on: the models of a Runtime, `tasks.yaml`, the cloud guard, and durations

TASK_PREFIX = "task:"


class ModelFacts:
    """The facts of one model, from its specification, and from the `evidence` and chat `template` of its source."""

    def __init__(self, spec: ModelSpec, evidence: Evidence, template: str = "") -> None:
        self.spec, self.evidence = spec, evidence
        try:
            self.template = chat_template.override(spec.options) or template
        except BadSetting:  # a load reports it
            self.template = template

    @cached_property
    def config(self) -> Json:
        """The model's config under Hugging Face's names. The fields of its text model are among them."""
        config = self.evidence.config
        inner = config.get("text_config")
        return {**inner, **config} if isinstance(inner, dict) else config

    @property
    def context_length(self) -> int | None:
        """The most tokens of a prompt and its answer together; None if it is not known."""
        options = self.spec.options.get("context_length")
        found = options or self.config.get("context_at_load")
        found = found or self.config.get("max_position_embeddings")
        return found if isinstance(found, int) else None

    @property
    def file_bytes(self) -> int:
        """The bytes of the weights as far as the source shows them; else the declared size; 0: unknown."""
        evidence = self.evidence
        return evidence.file_bytes or evidence.weight_bytes or self.spec.size or 0

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words."""
        kind = self.spec.model_type
        if kind in ("embedding", "reranker"):
            return ["embedding"] if kind == "embedding" else []
        if kind == "diffusion":
            return ["image"]
        found = ["completion"]
        if "tools" in self.template:
            found.append("tools")
        if kind == "vision":
            found.append("vision")
        switches = ("enable_thinking", "<think>", "reasoning_effort", "[THINK]")
        if any(word in self.template for word in switches):
            found.append("thinking")
        return found


class Choices:
    """Looks up the models that may answer a call."""

    def __init__(
        self,
        rt: Runtime,
        config: Callable[[], ServingConfig],
        guard: CloudGuard,
        costs: Costs,
        environment: Mapping[str, str],
    ) -> None:
        """Looks up models in `rt` and in its catalogue. `config()` returns the content of `tasks.yaml`.

        `guard` is the cloud guard, `costs` has the measured durations, and `environment` the clouds' addresses and
        keys.
        """
        self._rt = rt
        self._config = config
        self._guard = guard
        self._costs = costs
        self._environment = environment
        self._facts: dict[str, ModelFacts] = {}
        self._began = int(time.time())  # `/v1/models` shows it as the creation time of each model
        # Returns how many calls of a model wait or run.
        self.calls_of: Callable[[str], int] = lambda model: 0

    def of(
        self, call: Call, may_name: Callable[[str], bool] = lambda name: True
    ) -> tuple[tuple[Choice, ...], Call]:
        """The models that may answer `call`, in the order in which they are tried, and the `call` itself.

        If the call names a task, the returned call has the task's budget and time to stay warm, unless it sets its
        own. Raises Refused with 404 for an unknown model, naming those for which `may_name` is true, and with 504 if
        the budget is too short for all models. Some calls with too short budgets are tried, see `Costs.is_trial`.
        """
        try:
            return self._expected(call, may_name, lambda model: self._costs.expect(model, call))
        except Refused as refused:
            if refused.code != TOO_SHORT or not self._costs.is_trial(call.model):
                raise
            return self._expected(call, may_name, lambda model: Cost())

    def _expected(
        self, call: Call, may_name: Callable[[str], bool], cost: Callable[[str], Cost]
    ) -> tuple[tuple[Choice, ...], Call]:
        """The result of `of`, with the measured `cost` of the call with each model."""
        if call.model.startswith(TASK_PREFIX):
            name = call.model.removeprefix(TASK_PREFIX)
            task = self._config().tasks.get(name)
            if task is None:
                raise self._unknown(call.model, may_name)
            budget = task.budget_s if call.budget is None else call.budget
            stay_warm = task.keep_alive_s if call.stay_warm is None else call.stay_warm
            call = replace(call, budget=budget, stay_warm=stay_warm)
            found = candidates(
                name,
                task,
                warm=self._rt.here,
                known=self._known,
                cost=cost,
                allow_cloud=self._guard.allowed,
                budget=budget,
                load=self.calls_of,
            )
            return found, call
        if not self._known(call.model) and not is_configured_cloud(call.model, self._environment):
            raise self._unknown(call.model, may_name)
        fallbacks = self._config().fallbacks(call.model)
        guard = self._guard
        choices = chain(call.model, fallbacks, self._context, self._known, lambda: guard.allowed)
        warm = self._rt.here
        fitting = tuple(choice for choice in choices if fits(choice, call.budget, warm, cost))
        if not fitting:
            raise too_short(call.model, choices, call.budget, warm, cost)
        return fitting, call

    def doubts(self, config: ServingConfig) -> Iterator[str]:
        """Yields a sentence for each name in `config` that no call can use now, and for each hidden model."""
        for field, name in config.named_models():
            task = name.removeprefix(TASK_PREFIX) if name.startswith(TASK_PREFIX) else None
            is_known = name in config.aliases or self._known(name) or task in config.tasks
            if not is_known and not is_configured_cloud(name, self._environment):
                yield f"{field}: there is no model {quoted(name)} now"
        for name, model in config.aliases.items():
            if self._known(name):
                yield f"aliases.{name}: this hides the model {quoted(name)}; calls get {model}"

    def models(self) -> list[Json]:
        """The rows of `/v1/models`: the models of this process and of the catalogue, and the tasks and aliases."""
        rows = [self._model_row(spec) for spec in self._specs()]
        for name, task in self._config().tasks.items():
            rows.append(self._row(TASK_PREFIX + name, {"candidates": list(task.candidates)}))
        for name, model in self._config().aliases.items():
            rows.append(self._row(name, {"alias_of": model}))
        return rows

    def _specs(self) -> list[ModelSpec]:
        """The models of this process and of the catalogue that can be called."""
        specs = {spec.name: spec for spec in self._rt.specs()}
        for name in self._rt.catalog_names():
            with contextlib.suppress(GpuError):  # a broken entry is not listed
                specs.setdefault(name, self._rt.spec(name))
        return [spec for spec in specs.values() if spec.enabled]

    def _row(self, id: str, facts: Json) -> Json:
        head = {"id": id, "object": "model", "created": self._began, "owned_by": "gpu-console"}
        return {**head, "x_gpu": facts}

    def facts(self, name: str) -> ModelFacts | None:
        """What is known of the model with this name or alias; None for a task, or if the model is unknown.

        The source is read once for each specification of the model, which may take milliseconds.
        """
        name = self._config().aliases.get(name, name)
        try:
            spec = self._rt.spec(name)
            known = self._facts.get(name)
            if known is None or known.spec != spec:
                known = self._facts[name] = ModelFacts(spec, *self._rt._source_facts(name))
        except GpuError:  # the model is unknown, or its entry is broken: a call reports it
            return None
        return known

    def _model_row(self, spec: ModelSpec) -> Json:
        warm = self._rt.here(spec.name)
        facts = {"model_type": spec.model_type, "backend": spec.backend, "warm": warm}
        row = self._row(spec.name, facts)
        known = self.facts(spec.name)
        if known and known.context_length:  # the second name is vLLM's
            row |= dict.fromkeys(("context_length", "max_model_len"), known.context_length)
        return row

    def _known(self, name: str) -> bool:
        try:
            self._rt.spec(name)
        except UnknownModel:  # the task uses its next candidate
            return False
        except GpuError:  # the catalogue cannot be read now: the use of the model reports it
            return True
        return True

    def _unknown(self, name: str, may_name: Callable[[str], bool]) -> Refused:
        config = self._config()
        tasks = (TASK_PREFIX + task for task in config.tasks)
        names = {*(spec.name for spec in self._specs()), *tasks, *config.aliases}
        known = tuple(sorted(filter(may_name, names)))
        advice = "See them:  GET /v1/models"
        if ":" in name and not name.startswith(TASK_PREFIX):
            variable = address_variable(name.partition(":")[0])
            cloud = "If it is the model of a cloud, its address is missing"
            advice += f"\n  {cloud}:  {variable}=https://…"
        error = UnknownModel(name, known, none="None is registered.", advice=advice)
        return Refused(404, "model_not_found", str(error), param="model")

    def _context(self, name: str) -> int | None:
        with contextlib.suppress(GpuError):  # the model is unknown here
            length = self._rt.spec(name).options.get("context_length")
            return length if isinstance(length, int) else None
        return None
