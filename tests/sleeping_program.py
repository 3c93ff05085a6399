"""A server that holds real memory, frees it to sleep and takes it again to wake: the tests' stand-in for any program.

    python sleeping_program.py PORT MIB FAULT      serves
    python sleeping_program.py tell PORT PATH      sends a POST; for /state a GET, and ends with 0 if it sleeps, else 1

FAULT is a file with a word, which changes the next turn, see `turn`. Every path but /ready needs GPU_ENGINE_KEY.
"""

import json
import os
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = f"Bearer {os.environ.get('GPU_ENGINE_KEY')}"
MIB = 2**20


class Handler(BaseHTTPRequestHandler):
    """Answers a turn at once with 202, and makes it in a thread."""

    held, size, fault, turning = b"", 0, Path(), False

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        if self.path == "/ready":
            return self.answer(200 if self.held else 503, None)
        if self.headers.get("Authorization") != KEY:
            return self.answer(401, None)
        if self.word == "unclear":
            return self.answer(200, {"asleep": not self.held, "well": True})
        return self.answer(200, {"asleep": not self.held, "bytes": len(self.held)})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.headers.get("Authorization") != KEY:
            return self.answer(401, None)
        if self.word == "500":
            return self.answer(500, {"error": "out of luck"})
        if self.word == "dies":
            os._exit(1)
        threading.Thread(target=turn, args=[self.path == "/sleep", self.word]).start()
        return self.answer(202, None)

    @property
    def word(self) -> str:
        return self.fault.read_text() if self.fault.exists() else ""


def turn(asleep: bool, word: str) -> None:
    """Frees the memory or takes it. `waits`: once the file is gone; `never`."""
    while word == "waits" and Handler.fault.exists():
        time.sleep(0.01)
    if word == "never":
        return
    Handler.held = b"" if asleep else os.urandom(Handler.size)


def tell(port: str, path: str) -> int:
    """Sends the request of the command line. Returns the exit status."""
    body = None if path == "/state" else b""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Authorization": KEY})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(path == "/state" and not json.load(answer)["asleep"])


if __name__ == "__main__":
    if sys.argv[1] == "tell":
        sys.exit(tell(*sys.argv[2:]))
    Handler.size, Handler.fault = int(sys.argv[2]) * MIB, Path(sys.argv[3])
    Handler.held = os.urandom(Handler.size)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
