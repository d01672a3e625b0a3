"""A proxy of its own is killed between half message and commit, while the broker behind it lives, and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox.brokers.base import HalfRef, Verdict
from outbox.message import COMMIT, Half, Resolution, TopicType
from project.servers.rocketmq import RocketMQ
from project.servers.rocketmq_proxy import ClusterProxy
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.outbox.brokers.rocketmq.log import copies
from tests.waiting import wait_until

HALF = TopicType.TRANSACTION

SENDS_AGAIN, ASKS_AGAIN = 10, 60  # seconds from when the proxy is back


@pytest.fixture
def proxy(server: RocketMQ) -> Iterator[ClusterProxy]:
    proxy = ClusterProxy(server).start()
    yield proxy
    proxy.kill()


class TestKilledProxy:
    def test_leaves_half_messages_to_the_check_back(
        self, harness: RocketMQHarness, proxy: ClusterProxy, figure: Callable[[str, float], None]
    ):
        broker = harness.open(ENDPOINTS=proxy.endpoints, COMMIT_WINDOW=timedelta(minutes=10))
        acts = Acts(harness, broker)
        asked: list[str] = []

        def answer(half: Half) -> Resolution:
            asked.append(half.half_id)
            return COMMIT

        broker.listen(answer)
        ended, half = wait_until(lambda: accepted(acts), 30), wait_until(lambda: accepted(acts), 30)
        assert acts.end(ended) == ["committed"]
        assert copies(half.topic, half.message_id) == 0

        proxy.kill()
        [away] = broker.end([half], COMMIT)
        [unsent] = broker.send_halves([acts.message(HALF)])
        proxy.start()
        back_at = time.monotonic()
        wait_until(lambda: accepted(acts), SENDS_AGAIN)
        figure("sending goes on behind a cluster proxy", time.monotonic() - back_at)
        wait_until(lambda: half.half_id in asked, ASKS_AGAIN)
        figure("check-backs go on behind a cluster proxy", time.monotonic() - back_at)

        assert {away.verdict, unsent.verdict} == {Verdict.UNAVAILABLE}
        wait_until(lambda: copies(half.topic, half.message_id))
        assert copies(ended.topic, ended.message_id) == 1


def accepted(acts: Acts) -> HalfRef | None:
    """Send a half message; give it when it is stored."""
    [outcome] = acts.broker.send_halves([message := acts.message(HALF)])
    return HalfRef(message.topic, outcome.half_id, message.message_id) if outcome.verdict is Verdict.ACCEPTED else None
