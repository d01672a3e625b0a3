"""What needs no server: the time that a batch may take."""

import asyncio
from types import SimpleNamespace

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.producer import SEND_SECONDS, Sending
from outbox.message import TopicSpec, TopicType

TOPIC = TopicSpec("orders", TopicType.NORMAL)


class TestSend:
    def test_begins_no_message_when_the_batch_has_taken_too_long(self, monkeypatch):
        seconds = [0.0]
        link = SimpleNamespace(
            run=asyncio.run, options=SimpleNamespace(in_flight=1, commit_window=SimpleNamespace(total_seconds=int))
        )
        sending = Sending(link, clock=lambda: seconds[0])

        async def send_slowly(*pair, **options):
            seconds[0] += SEND_SECONDS * 0.6
            return SendResult(SendStatus.ACCEPTED)

        monkeypatch.setattr(sending, "_send", send_slowly)
        outcomes = sending.send([Outgoing(str(number), "orders", b"1") for number in range(4)], [TOPIC] * 4)

        assert [outcome.status for outcome in outcomes] == [SendStatus.ACCEPTED] * 2 + [SendStatus.UNAVAILABLE] * 2
        assert "took too long" in outcomes[2].reason
