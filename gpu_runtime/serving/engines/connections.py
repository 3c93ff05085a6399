"""The HTTP client for engines and clouds. Its connections are used again for later requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

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
        """A client of the running event loop.

        If `proxies` is true, it uses the proxies of the environment: for clouds, not for engines.
        """
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

        `check()` is called when a new connection is open, before anything is sent. It raises an error if nothing may be
        sent.
        """
        token = _check.set(check)
        try:
            return await self._session.post(
                url,
                json=body,
                headers=headers,
                allow_redirects=False,
                proxy=_proxy_for(url) if self._proxies else None,
            )
        finally:
            _check.reset(token)

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`, or None."""
    parts, known = urlsplit(url), getproxies()
    found = known.get(parts.scheme) or known.get("all")
    return None if not found or proxy_bypass(parts.netloc) else found
