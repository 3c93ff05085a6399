"""Limits the connections that strangers may open to a server, and closes connections that stay idle for long.

A stranger is a user of this machine, or an address of another machine. A connection counts as the stranger's until the
gate has admitted a request on it. On a shared machine all users have the same address, so the operating system is asked
which user opened a connection.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream

from ..tcp_sockets import user_of_client

HEADER_SECONDS = 20.0  # for the head of a request, and between two requests of one connection
BODY_SECONDS = 120.0  # for the body of a request
MOST_OF_A_STRANGER = 256  # open connections
WANTED_FILES = 65_536  # open files of this process, if the hard limit allows it
RESERVED_FILES = 128  # for the ledger, engines and everything else
MOST_ACCEPTED = 128  # connections, before other work of the event loop continues
PAUSE_SECONDS = 0.5  # without accepting, once the process or the machine can open no more files
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("gpu_runtime")


class Connections:
    """Accepts the connections of one Tornado server. Closes a new connection if too many are open."""

    def __init__(self, http: HTTPServer) -> None:
        """Takes over the listening sockets of `http`. Also raises this process's limit of open files."""
        self._http = http
        self._most = max(1, raise_file_limit() - RESERVED_FILES)
        self._strangers: dict[IOStream, str] = {}  # each open connection, and who opened it
        self._unadmitted: Counter[str] = Counter()  # open connections that are not admitted
        self._admitted: set[IOStream] = set()
        http.conn_params.header_timeout = HEADER_SECONDS
        http.conn_params.body_timeout = BODY_SECONDS
        self._serve = http.handle_stream
        self._closed = http.on_close
        http.handle_stream = self._handle_stream  # type: ignore[method-assign]
        http.on_close = self._on_close  # type: ignore[method-assign]
        for fd, listening in http._sockets.items():
            http._handlers[fd]()
            http._handlers[fd] = self._accept_on(listening)

    def __len__(self) -> int:
        return len(self._strangers)

    def stranger(self, stream: Any) -> str:
        """Who opened the connection `stream`: `uid 1000` or an address; "" if not known."""
        return self._strangers.get(stream, "")

    def admit(self, stream: Any) -> None:
        """Records that the request on `stream` was admitted: it counts as a stranger's no longer."""
        who = self._strangers.get(stream)
        if who is not None and stream not in self._admitted:
            self._admitted.add(stream)
            self._uncount(who)

    def _handle_stream(self, stream: IOStream, address: Any) -> None:
        who = stranger_of(stream.socket, address)
        is_stranger = who != f"uid {os.geteuid()}"
        has_most = is_stranger and self._unadmitted[who] >= MOST_OF_A_STRANGER
        if has_most or len(self) >= self._most:
            stream.close()
            return
        self._strangers[stream] = who
        self._unadmitted[who] += 1
        self._serve(stream, address)

    def _on_close(self, connection: Any) -> None:
        stream = connection.stream
        who = self._strangers.pop(stream, None)
        if stream in self._admitted:
            self._admitted.discard(stream)
        elif who is not None:
            self._uncount(who)
        self._closed(connection)

    def _uncount(self, who: str) -> None:
        self._unadmitted[who] -= 1
        if not self._unadmitted[who]:
            del self._unadmitted[who]

    def _accept_on(self, listening: socket.socket) -> Callable[[], None]:
        """Accepts connections on the socket `listening`. Returns a function that stops this.

        Tornado's own function raises an error when this process can open no more files. The event loop then logs the
        error and calls it again at once. That took 83 % of a core and wrote 3.8 MB of log a second.
        """
        loop = IOLoop.current()
        paused: list[object] = []  # during a pause, the timer that ends it

        def accept(fd: Any, events: int) -> None:
            for _ in range(MOST_ACCEPTED):
                try:
                    connection, address = listening.accept()
                except BlockingIOError:  # no connection waits
                    return
                except ConnectionAbortedError:  # the client has gone
                    continue
                except OSError as error:
                    if error.errno not in _NO_FILES:
                        raise
                    log.warning("no connection can be accepted: %s", error.strerror)
                    loop.remove_handler(listening)
                    paused.append(loop.call_later(PAUSE_SECONDS, resume))
                    return
                connection.setblocking(False)
                self._http._handle_connection(connection, address)

        def resume() -> None:
            paused.clear()
            loop.add_handler(listening, accept, IOLoop.READ)

        def stop() -> None:
            if paused:
                loop.remove_timeout(paused.pop())
            else:
                loop.remove_handler(listening)

        resume()
        return stop


def stranger_of(connection: socket.socket, address: Any) -> str:
    """The stranger who opened `connection`: a user of this machine as `uid 1000`, or the host in `address`, the
    client's.

    An IPv6 address counts as its network of 64 bits, since one machine may have all addresses of it.
    """
    uid = user_of_client(connection)
    if uid is not None:
        return f"uid {uid}"
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as allowed, and returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft
