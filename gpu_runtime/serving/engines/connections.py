"""The HTTP client for engines and clouds. Its connections are used again for later requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

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
# A free connection is closed after this time. Most engines close it after 5 s; a request that is sent at this moment
# would fail.
FREE_SECONDS = 3.0

# Is called when a new connection is open, before anything is sent. It raises an error if nothing may be sent.
check_connection: ContextVar[Callable[[], None] | None] = ContextVar(
    "check_connection", default=None
)


class _Connector(aiohttp.TCPConnector):
    async def _create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """A new connection. aiohttp calls this method in the context of the request that needs it."""
        connection = await super()._create_connection(*args, **kwargs)
        check = check_connection.get()
        try:
            if check:
                check()
        except BaseException:
            connection.close()
            raise
        return connection


def open_client(*, proxies: bool) -> aiohttp.ClientSession:
    """An HTTP client. If `proxies` is true, it uses the proxies of the environment: for clouds, not for engines.

    It keeps no cookies. It must be made in a running event loop. Its requests must not follow redirects, so that a key
    is sent only to the address for which it is set.
    """
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, keepalive_timeout=FREE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=TIMEOUT,
        trust_env=proxies,
    )
