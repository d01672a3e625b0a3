"""Messages that a group has finished, delivered to it again where a repeated send is not stored."""

import pytest

from outbox.brokers.base import Broker
from tests.contracts.acts import Acts

pytestmark = pytest.mark.needs("DeliversAgain")


class TestDeliverAgain:
    def test_hands_a_finished_message_to_its_group_as_if_for_the_first_time(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        broker.ack(acts.receive())

        found = broker.deliver_again("group", [message.message_id])

        assert found == {message.message_id}
        assert [(again.message_id, again.delivery_count) for again in acts.receive()] == [(message.message_id, 1)]

    def test_hands_it_to_no_other_group(self, acts: Acts, broker: Broker):
        [message] = acts.send_bodies(b"a")
        broker.ack([*acts.receive(), *acts.receive(group="other")])

        broker.deliver_again("group", [message.message_id])

        assert acts.receive(group="other") == []

    def test_leaves_what_the_group_still_has_before_it(self, acts: Acts, broker: Broker):
        held, waiting = acts.send_bodies(b"a")[0], "0190c1f8-0000-7000-8000-000000000000"
        acts.receive()

        assert broker.deliver_again("group", [held.message_id, waiting]) == set()
