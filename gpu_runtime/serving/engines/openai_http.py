"""The adapter of engines with OpenAI's HTTP API, an engine in its own process or a cloud, and its HTTP client."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from ...facts import ModelSpec
from ..records import traceparent
from ..requests import LOAD, Json, Refused, read_by_server
from . import chat_template
from .base import EngineFailed, cannot, require_tools, told_tools, without_tools
from .chat_template import with_thinking
from .openai_format import with_whole_arguments

PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
    "images": "/images/generations",
    "rerank": "/rerank",
}
POLL_SECONDS = 0.05
# If the template of an engine is not known, this text takes its place. The text has the names of the variables by which
# newer templates read tools and turn thinking off. Without these names, calls with tools would be refused.
UNKNOWN_TEMPLATE = "enable_thinking, tools"
TOO_MANY = 429
TOO_LARGE = "is too large to process"  # a text for an embedding. Source: llama.cpp, tools/server
BUSY_SECONDS = 5.0  # until the caller may retry, if a busy engine names no time
# How engines say that prompt and answer are too long. Sources: vLLM, entrypoints/openai; llama.cpp, tools/server
_TOO_LONG = re.compile(r"maximum context length is (\d+) tokens|exceeds the available context size")
_LIMITS = ("max_tokens", "max_completion_tokens")
_CALLER_STATUSES = (400, 404, 413, 422)  # statuses that mean a mistake in the request


# The errors of a request that did not reach its server, or whose answer broke off.
CONNECTION_ERRORS = (
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
    HttpProcessingError,  # a malformed body
)
# An engine may compute for long before its first token.
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=600.0)
# A free connection is closed after this time. Most engines close it after 5 s, and a request that is sent at this
# moment fails.
FREE_SECONDS = 3.0

_check: ContextVar[Callable[[], None]] = ContextVar("check")  # of the request that runs


class _Connector(aiohttp.TCPConnector):
    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """A new connection. aiohttp calls this method in the context of the request that needs it."""
        connection = await super()._create_connection(*args, **kwargs)
        try:
            _check.get()()
        except BaseException:
            connection.close()
            raise
        return connection


class HttpClient:
    """Sends requests. It keeps no cookies and follows no redirect, so a key is sent only to the given URL."""

    def __init__(self, *, proxies: bool) -> None:
        """A client of the running event loop. With `proxies`, it uses those of the environment: for clouds."""
        # `trust_env` of aiohttp would also send passwords from the file ~/.netrc.
        self._proxies = proxies
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=FREE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=TIMEOUT,
        )

    async def post(
        self,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        check: Callable[[], None] = lambda: None,
    ) -> aiohttp.ClientResponse:
        """Sends `body` as JSON, and returns the response before its body is read. Raises CONNECTION_ERRORS.

        `check()` is called when a new connection is open, before anything is sent. It raises if nothing may be sent.
        """
        token, traced = _check.set(check), traceparent.get()
        try:
            return await self._session.post(
                url,
                json=body,
                headers={**headers, "traceparent": traced} if traced else headers,
                allow_redirects=False,
                proxy=_proxy_for(url) if self._proxies else None,
            )
        finally:
            _check.reset(token)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._session.close()


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`, or None."""
    parts, known = urlsplit(url), getproxies()
    found = known.get(parts.scheme) or known.get("all")
    return None if not found or proxy_bypass(parts.netloc) else found


class HttpAdapter:
    """Sends each call's body to an engine with OpenAI's HTTP API, which may have another name for the model."""

    counts_tokens = False  # some engines do not know the field `stream_options`

    def __init__(
        self, name: str, handle: Any, http: HttpClient, spec: ModelSpec | None = None
    ) -> None:
        """An adapter for the model `name`. It sends requests through the client `http`. A cloud's model has no `spec`.

        `handle` has `base_url`, `model` and `headers`. Optional attributes: `ready_server()` has these three in its
        place, and is None while the engine restarts, `chat_template` is its template, `listens()` is whether the port
        of `base_url` reaches it, `more_paths` are paths that engines usually lack, `request_fields` are the fields that
        it reads, and `truncates` is whether `truncate` is one of them.
        """
        self.name = name
        self._handle = handle
        self._http = http
        self._spec = spec
        # The model's context in tokens, once the engine has refused the limit of an answer because of it.
        self._context = 0

    async def answer(self, kind: str, body: Json, think: bool | None) -> Json:
        if kind == LOAD and self._spec is not None:
            return {"model": self.name}
        plain = self._without_tools(kind, body)
        async with self._send(kind, {**(plain or body), "stream": None}, think) as response:
            data = await self._read(response)
        try:
            answer = json.loads(data)
        except ValueError:  # the error below shows it
            answer = None
        if not isinstance(answer, dict):
            raise self._failed(f"its answer is no JSON object: {_shorten(data)}")
        if answer.get("error") and "choices" not in answer:  # some send it with the status 200
            raise self._failed(_error_text(answer["error"]), 500)
        if plain is not None:
            answer = told_tools(answer)
        if kind == "images":
            return answer
        made = {"id": f"{kind}-{uuid.uuid4().hex}"}  # llama-server gives vectors none
        return {**made, **self._told_limit(answer), "model": self.name}

    async def stream(self, kind: str, body: Json, think: bool | None) -> AsyncIterator[Json]:
        plain = self._without_tools(kind, body)
        async with self._send(kind, {**(plain or body), "stream": True}, think) as response:
            async for event in self._events(response):
                if "error" in event and "choices" not in event:
                    raise self._failed(_error_text(event["error"]), 500)  # it still runs
                event = event if plain is None else told_tools(event)
                yield {**self._told_limit(event), "model": self.name}
                plain, self._context = None, 0

    async def _request(
        self, kind: str, body: Json, think: bool | None
    ) -> tuple[str, dict[str, str], Json]:
        handle = self._handle
        find = getattr(handle, "ready_server", lambda: handle)
        # A restart of the engine takes a short time. Calls that fail meanwhile would open the circuit breaker.
        while (server := find()) is None:
            await asyncio.sleep(POLL_SECONDS)
        path = {**PATHS, **getattr(handle, "more_paths", {})}.get(kind)
        if path is None:
            raise cannot(self.name, f"its engine has no route for {kind} here", "model")
        fields = {name: value for name, value in body.items() if value is not None}
        if kind == "embeddings" and not getattr(handle, "truncates", False):
            fields.pop("truncate", None)  # the engine decides whether a long text is refused
        fields["model"] = server.model
        if kind == "chat" and self._spec is not None:
            fields |= self._prompt_fields(fields, think, self._spec)
        known = getattr(handle, "request_fields", {}).get(kind)
        if known:
            fields = read_by_server(self.name, kind, fields, known)
        # Each new connection is checked, so the address need not be.
        return server.base_url.rstrip("/") + path, server.headers, fields

    def _require_listener(self) -> None:
        """Raises EngineFailed if a new connection reaches another process, after the engine has ended."""
        listens = getattr(self._handle, "listens", None)
        if listens and not listens():
            raise self._failed("no process of the engine listens on its port")

    def _template(self, spec: ModelSpec) -> str:
        """The chat template of the engine, or UNKNOWN_TEMPLATE; empty if the engine shows none."""
        template = getattr(self._handle, "chat_template", None)
        template = UNKNOWN_TEMPLATE if template is None else template
        return (chat_template.override(spec.options) or template) if template else ""

    def _without_tools(self, kind: str, body: Json) -> Json | None:
        spec = self._spec
        if spec is None:
            return None
        return without_tools(kind, body, lambda: self._template(spec) or UNKNOWN_TEMPLATE, spec)

    def _prompt_fields(self, body: Json, think: bool | None, spec: ModelSpec) -> Json:
        """The fields `messages` and `chat_template_kwargs`, from which the engine makes its prompt.

        The latter is there only if `think` needs variables of the chat template. Raises Refused for tools that this
        template would ignore.
        """
        template = self._template(spec)
        if template:
            require_tools(body, template, spec)
        body = {**body, "messages": with_whole_arguments(body["messages"])}
        messages, switches = with_thinking(body, think, template, self.name)
        fields: Json = {"messages": messages}
        if switches:
            variables = body.get("chat_template_kwargs") or {}
            fields["chat_template_kwargs"] = {**variables, **switches}
        return fields

    @asynccontextmanager
    async def _send(
        self, kind: str, body: Json, think: bool | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a call to the engine. Yields the response, whose body is not read yet.

        vLLM refuses an answer that may be longer than the rest of the context, but writes up to the rest without a
        limit. So such a call is sent again without its limit. Clouds decide themselves.
        """
        url, headers, fields = await self._request(kind, body, think)
        limits = [name for name in _LIMITS if fields.get(name) and self._spec is not None]
        while True:
            async with await self._post(url, headers, fields) as response:
                if 200 <= response.status < 300:
                    yield response
                    return
                data = await self._read(response)
            context = _TOO_LONG.search(data.decode("utf-8", "replace"))
            if not (limits and response.status == 400 and context and context[1]):
                raise self._refusal(response, data)
            fields, limits, self._context = {**fields, **dict.fromkeys(limits)}, [], int(context[1])

    def _told_limit(self, answer: Json) -> Json:
        """The `answer`, or a chunk of it, with a note in `x_gpu` if it may have only the rest of the context."""
        if not self._context:
            return answer
        read = (answer.get("usage") or {}).get("prompt_tokens")
        limit = self._context - read if read else "the rest of the context"
        return {**answer, "x_gpu": {**(answer.get("x_gpu") or {}), "max_tokens": limit}}

    async def _post(
        self, url: str, headers: dict[str, str], fields: Json
    ) -> aiohttp.ClientResponse:
        try:
            return await self._http.post(url, fields, headers, self._require_listener)
        except aiohttp.ClientResponseError as error:
            what = error.message.partition("\n")[0].rstrip(":")
            raise self._failed(f"{url} sent a malformed answer: {what}") from error
        except CONNECTION_ERRORS as error:
            why = f"{url} did not answer: {type(error).__name__} {error}".rstrip()
            raise self._failed(why) from error

    def _refusal(self, response: aiohttp.ClientResponse, data: bytes) -> Exception:
        """The error for a `response` without success, whose body is `data`."""
        text = _error_of_body(_shorten(data))
        status = response.status
        if status in _CALLER_STATUSES:
            status = 400 if status == 404 else status
            code = "context_length_exceeded" if _TOO_LONG.search(text) else "engine_refused"
            return Refused(status, code, f"{self.name} refused: {text}")
        if status == TOO_MANY:
            seconds = _seconds(response.headers.get("Retry-After"))
            return Refused(
                503, "engine_busy", f"{self.name} is busy: HTTP {status}: {text}", seconds
            )
        if status == 500 and TOO_LARGE in text:  # llama-server does not send 400
            why = f"{self.name} refused: {text}. n_ubatch in the catalogue raises the limit"
            return Refused(400, "engine_refused", why)
        if 400 <= status < 500:  # for example a wrong key, which is no fault of the engine
            return Refused(502, "engine_refused", f"{self.name} refused us: HTTP {status}: {text}")
        return self._failed(f"HTTP {status}: {text}", status)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except CONNECTION_ERRORS as error:
            raise self._broken_off(error) from error

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
        """Yields the data of each server-sent event. Raises EngineFailed if the stream ends before `[DONE]`."""
        try:
            async for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event, dict):
                    yield event
        except CONNECTION_ERRORS as error:
            raise self._broken_off(error) from error
        except ValueError:
            raise self._failed("it sent an event that is no JSON") from None
        raise self._failed("its answer broke off")

    def _broken_off(self, error: Exception) -> EngineFailed:
        return self._failed(f"its answer broke off: {type(error).__name__} {error}".rstrip())

    def _failed(self, why: str, status: int | None = None) -> EngineFailed:
        return EngineFailed(f"{self.name} failed: {why}", name=self.name, why=why, status=status)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of the body, of any length, without their ends."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _seconds(header: str | None) -> float:
    """The seconds of a `header` Retry-After, at most an hour. BUSY_SECONDS if it is missing or a date."""
    if header and header.isascii() and header.isdigit():
        return min(3600.0, float(header))
    return BUSY_SECONDS


def _error_of_body(text: str) -> str:
    """The message in `text`, the body of an error; the whole `text` if its format is unknown."""
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
