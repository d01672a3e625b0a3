"""The relay, the check-back and the sweep on a real RocketMQ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import connections

from outbox import conf, database
from outbox.brokers.base import Broker, Delivery
from outbox.check_back.ask import in_process
from outbox.check_back.checker import Checker
from outbox.message import Header, TopicType
from outbox.models import Batch, CheckBack, State, Topic
from outbox.relay.lane import Lane
from outbox.relay.run import Relay
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.factories import BatchFactory, TicketFactory, TopicFactory, stored
from tests.waiting import wait_until

HALF = TopicType.TRANSACTION

# The command in a process of its own, on the test's database.
CHECKER = """
import json, os, sys
import django
sys.path.insert(0, os.getcwd())
from django.conf import settings
name, settings.OUTBOX = json.loads(sys.argv[1])
settings.DATABASES["default"]["NAME"] = name
django.setup()
from django.core.management import call_command
call_command("outbox_checker")
"""

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def topic(harness: RocketMQHarness, settings: Any) -> Topic:
    topics = {spec.name: {"type": str(kind)} for kind, spec in harness.topics.items()}
    settings.OUTBOX = {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": harness.options()}},
        "TOPICS": {name: {"TYPE": topic["type"]} for name, topic in topics.items()},
    }
    return TopicFactory(name=harness.topic(HALF), type="transaction")


@pytest.fixture
def connection() -> Iterator[database.Connection]:
    with database.connect("default") as connection:
        yield connection


def relay(connection: database.Connection, broker: Broker) -> Relay:
    return Relay(connection, broker, Lane(1), settings=conf.RelaySettings(sweep_age=timedelta(0)))


def arrived(acts: Acts, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    wait_until(lambda: found.extend(acts.receive(HALF)) or len({one.message_id for one in found}) >= count, 60)
    return found


class TestRelay:
    def test_sends_a_batch_once_and_numbered(self, acts: Acts, broker: Broker, topic: Topic, connection: database.Connection):
        tickets = TicketFactory.create_batch(100, topic=topic)

        drained = relay(connection, broker).drain()

        assert (drained.sent, drained.parted) == (100, 0)
        found = arrived(acts, 100)
        assert sorted(one.message_id for one in found) == sorted(str(ticket.message_id) for ticket in tickets)
        assert sorted(int(one.headers[Header.NUMBER]) for one in found) == list(range(1, 101))
        assert Batch.objects.get().state == State.SENT

    def test_leaves_a_batch_it_was_too_slow_for_to_the_check_back(
        self, acts: Acts, harness: RocketMQHarness, topic: Topic, connection: database.Connection, fast_checks: None
    ):
        [ticket] = TicketFactory.create_batch(1, topic=topic)
        slow = harness.open(COMMIT_WINDOW=timedelta(microseconds=1), CHECK_HORIZON=timedelta(milliseconds=1))
        slow._sending._window = 2.0  # sends the half, as one would that stalls behind it
        running = relay(connection, slow)
        running.drain()
        before = Batch.objects.get().state

        checker = Checker("default", "default", in_process("default", asked_by="rocketmq"))
        checker.turn()
        found = arrived(acts, 1)
        checker.close()
        running.sweep()

        assert before == State.PREPARED
        assert {one.message_id for one in found} == {str(ticket.message_id)}
        assert CheckBack.objects.filter(asked_by="rocketmq", answer="COMMIT").exists()
        assert Batch.objects.get().state == State.SENT

    def test_sends_again_what_the_server_does_not_have(
        self, acts: Acts, harness: RocketMQHarness, topic: Topic, connection: database.Connection
    ):
        yesterday = datetime.now(UTC) - timedelta(days=1)
        batch = BatchFactory(topic=topic, state=State.PREPARED, half_ids=["lost.1"], decided_at=yesterday)
        running = relay(connection, harness.open())

        swept = running.sweep()
        running.drain()

        assert swept.returned == 1
        assert [one.message_id for one in arrived(acts, 1)] == [str(batch.message_ids[0])]
        assert stored(batch).state == State.SENT

    def test_keeps_messages_while_the_server_is_away(
        self, harness: RocketMQHarness, topic: Topic, connection: database.Connection
    ):
        TicketFactory.create_batch(3, topic=topic)

        relay(connection, harness.open_unreachable()).drain()

        [batch] = Batch.objects.all()
        assert (batch.state, batch.tries) == (State.RELEASED, 0)


class TestOutboxChecker:
    def test_answers_till_it_is_told_to_stop(
        self, acts: Acts, harness: RocketMQHarness, topic: Topic, connection: database.Connection, fast_checks: None
    ):
        TicketFactory(topic=topic)
        slow = harness.open(COMMIT_WINDOW=timedelta(microseconds=1))
        slow._sending._window = 2.0
        relay(connection, slow).drain()
        given = json.dumps([connections["default"].settings_dict["NAME"], django_settings.OUTBOX])
        checker = subprocess.Popen([sys.executable, "-c", CHECKER, given], cwd=django_settings.BASE_DIR)

        found = arrived(acts, 1)
        checker.terminate()

        assert len({one.message_id for one in found}) == 1
        assert checker.wait(20) == 0
