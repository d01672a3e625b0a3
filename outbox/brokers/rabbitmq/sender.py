"""
Publishes batches, and waits for the publisher confirms of each batch together.

A confirm says that the message is stored on a majority of the nodes of every queue that it was routed to. The server returns a
message that no queue takes (`mandatory`) before it confirms the message; the result is MISCONFIGURED, so that the relay sends it
again later. If confirms are missing, the channel of the batch is not used again, because a late confirm would be taken for that
of another message.

A message is not returned if only one of several queues is missing. So the queues that a batch needs are declared passively before
the first message, without waiting for an answer: if a queue is missing, the server closes the channel before it reads the first
message. A queue may also exist without its binding, after another client has deleted the exchange and declared it again. AMQP
clients cannot query bindings, so the queues are bound again, which changes nothing if they are bound. Each queue is bound at most
once every BIND_SECONDS, because all nodes of a cluster have to agree on a binding.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError, NotFound, PreconditionFailed

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.confirms import ConfirmingChannel, PendingConfirms
from outbox.brokers.rabbitmq.client import LOST, RabbitMQConnection, describe
from outbox.brokers.rabbitmq.envelope import to_amqp
from outbox.brokers.rabbitmq.topology import ALL_TAGS
from outbox.errors import BrokerUnavailable

NO_ROUTE = 312
BIND_SECONDS = 1.0
MANDATORY = PASSIVE = NOWAIT = True
TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
# A nack is UNAVAILABLE, not UNSURE, so that the relay counts no failure of the message while a queue is full. Some of its queues
# may have the message already; it is published to all of them again.
NACKED = SendResult(
    SendStatus.UNAVAILABLE, reason="RabbitMQ did not take the message: a queue is full, or most of its nodes are unreachable."
)
UNANSWERED = SendResult(SendStatus.UNSURE)
BLOCKED = "RabbitMQ has blocked this connection: it is short of memory or disk."


class DeclarationMissing(Exception):
    """Raised when a queue or an exchange that a batch needs does not exist. No message of the batch is stored."""


class RabbitMQSender:
    """
    Publishes over one connection.

    Args:
        timeout: how many seconds to wait for the confirms of a batch.
    """

    def __init__(self, connection: RabbitMQConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._channel: ConfirmingChannel | None = None
        self._channel_serial = 0  # the connection to which `_channel` belongs (`RabbitMQConnection.serial`)
        self._bound_at: dict[tuple[str, str], float] = {}  # exchange and queue -> when they were last bound, by `monotonic`

    def publish(self, messages: Sequence[Outgoing], *, queues: Collection[tuple[str, str]] = ()) -> list[SendResult]:
        """
        Publish messages and wait for all confirms.

        Args:
            queues: exchange and name of each queue that must exist. A queue that was not bound for BIND_SECONDS is also bound to
                the exchange again, for all tags.

        Raises:
            DeclarationMissing: one of these queues, or its exchange, does not exist.
        """
        if not messages:
            return []
        batch = PendingConfirms(NACKED, _explain_return)
        batch.extend((message.topic, message.message_id) for message in messages)
        may_be_published = False
        try:
            with self._connection.use() as connection:
                if self._is_blocked():  # the server would not answer
                    return batch.finish(SendResult(SendStatus.UNAVAILABLE, reason=BLOCKED))
                confirming = self._open_channel(connection)
                channel = confirming.begin(batch)
                may_be_published = True
                with confirming.writing_together():
                    self._write(channel, messages, queues)
                batch.wait(connection, time.monotonic() + self._timeout, self._is_blocked)
                if batch.pending and not self._is_blocked():
                    text = f"{batch.pending} of {len(batch.results)} confirms did not come within {self._timeout:g} s"
                    raise TimeoutError(text)
            if batch.pending:  # a blocked connection gets no confirms while memory or disk are short
                self._channel = None
                return batch.finish(SendResult(SendStatus.UNSURE, reason=BLOCKED))
        except BrokerUnavailable as error:
            return batch.finish(SendResult(SendStatus.UNAVAILABLE, reason=str(error)))
        except ChannelError as error:
            if isinstance(error, NotFound) and error.method_sig in (spec.Queue.Declare, spec.Queue.Bind):
                raise DeclarationMissing(describe(error)) from error
            return self._after_channel_error(messages, batch, error)
        except LOST as error:
            status = SendStatus.UNSURE if may_be_published else SendStatus.UNAVAILABLE
            return batch.finish(SendResult(status, reason=f"The connection to RabbitMQ broke: {describe(error)}."))
        return batch.finish(UNANSWERED)  # no message is pending any more, so each has a result, and none becomes UNANSWERED

    def _write(self, channel: amqp.Channel, messages: Iterable[Outgoing], queues: Collection[tuple[str, str]]) -> None:
        """Declare the queues passively, bind them again if that is due, and publish the messages."""
        now = time.monotonic()
        for exchange, name in queues:
            channel.send_method(spec.Queue.Declare, "BsbbbbbF", (0, name, PASSIVE, False, False, False, NOWAIT, {}))
            if now - self._bound_at.get((exchange, name), float("-inf")) >= BIND_SECONDS:
                self._bound_at[exchange, name] = now
                channel.send_method(spec.Queue.Bind, "BsssbF", (0, name, exchange, ALL_TAGS, NOWAIT, {}))
        for message in messages:
            channel.send_method(spec.Basic.Publish, "Bssbb", (0, message.topic, message.tag, MANDATORY, False), to_amqp(message))

    def _is_blocked(self) -> bool:
        return self._connection.is_blocked

    def _after_channel_error(self, messages: Sequence[Outgoing], batch: PendingConfirms, error: ChannelError) -> list[SendResult]:
        """
        Return results after the server has closed the channel. If one message is to blame, the others are published again.

        After an error that does not concern a message, all unanswered ones are UNSURE.
        """
        text = describe(error)
        if not isinstance(error, NotFound | AccessRefused | PreconditionFailed):
            return batch.finish(SendResult(SendStatus.UNSURE, reason=f"RabbitMQ closed the channel: {text}."))
        unanswered = [index for index, result in enumerate(batch.results) if result is None]
        blamed = {index: result for index in unanswered if (result := _blame(messages[index], text))}
        rest = [index for index in unanswered if index not in blamed]
        if not blamed and len(rest) == 1:
            status = SendStatus.REFUSED if isinstance(error, PreconditionFailed) else SendStatus.MISCONFIGURED
            blamed[rest.pop()] = SendResult(status, reason=f"RabbitMQ refused the message: {text}.")
        for index, result in blamed.items():
            batch.results[index] = result
        groups = [rest] if blamed else [[index] for index in rest]  # one by one, to find out which message is to blame
        for indexes in groups:
            for index, result in zip(indexes, self.publish([messages[n] for n in indexes]), strict=True):
                batch.results[index] = result
        return batch.finish(UNANSWERED)

    def _open_channel(self, connection: amqp.Connection) -> ConfirmingChannel:
        if self._channel is None or self._channel_serial != self._connection.serial:
            self._channel = ConfirmingChannel(connection)
            self._channel_serial = self._connection.serial
        return self._channel


def _blame(message: Outgoing, text: str) -> SendResult | None:
    """Return the result of a message if the text of the channel's error blames it, otherwise None."""
    if f"exchange '{message.topic}'" in text:
        return SendResult(SendStatus.MISCONFIGURED, reason=f"RabbitMQ refused the topic: {text}.")
    limit = TOO_LARGE.search(text)
    if limit is not None and len(message.body) > int(limit[1]):
        return SendResult(SendStatus.REFUSED, reason=f"RabbitMQ refused the message: {text}.")
    return None


def _explain_return(error: Exception, exchange: str, routing_key: str) -> SendResult:
    """Return the result of a message that the server returned."""
    reason = (
        f"No queue takes messages of {exchange!r}: no consumer group has received from it yet, or its queues were deleted. Start "
        'the consumers, or name the groups in OPTIONS["GROUPS"].'
        if getattr(error, "reply_code", 0) == NO_ROUTE
        else f"RabbitMQ returned the message: {describe(error)}."
    )
    return SendResult(SendStatus.MISCONFIGURED, reason=reason)
