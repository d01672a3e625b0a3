"""
Publish to RabbitMQ: write messages one after the other, and wait for their confirms together.

| answer of the server | result |
|---|---|
| ack | ACCEPTED |
| return (no queue is bound), then ack | the task's queue is declared, and the task sent again; MISCONFIGURED without a queue |
| nack (a queue is full and rejects) | MISCONFIGURED: it is tried again later, and tasks of other queues do not wait for it |
| connection.blocked (memory or disk alarm) | UNAVAILABLE for messages that were not written yet, UNSURE for the others |
| the channel is closed (404: no such exchange; 406: too large) | each message without an answer is sent again alone |
| the connection is closed because of a task (503: no such type; 530; 540) | `broker.py` tries each possible cause alone |
| no answer in time, or the connection breaks | UNSURE; the connection is closed |

`brokers/confirms.py` numbers the messages and waits for the confirms. The rest differs from the outbox's RabbitMQ broker
(`brokers/rabbitmq/sender.py`). That broker declares its queues and exchanges itself, so a nack means an outage of the server, and
no message makes the server close the connection. Here queues and exchanges are declared as in Celery's settings, on kombu's
connection, so the server may refuse a task, or the task's queue may be full, while other tasks are sent.

On a new connection one message is sent alone first, because RabbitMQ reports that it is blocked only when a message is published.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from time import monotonic
from typing import Any

import amqp
import msgspec
from amqp import spec
from celery import Celery
from kombu.common import maybe_declare

from outbox.brokers.base import SendResult, SendStatus
from outbox.brokers.confirms import ConfirmingChannel, PendingConfirms, handle_input
from outbox.celery.errors import AMQP_OUTAGES, TOO_LARGE, closed_by_server, failed, no_queue
from outbox.celery.link import OUT_OF_TIME
from outbox.celery.stored import TaskMessage

CLOSE_SECONDS = 2.0
MANDATORY = True  # the server returns a message that reaches no queue
TASKS_PER_WRITE = 100  # tasks that are written to the socket together
MIN_TIMEOUT = 0.01  # seconds; 0 would make the socket non-blocking

NACKED = SendResult(SendStatus.MISCONFIGURED, reason="Celery's broker: a queue is full and rejects what is published (nack).")
BLOCKED = SendResult(
    SendStatus.UNAVAILABLE, reason="Celery's broker accepts no messages now: an alarm blocks the connection (connection.blocked)."
)
NOT_CONFIRMED = SendResult(SendStatus.UNSURE, reason="Celery's broker did not confirm the task in time.")

DISCONNECTED = SendResult(SendStatus.UNAVAILABLE, reason="The connection to Celery's broker broke before this task was sent.")

CANNOT_BE_WRITTEN = (amqp.FrameSyntaxError, struct.error, TypeError, ValueError, OverflowError)  # a value that AMQP does not have


class Refusal(msgspec.Struct, frozen=True):
    """
    The answer of a server that has closed the connection because of a task.

    Args:
        result: the result of the task.
        possible_poison: the tasks of which one made the server close the connection; each is tried alone to find this task.
        queue: the queue of these tasks, if its declaration made the server close the connection. None: a published task did.
    """

    result: SendResult
    possible_poison: Sequence[TaskMessage]
    queue: str | None


class ConfirmingProducer:
    """
    Publishes over one connection, which is not used after an error.

    Args:
        connection: a connection of kombu that uses py-amqp.
        is_closing: returns True when no more messages should be sent, and no more confirms awaited.
        is_broken: whether the connection has failed, so that it must not be used again.
        refusal: why the server closed the connection, if one of the tasks may have made it do so.
    """

    def __init__(self, app: Celery, connection: Any, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._connection = connection
        self._wire = connection.connection  # the connection of py-amqp
        self._is_closing = is_closing
        self._is_blocked = False
        self._wire.on_blocked = self._on_blocked
        self._wire.on_unblocked = self._on_unblocked
        self._channel: ConfirmingChannel | None = None
        self._returned: set[str] = set()  # ids of messages that the server has returned
        self._declaring: Any = None  # the channel on which queues are declared
        self._is_proved = False  # whether the server has accepted a message on this connection
        self.is_broken = False
        self.refusal: Refusal | None = None

    def is_alive(self) -> bool:
        """Return whether the connection may be used: the server has not closed it since the last call."""
        try:
            if not self.is_broken:
                handle_input(self._wire)
        except (*self._connection.connection_errors, *self._connection.channel_errors, OSError):
            self.is_broken = True
        return not self.is_broken

    def publish(self, tasks: Sequence[TaskMessage], deadline: float) -> Iterator[tuple[TaskMessage, SendResult]]:
        """Publish a batch, and wait for its confirms until the deadline (a time of `monotonic`); yield each with its result."""
        returned = []
        for task, result in self._publish(tasks, deadline):
            if self._was_returned(task) and task.stored.queues:
                returned.append(task)  # its queue was deleted after it was declared
            else:
                yield task, result
        if returned:
            self._connection.declared_entities.clear()
            for task, result in self._publish(returned, deadline):
                self._was_returned(task)
                yield task, result

    def _publish(self, tasks: Sequence[TaskMessage], deadline: float) -> Iterator[tuple[TaskMessage, SendResult]]:
        """Declare queues; publish the first task of a connection alone, the others together, and unanswered ones alone."""
        remaining: Sequence[TaskMessage] = yield from self._declare_queues(tasks, deadline)
        if remaining and not self._is_proved:
            results = self._publish_together(remaining[:1], deadline)
            self._is_proved = results[0].status is SendStatus.ACCEPTED
            yield remaining[0], results[0]
            remaining = remaining[1:]
        unanswered: list[tuple[TaskMessage, SendResult]] = []
        for task, result in zip(remaining, self._publish_together(remaining, deadline), strict=True):
            if result.status is SendStatus.UNSURE and not self.is_broken:
                unanswered.append((task, result))  # one of the tasks made the server close the channel
            else:
                yield task, result
        for task, unsure in unanswered:
            [result] = self._publish_together([task], deadline)
            yield task, unsure if result.status is SendStatus.UNAVAILABLE else result  # the first try may have stored it

    def close(self) -> None:
        """Close the connection."""
        try:
            if not self.is_broken:
                with self._wire.transport.having_timeout(CLOSE_SECONDS):
                    self._connection.release()
        finally:
            self._connection.collect()  # closes without a handshake, for a server that does not answer

    def _declare_queues(
        self, tasks: Sequence[TaskMessage], deadline: float
    ) -> Generator[tuple[TaskMessage, SendResult], None, Sequence[TaskMessage]]:
        """Declare the queues of tasks; yield tasks whose queue cannot be declared, with their results, and return the others."""
        refused: dict[str, SendResult] = {}
        not_sent = DISCONNECTED if self.is_broken else self._stop_reason(deadline)
        for name in dict.fromkeys(name for task in tasks for name in task.stored.queues):
            if not_sent:
                break
            try:
                with self._wire.transport.having_timeout(max(MIN_TIMEOUT, deadline - monotonic())):
                    maybe_declare(self._app.amqp.queues[name], self._open_declaring_channel())
            except (*self._connection.connection_errors, OSError) as error:
                not_sent = self._break(error, [task for task in tasks if name in task.stored.queues], queue=name)
            except Exception as error:  # the server's queue has other arguments, or Celery's settings do not have the queue
                refused[name] = failed(SendStatus.MISCONFIGURED, error)
        remaining = []
        for task in tasks:
            result = not_sent or next((refused[name] for name in task.stored.queues if name in refused), None)
            if result is None:
                remaining.append(task)
            else:
                yield task, result
        return remaining

    def _open_declaring_channel(self) -> Any:
        """
        Return a separate channel for declarations, so that the server closes only this one if it refuses a declaration.

        kombu's default channel is not used, because it would wait for a new connection.
        """
        if self._declaring is None or not self._declaring.is_open:
            self._declaring = self._wire.channel()
        return self._declaring

    def _publish_together(self, tasks: Sequence[TaskMessage], deadline: float) -> list[SendResult]:
        """
        Publish tasks, wait for their confirms, and return the results in the order of the tasks.

        If a result is UNSURE and the connection is not broken, the server has closed the channel because of one of the tasks.
        """
        if self.is_broken:  # py-amqp would reconnect by itself, without a login
            return [DISCONNECTED] * len(tasks)
        if not tasks:
            return []
        batch = PendingConfirms(NACKED, lambda error, exchange, routing_key: no_queue(exchange, routing_key))
        written: list[TaskMessage] = []
        results: dict[int, SendResult] = {}  # results of tasks that were not written, by the tasks' numbers
        try:
            confirming = self._open_channel(deadline)
            channel = confirming.begin(batch)
            for start in range(0, len(tasks), TASKS_PER_WRITE):
                with self._wire.transport.having_timeout(max(MIN_TIMEOUT, deadline - monotonic())), confirming.writing_together():
                    for task in tasks[start : start + TASKS_PER_WRITE]:
                        written.append(task)
                        if result := self._stop_reason(deadline) or _write(channel, batch, task):
                            results[written.pop().number] = result
                handle_input(self._wire)  # the server may have sent connection.blocked
            batch.wait(self._wire, deadline, lambda: self._is_blocked or self._is_closing())
        except self._connection.channel_errors as error:
            self._channel = None
            status = SendStatus.UNSURE
            if len(tasks) == 1:
                status = SendStatus.REFUSED if isinstance(error, TOO_LARGE) else SendStatus.MISCONFIGURED
            unanswered = not_written = failed(status, error)
        except (*self._connection.connection_errors, OSError) as error:
            not_written = self._break(error, [task for task in written if task.number not in results])
            unanswered = SendResult(SendStatus.UNSURE, reason=not_written.reason)
        else:
            self.is_broken = batch.pending > 0  # on this connection, a late ack would be taken for that of another message
            unanswered = not_written = NOT_CONFIRMED
        self._returned |= {message_id for _, message_id in batch.returned}
        results |= {task.number: result for task, result in zip(written, batch.finish(unanswered), strict=False)}
        return [results.get(task.number, not_written) for task in tasks]

    def _open_channel(self, deadline: float) -> ConfirmingChannel:
        """Return the channel for messages."""
        if self._channel is None or not self._channel.channel.is_open:
            with self._wire.transport.having_timeout(max(MIN_TIMEOUT, deadline - monotonic())):
                self._channel = ConfirmingChannel(self._wire)
        return self._channel

    def _break(self, error: BaseException, possible_poison: list[TaskMessage], queue: str | None = None) -> SendResult:
        """Record that the connection broke, and a refusal if the server closed it because of one of these tasks."""
        self.is_broken = True
        closing_error = closed_by_server(error)
        if possible_poison and closing_error is not None and closing_error.reply_code not in AMQP_OUTAGES:
            self.refusal = Refusal(failed(SendStatus.MISCONFIGURED, closing_error), possible_poison, queue)
        return failed(SendStatus.UNAVAILABLE, closing_error or error)

    def _was_returned(self, task: TaskMessage) -> bool:
        """Return whether the server has returned a message, and forget it."""
        was_returned = task.message_id in self._returned
        self._returned.discard(task.message_id)
        return was_returned

    def _stop_reason(self, deadline: float) -> SendResult | None:
        """Return the result of messages that must not be written any more; None if writing can continue."""
        if self._is_blocked:
            return BLOCKED
        return OUT_OF_TIME if monotonic() >= deadline or self._is_closing() else None

    def _on_blocked(self, reason: str) -> None:
        self._is_blocked = True

    def _on_unblocked(self) -> None:
        self._is_blocked = False


def _write(channel: Any, batch: PendingConfirms, task: TaskMessage) -> SendResult | None:
    """Write a message to the connection. Return a result only if it cannot be written."""
    try:
        message = task.prepare(channel, message_id=task.message_id)
    except Exception as error:  # the task's headers or body may be wrong in many ways
        return failed(SendStatus.REFUSED, error)
    batch.extend([(task.stored.exchange, task.message_id)])
    try:
        arguments = (0, task.stored.exchange, task.stored.routing_key, MANDATORY, False)
        channel.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
    except CANNOT_BE_WRITTEN as error:  # py-amqp raises before it has written the first byte
        batch.remove_last()
        return failed(SendStatus.REFUSED, error)
    return None
