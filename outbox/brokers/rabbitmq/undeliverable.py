"""Messages that had no destination when their delay was over: their topic had no consumer group yet, or its queue was deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import amqp

from outbox.brokers.rabbitmq.connection import LOST, RabbitMQConnection, describe
from outbox.brokers.rabbitmq.envelope import again
from outbox.brokers.rabbitmq.sender import Publication
from outbox.brokers.rabbitmq.topology import DUE, UNDELIVERABLE
from outbox.errors import BrokerUnavailable

PORTION = 500
WAIT_SECONDS = 1.0


def bring_back(connection: RabbitMQConnection, publish: Callable[[Sequence[Publication]], None]) -> int:
    """
    Publish the messages in the queue `outbox.undeliverable` once more, each once. Return their number.

    Those that still have no destination return to the end of the queue. A process that dies meanwhile leaves some of them twice.

    Args:
        publish: publishes messages, and raises BrokerUnavailable unless all are stored.

    Raises:
        BrokerUnavailable: some were not stored; they stay in the queue.
    """
    try:
        with connection.use() as opened:
            channel = opened.channel()
            answer = channel.queue_declare(UNDELIVERABLE, passive=True)
            assert answer is not None, "it is waited for"
            count = left = int(answer[1])
            if left:
                found: list[amqp.Message] = []
                channel.basic_qos(0, min(left, PORTION), False)
                channel.basic_consume(UNDELIVERABLE, callback=found.append)
                while left > 0:
                    with suppress(TimeoutError):  # another process may have the rest
                        while len(found) < min(left, PORTION):
                            opened.drain_events(timeout=WAIT_SECONDS)
                    if not found:
                        break
                    publish([Publication(DUE, "", again(one)) for one in found])
                    channel.basic_ack(found[-1].delivery_info["delivery_tag"], multiple=True)
                    left -= len(found)
                    found.clear()
            with suppress(*LOST):
                channel.close()
            return count - max(0, left)
    except LOST as error:
        raise BrokerUnavailable(f"Messages in {UNDELIVERABLE!r} were not brought back: {describe(error)}.") from error
