"""`outbox_consume` on a real RocketMQ, killed in the middle."""

import os
import signal
from datetime import timedelta

import pytest

from outbox.models import Duplicate, Inbox
from outbox.relay import hosts
from tests.journeys.rocketmq.conftest import Journey
from tests.waiting import wait_until

MESSAGES = range(60)
IN_TRANSACTION, UNACKED = "consumer.after_handler", "consumer.after_commit"


@pytest.fixture
def sent(journey: Journey) -> None:
    """Messages that a relay has brought to the server."""
    journey.publish(journey.work, *MESSAGES)
    drained = hosts.run_once(
        hosts.RelayTarget("default", "default"), note="test", at_most=timedelta(seconds=60), idle_timeout=hosts.NO_IDLE_TIMEOUT
    )
    assert drained.sent == len(MESSAGES)


class TestKilledConsumers:
    @pytest.mark.parametrize("place", [IN_TRANSACTION, UNACKED])
    def test_apply_each_message_once(self, journey: Journey, sent: None, place: str):
        consumers = [journey.consume(failpoints=journey.kills(place)) for _ in range(2)]
        for _ in range(3):
            journey.permit(place)
            killed = wait_until(lambda: next((one for one in consumers if one.poll() is not None), None), 120)
            assert killed.returncode == -signal.SIGKILL
            consumers.remove(killed)
            consumers.append(journey.consume(failpoints=journey.kills(place)))

        wait_until(lambda: {number for _, number in journey.effects(journey.work)} == set(MESSAGES), 120)

        if place == UNACKED:
            wait_until(Duplicate.objects.exists, 120)  # behind a deferred message's commit, a kill leaves none
        assert sorted(number for _, number in journey.effects(journey.work)) == list(MESSAGES)
        assert Inbox.objects.count() == len(MESSAGES)

    def test_leave_the_rest_to_others(self, journey: Journey, sent: None):
        first = journey.consume()
        wait_until(lambda: journey.effects(journey.work), 120)

        os.killpg(first.pid, signal.SIGKILL)
        journey.consume()

        wait_until(lambda: len(journey.effects(journey.work)) >= len(MESSAGES), 120)
        assert sorted(number for _, number in journey.effects(journey.work)) == list(MESSAGES)
