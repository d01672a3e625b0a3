"""
Publishing to RabbitMQ: messages are written one after the other, and their confirms awaited together.

| what the server says | result |
|---|---|
| ack | ACCEPTED |
| return (no queue is bound), then ack | the queue it names is declared again, and it is sent again; else MISCONFIGURED |
| nack (a queue is full and rejects) | MISCONFIGURED: tried again later, and tasks of other queues do not wait for it |
| connection.blocked (memory or disk alarm) | UNAVAILABLE for what was not written yet, UNSURE for the others |
| the channel is closed (404: no such exchange; 406: too large) | each message without an answer goes again by itself |
| the connection is closed because of a task (503: no such type; 530; 540) | `broker.py` tries each possible poison alone |
| nothing in time, or the connection breaks | UNSURE; the connection is thrown away |

The numbers of messages, their confirms and the wait are those of `brokers/confirms.py`. The rest differs from RabbitMQ's own
broker (`brokers/rabbitmq/sender.py`), which declares its queues and exchanges itself: there a nack is an outage of the server,
and no message makes the server close the connection. Here they are declared as Celery's settings say, over kombu's connection: a
task may be refused, or its queue be full, while the others are sent.

On a new connection one message goes first: RabbitMQ says that it is blocked only when something is published.
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
MANDATORY = True
WRITE_TASKS = 100  # that are written together
SHORTEST = 0.01  # seconds; 0 would not wait at all

NACKED = SendResult(SendStatus.MISCONFIGURED, reason="Celery's broker: a queue is full and rejects what is published (nack).")
BLOCKED = SendResult(
    SendStatus.UNAVAILABLE, reason="Celery's broker accepts no messages now: an alarm blocks the connection (connection.blocked)."
)
NOT_CONFIRMED = SendResult(SendStatus.UNSURE, reason="Celery's broker did not confirm the task in time.")

AWAY = SendResult(SendStatus.UNAVAILABLE, reason="The connection to Celery's broker broke before this task was handed over.")

CANNOT_BE_WRITTEN = (amqp.FrameSyntaxError, struct.error, TypeError, ValueError, OverflowError)  # AMQP has no such value


class Refusal(msgspec.Struct, frozen=True):
    """
    What a server said when it closed the connection because of a task.

    Args:
        result: that of the task.
        possible_poison: the tasks of which one made it do so; each is tried alone, to find it.
        queue: the queue that was declared for them. None: they were published.
    """

    result: SendResult
    possible_poison: Sequence[TaskMessage]
    queue: str | None


class ConfirmingProducer:
    """
    Publishes over one connection, which is not used after an error.

    Args:
        connection: kombu's, over py-amqp.
        is_closing: whether no more is to be handed over, or waited for.
        refusal: why the server closed the connection, where one of the tasks may have made it do so.
    """

    def __init__(self, app: Celery, connection: Any, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._connection = connection
        self._wire = connection.connection  # py-amqp's
        self._is_closing = is_closing
        self._is_blocked = False
        self._wire.on_blocked = self._note_blocked
        self._wire.on_unblocked = self._note_unblocked
        self._channel: ConfirmingChannel | None = None
        self._returned: set[str] = set()  # ids of messages
        self._declaring: Any = None
        self._is_proved = False
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
        """Publish a batch, and wait for its confirms until the deadline of `monotonic`; return the result of each."""
        returned = []
        for task, result in self._publish(tasks, deadline):
            if self._was_returned(task) and task.stored.queues:
                returned.append(task)  # its queue was deleted since it was declared
            else:
                yield task, result
        if returned:
            self._connection.declared_entities.clear()
            for task, result in self._publish(returned, deadline):
                self._was_returned(task)
                yield task, result

    def _publish(self, tasks: Sequence[TaskMessage], deadline: float) -> Iterator[tuple[TaskMessage, SendResult]]:
        rest: Sequence[TaskMessage] = yield from self._with_queues(tasks, deadline)
        if rest and not self._is_proved:
            results = self._publish_together(rest[:1], deadline)
            self._is_proved = results[0].status is SendStatus.ACCEPTED
            yield rest[0], results[0]
            rest = rest[1:]
        again: list[tuple[TaskMessage, SendResult]] = []
        for task, result in zip(rest, self._publish_together(rest, deadline), strict=True):
            if result.status is SendStatus.UNSURE and not self.is_broken:
                again.append((task, result))  # the channel was closed by one of them
            else:
                yield task, result
        for task, unsure in again:
            [result] = self._publish_together([task], deadline)
            yield task, unsure if result.status is SendStatus.UNAVAILABLE else result  # it may be stored since the first time

    def close(self) -> None:
        """Close the connection."""
        try:
            if not self.is_broken:
                with self._wire.transport.having_timeout(CLOSE_SECONDS):
                    self._connection.release()
        finally:
            self._connection.collect()  # no closing handshake: the server does not answer

    def _with_queues(
        self, tasks: Sequence[TaskMessage], deadline: float
    ) -> Generator[tuple[TaskMessage, SendResult], None, Sequence[TaskMessage]]:
        """Declare the queues of tasks; yield the results of those whose queue cannot be, and return the others."""
        refused: dict[str, SendResult] = {}
        stopped_by = AWAY if self.is_broken else self._why_stop(deadline)
        for name in dict.fromkeys(name for task in tasks for name in task.stored.queues):
            if stopped_by:
                break
            try:
                with self._wire.transport.having_timeout(max(SHORTEST, deadline - monotonic())):
                    maybe_declare(self._app.amqp.queues[name], self._declaring_channel())
            except (*self._connection.connection_errors, OSError) as error:
                stopped_by = self._break(error, [task for task in tasks if name in task.stored.queues], queue=name)
            except Exception as error:  # the server's queue has other arguments, or is unknown to Celery's settings
                refused[name] = failed(SendStatus.MISCONFIGURED, error)
        rest = []
        for task in tasks:
            result = stopped_by or next((refused[name] for name in task.stored.queues if name in refused), None)
            if result is None:
                rest.append(task)
            else:
                yield task, result
        return rest

    def _declaring_channel(self) -> Any:
        """Return a channel that the server may close without harm to another; kombu's own would wait for a new connection."""
        if self._declaring is None or not self._declaring.is_open:
            self._declaring = self._wire.channel()
        return self._declaring

    def _publish_together(self, tasks: Sequence[TaskMessage], deadline: float) -> list[SendResult]:
        """Publish and wait. UNSURE without a broken connection: the channel was closed, and the server says by which."""
        if self.is_broken:  # since the last message; py-amqp would connect again by itself, and without a login
            return [AWAY] * len(tasks)
        if not tasks:
            return []
        batch = PendingConfirms(NACKED, lambda error, exchange, routing_key: no_queue(exchange, routing_key))
        written: list[TaskMessage] = []
        results: dict[int, SendResult] = {}  # of those that were not written, by their numbers
        try:
            confirming = self._open_channel(deadline)
            channel = confirming.begin(batch)
            for start in range(0, len(tasks), WRITE_TASKS):
                with self._wire.transport.having_timeout(max(SHORTEST, deadline - monotonic())), confirming.writing_together():
                    for task in tasks[start : start + WRITE_TASKS]:
                        written.append(task)
                        if result := self._why_stop(deadline) or _write(channel, batch, task):
                            results[written.pop().number] = result
                handle_input(self._wire)  # the server may say that it is blocked
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
            self.is_broken = batch.pending > 0  # a late ack would be taken for that of another message
            unanswered = not_written = NOT_CONFIRMED
        self._returned |= {message_id for _, message_id in batch.returned}
        results |= {task.number: result for task, result in zip(written, batch.finish(unanswered), strict=False)}
        return [results.get(task.number, not_written) for task in tasks]

    def _open_channel(self, deadline: float) -> ConfirmingChannel:
        """Return the channel for messages."""
        if self._channel is None or not self._channel.channel.is_open:
            with self._wire.transport.having_timeout(max(SHORTEST, deadline - monotonic())):
                self._channel = ConfirmingChannel(self._wire)
        return self._channel

    def _break(self, error: BaseException, possible_poison: list[TaskMessage], queue: str | None = None) -> SendResult:
        """Note that the connection broke, and whether the server closed it because of one of these tasks."""
        self.is_broken = True
        closed = closed_by_server(error)
        if possible_poison and closed is not None and closed.reply_code not in AMQP_OUTAGES:
            self.refusal = Refusal(failed(SendStatus.MISCONFIGURED, closed), possible_poison, queue)
        return failed(SendStatus.UNAVAILABLE, closed or error)

    def _was_returned(self, task: TaskMessage) -> bool:
        """Return whether the server has returned a message, once."""
        was_returned = task.message_id in self._returned
        self._returned.discard(task.message_id)
        return was_returned

    def _why_stop(self, deadline: float) -> SendResult | None:
        """Return why no more is to be written."""
        if self._is_blocked:
            return BLOCKED
        return OUT_OF_TIME if monotonic() >= deadline or self._is_closing() else None

    def _note_blocked(self, reason: str) -> None:
        self._is_blocked = True

    def _note_unblocked(self) -> None:
        self._is_blocked = False


def _write(channel: Any, batch: PendingConfirms, task: TaskMessage) -> SendResult | None:
    """Write a message to the connection. Return a result only if it cannot be written."""
    try:
        message = task.prepare(channel, message_id=task.message_id)
    except Exception as error:  # whatever is wrong with it
        return failed(SendStatus.REFUSED, error)
    batch.extend([(task.stored.exchange, task.message_id)])
    try:
        arguments = (0, task.stored.exchange, task.stored.routing_key, MANDATORY, False)
        channel.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
    except CANNOT_BE_WRITTEN as error:  # py-amqp finds out before the first byte
        batch.remove_last()
        return failed(SendStatus.REFUSED, error)
    return None
