"""A client that hangs up before the first word of a stream: nobody reads it, and it lets go all the same."""

from __future__ import annotations

import asyncio

from tests.serving.kitchen import kitchen
from tests.serving.loops import in_loop, until


@in_loop
async def test_a_stream_whose_client_is_gone_before_its_first_word_is_closed():
    """Its generator never began, so nothing in it would ever be cleaned up."""
    from gpu_runtime.serving.api.openai import Sent

    async with kitchen(qwen=4) as k:
        sent = Sent(await k.chat("qwen", stream=True))
        await until(lambda: k.pins() == {"qwen": 1})

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(3600)  # the connection takes nothing any more

        await sent({"type": "http"}, receive, send)
        assert k.gateway.state().running == {}
