"""What becomes of messages when the server is hurt: nothing that was confirmed is lost, and no restart of ours is needed."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker, receiver
from outbox.errors import BrokerUnavailable, KeptByClient, TimeLimitExceeded
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import accepted, receive_all, received, refused, statuses
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]

NewMessage = Callable[..., Outgoing]


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

        found = receive_all(broker, topic, set(confirmed))

        assert set(confirmed) <= set(found)  # which may have more: some whose confirm was lost

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
        assert statuses(wait_until(lambda: accepted(broker, message()))) == [SendStatus.ACCEPTED]

    def test_gives_back_what_was_held(self, broker, node: RabbitMQ, message: NewMessage, topic):
        broker.send([message(b"a")])
        [held] = broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=5))

        wait_until(lambda: node.knows_after_crash(f"{topic}:billing"))
        node.kill()
        node.start()

        [again] = wait_until(lambda: received(broker, topic))
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
        assert statuses(wait_until(lambda: accepted(broker, message()))) == [SendStatus.ACCEPTED]

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
            results = wait_until(lambda: refused(broker, message()))
            [held] = broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
            is_acked = broker.ack([held])
        finally:
            node.control("set_vm_memory_high_watermark", "0.6")

        assert "short of memory or disk" in results[0].reason
        assert is_acked == [True]
        assert statuses(wait_until(lambda: accepted(broker, message()))) == [SendStatus.ACCEPTED]


class TestCopyThatIsNotStored:
    def test_of_a_retry_leaves_the_message_with_its_process_for_the_delay(
        self, open_broker: Open, node: RabbitMQ, message: NewMessage, topic
    ):
        broker, other = open_broker(), open_broker()
        before = broker.delayed().waiting  # of other tests
        broker.send([message(b"a")])
        [held] = wait_until(lambda: received(broker, topic))
        node.control("set_vm_memory_high_watermark", "0.00001")
        try:
            wait_until(lambda: refused(broker, message(b"b")))  # it knows of the alarm now
            began = time.monotonic()
            with pytest.raises(KeptByClient, match="stays with this process for 3 s"):
                broker.retry(held, timedelta(seconds=3))
            [again] = wait_until(lambda: received(other, topic))
            waited = time.monotonic() - began
            is_acked = other.ack([again])
        finally:
            node.control("set_vm_memory_high_watermark", "0.6")

        assert (again.body, again.delivery_count) == (b"a", 2)
        assert 2.9 < waited < 10
        assert is_acked == [True]
        assert broker.ack([held]) == [False]
        wait_until(lambda: accepted(broker, message(b"c")))
        wait_until(lambda: broker.delayed().waiting <= before)

    def test_of_a_dead_letter_leaves_it_too(self, open_broker: Open, node: RabbitMQ, message: NewMessage, topic):
        broker = open_broker()
        broker.send([message(b"a")])
        [held] = wait_until(lambda: received(broker, topic))
        node.control("set_vm_memory_high_watermark", "0.00001")
        try:
            wait_until(lambda: refused(broker, message(b"b")))
            with pytest.raises(KeptByClient):
                broker.dead_letter(held, "no such customer")
        finally:
            node.control("set_vm_memory_high_watermark", "0.6")
        wait_until(lambda: accepted(broker, message(b"c")))
        again = wait_until(lambda: [one for one in received(broker, topic) if one.body == b"a"])
        is_ended = broker.dead_letter(again[0], "no such customer")

        assert is_ended
        assert [one.reason for one in wait_until(lambda: broker.dead_letters("billing"))] == ["no such customer"]


class TestExceptionBetweenMessageAndConfirm:
    def test_leaves_no_confirm_to_be_taken_for_another_messages(
        self, open_broker: Open, node: RabbitMQ, message: NewMessage, monkeypatch: pytest.MonkeyPatch
    ):
        broker = open_broker(MAX_LENGTH=1)
        wait_until(lambda: refused(broker, message()))
        with monkeypatch.context() as patch:
            patch.setattr(amqp.Connection, "blocking_read", _time_limit)
            with pytest.raises(TimeLimitExceeded):
                broker.send([message(), message(), message()])

        results = broker.send([message(), message()])

        assert statuses(results) == [SendStatus.UNAVAILABLE] * 2


class TestWrongPassword:
    def test_is_named_and_burns_no_message(self, open_broker: Open, message: NewMessage):
        broker = open_broker(PASSWORD="wrong")

        [result] = broker.send([message()])

        assert result.status is SendStatus.UNAVAILABLE
        assert "ACCESS_REFUSED" in result.reason
        with pytest.raises(BrokerUnavailable, match="ACCESS_REFUSED"):
            broker.check()


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
        [again] = wait_until(lambda: received(broker, topic))
        [kept] = broker.renew([again], timedelta(minutes=20))
        broker.ack([again])
        [second] = wait_until(lambda: received(broker, topic))

        assert (again.body, again.delivery_count, second.body) == (b"1", 2, b"2")
        assert kept is not None

    def test_leaves_a_retry_of_an_ordered_message_its_delay(self, open_broker: Open, message: NewMessage, topic):
        now = [0.0]
        broker = open_broker(TopicType.FIFO, clock=lambda: now[0])
        broker.send([message(b"1", key="a"), message(b"2", key="a")])
        [head] = broker.receive("billing", [topic], limit=5, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.retry(head, timedelta(minutes=60))

        now[0] += 30 * 60
        early = [one for _ in range(3) for one in received(broker, topic)]
        now[0] += 31 * 60
        late = wait_until(lambda: received(broker, topic))

        assert early == []
        assert [one.body for one in late] == [b"1"]

    def test_leaves_it_over_two_connections_of_which_one_fetched_nothing(
        self, open_broker: Open, node: RabbitMQ, message: NewMessage, topic
    ):
        now = [0.0]
        broker, other = open_broker(TopicType.FIFO, clock=lambda: now[0]), open_broker(TopicType.FIFO)
        broker.send([message(b"1", key="a")])
        [head] = broker.receive("billing", [topic], limit=5, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.retry(head, timedelta(minutes=60))
        received(other, topic)  # it waits for its turn to receive

        now[0] += 20 * 60  # the broker connects anew, and it is the other's turn
        nothing = received(broker, topic)
        node.control("close_all_connections", "a test")
        other.close()
        early = [one for _ in range(3) for one in received(broker, topic)]
        now[0] += 41 * 60
        late = wait_until(lambda: received(broker, topic))

        assert nothing == early == []
        assert [one.body for one in late] == [b"1"]


class TestDeliveryThatIsLostOnItsWay:
    """As it is where the leader of a queue dies: the server has sent it, and no client has got it."""

    def test_comes_again_with_another_channel(self, broker, message: NewMessage, topic, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(receiver, "CHANNEL_SECONDS", 0.5)
        received(broker, topic)
        with monkeypatch.context() as patch:
            patch.setattr(receiver.RabbitMQReceiver, "_on_message", lambda *arguments: None)
            broker.send([message(b"a")])
            nothing = received(broker, topic)

        [found] = wait_until(lambda: received(broker, topic))

        assert nothing == []
        assert (found.body, broker.ack([found])) == (b"a", [True])


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
