"""Where the servers of a RocketMQ node listen."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from typing import Self

from project.servers.program import HOST

# What a client of HTTP/2 begins with, an empty SETTINGS frame behind it. Source: RFC 9113, sections 3.4 and 6.5.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
SETTINGS = 4  # type of a frame

# Sockets at ports that stand for others: until this process ends, no other process finds those free.
_HOLDERS: list[socket.socket] = []


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the servers listen. The broker takes two more: `broker` - 2 and `broker` + 1."""

    namesrv: int = 9876
    grpc: int = 8081
    remoting: int = 8080
    broker: int = 10911

    @classmethod
    def free(cls) -> Self:
        """Find free ports below the ephemeral range; no other process finds the same ones."""
        while True:
            first = random.randrange(20_000, 32_000, 10)  # noqa: S311
            found = cls(namesrv=first, grpc=first + 1, remoting=first + 2, broker=first + 6)
            if found._hold(first + 9):
                return found

    def all(self) -> list[int]:
        """List every port that must be free."""
        return [self.namesrv, self.grpc, self.remoting, self.broker, self.broker - 2, self.broker + 1]

    def _hold(self, mark: int) -> bool:
        """Take one port as the lock for all of them, if they are free."""
        holder = socket.socket()
        try:
            holder.bind((HOST, mark))
        except OSError:
            holder.close()
            return False
        _HOLDERS.append(holder)
        return all(is_free(port) for port in self.all())


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
        return True


def serves_http2(port: int) -> bool:
    """
    Whether a server behind a port greets a client of HTTP/2: a port that is open may belong to one that is still starting.

    Raises:
        OSError: nobody listens, or nothing is said for a second.
    """
    with socket.create_connection((HOST, port), 1) as client:
        client.sendall(PREFACE)
        header = client.recv(9, socket.MSG_WAITALL)
        return len(header) == 9 and header[3] == SETTINGS
