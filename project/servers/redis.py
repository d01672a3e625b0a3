"""A real Redis on its own port, which ends with the process that started it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from project.servers.program import HOST, Program, free_port


class Redis(Program):
    """
    One server; leave the block to stop it.

    Args:
        home: its folder. It writes each change to disk before it answers, so that a killed server has it after a restart.
    """

    command = package = "redis-server"

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://{HOST}:{self.port}/0"

    def say(self, command: str) -> str:
        """Send a command on one line; return the answer: one line, or the text that follows it."""
        with socket.create_connection((HOST, self.port), timeout=5) as connection, connection.makefile("rwb") as stream:
            stream.write(f"{command}\r\n".encode())
            stream.flush()
            first = stream.readline().decode().strip()
            return stream.read(int(first[1:])).decode() if first.startswith("$") else first

    def follow(self, master: Redis) -> None:
        """Become a replica of another server."""
        self.say(f"REPLICAOF {HOST} {master.port}")

    def take_over(self) -> None:
        """Become a master."""
        self.say("REPLICAOF NO ONE")

    def swap_ports(self, other: Redis) -> None:
        """Exchange the ports of two servers, as an address does that follows the master; connections that are open stay."""
        mine, theirs = self.port, other.port
        other.listen_at(free_port())
        self.listen_at(theirs)
        other.listen_at(mine)

    def listen_at(self, port: int) -> None:
        """Change the port as soon as no other program has it; connections that are open stay. Raises ServerError."""
        assert self._child is not None
        self._child.wait_for_answer(lambda: self.say(f"CONFIG SET port {port}") == "+OK", 10)
        self.port = port

    def _make_home(self) -> Path:
        self._home.mkdir(exist_ok=True)
        return self._home

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        where = ["--port", str(self.port), "--bind", HOST, "--dir", str(home)]
        return [*where, "--save", "", "--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction"]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False
