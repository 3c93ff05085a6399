"""A stand-in for an engine that is not installed.

    python engine_stand_in.py vllm serve MODEL --port 8300 …

It accepts the flags in the engine's recorded help and speaks the engine's protocol. Any other flag
ends it, as argparse does. Environment variables change what it does:

    STAND_IN_RECORD    it appends the arguments of each start to this file, one JSON line per start
    STAND_IN_SAYS      it prints this text and ends at once
    STAND_IN_MUTE      it never becomes ready
    STAND_IN_LOADS     it listens only once this file exists, like an engine that loads its model first
    STAND_IN_LOADING   until this file exists, its health check answers 503 and all other paths answer as usual,
                       like some versions of llama-server that listen while they load their model
    STAND_IN_HEARD     it appends the path and the Authorization header of each request to this file
    STAND_IN_SPREAD=N  at the first N starts, half of Ollama's model is in RAM
    STAND_IN_CHILD     it starts a child in a session of its own, and writes the child's pid to this file
    STAND_IN_FAULT     a file with a word: how the next sleep or wake fails, see `turn`
    STAND_IN_HELD      the folder of the files, by pid, in which servers write how many bytes they hold on their card

vLLM and SGLang sleep as their source has it: vllm/entrypoints/serve/sleep/api_router.py, and
sglang/srt/entrypoints/http_server.py. vLLM's routes exist only in its development mode. vLLM reads its cards' numbers
as in vllm/platforms/interface.py, `device_id_to_physical_device_id`.
"""

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDED = Path(__file__).with_name("backends") / "recorded" / "engines"
GIB = 2**30


def rejected(engine: str, words: list[str]) -> list[str]:
    """The flags in `words` that the recorded help of `engine` does not contain."""
    known = set((RECORDED / f"{engine}.txt").read_text().splitlines()[1:])
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [flag for flag in flags if flag not in known]


def option(words: list[str], *names: str) -> str:
    """The value after the first flag of `names` in the command line. Empty if none of the flags is given."""
    return next((words[i + 1] for i, word in enumerate(words) if word in names), "")


class Handler(BaseHTTPRequestHandler):
    """Answers requests as the engine does. A chat answer is the reversed text of the messages."""

    engine, name, key, starts = "", "", "", 1
    middleware, asleep = "", False
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _record(self) -> None:
        if heard := os.environ.get("STAND_IN_HEARD"):
            with Path(heard).open("a") as file:
                file.write(json.dumps([self.path, self.headers.get("Authorization")]) + "\n")

    def do_GET(self) -> None:
        self._record()
        if os.environ.get("STAND_IN_MUTE"):
            return self._reply(503, {"error": "loading"})
        loading = os.environ.get("STAND_IN_LOADING")
        if loading and self.path == "/health" and not Path(loading).exists():
            return self._reply(503, {"error": {"message": "Loading model"}})
        if self.path in ("/health", "/api/version"):
            return self._reply(200, {"status": "ok"})
        if self.path == "/api/ps":
            spread = self.starts <= int(os.environ.get("STAND_IN_SPREAD", "0"))
            sizes = {"size": 4 * GIB, "size_vram": 2 * GIB if spread else 4 * GIB}
            return self._reply(200, {"models": [{"name": self.name, **sizes}]})
        if self.path == "/health_generate" and self.engine == "sglang":
            if self.asleep:  # it computes a token, with weights that are not on the card
                os._exit(1)
            return self._reply(200, None)
        if not self._has_key():
            return None
        if self.path == "/is_sleeping" and os.environ.get("VLLM_SERVER_DEV_MODE"):
            return self._reply(200, {"is_sleeping": self.asleep})
        return self._reply(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def do_POST(self) -> None:
        self._record()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if self.path == "/api/generate":
            type(self).name = body["model"]
            if body["model"] == "absent":
                return self._reply(404, {"error": "model 'absent' not found"})
            return self._reply(200, {"model": body["model"], "response": "", "done": True})
        if not self._has_key():
            return None
        if self.path in TURNS and (
            self.engine == "sglang" or os.environ.get("VLLM_SERVER_DEV_MODE")
        ):
            return self._turn(TURNS[self.path])
        if self.asleep:
            return self._reply(503, {"error": "it sleeps"})
        if body.get("model") != self.name:
            return self._reply(404, {"error": f"there is no {body.get('model')}"})
        said = " ".join(str(message.get("content")) for message in body.get("messages", ()))
        message = {"role": "assistant", "content": said[::-1]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"object": "chat.completion", "model": self.name, "choices": [choice]}
        return self._reply(200, answer)

    def _turn(self, asleep: bool) -> None:
        """Sleeps or wakes, or does what the file STAND_IN_FAULT says.

        It answers `500`, waits (`late`; `waits`: until the file is gone), dies (`dies`), or says that it sleeps and
        keeps its memory (`holds`).
        """
        file = Path(os.environ.get("STAND_IN_FAULT", "/nowhere"))
        fault = file.read_text() if file.exists() else ""
        if fault == "500":
            return self._reply(
                500, {"error": "CUDA error: an illegal memory access was encountered"}
            )
        if fault == "late":
            time.sleep(600)
        while fault == "waits" and file.exists():
            time.sleep(0.01)
        if fault == "dies":
            os._exit(1)
        type(self).asleep = asleep
        hold(ASLEEP_BYTES if asleep and fault != "holds" else AWAKE_BYTES)
        return self._reply(200, None)

    def _has_key(self) -> bool:
        if self.middleware and not asyncio.run(passes(self.middleware, self)):
            self._reply(401, {"error": "Unauthorized"})
            return False
        if self.engine == "vllm" and not self.path.startswith("/v1"):
            return True  # as in vLLM's versions before its key was checked for other paths
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._reply(401, {"error": "the key is missing or wrong"})
            return False
        return True


TURNS = {"/sleep?level=1": True, "/release_memory_occupation": True}
TURNS |= {"/wake_up": False, "/resume_memory_occupation": False}
AWAKE_BYTES, ASLEEP_BYTES = 4 * GIB, GIB // 2  # on its card


def hold(size: int) -> None:
    """Writes that this process holds `size` bytes on its card now."""
    if folder := os.environ.get("STAND_IN_HELD"):
        (Path(folder) / f"{os.getpid()}.new").write_text(str(size))
        (Path(folder) / f"{os.getpid()}.new").rename(Path(folder) / str(os.getpid()))


async def passes(middleware: str, request: BaseHTTPRequestHandler) -> bool:
    """Whether the middleware, a class as `--middleware` names it, lets this request pass."""
    module, _, name = middleware.rpartition(".")
    passed = []

    async def app(*_: object) -> None:
        passed.append(True)

    async def send(_: object) -> None:
        pass

    headers = [(key.lower().encode(), text.encode()) for key, text in request.headers.items()]
    scope = {"type": "http", "path": request.path.partition("?")[0], "headers": headers}
    await getattr(importlib.import_module(module), name)(app)(scope, None, send)
    return bool(passed)


def main(engine: str, words: list[str]) -> None:
    if unknown := rejected(engine, words):
        sys.exit(f"{engine}: error: unrecognized arguments: {' '.join(unknown)}")
    record = Path(os.environ["STAND_IN_RECORD"])
    seen = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("OLLAMA_", "CUDA_VISIBLE", "HIP_VISIBLE")) or name.endswith("API_KEY")
    }
    with record.open("a") as file:
        file.write(json.dumps({"words": words, "environment": seen, "pid": os.getpid()}) + "\n")
    if engine == "vllm" and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")):
        [int(number) for number in visible.split(",")]  # raises ValueError for a UUID
    if says := os.environ.get("STAND_IN_SAYS"):
        sys.exit(says)
    if child := os.environ.get("STAND_IN_CHILD"):
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        started = subprocess.Popen(sleeps, start_new_session=True)
        Path(child).write_text(str(started.pid))
    Handler.engine, Handler.starts = engine, len(record.read_text().splitlines())
    Handler.name = option(words, "--served-model-name", "--alias")
    Handler.middleware = option(words, "--middleware")
    Handler.key = os.environ.get("VLLM_API_KEY") or os.environ.get("LLAMA_API_KEY") or ""
    Handler.key = Handler.key or option(words, "--api-key")
    host, _, port = os.environ.get("OLLAMA_HOST", "").partition(":")
    if not port or engine != "ollama":
        host, port = "127.0.0.1", option(words, "--port")
    address = host, int(port)
    while (loaded := os.environ.get("STAND_IN_LOADS")) and not Path(loaded).exists():
        time.sleep(0.01)
    try:
        server = ThreadingHTTPServer(address, Handler)
    except OSError as error:
        sys.exit(f"error while attempting to bind on address {address}: {error.strerror.lower()}")
    hold(AWAKE_BYTES)
    server.serve_forever()
    time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
