"""
Publishes batches and waits for their confirms, once for each batch.

A confirm says that the message is on a majority of the nodes of every queue that it was routed to. A message that no queue
wanted comes back (`mandatory`) before its confirm. The channel of a batch that did not end well is not used again, since a
late confirm would be taken for another message's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError, NotFound, PreconditionFailed

from outbox.brokers.base import ACCEPTED, SendResult, SendStatus
from outbox.brokers.rabbitmq.connection import LOST, Connection, describe
from outbox.errors import BrokerUnavailable

NO_ROUTE = 312
TOO_LARGE = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
BLOCKED = "RabbitMQ has blocked this connection: it is short of memory or disk."


@dataclass(frozen=True, slots=True)
class Publication:
    """A message and where it goes."""

    exchange: str
    routing_key: str
    message: amqp.Message

    @property
    def id(self) -> tuple[str, str]:
        """Identifies it among those of one batch."""
        return self.exchange, self.message.properties.get("message_id", "")


@dataclass(slots=True)
class PendingConfirms:
    """
    Publications of one batch and what became of them.

    Args:
        first_tag: the delivery tag of the first one.
    """

    publications: Sequence[Publication]
    first_tag: int
    results: list[SendResult | None] = field(init=False)
    pending: int = field(init=False)
    returned: dict[tuple[str, str], SendResult] = field(default_factory=dict)
    settled_to: int = 0  # all before this index are settled

    def __post_init__(self) -> None:
        self.results = [None] * len(self.publications)
        self.pending = len(self.publications)

    def on_return(self, error: Exception, exchange: str, routing_key: str, message: amqp.Message) -> None:
        """Note that a message came back."""
        name = (exchange, message.properties.get("message_id", ""))
        code = getattr(error, "reply_code", 0)
        reason = (
            f"No queue takes messages of {exchange!r}: no consumer group has received from it yet. Start the consumers, or name "
            'the groups in OPTIONS["GROUPS"].'
            if code == NO_ROUTE
            else f"RabbitMQ returned the message: {describe(error)}."
        )
        self.returned[name] = SendResult(SendStatus.MISCONFIGURED, reason=reason)

    def on_ack(self, tag: int, multiple: bool) -> None:
        """Note that messages are stored."""
        self._settle(tag, multiple, ACCEPTED)

    def on_nack(self, tag: int, multiple: bool) -> None:
        """
        Note that messages are not stored in all of their queues. They may be in some, and are published to all of them again.

        This is an outage, and not an unsure send: no attempt is counted while a queue is full.
        """
        reason = "RabbitMQ did not take the message: a queue is full, or most of its nodes are away."
        self._settle(tag, multiple, SendResult(SendStatus.UNAVAILABLE, reason=reason))

    def finish(self, status: SendStatus, reason: str) -> list[SendResult]:
        """Return the results; those that are still open have this one."""
        rest = SendResult(status, reason=reason)
        return [result or rest for result in self.results]

    def _settle(self, tag: int, multiple: bool, result: SendResult) -> None:
        last = tag - self.first_tag
        assert last >= 0, "the channel of an earlier batch is not used again"
        for index in range(self.settled_to if multiple else last, last + 1):
            if self.results[index] is None:
                self.results[index] = self.returned.get(self.publications[index].id, result)
                self.pending -= 1
        if multiple:
            self.settled_to = last + 1


class Publisher:
    """
    Publishes over one connection.

    Args:
        timeout: seconds for the confirms of a batch.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._channel: amqp.Channel | None = None
        self._serial = 0
        self._next_tag = 1

    def publish(self, publications: Sequence[Publication]) -> list[SendResult]:
        """Publish messages and wait for all confirms."""
        if not publications:
            return []
        batch = PendingConfirms(publications, 0)
        is_begun = False
        try:
            with self._connection.use() as connection:
                if self._connection.is_blocked:  # it answers nothing until then
                    return batch.finish(SendStatus.UNAVAILABLE, BLOCKED)
                channel = self._open_channel(connection)
                batch.first_tag = self._next_tag
                _listen(channel, batch)
                is_begun = True
                for one in publications:
                    channel.send_method(spec.Basic.Publish, "Bssbb", (0, one.exchange, one.routing_key, True, False), one.message)
                self._next_tag += len(publications)
                self._wait(connection, batch)
            if batch.pending:
                self._channel = None
                return batch.finish(SendStatus.UNSURE, BLOCKED)
        except BrokerUnavailable as error:
            return batch.finish(SendStatus.UNAVAILABLE, str(error))
        except ChannelError as error:
            return self._after_channel_error(batch, error)
        except LOST as error:
            status = SendStatus.UNSURE if is_begun else SendStatus.UNAVAILABLE
            return batch.finish(status, f"The connection to RabbitMQ broke: {describe(error)}.")
        return batch.finish(SendStatus.UNSURE, "")  # none is open

    def _wait(self, connection: amqp.Connection, batch: PendingConfirms) -> None:
        """Wait for the confirms; those of a blocked connection do not come before memory and disk suffice again."""
        deadline = time.monotonic() + self._timeout
        while batch.pending and not self._connection.is_blocked:
            try:
                connection.blocking_read(max(1e-6, deadline - time.monotonic()))  # a heartbeat does not prolong it
            except TimeoutError as error:
                text = f"{batch.pending} of {len(batch.results)} confirms did not come within {self._timeout:g} s"
                raise TimeoutError(text) from error

    def _after_channel_error(self, batch: PendingConfirms, error: ChannelError) -> list[SendResult]:
        """Return results after the server has closed the channel over one message: the others are sent again."""
        text = describe(error)
        if not isinstance(error, NotFound | AccessRefused | PreconditionFailed):
            return batch.finish(SendStatus.UNSURE, f"RabbitMQ closed the channel: {text}.")
        open_ones = [index for index, result in enumerate(batch.results) if result is None]
        blamed = {index: result for index in open_ones if (result := _blame(batch.publications[index], text))}
        rest = [index for index in open_ones if index not in blamed]
        if not blamed and len(rest) == 1:
            blamed[rest.pop()] = SendResult(SendStatus.REFUSED, reason=f"RabbitMQ refused the message: {text}.")
        for index, result in blamed.items():
            batch.results[index] = result
        groups = [rest] if blamed else [[index] for index in rest]  # one by one: it has to be found out which it is
        for indexes in groups:
            for index, result in zip(indexes, self.publish([batch.publications[n] for n in indexes]), strict=True):
                batch.results[index] = result
        return batch.finish(SendStatus.UNSURE, "")

    def _open_channel(self, connection: amqp.Connection) -> amqp.Channel:
        if self._channel is None or self._serial != self._connection.serial:
            self._channel = connection.channel()
            self._channel.confirm_select()
            self._serial, self._next_tag = self._connection.serial, 1
        return self._channel


def _blame(publication: Publication, text: str) -> SendResult | None:
    """Return the result of a message over which, by its error, the server closed the channel; None: it was not this one."""
    if f"exchange '{publication.exchange}'" in text:
        return SendResult(SendStatus.MISCONFIGURED, reason=f"RabbitMQ refused the topic: {text}.")
    limit = TOO_LARGE.search(text)
    if limit is not None and len(publication.message.body) > int(limit[1]):
        return SendResult(SendStatus.REFUSED, reason=f"RabbitMQ refused the message: {text}.")
    return None


def _listen(channel: amqp.Channel, batch: PendingConfirms) -> None:
    events: dict[str, set[Callable[..., None]]] = channel.events  # type: ignore[attr-defined]  # the stubs lack it
    events.update(basic_ack={batch.on_ack}, basic_nack={batch.on_nack}, basic_return={batch.on_return})
