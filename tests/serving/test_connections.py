"""Connections to engines are used again, and none is shared by two requests at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from gpu_runtime.serving.engines import openai_http as connections
from gpu_runtime.serving.engines.openai_http import HttpClient
from tests.serving.loopback import loopback
from tests.serving.loops import until

CLOSES = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
KEEPS = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Engine:
    """A server that answers each request with `answer`, after `gate` if that is set."""

    def __init__(self) -> None:
        self.answer, self.gate = KEEPS, None
        self.opened = self.ended = 0
        self.writers = []

    async def serve(self, reader, writer) -> None:
        self.opened += 1
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if self.gate:
                    await self.gate.wait()
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.ended += 1
        finally:
            writer.close()


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[Engine, HttpClient, str]]:
    one = Engine()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, aclosing(HttpClient(proxies=False)) as client:
        yield one, client, url


async def text(client: HttpClient, url: str) -> str:
    async with await client.post(url, {}, {}) as response:
        return await response.text()


async def test_calls_at_the_same_time_have_a_connection_each_and_none_stays_open_for_long(
    monkeypatch,
):
    monkeypatch.setattr(connections, "FREE_SECONDS", 0.05)
    async with engine() as (one, client, url):
        one.gate = asyncio.Event()
        calls = [asyncio.ensure_future(text(client, url)) for _ in range(8)]
        await until(lambda: one.opened == 8)
        one.gate.set()
        assert [await call for call in calls] == ["ok"] * 8
        await until(lambda: one.ended == 8)
        assert await text(client, url) == "ok" and one.opened == 9


@pytest.mark.parametrize("closed", ["never", "with the answer", "later"])
async def test_calls_share_a_connection_until_the_engine_closes_it(closed):
    async with engine() as (one, client, url):
        one.answer = CLOSES if closed == "with the answer" else KEEPS
        for _ in range(3):
            assert await text(client, url) == "ok"
            if closed == "later":
                one.writers[-1].close()
                await one.writers[-1].wait_closed()
                await asyncio.sleep(0)
        assert one.opened == (1 if closed == "never" else 3)


async def test_a_call_that_is_cancelled_ends_its_connection():
    async with engine() as (one, client, url):
        one.gate = asyncio.Event()
        call = asyncio.ensure_future(text(client, url))
        await until(lambda: one.opened == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        one.gate.set()
        await until(lambda: one.ended == 1)
        assert await text(client, url) == "ok" and one.opened == 2


async def test_a_stream_that_is_left_ends_its_connection():
    async with engine() as (one, client, url):
        one.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"
        async with await client.post(url, {}, {}):
            pass
        await until(lambda: one.ended == 1)
        one.answer = KEEPS
        assert await text(client, url) == "ok" and one.opened == 2


async def test_the_end_of_the_client_closes_the_free_connections():
    async with engine() as (one, client, url):
        await text(client, url)
        await client.aclose()
        await until(lambda: one.ended == 1)


@pytest.mark.parametrize("through", ["proxy", "no_proxy", "for engines"])
async def test_only_clouds_are_reached_through_the_proxy_of_the_environment(
    through, monkeypatch, tmp_path
):
    """The client sends the given key, and no password of another program from ~/.netrc."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ann password secret")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    async with loopback() as proxy, loopback() as there:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("no_proxy", "127.0.0.1" if through == "no_proxy" else "")
        proxy.answers, there.answers = [{}], [{}]
        url = f"{there.url}/chat"
        async with aclosing(HttpClient(proxies=through != "for engines")) as client:
            async with await client.post(url, {}, {"Authorization": "Bearer key"}) as response:
                assert response.status == 200
        [(path, headers, _)] = proxy.requests if through == "proxy" else there.requests
        assert path == (url if through == "proxy" else "/v1/chat")
        assert headers["authorization"] == "Bearer key"
        assert len(proxy.requests) + len(there.requests) == 1
