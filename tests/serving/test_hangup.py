"""If a client disconnects before the first event of a stream, the model is released all the same."""

from __future__ import annotations

import asyncio

from tests.serving.harness import harness
from tests.serving.loops import in_loop, until


@in_loop
async def test_a_stream_whose_client_left_before_the_first_event_is_closed():
    """The stream's generator never started, so a `finally` block in the generator would not run."""
    from gpu_runtime.serving.api.openai import OpenAIWriter, Sent

    async with harness(qwen=4) as k:
        reply = await k.chat("qwen", stream=True)
        work = asyncio.get_running_loop().create_future()
        work.set_result(reply)
        sent = Sent(work, str, OpenAIWriter())
        await until(lambda: k.pins() == {"qwen": 1})

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(3600)  # the connection accepts no more data

        await sent({"type": "http"}, receive, send)
        assert k.gateway.state().running == {}
