"""Wakeups that no worker of Celery takes, at a real Redis and a real RabbitMQ."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import celery
import pytest
from kombu import Connection

from outbox.monitoring.doctor import Level, wakeups
from outbox.publishing import wakeup
from outbox.publishing.wakeup import Sender, Wakeup
from project.servers.rabbitmq import RabbitMQ
from project.servers.redis import Redis
from tests.waiting import wait_until

QUEUE = "outbox"
SERVERS = [
    pytest.param(Redis, marks=[pytest.mark.redis, pytest.mark.skipif(not Redis.is_here(), reason="There is no redis-server.")]),
    pytest.param(
        RabbitMQ,
        marks=[pytest.mark.rabbitmq, pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server.")],
    ),
]

pytestmark = pytest.mark.parametrize("server", SERVERS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with request.param(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def app(server: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[celery.Celery]:
    topics = {"orders": {}, "letters": {"BROKER": "spare"}}
    memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}
    settings.OUTBOX = {"BROKERS": {"default": memory, "spare": memory}, "TOPICS": topics, "CELERY_QUEUE": QUEUE}
    app = celery.Celery("woken", broker=server.url, set_as_current=False)
    monkeypatch.setattr(celery, "current_app", app)
    monkeypatch.setattr(wakeup, "PAUSE_SECONDS", 0.0)
    yield app
    take_all(app)  # not deleted: kombu shares producers among apps, and they do not declare a queue twice
    app.close()


def waiting(app: celery.Celery) -> int:
    with Connection(app.conf.broker_url) as connection:
        return wakeup.count_waiting(connection, QUEUE)


def take_all(app: celery.Celery) -> None:
    with app.connection_for_write() as connection, connection.channel() as channel:
        app.amqp.queues[QUEUE](channel).purge()


def commit(sender: Sender, times: int) -> None:
    """Have a sender wake both brokers for some commits, one after the other."""
    for number in range(times):
        done = sender.sent + sender.spared
        sender.add(Wakeup("default", ("default", "spare")[number % 2]))
        wait_until(lambda: sender.sent + sender.spared > done)  # noqa: B023


class TestWakeupsThatNoWorkerTakes:
    def test_wait_one_for_each_broker_however_many_commits_there_are(self, app):
        sender = Sender()

        commit(sender, 40)

        assert wait_until(lambda: waiting(app)) == 2
        assert (sender.sent, sender.spared, sender.failed) == (2, 38, 0)

    def test_are_sent_again_when_a_worker_has_taken_them(self, app):
        sender = Sender()
        commit(sender, 10)

        take_all(app)
        commit(sender, 2)

        assert sender.sent == 4

    def test_are_named_in_the_log_when_it_lasts(self, app, caplog, monkeypatch):
        monkeypatch.setattr(wakeup, "UNTAKEN_SECONDS", 0.0)
        caplog.set_level(logging.WARNING)

        commit(Sender(), 20)

        [line] = caplog.messages
        assert line.startswith("No worker of Celery has taken a wakeup from the queue 'outbox' for a minute: 2 wait")
        assert "Start a worker for this queue" in line

    def test_are_named_by_the_doctor_with_what_to_do(self, app, settings):
        commit(Sender(), 4)

        found = [one for one in wakeups.check() if one.level is Level.WARNING]

        assert [one.text for one in found] == ["2 tasks in Celery's queue 'outbox', and no worker that answers takes from it"]
        assert "Start a worker of Celery for this queue." in found[0].hint
