"""Finds the models that may answer a call, and what callers may know of a model before it is loaded.

The package `routing` makes the decisions. This module looks up their inputs: the models of a Runtime, `tasks.yaml`,
the cloud guard (whether clouds may be used as stand-ins), and the measured durations.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import BadSetting, GpuError, UnknownModel
from ..facts import Evidence, ModelSpec
from ..safe_text import quoted
from .engines import chat_template
from .health.costs import Costs
from .requests import Call, Json, Refused
from .routing.fallback import Choice, CloudGuard, address_variable, chain, is_configured_cloud
from .routing.tasks import TOO_SHORT, Cost, ServingConfig, Task, candidates, fits, too_short

if TYPE_CHECKING:
    from ..runtime import Runtime

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

        If the call names a task and sets no time budget, the returned call has the task's budget. Raises Refused with
        404 for an unknown model, naming those for which `may_name` is true, and with 504 if the budget is too short for
        all models. Some calls with too short budgets are tried, see `Costs.is_trial`.
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
        task = self.task(call.model, may_name)
        if task is not None:
            budget = task.budget_s if call.budget is None else call.budget
            call = replace(call, budget=budget)
            return self._of_task(call, task, cost), call
        if not self._known(call.model) and not is_configured_cloud(call.model, self._environment):
            raise self._unknown(call.model, may_name)
        stand_ins = self._config().stand_ins(call.model)
        guard = self._guard
        choices = chain(call.model, stand_ins, self._context, self._known, lambda: guard.allowed)
        warm = self._rt.here
        fitting = tuple(choice for choice in choices if fits(choice, call.budget, warm, cost))
        if not fitting:
            raise too_short(call.model, choices, call.budget, warm, cost)
        return fitting, call

    def task(self, name: str, may_name: Callable[[str], bool] = lambda name: True) -> Task | None:
        """The task of a `name` in the form `task:NAME`; None for another form. Raises Refused (404) for no task."""
        if not name.startswith(TASK_PREFIX):
            return None
        task = self._config().tasks.get(name.removeprefix(TASK_PREFIX))
        if task is None:
            raise self._unknown(name, may_name)
        return task

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
        specs = {spec.name: spec for spec in self._rt.specs()}
        for name in self._rt.catalog_names():
            with contextlib.suppress(GpuError):  # a broken entry is not listed
                specs.setdefault(name, self._rt.spec(name))
        rows = [self._model_row(spec) for spec in specs.values() if spec.enabled]
        for name, task in self._config().tasks.items():
            rows.append(self._row(TASK_PREFIX + name, {"candidates": list(task.candidates)}))
        for name, model in self._config().aliases.items():
            rows.append(self._row(name, {"alias_of": model}))
        return rows

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

    def _of_task(self, call: Call, task: Task, cost: Callable[[str], Cost]) -> tuple[Choice, ...]:
        return candidates(
            call.model.removeprefix(TASK_PREFIX),
            task,
            warm=self._rt.here,
            known=self._known,
            cost=cost,
            allow_cloud=self._guard.allowed,
            budget=call.budget,
            load=self.calls_of,
        )

    def _known(self, name: str) -> bool:
        try:
            self._rt.spec(name)
        except UnknownModel:  # the task uses its next candidate
            return False
        except GpuError:  # the catalogue cannot be read now: the use of the model reports it
            return True
        return True

    def _unknown(self, name: str, may_name: Callable[[str], bool]) -> Refused:
        known = tuple(sorted(filter(may_name, [row["id"] for row in self.models()])))
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
