"""A producer that Celery gives its messages to, and that keeps them instead of sending them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from kombu import Exchange, Queue
from kombu.compression import compress
from kombu.serialization import dumps
from kombu.utils.functional import maybe_list

from outbox.celery.stored import encode
from outbox.errors import InvalidMessage

PERSISTENT = 2
MODES = {"persistent": PERSISTENT, "transient": 1}


@dataclass(frozen=True, slots=True)
class EncodedTask:
    """A task as it would have been sent: its name, its id, and the body of its message row."""

    task: str
    id: str
    body: bytes


class _NoConnection:
    """The connection of a producer that has none."""

    def _reraise_as_library_errors(self) -> nullcontext[None]:  # Celery asks for it around a send
        return nullcontext()


@dataclass(slots=True)
class CapturingProducer:
    """
    Keeps what is published; duck-typed, as Celery takes any producer.

    Args:
        ignore_result: what the next message says of its result. Celery is told to ignore all of them, or it would turn to the
            result backend before the transaction has committed.
    """

    app: Celery
    ignore_result: bool | None = None
    captured: list[EncodedTask] = field(default_factory=list)
    connection: _NoConnection = field(default_factory=_NoConnection)
    serializer: str | None = None

    def publish(
        self,
        body: Any,
        *,
        headers: Mapping[str, Any],
        exchange: Exchange | str | None = None,
        routing_key: str | None = None,
        declare: Sequence[Any] | None = None,
        serializer: str | None = None,
        compression: str | None = None,
        delivery_mode: int | str | None = None,
        expiration: float | None = None,
        **properties: Any,
    ) -> None:
        """
        Encode a message as kombu's producer does, and keep it.

        Raises:
            kombu.exceptions.EncodeError: the serializer cannot write the arguments.
            InvalidMessage: the outbox cannot keep the message as it is.
        """
        if "task" not in headers:  # an event about the task
            return
        for name in ("retry", "retry_policy", "timeout", "confirm_timeout", "mandatory", "immediate"):
            properties.pop(name, None)  # the relay decides how it is sent
        if expiration is not None:
            properties["expiration"] = str(int(expiration * 1000))
        name = headers["task"]
        properties["delivery_mode"] = MODES.get(str(delivery_mode), delivery_mode) or PERSISTENT
        headers = {**headers, "ignore_result": self.ignore_result}
        payload: str | bytes
        content_type, content_encoding, payload = dumps(body, serializer=serializer)
        if compression:
            payload, headers["compression"] = compress(payload, compression)
        encoded = encode(
            payload,
            headers=headers,
            properties=properties,
            content_type=content_type,
            content_encoding=content_encoding,
            exchange=exchange.name if isinstance(exchange, Exchange) else exchange or "",
            routing_key=routing_key or "",
            queues=self._names(name, declare),
        )
        self.captured.append(EncodedTask(name, headers["id"], encoded))

    def _names(self, task: str, declare: Sequence[Any] | None) -> list[str]:
        """Return the names of queues; each must be one that the relay finds, or makes, by its name."""
        names = []
        for queue in maybe_list(declare) or ():
            if not isinstance(queue, Queue) or not queue.name or self.app.amqp.queues[queue.name] != queue:
                raise InvalidMessage(
                    f"Task {task} is to declare {queue!r}, which the relay would not know. Put it into task_queues of Celery's "
                    "settings, and name it by queue=."
                )
            names.append(queue.name)
        return names
