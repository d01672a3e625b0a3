"""A real Redis on a free port. It ends with the process that started it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from project.servers.program import HOST, Program, free_port


class Redis(Program):
    """
    One server, as a context manager.

    Args:
        home: the server's folder. It writes each change to disk before it answers, so that no change is lost if it is killed.
    """

    command = package = "redis-server"

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"redis://{HOST}:{self.port}/0"

    def say(self, command: str) -> str:
        """Send a command in one line; return the answer: its line, or the bulk string that the line announces."""
        with socket.create_connection((HOST, self.port), timeout=5) as connection, connection.makefile("rwb") as stream:
            stream.write(f"{command}\r\n".encode())
            stream.flush()
            first = stream.readline().decode().strip()
            return stream.read(int(first[1:])).decode() if first.startswith("$") else first

    def follow(self, master: Redis) -> None:
        """Make this server a replica of another one."""
        self.say(f"REPLICAOF {HOST} {master.port}")

    def take_over(self) -> None:
        """Make this server a master."""
        self.say("REPLICAOF NO ONE")

    def swap_ports(self, other: Redis) -> None:
        """Exchange the ports of two servers, like an address that always leads to the master. Open connections stay open."""
        own_port, other_port = self.port, other.port
        other.listen_at(free_port())
        self.listen_at(other_port)
        other.listen_at(own_port)

    def listen_at(self, port: int) -> None:
        """
        Change the port as soon as no other program uses the new one. Open connections stay open.

        Raises:
            ServerError: the port was not free in time.
        """
        assert self._child is not None
        self._child.wait_for_answer(lambda: self.say(f"CONFIG SET port {port}") == "+OK", 10)
        self.port = port

    def _make_home(self) -> Path:
        self._home.mkdir(exist_ok=True)
        return self._home

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        basics = ["--port", str(self.port), "--bind", HOST, "--dir", str(home)]
        return [*basics, "--save", "", "--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False
