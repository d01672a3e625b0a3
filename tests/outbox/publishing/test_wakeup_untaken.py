"""Wakeups that no worker of Celery takes, at a real Redis and a real RabbitMQ."""

import time
from collections.abc import Iterator
from typing import Any

import celery
import pytest
from kombu import Connection

from outbox import database
from outbox.monitoring.doctor import check_wakeups
from outbox.publishing import wakeup
from outbox.publishing.wakeup import WakeupSender
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


def written(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == wakeup.__name__]


def commit(sender: WakeupSender, times: int) -> None:
    """Have a sender wake both brokers for some commits, one after the other."""
    for number in range(times):
        done = sender.sent + sender.spared
        sender.add(("default", ("default", "spare")[number % 2]))
        wait_until(lambda: sender.sent + sender.spared > done)  # noqa: B023


class Clock:
    """Replaces the module `time`; tests move it."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(wakeup, "time", clock)
    return clock


class TestWakeupsThatNoWorkerTakes:
    def test_wait_ten_however_many_commits_there_are(self, app):
        sender = WakeupSender()

        commit(sender, 40)

        assert wait_until(lambda: waiting(app)) == 10
        assert (sender.sent, sender.spared, sender.failed) == (10, 30, 0)

    def test_wait_two_for_each_database_and_broker_if_that_is_more(self, app, monkeypatch):
        monkeypatch.setattr(database, "outbox_databases", lambda: ["default", "second", "third"])
        sender = WakeupSender()

        commit(sender, 20)

        assert (sender.sent, sender.spared) == (12, 8)

    def test_are_not_kept_back_by_a_few_tasks_of_other_kinds(self, app):
        for _ in range(3):
            app.send_task("outbox.tasks.maintenance", queue=QUEUE)
        sender = WakeupSender()

        commit(sender, 2)

        assert (sender.sent, sender.spared) == (2, 0)

    def test_are_sent_again_when_a_worker_has_taken_them(self, app):
        sender = WakeupSender()
        commit(sender, 12)

        take_all(app)
        commit(sender, 2)

        assert sender.sent == 12

    def test_are_named_in_the_log_when_each_look_for_a_minute_shows_them(self, app, caplog, clock):
        sender = WakeupSender()
        commit(sender, 10)

        for _ in range(14):
            commit(sender, 1)
            clock.now += 5

        [line] = written(caplog)
        assert line.startswith("10 tasks wait in Celery's queue 'outbox', and there were too many during the last minute")
        assert "Start workers for this queue" in line

    def test_are_not_named_after_two_looks_that_are_minutes_apart(self, app, caplog, clock):
        sender = WakeupSender()
        commit(sender, 11)

        clock.now += 120
        commit(sender, 1)

        assert sender.spared == 2
        assert written(caplog) == []

    def test_are_not_named_if_they_were_taken_meanwhile(self, app, caplog, clock):
        sender = WakeupSender()
        for _ in range(10):
            commit(sender, 12)
            take_all(app)
            commit(sender, 1)
            take_all(app)
            clock.now += 9

        assert written(caplog) == []

    def test_are_named_by_the_doctor_with_what_to_do(self, app, settings):
        commit(WakeupSender(), 4)

        found = [one for one in check_wakeups() if one.level_name == "warning"]

        assert [one.text for one in found] == ["4 tasks in Celery's queue 'outbox', and no worker that answers takes from it"]
        assert "Start a worker of Celery for this queue." in found[0].hint
