"""What becomes of messages when the server is hurt: nothing that was confirmed is lost, and no restart of ours is needed."""

import threading
from collections.abc import Callable
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Outgoing, SendStatus
from outbox.errors import BrokerUnavailable, TimeLimitExceeded
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


class TestNodes:
    def test_are_tried_in_turn(self, open_broker: Open, node: RabbitMQ, message: NewMessage):
        broker = open_broker(NODES=["127.0.0.1:1", node.address])

        assert statuses(broker.send([message()])) == [SendStatus.ACCEPTED]


def _time_limit(*args: object) -> None:
    raise TimeLimitExceeded
