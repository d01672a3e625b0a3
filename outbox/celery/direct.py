"""
Publish over a transport whose server answers each message: Redis, with its LPUSH, and all other virtual transports of kombu.

If the call returns, the message is stored. If the connection breaks during the call, the message may be stored.
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
        connection: a connection of kombu.
        is_closing: returns True when no more messages should be sent.
    """

    refusal = None  # a server that answers each message does not close the connection because of a message

    def __init__(self, app: Celery, connection: Any, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._connection = connection
        self._is_closing = is_closing
        self._channel = connection.channel()
        self.is_broken = False

    def is_alive(self) -> bool:
        """Return whether the connection may be used. Only the next call shows whether it still works."""
        return not self.is_broken

    def publish(self, tasks: Sequence[TaskMessage], deadline: float) -> Iterator[tuple[TaskMessage, SendResult]]:
        """Publish one task after the other, until the deadline (a time of `monotonic`); yield each with its result."""
        not_sent: SendResult | None = None
        for task in tasks:
            if not_sent is None and (monotonic() >= deadline or self._is_closing()):
                not_sent = OUT_OF_TIME
            result = not_sent or self._publish(task)
            yield task, result
            if self.is_broken and not_sent is None:
                not_sent = SendResult(SendStatus.UNAVAILABLE, reason=result.reason)

    def close(self) -> None:
        """Close the connection."""
        self._connection.release()

    def _publish(self, task: TaskMessage) -> SendResult:
        stored, status_on_error = task.stored, SendStatus.MISCONFIGURED
        try:
            queues = self._queues_of(stored)
        except KeyError as error:  # caught here, because kombu counts KeyError among the errors of a connection
            return failed(SendStatus.MISCONFIGURED, error)
        try:
            for queue in queues:
                maybe_declare(queue, self._channel)
            if not self._reaches_a_queue(stored):
                self._connection.declared_entities.clear()
                return no_queue(stored.exchange, stored.routing_key)
            status_on_error = SendStatus.REFUSED
            message = task.prepare(self._channel)
            status_on_error = SendStatus.UNSURE
            self._channel.basic_publish(message, exchange=stored.exchange, routing_key=stored.routing_key)
        except self._connection.channel_errors as error:  # the server has answered, and did not store the message
            self.is_broken = redis_code(error) in REDIS_OUTAGES  # so reconnect: another server may take over the same address
            return failed(SendStatus.UNAVAILABLE if self.is_broken else SendStatus.MISCONFIGURED, error)
        except (*self._connection.connection_errors, OSError) as error:
            self.is_broken = True
            return failed(SendStatus.UNSURE if status_on_error is SendStatus.UNSURE else SendStatus.UNAVAILABLE, error)
        except Exception as error:  # an error about this task only, such as a value that the transport cannot write
            return failed(status_on_error, error)
        return ACCEPTED

    def _queues_of(self, stored: StoredTask) -> list[Queue]:
        """
        Return the queues that a task names. If it names none, return the queues of its exchange.

        Redis does not know the type of an exchange before a queue of it was declared.
        """
        known_queues = self._app.amqp.queues
        if stored.queues or not stored.exchange:
            return [known_queues[name] for name in stored.queues]
        return [queue for queue in list(known_queues.values()) if queue.exchange and queue.exchange.name == stored.exchange]

    def _reaches_a_queue(self, stored: StoredTask) -> bool:
        """Return whether a task reaches a queue. A virtual transport silently drops a message that reaches none."""
        if not stored.exchange or not isinstance(self._channel, virtual.Channel):
            return True
        if self._channel.typeof(stored.exchange).type == "fanout":
            return True
        return bool(self._channel._lookup(stored.exchange, stored.routing_key))
