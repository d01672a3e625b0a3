"""What becomes of messages when the server is hurt: nothing that was confirmed is lost, and no restart of ours is needed."""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Delivery, Outgoing, SendResult, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.topology import DUE
from outbox.errors import BrokerUnavailable, TimeLimitExceeded
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]


def receive_all(broker: RabbitMQBroker, topic: str, count: int) -> list[str]:
    """Receive and acknowledge until so many different messages have come; return the ids of all, again and again."""
    found: list[str] = []

    def receive() -> bool:
        with suppress(BrokerUnavailable):
            deliveries = broker.receive("billing", [topic], limit=500, invisible_for=HELD, wait=timedelta(seconds=1))
            found.extend(one.message_id for one in deliveries)
            broker.ack(deliveries)
        return len(set(found)) >= count

    wait_until(receive, 60)
    return found


def statuses(results: list[SendResult]) -> list[SendStatus]:
    return [one.status for one in results]


class TestManyMessages:
    def test_none_is_lost_and_none_doubled(self, broker, message: NewMessage, topic):
        messages = [message(b"%d" % n) for n in range(10_000)]

        results = [result for n in range(0, 10_000, 2000) for result in broker.send(messages[n : n + 2000])]
        found = receive_all(broker, topic, 10_000)

        assert set(statuses(results)) == {SendStatus.ACCEPTED}
        assert sorted(found) == sorted(one.message_id for one in messages)


class TestKilledServer:
    def test_keeps_what_it_confirmed(self, broker, node: RabbitMQ, message: NewMessage, topic):
        confirmed: list[str] = []
        is_over = threading.Event()

        def send() -> None:
            while not is_over.is_set():
                batch = [message() for _ in range(100)]
                for one, result in zip(batch, broker.send(batch), strict=True):
                    if result.status is SendStatus.ACCEPTED:
                        confirmed.append(one.message_id)

        sender = threading.Thread(target=send)
        sender.start()
        wait_until(lambda: len(confirmed) > 1000)
        wait_until(lambda: node.knows_after_crash(f"{topic}:billing"))
        node.kill()
        before = len(confirmed)
        node.start()
        wait_until(lambda: len(confirmed) > before + 200)
        is_over.set()
        sender.join(30)

        assert set(confirmed) <= set(receive_all(broker, topic, len(set(confirmed))))

    def test_leaves_what_was_sent_unsure_and_the_next_unavailable(self, broker, node: RabbitMQ, message: NewMessage, topic):
        broker.send([message()])
        wait_until(lambda: node.knows_after_crash(f"{topic}:billing"))
        node.freeze()
        killer = threading.Timer(1, node.kill)
        killer.start()

        results = broker.send([message()])
        killer.join()
        later = broker.send([message()])
        node.start()

        assert statuses(results) == [SendStatus.UNSURE]
        assert statuses(later) == [SendStatus.UNAVAILABLE]
        assert "could be connected to" in later[0].reason
        assert statuses(wait_until(lambda: _accepted(broker, message()))) == [SendStatus.ACCEPTED]

    def test_gives_back_what_was_held(self, broker, node: RabbitMQ, message: NewMessage, topic):
        broker.send([message(b"a")])
        [held] = broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=5))

        wait_until(lambda: node.knows_after_crash(f"{topic}:billing"))
        node.kill()
        node.start()

        [again] = wait_until(lambda: _received(broker, topic))
        assert (again.message_id, again.body) == (held.message_id, b"a")
        assert broker.ack([held]) == [False]
        assert broker.ack([again]) == [True]


class TestFrozenServer:
    def test_leaves_a_batch_unsure_and_is_used_again_later(self, open_broker: Open, node: RabbitMQ, message: NewMessage):
        broker = open_broker(REQUEST_TIMEOUT="PT1S")
        broker.send([message()])

        node.freeze()
        results = broker.send([message(), message()])
        node.thaw()

        assert statuses(results) == [SendStatus.UNSURE] * 2
        assert "did not come within 1 s" in results[0].reason
        assert statuses(wait_until(lambda: _accepted(broker, message()))) == [SendStatus.ACCEPTED]

    def test_is_noticed_by_a_consumer_that_waits(self, open_broker: Open, node: RabbitMQ, topic):
        broker = open_broker(HEARTBEAT="PT1S", REQUEST_TIMEOUT="PT2S")
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())

        node.freeze()
        try:
            with pytest.raises(BrokerUnavailable):
                broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=30))
        finally:
            node.thaw()


class TestMemoryAlarm:
    def test_is_an_outage_for_senders_and_none_for_consumers(self, broker, node: RabbitMQ, message: NewMessage, topic):
        broker.send([message(b"a")])
        node.control("set_vm_memory_high_watermark", "0.00001")
        try:
            refused = wait_until(lambda: _refused(broker, message()))
            [held] = broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
            is_acked = broker.ack([held])
        finally:
            node.control("set_vm_memory_high_watermark", "0.6")

        assert "short of memory or disk" in wait_until(lambda: refused[0].reason)
        assert is_acked == [True]
        assert statuses(wait_until(lambda: _accepted(broker, message()))) == [SendStatus.ACCEPTED]


class TestExceptionBetweenMessageAndConfirm:
    def test_leaves_no_confirm_to_be_taken_for_another_messages(
        self, open_broker: Open, node: RabbitMQ, message: NewMessage, monkeypatch: pytest.MonkeyPatch
    ):
        broker = open_broker(MAX_LENGTH=1)
        wait_until(lambda: _refused(broker, message()))
        with monkeypatch.context() as patch:
            patch.setattr(amqp.Connection, "blocking_read", _time_limit)
            with pytest.raises(TimeLimitExceeded):
                broker.send([message(), message(), message()])

        results = broker.send([message(), message()])

        assert statuses(results) == [SendStatus.UNAVAILABLE] * 2


class TestDeletedLadder:
    def test_is_declared_again(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])
        channel.exchange_delete(DUE)

        with pytest.raises(BrokerUnavailable, match=DUE):
            broker.receive("shipping", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        broker.receive("shipping", [topic], limit=1, invisible_for=HELD, wait=timedelta())

        broker.send([message(b"later")])
        [delivery] = broker.receive("shipping", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
        assert delivery.body == b"later"


class TestFullQueue:
    def test_is_an_outage_until_somebody_receives(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(MAX_LENGTH=3)
        filled = [result for _ in range(8) for result in broker.send([message()])]  # it takes some more than its length

        [held, *rest] = broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.ack([held, *rest])

        assert filled[-1].status is SendStatus.UNAVAILABLE
        assert "a queue is full" in filled[-1].reason
        assert statuses(wait_until(lambda: _accepted(broker, message()))) == [SendStatus.ACCEPTED]


class TestDeletedQueue:
    def test_is_declared_again_by_its_consumers_and_an_alert_until_then(
        self, broker, channel: amqp.Channel, message: NewMessage, topic
    ):
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        broker.send([message()])
        channel.queue_delete(f"{topic}:billing")

        astray = broker.send([message()])
        with pytest.raises(BrokerUnavailable, match="no queue"):
            broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        later = broker.send([message(b"later")])

        assert statuses(astray) == [SendStatus.MISCONFIGURED]
        assert f"No queue takes messages of '{topic}'" in astray[0].reason
        assert statuses(later) == [SendStatus.ACCEPTED]
        assert [one.body for one in wait_until(lambda: _received(broker, topic))] == [b"later"]


class TestDeletedExchange:
    def test_is_declared_again(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])
        channel.exchange_delete(topic)

        first = broker.send([message()])
        second = broker.send([message()])

        assert statuses(first) == [SendStatus.MISCONFIGURED]
        assert "no exchange" in first[0].reason
        assert statuses(second) == [SendStatus.ACCEPTED]


class TestDeclaredOtherwise:
    def test_is_named_with_the_difference(self, open_broker: Open, message: NewMessage, topic):
        open_broker().send([message()])
        other = open_broker(MAX_LENGTH=5)

        [result] = other.send([message()])

        assert result.status is SendStatus.MISCONFIGURED
        assert "x-max-length" in result.reason
        assert "x-max-length" in other.check()[0].text
        with pytest.raises(BrokerUnavailable, match="x-max-length"):
            other.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())


class TestWrongPassword:
    def test_is_named_and_burns_no_message(self, open_broker: Open, message: NewMessage):
        broker = open_broker(PASSWORD="wrong")

        [result] = broker.send([message()])

        assert result.status is SendStatus.UNAVAILABLE
        assert "ACCESS_REFUSED" in result.reason
        with pytest.raises(BrokerUnavailable, match="ACCESS_REFUSED"):
            broker.check()


class TestMessageTooLargeForTheServer:
    def test_is_refused_and_its_neighbours_taken(self, open_broker: Open, message: NewMessage, tmp_path):
        with RabbitMQ(tmp_path / "small", settings="max_message_size = 1000\n") as node:
            broker = open_broker(NODES=[node.address])

            results = broker.send([message(b"a"), message(b"x" * 2000), message(b"b")])

            assert statuses(results) == [SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.ACCEPTED]
            assert "message size" in results[1].reason
            broker.close()


class TestDeliveryLimit:
    def test_makes_a_dead_letter_that_says_why(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(DELIVERY_LIMIT=2)
        broker.send([message(b"poison")])

        for _ in range(3):
            deliveries = wait_until(lambda: _received(broker, topic))
            broker.release(deliveries)

        [letter] = wait_until(lambda: broker.dead_letters("billing"))
        assert "delivered it too often" in letter.reason
        assert broker.replay("billing", [letter.id]) == 1
        assert [(one.body, one.attempt) for one in wait_until(lambda: _received(broker, topic))] == [(b"poison", 1)]


class TestConsumerTimeout:
    def test_ends_renewals_before_the_server_takes_the_channel(self, open_broker: Open, message: NewMessage, topic):
        now = [0.0]
        broker = open_broker(clock=lambda: now[0])
        broker.send([message()])
        [held] = broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))

        kept = []
        for _ in range(6):
            now[0] += 300
            kept.append(broker.renew([held], HELD)[0] is not None)

        assert kept == [True, True, True, False, False, False]

    def test_is_not_reached_by_ordered_messages_that_wait_behind_their_key(self, open_broker: Open, message: NewMessage, topic):
        now = [0.0]
        broker = open_broker(TopicType.FIFO, clock=lambda: now[0])
        broker.send([message(b"1", key="a"), message(b"2", key="a")])
        [head] = broker.receive("billing", [topic], limit=5, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.retry(head, timedelta(minutes=20))

        now[0] += 20 * 60
        [again] = wait_until(lambda: _received(broker, topic))
        [kept] = broker.renew([again], timedelta(minutes=20))
        broker.ack([again])
        [second] = wait_until(lambda: _received(broker, topic))

        assert (again.body, again.attempt, second.body) == (b"1", 2, b"2")
        assert kept is not None

    def test_leaves_a_retry_of_an_ordered_message_its_delay(self, open_broker: Open, message: NewMessage, topic):
        now = [0.0]
        broker = open_broker(TopicType.FIFO, clock=lambda: now[0])
        broker.send([message(b"1", key="a"), message(b"2", key="a")])
        [head] = broker.receive("billing", [topic], limit=5, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.retry(head, timedelta(minutes=60))

        now[0] += 30 * 60
        early = [one for _ in range(3) for one in _received(broker, topic)]
        now[0] += 31 * 60
        late = wait_until(lambda: _received(broker, topic))

        assert early == []
        assert [one.body for one in late] == [b"1"]


class TestSeveralTopics:
    def test_leave_nothing_with_a_consumer_that_did_not_ask_for_it(self, node: RabbitMQ, topic, message: NewMessage):
        names = [topic, f"{topic}-2"]
        options = {"NODES": [node.address], "GROUPS": {name: ["billing"] for name in names}}
        specs = [TopicSpec(name, TopicType.NORMAL) for name in names]
        broker, other = RabbitMQBroker("a", options, specs), RabbitMQBroker("b", options, specs)
        broker.send([Outgoing(name, name, b"a") for name in names])

        first = broker.receive("billing", names, limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
        second = wait_until(lambda: other.receive("billing", names, limit=5, invisible_for=HELD, wait=timedelta(seconds=1)))

        assert sorted(one.topic for one in [*first, *second]) == names
        broker.close()
        other.close()


class TestNodes:
    def test_are_tried_in_turn(self, open_broker: Open, node: RabbitMQ, message: NewMessage):
        broker = open_broker(NODES=["127.0.0.1:1", node.address])

        assert statuses(broker.send([message()])) == [SendStatus.ACCEPTED]


def _time_limit(*args: object) -> None:
    raise TimeLimitExceeded


def _accepted(broker: RabbitMQBroker, one: Outgoing) -> list[SendResult] | None:
    results = broker.send([one])
    return results if results[0].status is SendStatus.ACCEPTED else None


def _refused(broker: RabbitMQBroker, one: Outgoing) -> list[SendResult] | None:
    results = broker.send([one])
    return results if results[0].status is SendStatus.UNAVAILABLE else None


def _received(broker: RabbitMQBroker, topic: str) -> list[Delivery]:
    with suppress(BrokerUnavailable):
        return broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=1))
    return []
