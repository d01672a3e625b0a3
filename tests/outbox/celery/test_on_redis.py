"""Tasks sent to a real Redis."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
from celery import Celery
from msgspec.structs import replace

from outbox.brokers.base import Outgoing, SendStatus
from outbox.celery import CeleryBroker
from project.servers.redis import Redis
from tests.outbox.celery.app import app as tests_app
from tests.outbox.celery.conftest import broker_at, configured, numbers, statuses, task
from tests.waiting import wait_until

ACCEPTED, UNAVAILABLE, UNSURE = SendStatus.ACCEPTED, SendStatus.UNAVAILABLE, SendStatus.UNSURE

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server: apt-get install redis-server."),
]


@pytest.fixture
def server(tmp_path) -> Iterator[Redis]:
    with Redis(tmp_path) as server:
        yield server


@pytest.fixture
def app(server: Redis) -> Iterator[Celery]:
    with configured(tests_app, broker_url=server.url):
        yield tests_app


@pytest.fixture
def broker(server: Redis, app: Celery) -> Iterator[CeleryBroker]:
    with broker_at(server.url) as broker:
        yield broker


class TestSend:
    def test_accepts_what_redis_has(self, broker: CeleryBroker, app: Celery):
        results = broker.send([task(number) for number in range(100)])

        assert statuses(results) == [ACCEPTED] * 100
        assert numbers(app) == list(range(100))

    def test_goes_on_after_a_restart_with_all_that_was_accepted(self, broker: CeleryBroker, app: Celery, server: Redis):
        broker.send([task(1)])
        server.kill()
        away = broker.send([task(2), task(3)]), broker.send([task(4)])
        server.start()

        results = broker.send([task(5)])

        assert statuses(away[0])[0] in (UNSURE, UNAVAILABLE)
        assert statuses(away[0])[1] is UNAVAILABLE
        assert statuses(away[1]) == [UNAVAILABLE]
        assert statuses(results) == [ACCEPTED]
        assert numbers(app) == [1, 5]

    def test_finds_the_queue_of_an_exchange_by_the_routing_key(self, broker: CeleryBroker, app: Celery):
        found = _to(task(1), exchange="routed", routing_key="routed.now")
        lost = _to(task(2), exchange="routed", routing_key="elsewhere")

        results = broker.send([found, lost])

        assert statuses(results) == [ACCEPTED, SendStatus.MISCONFIGURED]
        assert "no queue for exchange 'routed' with routing key 'elsewhere'" in results[1].reason
        assert numbers(app, "routed") == [1]

    def test_sends_others_beside_a_task_whose_queue_is_unknown(self, broker: CeleryBroker, app: Celery):
        unknown = _to(task(1), queues=["nowhere"])
        create_missing, app.amqp.queues.create_missing = app.amqp.queues.create_missing, False

        results = broker.send([unknown, task(2)])
        app.amqp.queues.create_missing = create_missing

        assert statuses(results) == [SendStatus.MISCONFIGURED, ACCEPTED]
        assert numbers(app) == [2]

    def test_calls_a_full_memory_unavailable(self, broker: CeleryBroker, app: Celery, server: Redis):
        broker.send([task(1)])
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
            results = broker.send([task(2), task(3)])
            client.config_set("maxmemory", 0)

        assert statuses(results) == [UNAVAILABLE] * 2
        assert statuses(broker.send([task(4)])) == [ACCEPTED]
        assert numbers(app) == [1, 4]

    def test_calls_a_key_that_its_user_may_not_touch_misconfigured_and_sends_the_others(self, app: Celery, server: Redis):
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~celery*", "~_kombu.*", "+@all")
        with broker_at(server.url.replace("redis://", "redis://shop:secret@")) as broker:
            results = broker.send([task(number, "routed" if number % 50 == 0 else "celery") for number in range(120)])

        assert {number for number, one in enumerate(results) if one.status is SendStatus.MISCONFIGURED} == {0, 50, 100}
        assert {one.status for one in results} == {ACCEPTED, SendStatus.MISCONFIGURED}
        assert "no permissions to access one of the keys" in results[0].reason
        assert len(numbers(app)) == 117

    def test_calls_a_key_that_is_not_a_list_misconfigured_and_sends_the_others(
        self, broker: CeleryBroker, app: Celery, server: Redis
    ):
        with redis.Redis.from_url(server.url) as client:
            client.set("routed", "not a list")

        results = broker.send([_to(task(1), exchange="routed", routing_key="routed.now"), task(2)])

        assert statuses(results) == [SendStatus.MISCONFIGURED, ACCEPTED]
        assert "WRONGTYPE" in results[0].reason
        assert numbers(app) == [2]

    def test_follows_a_replica_that_takes_over_behind_the_same_address(
        self, broker: CeleryBroker, app: Celery, server: Redis, tmp_path
    ):
        broker.send([task(1)])
        with Redis(tmp_path / "second") as second:
            second.follow(server)
            wait_until(lambda: second.say("LLEN celery") == ":1")
            second.take_over()
            second.swap_ports(server)
            server.follow(second)
            away = broker.send([task(2), task(3)])

            results = broker.send([task(4)])

            assert statuses(away) == [UNAVAILABLE] * 2
            assert "ReadOnlyError" in away[0].reason
            assert statuses(results) == [ACCEPTED]
            assert numbers(app) == [1, 4]

    def test_is_misconfigured_where_the_password_is_wrong(self, broker: CeleryBroker, server: Redis):
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "secret")
            with broker_at(server.url.replace("redis://", "redis://:wrong@")) as wrong:
                results = wrong.send([task(1)])

        assert statuses(results) == [SendStatus.MISCONFIGURED]


def _to(message: Outgoing, **where: Any) -> Outgoing:
    """Return a task's message with another destination."""
    stored = {**msgspec.json.decode(message.body), "queues": [], **where}
    return replace(message, body=msgspec.json.encode(stored))
