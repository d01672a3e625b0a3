"""
Celery without a server: tasks travel between processes as files in a folder.

kombu's own filesystem transport creates a task's file under its final name, and writes to it afterwards. A worker that reads
the file in between gets no content: the task is lost, and the worker ends with a JSON error. Here each file is written under
another name and renamed when it is complete, and a worker takes a file by renaming it. A rename within a file system is atomic.

The running tasks of a worker that is killed are lost, even with `acks_late`. That suits wakeups, which may be lost. Tasks that
must not be lost need Redis or RabbitMQ (`CELERY_BROKER_URL`).
"""

import fcntl
import time
import uuid
from functools import cached_property
from pathlib import Path
from queue import Empty
from typing import Any

from kombu.transport import filesystem, virtual
from kombu.utils.json import dumps, loads


class Channel(filesystem.Channel):
    """A channel that writes files atomically to the folder of its option `folder`, which it creates."""

    @cached_property
    def data_folder_in(self) -> Path:
        return self._made("tasks")

    @property
    def data_folder_out(self) -> Path:
        return self.data_folder_in

    @cached_property
    def processed_folder(self) -> Path:
        return self._made("taken")

    @cached_property
    def control_folder(self) -> Path:
        return self._made("exchanges")

    def _made(self, name: str) -> Path:
        folder = Path(self.transport_options["folder"], name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]
        # Wall-clock time, not a monotonic clock: so tasks keep their order after a restart of the machine.
        name = f"{time.time_ns()}_{uuid.uuid4()}.{queue}.msg"
        _write_whole(self.data_folder_out / name, dumps(payload))

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        for path in sorted(self.data_folder_in.iterdir()):
            if path.name.partition(".")[2] != f"{queue}.msg":
                continue
            taken = self.processed_folder / path.name
            try:
                path.rename(taken)
            except FileNotFoundError:
                continue  # another worker was faster
            payload = taken.read_bytes()
            taken.unlink()
            return loads(payload)
        raise Empty

    def _queue_bind(self, exchange: str, routing_key: str | None, pattern: str | None, queue: str) -> None:
        # kombu locks the table of an exchange when it changes it, but creates it without a lock.
        with (self.control_folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = self._exchange_file(exchange)  # type: ignore[attr-defined]
            if not table.exists():
                _write_whole(table, "[]")
        super()._queue_bind(exchange, routing_key or "", pattern or "", queue)


class Transport(filesystem.Transport):
    """`files://`, with the transport option `folder`."""

    Channel = Channel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.state = virtual.BrokerState()  # bindings are in the folder of this connection, not shared within the process


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.{uuid.uuid4()}.part")  # readers ignore names with this suffix
    part.write_text(text)
    part.rename(path)
