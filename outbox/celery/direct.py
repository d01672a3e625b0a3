"""
Publishing over a transport that answers each message: Redis with its LPUSH, and all of kombu's other virtual transports.

The return of the call is the confirmation. A message during whose call the connection breaks may be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from celery import Celery
from kombu.common import maybe_declare

from outbox.brokers.base import SendResult, SendStatus
from outbox.celery.link import ACCEPTED, OUT_OF_TIME, failed
from outbox.celery.parcel import Parcel


class DirectProducer:
    """
    Publishes over one connection, which is not used after an error.

    Args:
        connection: kombu's.
        is_closing: whether no more is to be handed over.
    """

    def __init__(self, app: Celery, connection: Any, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._connection = connection
        self._is_closing = is_closing
        self._channel = connection.channel()
        self.is_broken = False

    def is_alive(self) -> bool:
        """Return whether the connection may be used; whether it still works, the next call finds out."""
        return not self.is_broken

    def publish(self, parcels: Sequence[Parcel], deadline: float) -> Iterator[tuple[Parcel, SendResult]]:
        """Publish one after the other until the deadline of `monotonic`; return the result of each."""
        trouble: SendResult | None = None
        for parcel in parcels:
            if trouble is None and (monotonic() >= deadline or self._is_closing()):
                trouble = OUT_OF_TIME
            result = trouble or self._publish(parcel)
            yield parcel, result
            if self.is_broken and trouble is None:
                trouble = SendResult(SendStatus.UNAVAILABLE, reason=result.reason)

    def close(self) -> None:
        """Close the connection."""
        self._connection.release()

    def _publish(self, parcel: Parcel) -> SendResult:
        task, status = parcel.task, SendStatus.MISCONFIGURED
        try:
            for queue in task.queues:
                maybe_declare(self._app.amqp.queues[queue], self._channel)
            status = SendStatus.REFUSED
            message = parcel.prepare(self._channel)
            status = SendStatus.UNSURE
            self._channel.basic_publish(message, exchange=task.exchange, routing_key=task.routing_key)
        except self._connection.channel_errors as error:  # the server has answered, and did not store it
            return failed(SendStatus.UNAVAILABLE, error)
        except (*self._connection.connection_errors, OSError) as error:
            self.is_broken = True
            return failed(SendStatus.UNSURE if status is SendStatus.UNSURE else SendStatus.UNAVAILABLE, error)
        except Exception as error:  # of this task only: whatever a transport raises about what it cannot take
            return failed(status, error)
        return ACCEPTED
