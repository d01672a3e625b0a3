"""The ports of a RocketMQ node's servers."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from typing import Self

from project.servers.program import HOST

# The connection preface of an HTTP/2 client, with an empty SETTINGS frame. Source: RFC 9113, sections 3.4 and 6.5.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
SETTINGS = 4  # the frame type of SETTINGS

# A socket at one port of each block of ports that `Ports.free` has returned. It reserves the block for this process.
_LOCKS: list[socket.socket] = []


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of the servers. The broker uses two more: `broker` - 2 and `broker` + 1."""

    namesrv: int = 9876
    grpc: int = 8081
    remoting: int = 8080
    broker: int = 10911

    @classmethod
    def free(cls) -> Self:
        """Find free ports below the ephemeral range, and reserve them until this process ends."""
        while True:
            first = random.randrange(20_000, 32_000, 10)  # noqa: S311
            ports = cls(namesrv=first, grpc=first + 1, remoting=first + 2, broker=first + 6)
            if ports._reserve(first + 9):
                return ports

    def all(self) -> list[int]:
        """Return every port that must be free."""
        return [self.namesrv, self.grpc, self.remoting, self.broker, self.broker - 2, self.broker + 1]

    def _reserve(self, lock_port: int) -> bool:
        """Bind one port as a lock for the whole block; return whether this worked and all ports are free."""
        lock = socket.socket()
        try:
            lock.bind((HOST, lock_port))
        except OSError:
            lock.close()
            return False
        _LOCKS.append(lock)
        return all(is_free(port) for port in self.all())


def is_free(port: int) -> bool:
    """Return whether a server could listen at a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
        return True


def serves_http2(port: int) -> bool:
    """
    Return whether the server at a port answers an HTTP/2 client: an open port may belong to a server that is still starting.

    Raises:
        OSError: no server listens, or it does not answer within a second.
    """
    with socket.create_connection((HOST, port), 1) as client:
        client.sendall(PREFACE)
        header = client.recv(9, socket.MSG_WAITALL)
        return len(header) == 9 and header[3] == SETTINGS
