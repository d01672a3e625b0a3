"""Tasks sent to a real RabbitMQ, and what becomes of them when it is full, blocked, set up otherwise or killed."""

import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
from amqp import Channel
from celery import Celery
from kombu import Connection, Exchange, Queue

from outbox.brokers.base import SendStatus
from outbox.brokers.confirms import WRITE_BYTES
from outbox.celery import CeleryBroker
from outbox.celery.confirms import TASKS_PER_WRITE
from outbox.errors import BrokerUnavailable
from project.servers.rabbitmq import RabbitMQ
from tests.outbox.celery.app import app as tests_app
from tests.outbox.celery.conftest import broker_at, configured, numbers, statuses, task
from tests.rabbitmq_node import socket_writes
from tests.waiting import wait_until

ACCEPTED, REFUSED, MISCONFIGURED = SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.MISCONFIGURED
UNAVAILABLE, UNSURE = SendStatus.UNAVAILABLE, SendStatus.UNSURE

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.slow,
    pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server."),
]

LARGEST = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    with RabbitMQ(tmp_path_factory.mktemp("rabbitmq"), settings=f"max_message_size = {LARGEST}\n") as server:
        yield server


@pytest.fixture
def app(server: RabbitMQ) -> Iterator[Celery]:
    with Connection(server.url) as connection:
        channel = connection.channel()
        for name in ("celery", "routed", "full"):
            channel.queue_delete(name)
    queues = [*tests_app.conf.task_queues, Queue("full", queue_arguments={"x-max-length": 2, "x-overflow": "reject-publish"})]
    with configured(tests_app, broker_url=server.url, task_queues=queues):
        _forget_queues()
        yield tests_app
    _forget_queues()


def _forget_queues() -> None:
    """Have Celery read its queues from its settings again; its router keeps those that it was made with."""
    for name in ("queues", "router"):
        tests_app.amqp.__dict__.pop(name, None)


@pytest.fixture
def broker(server: RabbitMQ, app: Celery) -> Iterator[CeleryBroker]:
    with broker_at(server.url) as broker:
        yield broker


class TestSend:
    def test_is_confirmed_for_a_whole_batch(self, broker: CeleryBroker, app: Celery):
        results = broker.send([task(number) for number in range(500)])

        assert statuses(results) == [ACCEPTED] * 500
        assert numbers(app) == list(range(500))

    def test_is_written_to_the_socket_in_few_pieces(self, broker: CeleryBroker):
        with socket_writes() as writes:
            broker.send([task(1)])

            writes.clear()
            results = broker.send([task(number) for number in range(500)])

        assert statuses(results) == [ACCEPTED] * 500
        assert len(writes) <= 500 // TASKS_PER_WRITE + sum(writes) // WRITE_BYTES

    def test_waits_for_nothing_before_a_task_while_the_server_has_said_nothing(self, broker: CeleryBroker, monkeypatch):
        broker.send([task(1)])
        producer = broker._producer

        with monkeypatch.context() as patched:
            patched.setattr(producer._wire, "drain_events", lambda timeout: pytest.fail("There is nothing to read."))
            assert producer.is_alive()

    def test_declares_the_queue_and_sends_what_outlives_a_restart(self, broker: CeleryBroker, app: Celery, server: RabbitMQ):
        broker.send([task(1, "routed", routing_key="routed.now")])

        with Connection(server.url) as connection:
            message = app.amqp.queues["routed"](connection.channel()).get()
        assert message.properties["delivery_mode"] == 2

    def test_declares_a_queue_anew_that_was_deleted(self, broker: CeleryBroker, app: Celery, server: RabbitMQ):
        broker.send([task(1)])
        with Connection(server.url) as connection:
            connection.channel().queue_delete("celery")

        results = broker.send([task(2), task(3, "routed", routing_key="routed.now"), task(4)])

        assert statuses(results) == [ACCEPTED] * 3
        assert numbers(app) == [2, 4]
        assert numbers(app, "routed") == [3]

    def test_calls_a_message_that_reaches_no_queue_misconfigured(self, broker: CeleryBroker, app: Celery):
        broker.send([task(1, "routed", routing_key="routed.now")])

        results = broker.send(
            [task(2), task(3, "routed", routing_key="astray"), task(4, None, exchange="routed", routing_key="x")]
        )

        assert statuses(results) == [ACCEPTED, MISCONFIGURED, MISCONFIGURED]
        assert "no queue for exchange 'routed' with routing key 'astray'" in results[1].reason
        assert numbers(app) == [2]

    def test_calls_an_unknown_exchange_misconfigured_and_sends_the_others(self, broker: CeleryBroker, app: Celery):
        astray = task(0, queue=None, exchange="nowhere", routing_key="x")

        results = broker.send([task(1), task(2), astray, task(3)])

        assert statuses(results) == [ACCEPTED, ACCEPTED, MISCONFIGURED, ACCEPTED]
        assert "nowhere" in results[2].reason
        assert set(numbers(app)) == {1, 2, 3}

    def test_refuses_what_is_larger_than_the_server_takes_and_sends_the_others(self, broker: CeleryBroker, app: Celery):
        large = task(0, headers={"padding": "x" * 10}, compression=None, link=task_of(LARGEST))

        results = broker.send([task(1), large, task(2)])

        assert statuses(results) == [ACCEPTED, REFUSED, ACCEPTED]
        assert set(numbers(app)) == {1, 2}

    def test_calls_a_full_queue_misconfigured_so_that_others_do_not_wait(self, broker: CeleryBroker, app: Celery):
        results = broker.send([task(number, "full") for number in range(5)])

        assert statuses(results) == [ACCEPTED] * 2 + [MISCONFIGURED] * 3
        assert numbers(app, "full") == [0, 1]

    def test_calls_a_queue_with_other_arguments_misconfigured(self, broker: CeleryBroker, app: Celery, server: RabbitMQ):
        with Connection(server.url) as connection:
            Queue("full", queue_arguments={"x-max-length": 7})(connection.channel()).declare()

        results = broker.send([task(1, "full"), task(2)])

        assert statuses(results) == [MISCONFIGURED, ACCEPTED]
        assert "x-max-length" in results[0].reason
        assert statuses(broker.send([task(3)])) == [ACCEPTED]

    def test_calls_an_unknown_type_of_exchange_misconfigured_and_sends_the_others(self, broker: CeleryBroker, app: Celery):
        app.amqp.queues.add(Queue("odd", Exchange("odd", type="no-such-type"), "odd"))
        tasks = [task(number, "odd" if number in (0, 60, 61) else "celery") for number in range(123)]

        results = broker.send(tasks)

        assert {number for number, one in enumerate(results) if one.status is MISCONFIGURED} == {0, 60, 61}
        assert {one.status for one in results} == {ACCEPTED, MISCONFIGURED}
        assert "unknown exchange type 'no-such-type'" in results[0].reason
        assert len(numbers(app)) == 120

    def test_calls_several_queues_that_close_the_connection_misconfigured(self, broker: CeleryBroker, app: Celery):
        for name in ("odd", "odder"):
            app.amqp.queues.add(Queue(name, Exchange(name, type=name), name))

        results = broker.send([task(1, "odd"), task(2, "odder"), task(3)])

        assert statuses(results) == [MISCONFIGURED, MISCONFIGURED, ACCEPTED]
        assert ["'odd'" in results[0].reason, "'odder'" in results[1].reason] == [True, True]

    def test_calls_a_publish_that_closes_the_connection_misconfigured(self, broker: CeleryBroker, app: Celery, monkeypatch):
        send = Channel.send_method

        def send_bad_at_once(
            channel: Channel, sig: Any, form: Any = None, args: Any = None, content: Any = None, **more: Any
        ) -> Any:
            if content is not None and "bad" in content.body:
                args = (*args[:-1], True)  # immediate
            return send(channel, sig, form, args, content, **more)

        monkeypatch.setattr(Channel, "send_method", send_bad_at_once)
        bad = task(7, link=tests_app.signature("bad"))

        results = broker.send([*(task(number) for number in range(5)), bad, *(task(number) for number in range(8, 12))])

        assert statuses(results) == [ACCEPTED] * 5 + [MISCONFIGURED] + [ACCEPTED] * 4
        assert "NOT_IMPLEMENTED - immediate=true" in results[5].reason
        assert {*range(5), *range(8, 12)} <= set(numbers(app))

    def test_calls_a_limit_of_connections_an_outage(self, broker: CeleryBroker, app: Celery, server: RabbitMQ):
        server.control("set_vhost_limits", "-p", "/", '{"max-connections": 0}')
        results = broker.send([task(1)])
        server.control("clear_vhost_limits", "-p", "/")

        assert statuses(results) == [UNAVAILABLE]
        assert "limit" in results[0].reason
        assert statuses(broker.send([task(1)])) == [ACCEPTED]

    def test_goes_on_over_a_new_connection_when_the_server_has_closed_the_last(
        self, broker: CeleryBroker, app: Celery, server: RabbitMQ
    ):
        broker.send([task(1)])
        server.control("close_all_connections", "a test")

        results = broker.send([task(2), task(3)])

        assert statuses(results) == [ACCEPTED] * 2
        assert numbers(app) == [1, 2, 3]

    def test_calls_an_alarm_unavailable_and_goes_on_when_it_is_over(self, server: RabbitMQ, app: Celery):
        with broker_at(server.url, TIMEOUT=timedelta(seconds=2)) as broker:
            broker.send([task(1)])
            server.control("set_vm_memory_high_watermark", "0.0001")
            try:
                began = monotonic()
                first = broker.send([task(number) for number in range(2, 500)])
                second = broker.send([task(number) for number in range(500, 1000)])
                took = monotonic() - began
            finally:
                server.control("set_vm_memory_high_watermark", "0.6")

            assert UNAVAILABLE in statuses(second)
            assert statuses(second).count(UNAVAILABLE) >= 499
            assert REFUSED not in statuses(first)
            assert took < 6
            wait_until(lambda: statuses(broker.send([task(1000)])) == [ACCEPTED])
        sent = {one for one in range(2, 500) if first[one - 2].status is ACCEPTED}
        assert sent | {1, 1000} <= set(numbers(app))

    def test_refuses_what_amqp_cannot_write_and_sends_the_others(self, broker: CeleryBroker, app: Celery):
        results = broker.send([task(1), task(0, headers={"large": 2**80}), task(0, priority=1000), task(2)])

        assert statuses(results) == [ACCEPTED, REFUSED, REFUSED, ACCEPTED]
        assert numbers(app) == [1, 2]

    @pytest.mark.parametrize("is_connected", [True, False], ids=["while connected", "before a connection"])
    def test_does_not_wait_for_a_frozen_server_and_goes_on_when_it_is_back(
        self, server: RabbitMQ, app: Celery, is_connected: bool
    ):
        with broker_at(server.url, TIMEOUT=timedelta(seconds=1)) as broker:
            if is_connected:
                broker.send([task(1)])
            server.freeze()
            try:
                began = monotonic()
                results = broker.send([task(2), task(3, "routed", routing_key="routed.now")])
                took = monotonic() - began
            finally:
                server.thaw()

            assert set(statuses(results)) <= {UNSURE, UNAVAILABLE}
            assert took < 8
            wait_until(lambda: statuses(broker.send([task(4)])) == [ACCEPTED])
        assert 4 in numbers(app)

    def test_is_misconfigured_where_the_password_is_wrong(self, server: RabbitMQ, app: Celery):
        with broker_at(server.url.replace("guest:guest", "guest:wrong")) as broker:
            results = broker.send([task(1)])

        assert statuses(results) == [MISCONFIGURED]

    def test_loses_nothing_when_the_server_is_killed_and_goes_on_when_it_is_back(
        self, broker: CeleryBroker, app: Celery, server: RabbitMQ
    ):
        broker.send([task(-1)])
        batches: list[list[SendStatus]] = [statuses(broker.send([task(number) for number in range(100)]))]
        server.kill()

        after = broker.send([task(number) for number in range(100, 200)])
        again = broker.send([task(200)])
        server.start()
        back = wait_until(lambda: statuses(broker.send([task(300)])) == [ACCEPTED])

        assert batches == [[ACCEPTED] * 100]
        assert UNAVAILABLE in statuses(after)
        assert ACCEPTED not in statuses(after)
        assert statuses(again) == [UNAVAILABLE]
        assert back
        assert set(numbers(app)) >= {-1, *range(100), 300}

    def test_loses_nothing_that_it_accepted_when_the_server_is_killed_under_load(
        self, broker: CeleryBroker, app: Celery, server: RabbitMQ
    ):
        accepted: list[int] = []
        killer = threading.Timer(0.3, server.kill)
        for first in itertools.count(step=200):
            results = broker.send([task(first + number) for number in range(200)])
            accepted += [first + number for number, one in enumerate(results) if one.status is ACCEPTED]
            if first == 0:
                killer.start()
            if UNAVAILABLE in statuses(results):
                break
        killer.join()
        server.start()
        wait_until(lambda: statuses(broker.send([task(-1)])) == [ACCEPTED])

        found = set(numbers(app))
        assert accepted
        assert set(accepted) - found == set()


class TestCheck:
    def test_is_content_with_a_server_that_answers(self, broker: CeleryBroker):
        assert broker.check() == []

    def test_says_that_the_server_is_away(self):
        with broker_at("amqp://guest:guest@127.0.0.1:1//") as broker, pytest.raises(BrokerUnavailable, match="refused"):
            broker.check()


def task_of(size: int) -> object:
    return tests_app.signature("tests.add", args=("x" * size,))
