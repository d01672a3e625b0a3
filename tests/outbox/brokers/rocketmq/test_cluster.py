"""A proxy of its own is killed, while the broker behind it lives, and comes back: nothing but check-backs needs it."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox.message import COMMIT, Half, Resolution, TopicType
from project.servers.rocketmq import FAST_CHECKS, RocketMQ
from project.servers.rocketmq_proxy import ClusterProxy
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.outbox.brokers.rocketmq.log import copies
from tests.outbox.brokers.rocketmq.standing import accepted
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

HALF = TopicType.TRANSACTION

PATIENCE = 120  # seconds, of a busy machine; how many it took the figures say


@pytest.fixture
def proxy(server: RocketMQ) -> Iterator[ClusterProxy]:
    # By default it tells the broker each 20 s whom to ask.
    proxy = ClusterProxy(server, {"transactionHeartbeatPeriodSecond": 1}).start()
    yield proxy
    proxy.kill()
    server.set("transactionTimeOut", FAST_CHECKS["transactionTimeOut"])


class TestKilledProxy:
    def test_costs_no_send_and_no_end_and_check_backs_go_on_when_it_is_back(
        self, harness: RocketMQHarness, server: RocketMQ, proxy: ClusterProxy, figure: Callable[[str, float], None]
    ):
        broker = harness.open(ENDPOINTS=proxy.endpoints, COMMIT_WINDOW=timedelta(minutes=10))
        acts = Acts(harness, broker)
        asked: list[str] = []

        def answer(half: Half) -> Resolution:
            asked.append(half.half_id)
            return COMMIT

        server.set("transactionTimeOut", 600_000)  # nobody asks yet
        broker.listen(answer)
        before, half = wait_until(lambda: accepted(acts), PATIENCE), wait_until(lambda: accepted(acts), PATIENCE)

        proxy.kill()
        meanwhile = accepted(acts)
        ended = acts.end(before, meanwhile)
        proxy.start()
        back_at = time.monotonic()
        server.set("transactionTimeOut", 500)
        wait_until(lambda: half.half_id in asked, PATIENCE)
        figure("check-backs go on behind a cluster proxy that announces listeners each second", time.monotonic() - back_at)

        assert ended == ["committed", "committed"]
        wait_until(lambda: copies(half.topic, half.message_id), PATIENCE)
        assert [copies(one.topic, one.message_id) for one in (before, meanwhile)] == [1, 1]
        assert asked.count(before.half_id) == asked.count(meanwhile.half_id) == 0
