"""Order by key, from publish to handler, through relay and consumer as processes."""

from outbox.models import FailedDelivery
from project.servers.remoting import pull
from tests.journeys.rocketmq.conftest import QUEUES, Journey
from tests.rocketmq_node import server
from tests.waiting import wait_until

KEYS = ["a", "b", "c", "d", "e", "f", "g", "h"]
NUMBERS = list(range(4))


class TestOrder:
    def test_is_kept_behind_a_failing_head_which_holds_back_no_other_queue(self, journey: Journey):
        journey.stick("a")
        for number in NUMBERS:
            for key in KEYS:
                journey.publish(journey.steps, number, key=key)
        journey.start("django", "outbox_relay")
        for _ in range(2):
            journey.consume()
        others = wait_until(lambda: keys_of_other_queues(journey), 120)

        wait_until(lambda: set(by_key(journey)) >= others and all(by_key(journey)[key] == NUMBERS for key in others), 120)
        wait_until(lambda: FailedDelivery.objects.count() >= 3, 120)
        meanwhile = by_key(journey)
        journey.unstick()
        wait_until(lambda: len(journey.effects(journey.steps)) >= len(NUMBERS) * len(KEYS), 120)

        assert "a" not in meanwhile
        assert by_key(journey) == dict.fromkeys(KEYS, NUMBERS)
        assert {row.error for row in FailedDelivery.objects.all()} == {"ValueError: a is stuck"}


def keys_of_other_queues(journey: Journey) -> set[str]:
    """Return the keys that do not share the queue of a, once all are there: RocketMQ holds back a queue, not a key."""
    broker = server().broker_address
    queues = {
        (stored.properties["__SHARDINGKEY"], queue)
        for queue in range(QUEUES)
        for stored in pull(broker, journey.steps, 0, queue=queue)[0]
    }
    of_a = {queue for key, queue in queues if key == "a"}
    return {key for key, queue in queues if queue not in of_a} if len(queues) == len(KEYS) else set()


def by_key(journey: Journey) -> dict[str, list[int]]:
    """Return what was handled of each key, in that order."""
    found: dict[str, list[int]] = {}
    for key, number in journey.effects(journey.steps):
        found.setdefault(key, []).append(number)
    return found
