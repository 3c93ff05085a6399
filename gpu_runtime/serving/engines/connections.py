"""Connections to engines. A request takes the connection that became free last, or makes a new one.

httpx sends requests through the connection pool of httpcore. This pool looks at each of its connections for each
request. With 32 clients, that took a third of the server's processor time (py-spy, a llama-server with 32 slots, 635
samples). So this module makes pools (httpx calls them transports) of one connection each, and chooses among them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx

MOST_FREE = 32  # connections to one address that are kept although no request uses them
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1)

Address = tuple[bytes, bytes, int | None]  # scheme, host and port


class EngineTransport(httpx.AsyncBaseTransport):
    """The transport for a client of httpx. It uses no proxies, and sends each request through a free connection."""

    def __init__(self) -> None:
        self._free: dict[Address, list[httpx.AsyncHTTPTransport]] = {}
        self._context = (
            httpx.create_ssl_context()
        )  # one context for all connections, since reading the certificates takes long
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends the `request`. The connection is free again when the response is closed."""
        url = request.url
        address = url.raw_scheme, url.raw_host, url.port
        free = self._free.setdefault(address, [])
        one = free.pop() if free else self._new()
        try:
            response = await one.handle_async_request(request)
        except BaseException:
            await one.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, lambda: self._keep(address, one))
        return response

    def _new(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=self._context, limits=_ONE, trust_env=False)

    def _keep(
        self, address: Address, one: httpx.AsyncHTTPTransport
    ) -> httpx.AsyncHTTPTransport | None:
        """Keeps the transport `one`, which is free now. Returns a transport that the caller has to close, or None.

        After `aclose`, the result is `one` itself. If more than MOST_FREE transports to this `address` are free, the
        result is the transport that has been free the longest.
        """
        free = self._free.setdefault(address, [])
        if self._closed:
            return one
        free.append(one)
        return free.pop(0) if len(free) > MOST_FREE else None

    async def aclose(self) -> None:
        """Closes all free connections. The other connections are closed with their responses."""
        self._closed = True
        free, self._free = self._free, {}
        for transports in free.values():
            for one in transports:
                await one.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of a response. When the body is closed, the response's transport becomes free.

    `keep()` keeps this transport for the next request, and returns a transport to close, or None.
    """

    def __init__(
        self, body: httpx.AsyncByteStream, keep: Callable[[], httpx.AsyncHTTPTransport | None]
    ) -> None:
        self._body = body
        self._keep: Callable[[], httpx.AsyncHTTPTransport | None] | None = keep

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        """Ends the response. A connection with unread bytes is closed, and its transport stays usable."""
        try:
            await self._body.aclose()
        finally:
            keep, self._keep = self._keep, None
            surplus = keep() if keep else None
            if surplus is not None:
                await surplus.aclose()
