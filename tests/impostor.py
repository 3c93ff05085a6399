"""A program that listens on a port, answers every request with 200, and prints what it was sent.

    python impostor.py PORT UID

The program poses as an engine, as any user of the machine can. With a UID it first becomes that user.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.clock import PATIENCE

NOBODY = 65534
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


class Impostor:
    """The running program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def heard(self) -> list[str]:
        """Ends the program and returns what each connection sent. Connections that sent nothing are left out."""
        self._process.terminate()
        lines = self._process.communicate(timeout=PATIENCE)[0].splitlines()
        return [text for line in lines if (text := json.loads(line))]


@contextmanager
def impostor(port: int, uid: int | None = None) -> Iterator[Impostor]:
    """Starts an impostor that listens on `port` of 127.0.0.1, as the user `uid`."""
    words = [sys.executable, __file__, str(port), *([] if uid is None else [str(uid)])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == '""'
    try:
        yield Impostor(process)
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdout.close()


def main(port: int, uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    with socket.create_server(("127.0.0.1", port)) as listening:
        print(json.dumps(""), flush=True)
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(PATIENCE)
                try:
                    sent = connection.recv(1 << 16)
                    print(json.dumps(sent.decode("latin-1")), flush=True)
                    connection.sendall(ANSWER if sent else b"")
                except OSError:
                    continue


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
