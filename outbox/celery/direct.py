"""
Publishing over a transport that answers each message: Redis with its LPUSH, and all of kombu's other virtual transports.

The return of the call is the confirmation. A message during whose call the connection breaks may be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from celery import Celery
from kombu import Queue
from kombu.common import maybe_declare
from kombu.transport import virtual

from outbox.brokers.base import ACCEPTED, SendResult, SendStatus
from outbox.celery.errors import REDIS_OUTAGES, failed, no_queue, redis_code
from outbox.celery.link import OUT_OF_TIME
from outbox.celery.stored import StoredTask, TaskMessage


class DirectProducer:
    """
    Publishes over one connection, which is not used after an error.

    Args:
        connection: kombu's.
        is_closing: whether no more is to be handed over.
    """

    refusal = None  # a server that answers each message does not close the connection because of one

    def __init__(self, app: Celery, connection: Any, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._connection = connection
        self._is_closing = is_closing
        self._channel = connection.channel()
        self.is_broken = False

    def is_alive(self) -> bool:
        """Return whether the connection may be used; whether it still works, the next call finds out."""
        return not self.is_broken

    def publish(self, tasks: Sequence[TaskMessage], deadline: float) -> Iterator[tuple[TaskMessage, SendResult]]:
        """Publish one after the other until the deadline of `monotonic`; return the result of each."""
        trouble: SendResult | None = None
        for task in tasks:
            if trouble is None and (monotonic() >= deadline or self._is_closing()):
                trouble = OUT_OF_TIME
            result = trouble or self._publish(task)
            yield task, result
            if self.is_broken and trouble is None:
                trouble = SendResult(SendStatus.UNAVAILABLE, reason=result.reason)

    def close(self) -> None:
        """Close the connection."""
        self._connection.release()

    def _publish(self, task: TaskMessage) -> SendResult:
        stored, status = task.stored, SendStatus.MISCONFIGURED
        try:
            queues = self._queues_of(stored)
        except KeyError as error:  # kombu counts it among the errors of a connection
            return failed(SendStatus.MISCONFIGURED, error)
        try:
            for queue in queues:
                maybe_declare(queue, self._channel)
            if not self._reaches_a_queue(stored):
                self._connection.declared_entities.clear()
                return no_queue(stored.exchange, stored.routing_key)
            status = SendStatus.REFUSED
            message = task.prepare(self._channel)
            status = SendStatus.UNSURE
            self._channel.basic_publish(message, exchange=stored.exchange, routing_key=stored.routing_key)
        except self._connection.channel_errors as error:  # the server has answered, and did not store it
            self.is_broken = redis_code(error) in REDIS_OUTAGES  # another server may take over behind the same address
            return failed(SendStatus.UNAVAILABLE if self.is_broken else SendStatus.MISCONFIGURED, error)
        except (*self._connection.connection_errors, OSError) as error:
            self.is_broken = True
            return failed(SendStatus.UNSURE if status is SendStatus.UNSURE else SendStatus.UNAVAILABLE, error)
        except Exception as error:  # of this task only: whatever a transport raises about what it cannot take
            return failed(status, error)
        return ACCEPTED

    def _queues_of(self, stored: StoredTask) -> list[Queue]:
        """Return the queues of a task, or those of its exchange where it names none: Redis does not know the type of that."""
        known = self._app.amqp.queues
        if stored.queues or not stored.exchange:
            return [known[name] for name in stored.queues]
        return [queue for queue in list(known.values()) if queue.exchange and queue.exchange.name == stored.exchange]

    def _reaches_a_queue(self, stored: StoredTask) -> bool:
        """Return whether a queue takes a task. A virtual transport drops one that none takes, and says nothing."""
        if not stored.exchange or not isinstance(self._channel, virtual.Channel):
            return True
        if self._channel.typeof(stored.exchange).type == "fanout":
            return True
        return bool(self._channel._lookup(stored.exchange, stored.routing_key))
