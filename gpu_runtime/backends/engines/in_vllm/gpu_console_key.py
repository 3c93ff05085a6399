"""A middleware that demands the key for every path of vLLM's server but its health check.

vLLM imports this module, in its own environment. So the module imports nothing of gpu-console, and its folder has no
other module.
"""

import hmac
import os


class Keyed:
    """An ASGI middleware around the application `app`. The key is that of vLLM itself, VLLM_API_KEY."""

    def __init__(self, app):
        self.app = app
        self._wanted = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                await _refuse(scope["type"], send)
                return
        await self.app(scope, receive, send)


async def _refuse(kind, send):
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
