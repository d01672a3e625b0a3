"""What RocketMQ's dead letters have of their own: where they came from, and who may die while one is replayed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.brokers.rocketmq import dead_letters
from outbox.errors import BrokerUnavailable
from project.servers.rocketmq import RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.outbox.brokers.rocketmq.log import copies
from tests.waiting import wait_until


def given_up(acts: Acts, broker: Broker) -> Delivery:
    """Send a message and give it up."""
    acts.send_bodies(b"poison")
    [delivery] = acts.receive()
    broker.dead_letter(delivery, "cannot be read")
    return delivery


class TestDeadLetters:
    def test_name_the_topic_of_a_message_that_came_again(self, acts: Acts, broker: Broker, harness: RocketMQHarness):
        [message] = acts.send_bodies(b"poison")
        [first] = acts.receive()
        broker.retry(first, timedelta())
        [second] = acts.receive_again()

        broker.dead_letter(second, "cannot be read")

        [letter] = acts.dead_letters(count=1)
        assert (letter.topic, letter.message_id, letter.delivery_count) == (message.topic, message.message_id, 2)

    def test_hold_what_the_server_gave_up_by_itself(self, acts: Acts, broker: Broker, harness: RocketMQHarness, server: RocketMQ):
        server.make_group("hasty", retries=1)
        acts.send_bodies(b"poison")
        for _ in range(2):
            [delivery] = acts.receive_again(group="hasty")
            broker.retry(delivery, timedelta())

        # The proxy gives it up when it would hand it out once more.
        more: list[Delivery] = []
        [letter] = wait_until(lambda: more.extend(acts.receive(group="hasty")) or acts.dead_letters("hasty"), 60)
        assert more == []
        assert (letter.message_id, letter.reason) == (delivery.message_id, "")
        assert letter.delivery_count == 3  # which the server did not hand out

    def test_cannot_be_listed_without_the_brokers_own_port(self, harness: RocketMQHarness):
        broker = harness.open(NAME_SERVERS=[])

        for act in (
            lambda: broker.dead_letters("group"),
            lambda: broker.count_dead_letters("group"),
            lambda: broker.replay("group", []),
            lambda: broker.discard("group", []),
        ):
            with pytest.raises(BrokerUnavailable, match="NAME_SERVERS"):
                act()

    def test_cannot_be_listed_while_the_broker_is_away(self, harness: RocketMQHarness):
        broker = harness.open(NAME_SERVERS=["127.0.0.1:1"])

        with pytest.raises(BrokerUnavailable, match="dead letters cannot be read"):
            broker.dead_letters("group")


class TestReplay:
    def test_sends_no_second_copy_after_it_died_before_the_mark(
        self, acts: Acts, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ):
        given_up(acts, broker)
        [letter] = acts.dead_letters(count=1)

        async def die(*_: object) -> None:
            raise ConnectionError("the end")

        with monkeypatch.context() as patched:
            patched.setattr(dead_letters, "_send_mark", die)
            with pytest.raises(BrokerUnavailable, match="the end"):
                broker.replay("group", [letter.id])
        before = acts.dead_letters()
        wait_until(lambda: copies(letter.topic, letter.id), 60)  # a copy has the letter's id among its keys
        replayed = broker.replay("group", [letter.id])

        assert [one.id for one in before] == [letter.id]
        assert (replayed, acts.dead_letters()) == (set(), [])
        assert len(acts.receive()) == 1

    @pytest.mark.parametrize(
        "letter_id", ["", "no letter", "7F000001000067A8FFFFFFFFFFFFFFFF", "7F000001000067A80000000000000001"]
    )
    def test_leaves_what_is_no_letter_alone(self, broker: Broker, letter_id: str):
        assert broker.replay("group", [letter_id]) == set()

    def test_leaves_the_letters_of_other_groups_alone(self, acts: Acts, broker: Broker):
        given_up(acts, broker)
        [letter] = acts.dead_letters(count=1)

        assert broker.replay("other", [letter.id]) == set()
        assert [one.id for one in acts.dead_letters()] == [letter.id]

    def test_leaves_a_letter_at_the_same_place_of_another_broker_alone(self, acts: Acts, broker: Broker):
        given_up(acts, broker)
        [letter] = acts.dead_letters(count=1)
        elsewhere = "0A000001000067A8" + letter.id[16:]

        assert broker.replay("group", [elsewhere]) == set()
        assert [one.id for one in acts.dead_letters()] == [letter.id]
