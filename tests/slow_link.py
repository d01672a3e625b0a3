"""A slow link to a server: a TCP proxy that limits the bytes a second which its clients send."""

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from outbox.errors import BrokerUnavailable
from outbox.models import Batch, State
from outbox.relay.rounds import Relay

HOST = "127.0.0.1"
CHUNK = 16_384


class SlowLink:
    """
    Passes connections on while the block runs.

    Args:
        bytes_per_second: of each connection; answers pass at once.
        target: the server's address, host:port; it may be set before the first connection.
        passed: bytes that clients have sent.
    """

    def __init__(self, bytes_per_second: float, target: str = "") -> None:
        self.target = target
        self.passed = 0
        self._seconds = CHUNK / bytes_per_second
        self._stopped = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * CHUNK)  # else the kernel hides how slow it is
        self._listener.bind((HOST, 0))
        self._listener.listen()
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = self._listener.accept()
                host, port = self.target.split(":")
                try:
                    server = socket.create_connection((host, int(port)))
                except OSError:
                    client.close()
                    continue
                threading.Thread(target=self._pass_on, args=[client, server, self._seconds], daemon=True).start()
                threading.Thread(target=self._pass_on, args=[server, client, 0.0], daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        due_at = time.monotonic()
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if seconds:
                    due_at = max(due_at, time.monotonic() - seconds) + seconds * len(data) / CHUNK
                    if self._stopped.wait(max(0.0, due_at - time.monotonic())):
                        break
                    self.passed += len(data)
                target.sendall(data)
        for connection in (source, target):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def drains(relay: Relay) -> bool:
    """Return whether all is sent."""
    with suppress(BrokerUnavailable):
        relay.drain()
    return set(Batch.objects.values_list("state", flat=True)) == {State.SENT}
