"""What a broker answers to messages that are handed to it."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, SendStatus
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness

HALF, NORMAL, FIFO, DELAY = TopicType.TRANSACTION, TopicType.NORMAL, TopicType.FIFO, TopicType.DELAY


class TestSend:
    def test_accepts_a_message_and_delivers_it_as_it_was(self, acts: Acts):
        body = bytes(range(256))
        headers = {"ce-source": "urn:shop", "content-type": "application/json", "who": 'Zoë "Z" \\ \x00 \U0001f43f'}
        message = acts.message(body=body, key="ключ-🐿", tag="placed", headers=headers)

        acts.send(message)

        [delivery] = acts.receive()
        assert delivery.message_id == message.message_id
        assert delivery.topic == message.topic
        assert (delivery.body, delivery.key, delivery.tag) == (body, "ключ-🐿", "placed")
        assert delivery.headers == headers
        assert delivery.delivery_count == 1
        assert acts.harness.is_now(delivery.stored_at)

    def test_accepts_a_body_of_the_greatest_size(self, acts: Acts, broker: Broker):
        body = b"x" * broker.max_body_bytes

        acts.send_bodies(body)

        assert acts.bodies() == [body]

    def test_refuses_a_body_that_is_empty_or_too_large_and_takes_its_neighbours(self, acts: Acts, broker: Broker):
        bodies = [b"a", b"", b"x" * (broker.max_body_bytes + 1), b"b"]

        outcomes = broker.send([acts.message(body=body) for body in bodies])

        statuses = [outcome.status for outcome in outcomes]
        assert statuses == [SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.REFUSED, SendStatus.ACCEPTED]
        assert all(outcome.reason for outcome in outcomes[1:3])
        assert sorted(acts.bodies()) == [b"a", b"b"]

    @pytest.mark.parametrize(
        "wrong", [{"key": "nul \0"}, {"tag": "half a surrogate \ud83d"}, {"headers": {"who": "\ud83d"}}], ids=str
    )
    def test_refuses_a_text_that_cannot_be_stored_and_takes_its_neighbours(
        self, acts: Acts, broker: Broker, wrong: dict[str, Any]
    ):
        outcomes = broker.send([acts.message(body=b"a"), acts.message(**wrong), acts.message(body=b"b")])

        assert [outcome.status for outcome in outcomes] == [SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.ACCEPTED]
        assert sorted(acts.bodies()) == [b"a", b"b"]

    @pytest.mark.sends_only
    def test_calls_an_unknown_topic_a_matter_for_an_operator(self, acts: Acts, broker: Broker):
        astray = replace(acts.message(), topic="no-such-topic")

        outcomes = broker.send([astray, acts.message()])

        assert [outcome.status for outcome in outcomes] == [SendStatus.MISCONFIGURED, SendStatus.ACCEPTED]
        assert "no-such-topic" in outcomes[0].reason

    @pytest.mark.needs("HalfMessages")
    def test_calls_a_topic_of_another_type_a_matter_for_an_operator(self, acts: Acts, broker: Broker):
        outcomes = [*broker.send([acts.message(HALF)]), *broker.send_halves([acts.message(NORMAL)])]

        assert [outcome.status for outcome in outcomes] == [SendStatus.MISCONFIGURED] * 2

    @pytest.mark.sends_only
    def test_takes_a_time_only_on_a_topic_of_type_delay(self, acts: Acts, broker: Broker):
        later = acts.harness.now + timedelta(minutes=1)

        [outcome] = broker.send([acts.message(NORMAL, deliver_at=later)])

        assert outcome.status is SendStatus.MISCONFIGURED

    @pytest.mark.needs("supports_order")
    def test_refuses_a_message_without_a_key_on_a_fifo_topic(self, acts: Acts, broker: Broker):
        outcomes = broker.send([acts.message(FIFO), acts.message(FIFO, key="a")])

        assert [outcome.status for outcome in outcomes] == [SendStatus.REFUSED, SendStatus.ACCEPTED]

    @pytest.mark.sends_only
    def test_says_so_when_the_server_is_away(self, acts: Acts, harness: Harness):
        broker = harness.open_unreachable()

        outcomes = broker.send([acts.message(), acts.message()])

        assert [outcome.status for outcome in outcomes] == [SendStatus.UNAVAILABLE] * 2

    @pytest.mark.needs("deduplicates_sends")
    def test_publishes_a_message_once_however_often_it_is_sent(self, acts: Acts):
        message = acts.message()

        acts.send(message, message)
        acts.send(message)

        assert len(acts.receive()) == 1

    @pytest.mark.needs("deduplicates_sends")
    def test_tells_messages_of_two_sources_apart(self, acts: Acts):
        ours = acts.message(headers={"ce-source": "urn:ours"})
        theirs = replace(ours, headers={"ce-source": "urn:theirs"})

        acts.send(ours, theirs)

        assert len(acts.receive()) == 2

    @pytest.mark.sends_only
    def test_answers_an_empty_batch(self, broker: Broker):
        assert broker.send([]) == []


class TestDelay:
    @pytest.mark.needs("supports_delay")
    def test_hides_a_message_until_its_time(self, acts: Acts):
        message = acts.message(DELAY, deliver_at=acts.harness.now + timedelta(minutes=5))

        acts.send(message)

        assert acts.receive(DELAY) == []
        assert acts.waiting(DELAY) == 0

    @pytest.mark.needs("supports_delay", "Lookups")
    def test_finds_a_message_that_waits_for_its_time(self, acts: Acts):
        message = acts.message(DELAY, deliver_at=acts.harness.now + timedelta(minutes=5))

        acts.send(message)

        acts.find(message.message_id, "delayed")

    @pytest.mark.needs("supports_delay")
    def test_delivers_each_message_at_its_time(self, acts: Acts, harness: Harness):
        for minutes in (3, 1, 2):
            due = harness.now + timedelta(minutes=minutes)
            acts.send(acts.message(DELAY, body=b"%d" % minutes, deliver_at=due))

        found = acts.receive_while_time_passes(timedelta(minutes=3), DELAY, count=3)

        assert sorted(one.delivery.body for one in found) == [b"1", b"2", b"3"]
        assert all(one.age >= timedelta(minutes=int(one.delivery.body)) for one in found)

    @pytest.mark.needs("supports_delay")
    def test_delivers_at_once_when_the_time_is_past_or_missing(self, acts: Acts, harness: Harness):
        past = acts.message(DELAY, body=b"past", deliver_at=harness.now - timedelta(minutes=1))
        acts.send(past, acts.message(DELAY, body=b"none"))

        assert sorted(acts.bodies(DELAY, count=2)) == [b"none", b"past"]


class TestClose:
    @pytest.mark.sends_only
    def test_may_be_called_twice_after_a_send(self, acts: Acts, broker: Broker):
        acts.send(acts.message())

        broker.close()
        broker.close()

    def test_may_be_called_twice(self, harness: Harness):
        broker = harness.open()
        broker.backlog("group")

        broker.close()
        broker.close()
