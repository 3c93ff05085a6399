"""A gateway over simulated cards, with a clock that the test sets and engines that follow a script."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime import Runtime
from gpu_runtime.serving.engines.base import EngineAdapter
from gpu_runtime.serving.engines.registry import EchoAdapter, adapter_for
from gpu_runtime.serving.gateway import Gateway
from gpu_runtime.serving.requests import Refused
from gpu_runtime.serving.tasks import ServingConfig
from tests.clock import Clock
from tests.owner.conftest import where
from tests.serving.loops import settle, until


def chat(model: str, text: str = "one two three", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


@contextmanager
def refusal(
    status: int,
    code: str = "",
    *,
    param: str = "",
    retry_after: float | None = None,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Refused]]:
    """The `with` block must be refused with this status, and with the code, parameter and words that are given."""
    with pytest.raises(Refused, match=match) as refused:
        yield refused
    error = refused.value
    assert error.status == status, str(error)
    assert code in ("", error.code) and (not param or error.facts["param"] == param)
    assert retry_after in (None, error.retry_after)


def answer_text(reply: Any) -> str:
    return reply.json["choices"][0]["message"]["content"]


async def stream_text(reply: Any) -> str:
    return "".join(
        [
            choice["delta"].get("content") or ""
            async for event in reply.events
            for choice in event.get("choices", ())
        ]
    )


class Scripted(EchoAdapter):
    """An engine that follows its script, with one entry of the script for each call.

    After an error it fails at the plain call too, unless the error has `only_this_call`. It raises an exception, or
    answers with the prompt. With an event, it waits for the event after each piece. With a tuple, it raises the error
    in the tuple after the first piece.
    """

    def __init__(self, value: Any, spec: Any, script: list[Any], log: list[str]) -> None:
        super().__init__(value, spec)
        self._script, self._log = script, log
        self._failed: BaseException | None = None

    async def pieces(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncGenerator[Any]:
        if self._failed is not None and not hasattr(self._failed, "only_this_call"):
            raise self._failed
        self._log.append(f"{self.spec.name}: {self.prompt(kind, body, think)}")
        try:
            step = self._script.pop(0) if self._script else None
            if isinstance(step, BaseException):
                self._failed = step
                raise step
            async for piece in super().pieces(kind, body, think):
                yield piece
                if isinstance(step, asyncio.Event):
                    await step.wait()
                if isinstance(step, tuple):
                    self._failed = step[0]
                    raise step[0]
        finally:
            self._log.append(f"{self.spec.name} ended")


class Guard(SimpleNamespace):
    """A CloudGuard without a file."""

    def __init__(self, allowed: bool) -> None:
        super().__init__(allowed=allowed)

    def allow(self, allowed: bool) -> None:
        self.allowed = allowed


class Harness:
    """A gateway with `models` (name -> GiB) on one card of 24 GiB, of which 21.6 GiB may be claimed."""

    def __init__(
        self,
        serving: ServingConfig | None = None,
        *,
        ledger: str = "memory:",
        scripts: dict[str, list[Any]] | None = None,
        environment: dict[str, str] | None = None,
        options: dict[str, dict[str, Any]] | None = None,
        make_adapter: Callable[..., EngineAdapter] | None = None,
        guard: Any = None,
        settings: dict[str, Any] | None = None,
        keys: Callable[[], Any] = dict,
        **models: float,
    ) -> None:
        self.clock, self.log, self.scripts = Clock(), [], scripts or {}
        self.rt = Runtime(devices="sim:24GiB,host:64GiB", ledger=ledger, **(settings or {}))
        for name, gib in models.items():
            given = {"model_type": "llm", **(options or {}).get(name, {})}
            self.rt.register(name, backend="fake", size=f"{gib} GiB", **given)
        self.gateway = Gateway(
            self.rt, clock=self.clock, environment=environment or {}, guard=guard or Guard(True), keys=keys,
            make_adapter=make_adapter or self._adapter,
        )  # fmt: skip
        content = serving or ServingConfig()
        self.gateway._tasks = SimpleNamespace(content=lambda: content, reload=lambda: None)

    def _adapter(self, value: Any, spec: Any, http: Any) -> EngineAdapter:
        if spec.name in self.scripts:
            return Scripted(value, spec, self.scripts[spec.name], self.log)
        return adapter_for(value, spec, http)

    async def chat(self, model: str, text: str = "one two three", **more: Any) -> Any:
        return await self.gateway.answer("chat", chat(model, text, **more))

    def pins(self) -> dict[str, int]:
        seen = self.rt.status()
        mine = seen.sections.get(seen.owner.id)
        return {lease.name: lease.pins for lease in (mine.leases if mine else ()) if lease.pins}

    def where(self) -> dict[str, str]:
        return where(self.rt)


@asynccontextmanager
async def harness(*args: Any, **kwargs: Any) -> AsyncIterator[Harness]:
    """Yields a Harness. At the end of the `with` block no running call, pin or request in the book may remain."""
    made = Harness(*args, **kwargs)
    try:
        yield made
        await settle()
        state = made.gateway.state()
        assert (state.waiting, state.running) == ({}, {})
        await until(lambda: not made.pins())
        await until(lambda: not made.rt.status().tickets)
        assert all(pattern.running == 0 for pattern in state.clients.values())
    finally:
        await made.gateway.close()
        made.rt.close()
