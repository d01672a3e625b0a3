"""
Publisher confirms of RabbitMQ, awaited for a batch.

The server counts the messages of a channel, and answers by their numbers (delivery tags). A message that no queue takes comes
back before its confirm, if it was published as mandatory. The channel of a batch without all answers is not used again, since a
late answer would be taken for that to another batch.

Source: https://www.rabbitmq.com/docs/confirms
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.brokers.base import ACCEPTED, SendResult

if TYPE_CHECKING:  # the callers have it
    import amqp

Name = tuple[str, str]  # exchange and message id, by which a message that comes back is known


@dataclass(slots=True)
class PendingConfirms:
    """
    The messages of a batch, in the order in which they are published, and what the server has answered.

    Args:
        first_tag: the delivery tag of the first one.
        not_taken: the result of a message that the server has not taken (nack).
        explain_return: returns the result of a message that came back, by the error, the exchange and the routing key.
    """

    first_tag: int
    not_taken: SendResult
    explain_return: Callable[[Exception, str, str], SendResult]
    results: list[SendResult | None] = field(default_factory=list)
    returned: dict[Name, SendResult] = field(default_factory=dict)
    pending: int = 0
    _names: list[Name] = field(default_factory=list)
    _settled_to: int = 0  # all before this index are settled

    @property
    def next_tag(self) -> int:
        """The delivery tag of the message that is published next."""
        return self.first_tag + len(self._names)

    def extend(self, names: Iterable[Name]) -> None:
        """Add messages that are about to be published."""
        added = list(names)
        self._names += added
        self.results += [None] * len(added)
        self.pending += len(added)

    def remove_last(self) -> None:
        """Remove the last message, which was not published."""
        self._names.pop()
        self.results.pop()
        self.pending -= 1

    def listen(self, channel: amqp.Channel) -> None:
        """Register this batch, and no other, for the answers of a channel."""
        events: dict[str, set[Callable[..., None]]] = channel.events  # type: ignore[attr-defined]  # the stubs lack it
        events.update(basic_ack={self.on_ack}, basic_nack={self.on_nack}, basic_return={self.on_return})

    def on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note that a message came back."""
        name = (exchange, message.properties.get("message_id", ""))
        self.returned[name] = self.explain_return(error, exchange, routing_key)

    def on_ack(self, tag: int, multiple: bool) -> None:
        """Note that messages are stored."""
        self._settle(tag, multiple, ACCEPTED)

    def on_nack(self, tag: int, multiple: bool) -> None:
        """Note that messages are not stored in all of their queues. They may be in some."""
        self._settle(tag, multiple, self.not_taken)

    def finish(self, rest: SendResult) -> list[SendResult]:
        """Return the results, and this one for messages without an answer."""
        return [result or rest for result in self.results]

    def _settle(self, tag: int, multiple: bool, result: SendResult) -> None:
        last = tag - self.first_tag
        assert last >= 0, "the channel of an earlier batch is not used again"
        for index in range(self._settled_to if multiple else last, last + 1):
            if self.results[index] is None:
                self.results[index] = self.returned.get(self._names[index], result)
                self.pending -= 1
        if multiple:
            self._settled_to = last + 1
