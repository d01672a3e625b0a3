"""Sends, with the memory broker and its faults."""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from outbox import database
from outbox.batches.batch import BatchSendResult, SplitReason
from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.models import MessageRow, Topic
from outbox.outages import Backoff
from outbox.relay.breaker import Breaker, Breakers
from outbox.relay.send import Sender
from tests.factories import BatchFactory, MessageRowFactory
from tests.outbox.relay.batches import claimed, make_claimed
from tests.outbox.relay.outages import open_broker, open_for

pytestmark = pytest.mark.django_db

NEVER = float("inf")


class Recorder(MemoryBroker):
    """A memory broker that records the message ids of each call."""

    calls: list[list[str]]
    on_send: Callable[[], object] = staticmethod(lambda: None)

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        self.calls.append([message.message_id for message in messages])
        self.on_send()
        return super().send(messages)


@pytest.fixture
def broker(make_topic) -> Recorder:
    broker = Recorder("default", {}, [])
    broker.topics = make_topic.specs
    broker.calls = []
    return broker


@pytest.fixture
def breakers(clock) -> Breakers:
    return Breakers(lambda: Breaker(2, Backoff(timedelta(seconds=1), timedelta(seconds=1), lambda: 1.0), clock))


@pytest.fixture
def sender(broker, breakers, clock, hold_budget) -> Sender:
    hold_budget(breakers, 1000)
    return Sender(database.raw("default"), broker, breakers, "urn:uuid:1", lambda: False, clock)


def send(sender: Sender, *batches, shed_at: float = NEVER, is_half: bool = False) -> BatchSendResult:
    return sender.send(batches, is_half=is_half, shed_at=shed_at)[0]


def reasons(result: BatchSendResult) -> dict[int, SplitReason]:
    return {position: parting.reason for position, parting in sorted(result.unaccepted.items())}


class TestSend:
    def test_sends_whole_messages(self, sender, broker, make_topic):
        batch = make_claimed(topic=make_topic(), size=3)

        result = send(sender, batch)

        assert result.accepted == {1: "", 2: "", 3: ""}
        assert [message.message_id for message in broker.visible(batch.topic)] == batch.message_ids

    def test_stores_half_messages(self, sender, broker, make_topic):
        batch = make_claimed(topic=make_topic("transaction"), size=2)

        result = send(sender, batch, is_half=True)

        assert list(result.accepted.values()) == [half.id for half in broker.halves()]
        assert [half.message.token for half in broker.halves()] == [f"urn:uuid:1:{batch.id}:1:{p}" for p in (1, 2)]
        assert broker.visible(batch.topic) == []

    def test_hands_over_several_batches_in_one_call(self, sender, broker, make_topic):
        batches = [make_claimed(topic=make_topic(), size=2), make_claimed(topic=make_topic(), size=1)]

        result = sender.send(batches, is_half=False, shed_at=NEVER)

        assert [len(call) for call in broker.calls] == [3]
        assert [one.accepted for one in result] == [{1: "", 2: ""}, {1: ""}]

    def test_passes_over_positions_that_were_split_off(self, sender, broker, make_topic):
        batch = make_claimed(topic=make_topic(), size=3, split=[2])

        assert send(sender, batch).accepted == {1: "", 3: ""}

    @pytest.mark.parametrize("verdict", [SendStatus.REFUSED, SendStatus.MISCONFIGURED, SendStatus.UNSURE])
    def test_says_which_message_the_broker_did_not_take(self, sender, broker, make_topic, verdict):
        batch = make_claimed(topic=make_topic(), size=3)
        broker.fail("send", verdict, where=lambda message: message.message_id == batch.message_ids[1], reason="no")

        result = send(sender, batch)

        assert result.accepted == {1: "", 3: ""}
        assert (reasons(result), result.unaccepted[2].text) == ({2: SplitReason(verdict)}, "no")

    def test_is_unsure_of_all_when_the_broker_raises(self, sender, broker, make_topic, caplog):
        batch = make_claimed(topic=make_topic(), size=2)

        def fail() -> None:
            raise RuntimeError("not foreseen")

        broker.on_send = fail
        result = send(sender, batch)

        assert reasons(result) == {1: SplitReason.UNSURE, 2: SplitReason.UNSURE}
        assert f"RuntimeError: not foreseen. Batches: [{batch.id}]" in caplog.text

    @pytest.mark.parametrize("count", [1, 3])
    def test_is_unsure_of_all_when_the_outcomes_do_not_fit(self, sender, broker, make_topic, caplog, monkeypatch, count):
        batch = make_claimed(topic=make_topic(), size=2)
        monkeypatch.setattr(broker, "send", lambda messages: [SendResult(SendStatus.ACCEPTED)] * count)

        result = send(sender, batch)

        assert reasons(result) == {1: SplitReason.UNSURE, 2: SplitReason.UNSURE}
        assert f"{count} results for 2 messages. Batches: [{batch.id}]" in caplog.text

    def test_refuses_a_message_whose_row_is_gone_and_alerts(self, sender, make_topic, caplog, alerts):
        row = BatchFactory(topic=make_topic(), size=2)
        MessageRow.objects.filter(pk=row.message_ids[0]).delete()

        with caplog.at_level(logging.ERROR):
            result = send(sender, claimed(row))

        assert (reasons(result), result.accepted) == ({1: SplitReason.REFUSED}, {2: ""})
        assert [one["details"] for one in alerts] == [{"batch": row.id, "message": str(row.message_ids[0])}]
        assert f"{row.message_ids[0]} of batch {row.id}" in caplog.text

    def test_refuses_a_message_whose_headers_cannot_be_read(self, sender, make_topic):
        topic = make_topic()
        broken = MessageRowFactory(topic=topic, headers="{")
        batch = make_claimed(topic=topic, message_ids=[broken.id])

        result = send(sender, batch)

        assert reasons(result) == {1: SplitReason.REFUSED}
        assert "Its row cannot be read" in result.unaccepted[1].text


def make_large(topic: Topic, count: int) -> list:
    return [MessageRowFactory(topic=topic, body=b"x" * 600).id for _ in range(count)]  # one in each slice


class TestHalt:
    def test_hands_nothing_over_once_the_broker_is_unavailable(self, sender, broker, make_topic):
        topic = make_topic()
        batch = make_claimed(topic=topic, message_ids=make_large(topic, 3))
        broker.fail("send", SendStatus.UNAVAILABLE, where=lambda message: message.message_id == batch.message_ids[1])

        result = send(sender, batch)

        assert result.accepted == {1: ""}
        assert reasons(result) == {2: SplitReason.UNAVAILABLE, 3: SplitReason.UNAVAILABLE}
        assert len(broker.calls) == 2

    def test_sheds_what_is_left_when_the_lease_is_half_gone(self, sender, broker, make_topic, clock):
        topic = make_topic()
        batch = make_claimed(topic=topic, message_ids=make_large(topic, 3))

        def take_ten_seconds() -> None:
            clock.now += 10

        broker.on_send = take_ten_seconds
        result = send(sender, batch, shed_at=clock.now + 15)

        assert result.accepted == {1: "", 2: ""}
        assert reasons(result) == {3: SplitReason.SHED}

    def test_makes_one_call_however_late_it_is(self, sender, make_topic, clock):
        """Otherwise, with a lease shorter than the claim, nothing would ever be sent."""
        batch = make_claimed(topic=make_topic())

        assert send(sender, batch, shed_at=clock.now - 1).accepted == {1: ""}

    def test_sheds_what_is_left_when_told_to_stop(self, sender, broker, make_topic):
        topic = make_topic()
        sender.is_stopping = lambda: bool(broker.calls)

        result = send(sender, make_claimed(topic=topic, message_ids=make_large(topic, 2)))

        assert (result.accepted, reasons(result)) == ({1: ""}, {2: SplitReason.SHED})


class TestBreakersOfASender:
    def test_open_after_batches_of_a_topic_that_got_no_answer(self, sender, broker, breakers, make_topic):
        topic = make_topic()
        broker.fail("send", SendStatus.UNAVAILABLE, times=None)

        for _ in range(2):
            send(sender, make_claimed(topic=topic, size=2))

        assert breakers.open_topics == [topic.name]

    def test_keep_the_broker_from_being_called(self, sender, broker, breakers, make_topic):
        open_broker(breakers)

        result = send(sender, make_claimed(topic=make_topic()))

        assert reasons(result) == {1: SplitReason.UNAVAILABLE}
        assert broker.calls == []

    def test_say_why_they_are_open(self, sender, broker, breakers, make_topic):
        topic = make_topic()
        broker.fail("send", SendStatus.UNAVAILABLE, times=None, reason="low on memory")
        for _ in range(2):
            send(sender, make_claimed(topic=topic))

        of_topic = send(sender, make_claimed(topic=topic))
        open_broker(breakers)
        of_broker = send(sender, make_claimed(topic=make_topic()))

        assert [one.unaccepted[1].text for one in (of_topic, of_broker)] == ["low on memory"] * 2
        assert len(broker.calls) == 2

    def test_send_the_other_topics_of_a_call_that_one_got_no_answer_in(self, sender, broker, make_topic):
        away, well = make_topic(), make_topic()
        batches = [make_claimed(topic=topic, message_ids=make_large(topic, 2)) for topic in (away, well)]
        broker.fail("send", SendStatus.UNAVAILABLE, where=lambda message: message.topic == away.name)

        first, second = sender.send(batches, is_half=False, shed_at=NEVER)

        assert set(reasons(first).values()) == {SplitReason.UNAVAILABLE}
        assert second.accepted == {1: "", 2: ""}
        assert len(broker.calls) == 3  # nothing more of the first one

    @pytest.mark.parametrize("verdict", [SendStatus.REFUSED, SendStatus.MISCONFIGURED])
    def test_close_by_any_answer(self, sender, broker, breakers, clock, make_topic, verdict):
        topic = make_topic()
        open_for(breakers, topic.name)
        clock.now += 1
        broker.fail("send", verdict)

        send(sender, make_claimed(topic=topic))

        assert breakers.open_topics == []

    def test_probe_with_one_message(self, sender, broker, breakers, clock, make_topic):
        topic = make_topic()
        open_for(breakers, topic.name)
        clock.now += 1
        broker.fail("send", SendStatus.UNAVAILABLE)

        result = send(sender, make_claimed(topic=topic, size=3))

        assert [len(call) for call in broker.calls] == [1]
        assert set(reasons(result).values()) == {SplitReason.UNAVAILABLE}
        assert breakers.open_topics == [topic.name]

    def test_send_the_rest_when_the_probe_is_answered(self, sender, broker, breakers, clock, make_topic):
        topic = make_topic()
        open_for(breakers, topic.name)
        clock.now += 1

        result = send(sender, make_claimed(topic=topic, size=3))

        assert [len(call) for call in broker.calls] == [1, 2]
        assert result.accepted == {1: "", 2: "", 3: ""}


class TestSendOrdered:
    @pytest.fixture
    def make_ordered(self, make_topic):
        def make(*keys: int, body: bytes = b"x"):
            topic = make_topic("fifo")
            messages = [MessageRowFactory(topic=topic, key=str(key), body=body).id for key in keys]
            return make_claimed(topic=topic, message_ids=messages, order_keys=list(keys))

        return make

    def test_sends_the_next_of_a_key_after_the_answer_for_the_one_before(self, sender, broker, make_ordered):
        batch = make_ordered(1, 2, 1, 1, 2)

        result = send(sender, batch)

        a, b, c, d, e = batch.message_ids
        assert broker.calls == [[a, b], [c, e], [d]]
        assert len(result.accepted) == 5

    @pytest.mark.parametrize("verdict", [SendStatus.REFUSED, SendStatus.MISCONFIGURED, SendStatus.UNSURE])
    def test_sends_no_more_of_a_key_after_a_failure(self, sender, broker, make_ordered, verdict):
        batch = make_ordered(1, 2, 1, 2, 1)
        broker.fail("send", verdict, where=lambda message: message.message_id == batch.message_ids[0])

        result = send(sender, batch)

        assert result.accepted == {2: "", 4: ""}
        assert reasons(result) == {1: SplitReason(verdict), 3: SplitReason.HELD, 5: SplitReason.HELD}

    def test_sends_no_more_of_a_key_in_the_next_slice(self, sender, broker, make_ordered):
        batch = make_ordered(1, 1, 2, body=b"x" * 600)
        broker.fail("send", SendStatus.UNSURE, where=lambda message: message.message_id == batch.message_ids[0])

        result = send(sender, batch)

        assert result.accepted == {3: ""}
        assert reasons(result) == {1: SplitReason.UNSURE, 2: SplitReason.HELD}

    def test_holds_a_key_in_slices_that_the_relay_did_not_come_to(self, sender, broker, make_ordered):
        batch = make_ordered(1, 2, 1, 2, body=b"x" * 600)
        broker.fail("send", SendStatus.REFUSED, where=lambda message: message.message_id == batch.message_ids[0])
        sender.is_stopping = lambda: bool(broker.calls)

        result = send(sender, batch)

        shed = SplitReason.SHED
        assert reasons(result) == {1: SplitReason.REFUSED, 2: shed, 3: SplitReason.HELD, 4: shed}

    def test_holds_a_key_whose_row_is_gone(self, sender, make_ordered):
        batch = make_ordered(1, 1)
        MessageRow.objects.filter(pk=batch.message_ids[0]).delete()

        assert reasons(send(sender, batch)) == {1: SplitReason.REFUSED, 2: SplitReason.HELD}

    def test_keeps_keys_of_two_batches_apart(self, sender, broker, make_ordered):
        first, second = make_ordered(1, 1), make_ordered(1)
        broker.fail("send", SendStatus.UNSURE, where=lambda message: message.message_id == first.message_ids[0])

        result = sender.send([first, second], is_half=False, shed_at=NEVER)

        assert [reasons(one) for one in result] == [{1: SplitReason.UNSURE, 2: SplitReason.HELD}, {}]
