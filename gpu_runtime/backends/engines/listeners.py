"""Which process listens on a port of this machine, as the kernel reports it.

Every user of the machine can listen on a port that is free for a moment, and answer there like an engine.
So nothing is sent to a port before its listening socket is known to belong to the engine's processes.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = "0A"  # a state in these tables
_LOOPBACK = socket.inet_aton("127.0.0.1")
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in an IPv6 one begins with it
# A connection to 127.0.0.1 reaches a socket that listens on one of these.
_REACHED = (_LOOPBACK, bytes(4), bytes(16), _MAPPED + _LOOPBACK, _MAPPED + bytes(4))

# The kernel's interface sock_diag: linux/inet_diag.h and linux/netlink.h.
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_REQUEST = struct.Struct("=BBBxI2s46x")  # family, protocol, extensions, states, source port
_ANSWER = struct.Struct("=4x2s2x16s16s12x12xII")  # source port, source, destination, uid, inode
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _DONE = 4, 20, 0x301, 3
_STATE_LISTEN = 1 << 10
_MOST_ANSWER_BYTES = 1 << 16


class Listener(NamedTuple):
    """A listening socket: its inode, which names it in /proc/PID/fd, and the user that opened it."""

    inode: int
    uid: int


def listeners(port: int) -> frozenset[Listener]:
    """The sockets that a connection to 127.0.0.1 and this `port` may reach."""
    try:
        found = {*_asked(port, socket.AF_INET), *_asked(port, socket.AF_INET6)}
    except OSError:  # a sandbox may forbid this kind of socket
        return frozenset(_listed(port))
    return frozenset(found)


def _asked(port: int, family: int) -> Iterator[Listener]:
    """Those of one address `family`, from the kernel's answer to one question.

    Both families take 0.3 ms. Reading /proc/net/tcp takes 22 ms on the same machine, since the kernel then
    walks through its table of all connections.
    """
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _STATE_LISTEN, port.to_bytes(2, "big"))
    size = _HEADER.size + len(request)
    header = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + request)
        while True:
            data = kernel.recv(_MOST_ANSWER_BYTES)
            at = 0
            while at + _HEADER.size <= len(data):
                size, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind != _SOCK_DIAG_BY_FAMILY:
                    raise OSError("the kernel does not list sockets by sock_diag")
                number, source, _, uid, inode = _ANSWER.unpack_from(data, at + _HEADER.size)
                address = source[:4] if family == socket.AF_INET else source
                if address in _REACHED and int.from_bytes(number, "big") == port:
                    yield Listener(inode, uid)
                at += (size + 3) & ~3


def _listed(port: int) -> Iterator[Listener]:
    """All of them, from the kernel's tables in /proc."""
    reached = {_hex(address) for address in _REACHED}
    for table in _TABLES:
        try:
            file = open(table)
        except FileNotFoundError:  # the machine has no IPv6
            continue
        with file:
            next(file, None)
            for line in file:
                fields = line.split()
                if fields[3] != _LISTENING:
                    break  # the listening sockets are listed first
                address, _, number = fields[1].partition(":")
                if address in reached and int(number, 16) == port:
                    yield Listener(inode=int(fields[9]), uid=int(fields[7]))


def _hex(address: bytes) -> str:
    """The `address` as the tables write it: 32 bits at a time, in the byte order of the machine."""
    words = (address[at : at + 4] for at in range(0, len(address), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def socket_inodes(pids: Iterable[int]) -> frozenset[int]:
    """The inodes of all sockets that the processes `pids` have open. Ended processes have none."""
    found = set()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return frozenset(found)


def of_another_user(port: int) -> int | None:
    """The user id of a process of another user that listens on `port`; None if there is none."""
    return next((one.uid for one in listeners(port) if one.uid != os.geteuid()), None)
