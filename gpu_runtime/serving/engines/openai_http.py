"""Talking to whatever speaks OpenAI's HTTP: an engine in a process of its own, or a cloud."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx

from ...facts import ModelSpec
from ..requests import Refused
from ..routing.profiles import thought
from . import chat_template
from .base import EngineFailed

PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
    "images": "/images/generations",
}
TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # an engine may think for long before its first token
POLL_SECONDS = 0.05
_CALLERS = (400, 404, 413, 422)  # statuses that blame the request


def open_client() -> httpx.AsyncClient:
    """The client for engines and clouds. It follows no redirects: a key goes only where it was meant to."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return httpx.AsyncClient(timeout=TIMEOUT, limits=limits, follow_redirects=False, trust_env=True)


class RemoteSpeaker:
    """Passes a body on, under the other side's name for the model, and its answer back, under ours.

    `there` has `base_url`, `model` and `headers`. Where it has `starting`, that tells whether to wait with asking, and
    `chat_template` what its switches reach.
    """

    def __init__(
        self, name: str, there: Any, http: httpx.AsyncClient, spec: ModelSpec | None = None
    ) -> None:
        self.name, self._there, self._http = name, there, http
        self._spec = spec  # None: a cloud's, which is told nothing but the body

    async def answer(self, kind: str, body: dict[str, Any], think: bool | None) -> dict[str, Any]:
        response = await self._sent(await self._request(kind, {**body, "stream": None}, think))
        async with aclosing(response):
            data = await self._read(response)
        try:
            said = json.loads(data)
            assert isinstance(said, dict)
        except (ValueError, AssertionError):
            raise self._failed(f"it answered with what is no JSON object: {_short(data)}") from None
        return {**said, "model": self.name} if kind != "images" else said

    async def stream(
        self, kind: str, body: dict[str, Any], think: bool | None
    ) -> AsyncIterator[dict[str, Any]]:
        response = await self._sent(await self._request(kind, {**body, "stream": True}, think))
        async with aclosing(response):
            async for event in self._events(response):
                if "error" in event and "choices" not in event:
                    raise self._failed(_message(event["error"]))
                yield {**event, "model": self.name}

    async def _request(self, kind: str, body: dict[str, Any], think: bool | None) -> httpx.Request:
        while getattr(
            self._there, "starting", False
        ):  # a restart is soon over; to fail meanwhile would open breakers
            await asyncio.sleep(POLL_SECONDS)
        there = self._there
        body = {name: value for name, value in body.items() if value is not None} | {
            "model": there.model
        }
        if kind == "chat" and self._spec is not None:
            body |= self._prompted(body, think, self._spec)
        return self._http.build_request(
            "POST", there.base_url.rstrip("/") + PATHS[kind], json=body, headers=there.headers
        )

    def _prompted(
        self, body: dict[str, Any], think: bool | None, spec: ModelSpec
    ) -> dict[str, Any]:
        """Fields by which the engine makes another prompt: by a switch of its template, where it lets us have it."""
        template = getattr(self._there, "chat_template", None)
        if template != "":
            template = (
                chat_template.override(spec.options) or template or "enable_thinking"
            )  # not known: newer ones do
        messages, switches = thought(body["messages"], think, template)
        fields: dict[str, Any] = {"messages": messages}
        if switches:
            fields["chat_template_kwargs"] = {
                **(body.get("chat_template_kwargs") or {}),
                **switches,
            }
        return fields

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._failed(
                f"{request.url} did not answer: {type(error).__name__} {error}".rstrip()
            ) from error
        if response.is_success:
            return response
        async with aclosing(response):
            text = _short(await self._read(response))
        try:
            said = json.loads(text)
            text = _message(said.get("error") or said["detail"])  # the second where FastAPI refuses
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        if response.status_code in _CALLERS:
            raise Refused(
                response.status_code if response.status_code != 404 else 400,
                "engine_refused",
                f"{self.name} refused: {text}",
            )
        raise self._failed(f"HTTP {response.status_code}: {text}")

    async def _read(self, response: httpx.Response) -> bytes:
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise self._failed(
                f"its answer broke off: {type(error).__name__} {error}".rstrip()
            ) from error

    async def _events(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        """The data of its server-sent events. Raises EngineFailed where they end before their end is said."""
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
            raise self._failed(
                f"its answer broke off: {type(error).__name__} {error}".rstrip()
            ) from error
        except ValueError:
            raise self._failed("it sent an event that is no JSON") from None
        raise self._failed("its answer broke off")

    def _failed(self, why: str) -> EngineFailed:
        return EngineFailed(f"{self.name} failed: {why}", name=self.name, why=why)


def _message(error: Any) -> str:
    """An error's words, as any of the engines shapes it."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _short(data: bytes) -> str:
    return data[:500].decode("utf-8", "replace").strip()
