"""The server is killed under a relay, and comes back: broker and proxy in one, by SIGKILL."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from outbox import conf, database
from outbox.brokers.base import SendStatus
from outbox.check_backs.loop import Checker
from outbox.message import COMMIT, TopicType
from outbox.models import Batch, CheckBack, DeadMessage, State, Topic
from outbox.relay.rounds import Relay
from project.servers.rocketmq import RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.factories import TicketFactory
from tests.outbox.brokers.rocketmq.log import copies, seen
from tests.outbox.brokers.rocketmq.standing import accepted
from tests.waiting import wait_until

HALF = TopicType.TRANSACTION

PATIENCE = 120  # seconds, of a busy machine; how many it took the figures say

pytestmark = pytest.mark.django_db(transaction=True)


def publish(topic: Topic) -> set[str]:
    return {str(ticket.message_id) for ticket in TicketFactory.create_batch(5, topic=topic)}


class TestKilledServer:
    def test_costs_no_message_and_no_try(
        self,
        harness: RocketMQHarness,
        server: RocketMQ,
        topic: Topic,
        connection: database.Connection,
        checker: Checker,
        die: Callable[[Relay, str], None],
        figure: Callable[[str, float], None],
    ):
        relay = Relay(connection, harness.open(), 1, settings=conf.RelaySettings(sweep_age=timedelta(0)))

        committed = publish(topic)
        relay.drain()
        decided = publish(topic)
        die(relay, "relay.after_decide")
        committed_just_now = publish(topic)
        relay.drain()
        stored = publish(topic)
        die(relay, "relay.after_half")
        assert sorted(Batch.objects.values_list("state", flat=True)) == [State.CLAIMED, State.PREPARED, State.SENT, State.SENT]

        server.kill_broker()
        waiting = publish(topic)
        relay.drain()
        newcomer = Acts(harness, harness.open())
        [away] = newcomer.broker.send_halves([newcomer.message(HALF)])

        assert relay.breakers.failed_topics == [topic.name]
        assert set(Batch.objects.values_list("failures", flat=True)) == {0}
        assert away.status is SendStatus.UNAVAILABLE

        asked = CheckBack.objects.count()
        server.start_broker()
        back_at = time.monotonic()
        half = wait_until(lambda: accepted(newcomer), PATIENCE)
        assert newcomer.end(half, resolution=COMMIT) == ["committed"]
        wait_until(lambda: relay.drain().sent, PATIENCE)
        figure("sending goes on behind a local proxy", time.monotonic() - back_at)
        wait_until(lambda: CheckBack.objects.count() > asked, PATIENCE)
        figure("check-backs go on behind a local proxy", time.monotonic() - back_at)

        everything = committed | decided | committed_just_now | stored | waiting
        wait_until(lambda: not relay.drain().claimed and seen(topic.name, everything) == everything, PATIENCE)
        assert set(Batch.objects.values_list("failures", flat=True)) == {0}
        assert not DeadMessage.objects.exists()
        figure("copies of 25 messages after the kill", sum(copies(topic.name, one) for one in everything))
