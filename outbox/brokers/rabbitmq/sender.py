"""
Publishes batches and waits for their confirms, once for each batch.

A confirm says that the message is on a majority of the nodes of every queue that it was routed to. A message that no queue
takes comes back (`mandatory`) before its confirm, and is MISCONFIGURED: the relay sends it again later. The channel of a batch
that did not end well is not used again, since a late confirm would be taken for another message's.

`mandatory` says nothing about one queue of several. So the queues that a batch needs are declared passively ahead of it, without
waiting for an answer: if one is missing, the server closes the channel before it reads the first message. A binding can be asked
for by no client, so the queues are also bound again, which changes nothing where they are bound: at most each BIND_SECONDS, as a
cluster decides on each binding together. An exchange that was deleted and declared by somebody else has none of ours.
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
# A nack is an outage, and not an unsure send: no failure is counted while a queue is full. The message may be in some of its
# queues, and is published to all of them again.
NOT_TAKEN = SendResult(
    SendStatus.UNAVAILABLE, reason="RabbitMQ did not take the message: a queue is full, or most of its nodes are away."
)
UNANSWERED = SendResult(SendStatus.UNSURE)
BLOCKED = "RabbitMQ has blocked this connection: it is short of memory or disk."


class DeclarationMissing(Exception):
    """A queue that a batch needs does not exist. Nothing of the batch is stored."""


class RabbitMQSender:
    """
    Publishes over one connection.

    Args:
        timeout: seconds for the confirms of a batch.
    """

    def __init__(self, connection: RabbitMQConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._channel: ConfirmingChannel | None = None
        self._serial = 0
        self._bound_at: dict[tuple[str, str], float] = {}

    def publish(self, messages: Sequence[Outgoing], *, queues: Collection[tuple[str, str]] = ()) -> list[SendResult]:
        """
        Publish messages and wait for all confirms.

        Args:
            queues: exchange and name of those that must exist, and be bound to all its messages.

        Raises:
            DeclarationMissing: one of them does not exist, or its exchange.
        """
        if not messages:
            return []
        batch = PendingConfirms(NOT_TAKEN, _explain_return)
        batch.extend((message.topic, message.message_id) for message in messages)
        is_begun = False
        try:
            with self._connection.use() as connection:
                if self._is_blocked():  # it answers nothing until then
                    return batch.finish(SendResult(SendStatus.UNAVAILABLE, reason=BLOCKED))
                confirming = self._open_channel(connection)
                channel = confirming.begin(batch)
                is_begun = True
                with confirming.writing_together():
                    self._write(channel, messages, queues)
                batch.wait(connection, time.monotonic() + self._timeout, self._is_blocked)
                if batch.pending and not self._is_blocked():
                    text = f"{batch.pending} of {len(batch.results)} confirms did not come within {self._timeout:g} s"
                    raise TimeoutError(text)
            if batch.pending:  # the confirms of a blocked connection do not come before memory and disk suffice again
                self._channel = None
                return batch.finish(SendResult(SendStatus.UNSURE, reason=BLOCKED))
        except BrokerUnavailable as error:
            return batch.finish(SendResult(SendStatus.UNAVAILABLE, reason=str(error)))
        except ChannelError as error:
            if isinstance(error, NotFound) and error.method_sig in (spec.Queue.Declare, spec.Queue.Bind):
                raise DeclarationMissing(describe(error)) from error
            return self._after_channel_error(messages, batch, error)
        except LOST as error:
            status = SendStatus.UNSURE if is_begun else SendStatus.UNAVAILABLE
            return batch.finish(SendResult(status, reason=f"The connection to RabbitMQ broke: {describe(error)}."))
        return batch.finish(UNANSWERED)  # none is open

    def _write(self, channel: amqp.Channel, messages: Iterable[Outgoing], queues: Collection[tuple[str, str]]) -> None:
        """Declare passively what must exist, bind it again where that is due, then publish."""
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
        """Return results after the server has closed the channel over one message: the others are sent again."""
        text = describe(error)
        if not isinstance(error, NotFound | AccessRefused | PreconditionFailed):
            return batch.finish(SendResult(SendStatus.UNSURE, reason=f"RabbitMQ closed the channel: {text}."))
        open_ones = [index for index, result in enumerate(batch.results) if result is None]
        blamed = {index: result for index in open_ones if (result := _blame(messages[index], text))}
        rest = [index for index in open_ones if index not in blamed]
        if not blamed and len(rest) == 1:
            status = SendStatus.REFUSED if isinstance(error, PreconditionFailed) else SendStatus.MISCONFIGURED
            blamed[rest.pop()] = SendResult(status, reason=f"RabbitMQ refused the message: {text}.")
        for index, result in blamed.items():
            batch.results[index] = result
        groups = [rest] if blamed else [[index] for index in rest]  # one by one: it has to be found out which it is
        for indexes in groups:
            for index, result in zip(indexes, self.publish([messages[n] for n in indexes]), strict=True):
                batch.results[index] = result
        return batch.finish(UNANSWERED)

    def _open_channel(self, connection: amqp.Connection) -> ConfirmingChannel:
        if self._channel is None or self._serial != self._connection.serial:
            self._channel = ConfirmingChannel(connection)
            self._serial = self._connection.serial
        return self._channel


def _blame(message: Outgoing, text: str) -> SendResult | None:
    """Return the result of a message over which, by its error, the server closed the channel; None: it was not this one."""
    if f"exchange '{message.topic}'" in text:
        return SendResult(SendStatus.MISCONFIGURED, reason=f"RabbitMQ refused the topic: {text}.")
    limit = TOO_LARGE.search(text)
    if limit is not None and len(message.body) > int(limit[1]):
        return SendResult(SendStatus.REFUSED, reason=f"RabbitMQ refused the message: {text}.")
    return None


def _explain_return(error: Exception, exchange: str, routing_key: str) -> SendResult:
    """Return the result of a message that came back."""
    reason = (
        f"No queue takes messages of {exchange!r}: no consumer group has received from it yet, or its queues were deleted. Start "
        'the consumers, or name the groups in OPTIONS["GROUPS"].'
        if getattr(error, "reply_code", 0) == NO_ROUTE
        else f"RabbitMQ returned the message: {describe(error)}."
    )
    return SendResult(SendStatus.MISCONFIGURED, reason=reason)
