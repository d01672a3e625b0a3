"""The order of a key after faults."""

import pytest

from outbox.brokers.base import SendStatus
from outbox.models import Batch, State
from tests.factories import MessageRowFactory, TicketFactory

pytestmark = pytest.mark.django_db(transaction=True)


class TestOrder:
    def publish(self, topic, key: str) -> str:
        message = MessageRowFactory(topic=topic, key=key)
        TicketFactory(topic=topic, message=message, order_key=ord(key))
        return str(message.id)

    def shown(self, broker, topic) -> list[str]:
        return [message.message_id for message in broker.visible(topic.name)]

    def test_a_dead_message_holds_its_key_until_an_operator_discards_it(self, start, broker, make_topic):
        topic = make_topic("fifo")
        head, second, other = (self.publish(topic, key) for key in "aab")
        broker.fail("send", SendStatus.REFUSED, where=lambda message: message.message_id == head)
        relay = start()
        relay.drain()
        later = self.publish(topic, "a")
        relay.drain()
        assert self.shown(broker, topic) == [other]

        Batch.objects.filter(state=State.DEAD).update(state=State.DISCARDED)
        relay.drain()

        assert self.shown(broker, topic) == [other, second, later]

    def test_holds_through_answers_that_are_lost(self, start, broker, make_topic):
        topic = make_topic("fifo")
        messages = [self.publish(topic, "ab"[n % 2]) for n in range(12)]
        broker.fail("send", SendStatus.UNSURE, times=5, where=lambda message: message.message_id in messages[::3])

        start(batch_size=5).drain()

        for key in (0, 1):
            assert [one for one in self.shown(broker, topic) if one in messages[key::2]] == messages[key::2]

    def test_holds_when_the_relay_of_the_first_dies(self, crash_at, start, broker, make_topic):
        topic = make_topic("fifo")
        first = self.publish(topic, "a")

        crash_at("relay.after_claim")
        second = self.publish(topic, "a")
        start().drain()

        assert self.shown(broker, topic) == [first, second]
