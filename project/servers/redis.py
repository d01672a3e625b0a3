"""A real Redis on its own port, which ends with the process that started it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from project.servers.program import HOST, Program


class Redis(Program):
    """
    One server; leave the block to stop it.

    Args:
        home: its folder; it writes down every change, so that it knows it after a restart.
    """

    command = package = "redis-server"

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"redis://{HOST}:{self.port}/0"

    def _make_home(self) -> Path:
        return self._home

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        where = ["--port", str(self.port), "--bind", HOST, "--dir", str(home)]
        return [*where, "--save", "", "--appendonly", "yes", "--maxmemory-policy", "noeviction"]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False
