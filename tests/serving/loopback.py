"""A server on this machine with OpenAI's HTTP API and prepared answers, in place of an engine or a cloud."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Loopback:
    """A server that answers each request with the next of `answers`.

    It sends a dict as JSON, a list as events, an int as a status, and bytes unchanged. For `None` it disconnects.
    `requests` has the path, headers and body of each request.
    """

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.hung_up = 0  # clients that disconnected during a stream
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head[1:])
            }
            body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
            self.requests.append((head[0].split()[1], headers, body))
            await self._send(writer, self.answers.pop(0))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up += 1
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, answer: Any) -> None:
        if answer is None:
            return
        if isinstance(answer, int):
            answer = (
                b"HTTP/1.1 %d no\r\nConnection: close\r\n\r\n" % answer
                + json.dumps({"error": {"message": f"status {answer}, as told"}}).encode()
            )
        if isinstance(answer, dict):
            data = json.dumps(answer).encode()
            answer = (
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n\r\n"
                + data
            )
        if isinstance(answer, bytes):
            writer.write(answer)
            return await writer.drain()
        writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n"
        )
        for event in answer:
            if isinstance(event, asyncio.Event):
                await event.wait()
            elif event is None:
                return
            else:
                text = event if isinstance(event, str) else json.dumps(event)
                writer.write(f"data: {text}\n\n".encode())
                await writer.drain()


@asynccontextmanager
async def loopback() -> AsyncIterator[Loopback]:
    made = Loopback()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield made


def completion(text: str, model: str = "theirs") -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def chunk(text: str) -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "theirs",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }
