"""The adapter of engines with OpenAI's HTTP API: an engine in its own process, or a cloud."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx

from ...facts import ModelSpec
from ..requests import Refused
from ..routing.profiles import with_thinking
from . import chat_template
from .base import EngineFailed, cannot
from .connections import MOST_FREE, EngineTransport
from .tool_calls import tools_of

PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
    "images": "/images/generations",
    "rerank": "/rerank",
}
# An engine may compute for long before its first token.
TIMEOUT = httpx.Timeout(600.0, connect=10.0)
POLL_SECONDS = 0.05
# If the template of an engine is not known, this text takes its place. The text has the names of the variables by which
# newer templates read tools and turn thinking off. Without these names, calls with tools would be refused.
UNKNOWN_TEMPLATE = "enable_thinking, tools"
TOO_MANY = 429
BUSY_SECONDS = 5.0  # until the caller may retry, if a busy engine names no time
_CALLER_STATUSES = (400, 404, 413, 422)  # statuses that mean a mistake in the request


def open_client(*, proxies: bool) -> httpx.AsyncClient:
    """An HTTP client. If `proxies` is true, it uses the proxies of the environment: for clouds, not for engines.

    The client follows no redirect, so a key is sent only to the address for which it is set.
    """
    if not proxies:
        return httpx.AsyncClient(timeout=TIMEOUT, transport=EngineTransport(), trust_env=False)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MOST_FREE)
    return httpx.AsyncClient(timeout=TIMEOUT, limits=limits)


class HttpAdapter:
    """Sends each call's body to an engine with OpenAI's HTTP API, and returns the engine's answer.

    The engine may have another name for the model. The adapter replaces the name in requests and in answers.
    """

    counts_tokens = False  # some engines do not know the field `stream_options`

    def __init__(
        self, name: str, handle: Any, http: httpx.AsyncClient, spec: ModelSpec | None = None
    ) -> None:
        """An adapter for the model `name`. It sends requests through the client `http`. A cloud's model has no `spec`.

        `handle` has `base_url`, `model` and `headers`. Further attributes are optional: `starting` is whether the
        engine restarts now, `chat_template` is the engine's template, `listens()` is whether the port of `base_url`
        reaches the engine, and `more_paths` are paths that engines usually lack.
        """
        self.name = name
        self._handle = handle
        self._http = http
        self._spec = spec

    async def answer(self, kind: str, body: dict[str, Any], think: bool | None) -> dict[str, Any]:
        """See `EngineAdapter.answer`, which has the same parameters `kind`, `body` and `think`."""
        response = await self._send(await self._request(kind, {**body, "stream": None}, think))
        async with aclosing(response):
            data = await self._read(response)
        try:
            answer = json.loads(data)
        except ValueError:  # the error below shows it
            answer = None
        if not isinstance(answer, dict):
            raise self._failed(f"its answer is no JSON object: {_shorten(data)}")
        return {**answer, "model": self.name} if kind != "images" else answer

    async def stream(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncIterator[dict[str, Any]]:
        """See `EngineAdapter.stream`, which has the same parameters `kind`, `body` and `think`."""
        response = await self._send(await self._request(kind, {**body, "stream": True}, think))
        async with aclosing(response):
            async for event in self._events(response):
                if "error" in event and "choices" not in event:
                    raise self._failed(_error_text(event["error"]))
                yield {**event, "model": self.name}

    async def _request(self, kind: str, body: dict[str, Any], think: bool | None) -> httpx.Request:
        # The call waits until the engine has restarted, which takes a short time. If calls failed meanwhile, they
        # would open the circuit breaker.
        while getattr(self._handle, "starting", False):
            await asyncio.sleep(POLL_SECONDS)
        handle = self._handle
        path = {**PATHS, **getattr(handle, "more_paths", {})}.get(kind)
        if path is None:
            raise cannot(self.name, f"its engine has no route for {kind} here", "model")
        fields = {name: value for name, value in body.items() if value is not None}
        fields["model"] = handle.model
        if kind == "chat" and self._spec is not None:
            fields |= self._prompt_fields(fields, think, self._spec)
        url = handle.base_url.rstrip("/") + path
        request = self._http.build_request("POST", url, json=fields, headers=handle.headers)
        if hasattr(handle, "listens"):
            request.extensions = {**request.extensions, "trace": self._check_listener}
        return request

    async def _check_listener(self, event: str, info: dict[str, Any]) -> None:
        """Closes a new connection that does not reach the engine. The HTTP client calls this method with each `event`.

        After an engine has ended, a process of another user may listen on its port. A connection to such a process is
        closed before anything is sent.
        """
        if event == "connection.connect_tcp.complete" and not self._handle.listens():
            await info["return_value"].aclose()
            raise self._failed("no process of the engine listens on its port")

    def _prompt_fields(
        self, body: dict[str, Any], think: bool | None, spec: ModelSpec
    ) -> dict[str, Any]:
        """The fields `messages` and `chat_template_kwargs` that replace those fields of `body` in the request.

        The engine makes its prompt from these fields. `chat_template_kwargs` is included only if `think` needs
        variables of the engine's chat template. Raises Refused for tools that this template would ignore.
        """
        template = getattr(self._handle, "chat_template", None)
        template = UNKNOWN_TEMPLATE if template is None else template
        if template:
            template = chat_template.override(spec.options) or template
        if template and "tools" not in template and tools_of(body).tools:
            raise cannot(self.name, "its chat template takes no tools", "tools")
        messages, switches = with_thinking(body["messages"], think, template, self.name)
        fields: dict[str, Any] = {"messages": messages}
        if switches:
            variables = body.get("chat_template_kwargs") or {}
            fields["chat_template_kwargs"] = {**variables, **switches}
        return fields

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            why = f"{request.url} did not answer: {type(error).__name__} {error}".rstrip()
            raise self._failed(why) from error
        if response.is_success:
            return response
        async with aclosing(response):
            text = _error_of_body(_shorten(await self._read(response)))
        status = response.status_code
        if status in _CALLER_STATUSES:
            status = 400 if status == 404 else status
            raise Refused(status, "engine_refused", f"{self.name} refused: {text}")
        if status == TOO_MANY:
            seconds = _seconds(response.headers.get("Retry-After"))
            raise Refused(
                503, "engine_busy", f"{self.name} is busy: HTTP {status}: {text}", seconds
            )
        if 400 <= status < 500:  # for example a wrong key, which is no fault of the engine
            raise Refused(502, "engine_refused", f"{self.name} refused us: HTTP {status}: {text}")
        raise self._failed(f"HTTP {status}: {text}")

    async def _read(self, response: httpx.Response) -> bytes:
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise self._broken_off(error) from error

    async def _events(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        """Yields the data of each server-sent event in `response`.

        Raises EngineFailed if the stream ends before `[DONE]`.
        """
        try:
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict):
                    yield event
        except httpx.HTTPError as error:
            raise self._broken_off(error) from error
        except ValueError:
            raise self._failed("it sent an event that is no JSON") from None
        raise self._failed("its answer broke off")

    def _broken_off(self, error: httpx.HTTPError) -> EngineFailed:
        return self._failed(f"its answer broke off: {type(error).__name__} {error}".rstrip())

    def _failed(self, why: str) -> EngineFailed:
        return EngineFailed(f"{self.name} failed: {why}", name=self.name, why=why)


def _seconds(header: str | None) -> float:
    """The seconds in `header`, a header `Retry-After`, at most an hour. BUSY_SECONDS if it is missing or a date."""
    if header and header.isascii() and header.isdigit():
        return min(3600.0, float(header))
    return BUSY_SECONDS


def _error_of_body(text: str) -> str:
    """The message in `text`, which is the body of an error. The result is the whole `text` if its format is unknown."""
    try:
        body = json.loads(text)
        return _error_text(body.get("error") or body["detail"])  # FastAPI writes "detail"
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


def _error_text(error: Any) -> str:
    """The message of `error`, in any of the formats that engines use."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _shorten(data: bytes) -> str:
    return data[:500].decode("utf-8", "replace").strip()
