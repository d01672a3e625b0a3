"""`outbox_record` on a real RocketMQ: killed in the middle, set right by redelivery, and read as the audit reads it."""

import re
import signal
from collections import Counter
from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.db.models import QuerySet

from outbox import conf
from outbox.brokers.base import Delivery, HalfRef, Outgoing
from outbox.brokers.rocketmq.options import parse_address
from outbox.message import COMMIT, Header
from outbox.models import Batch, State
from outbox.pipeline.models import RecordedTopic
from outbox.pipeline.spark.statements import of_recorded
from project.servers.remoting import call
from tests.journeys.rocketmq.conftest import Journey
from tests.rocketmq_node import server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

WORK, STEPS = range(40), range(12)
KILL = "recorder.after_write"

TOPIC_STATS = 202
MAX_OFFSET = re.compile(rb'"maxOffset":(\d+)')


@pytest.fixture
def group(journey: Journey) -> str:
    """The recorder's group at the server."""
    name = f"recorder-{journey.unique}"
    server().make_group(name)
    server().make_group(f"{name}_fifo", is_ordered=True)
    return name


def record(journey: Journey, group: str, **options: str):
    return journey.start("django", "outbox_record", "--group", group, **options)


def stored(topic: str) -> int:
    """Ask the server how many messages it has stored in a topic."""
    stats = call(parse_address(server().broker), TOPIC_STATS, {"topic": topic})
    return sum(int(found) for found in MAX_OFFSET.findall(stats))


def copies(*topics: str) -> Counter[tuple[str, int]]:
    """Count what the audit reads as the broker's side: topic, number -> copies."""
    with connection.cursor() as cursor:
        cursor.execute(of_recorded(topics).query)
        heads = [column.name for column in cursor.description]
        return Counter((row["topic"], row["number"]) for row in (dict(zip(heads, values, strict=True)) for values in cursor))


def read_until() -> list[datetime | None]:
    return list(RecordedTopic.objects.values_list("read_until", flat=True))


def is_read_since(time: datetime) -> bool:
    return all(until is not None and until > time for until in read_until())


def now() -> datetime:
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (found,) = cursor.fetchone()
    return found


def count(batches: QuerySet[Batch]) -> int:
    """Count messages."""
    return sum(len(batch.message_ids) - len(batch.split) for batch in batches)


def sent_again(journey: Journey, topic: str, number: int) -> None:
    """Store one of a transaction topic's messages a second time, as a relay does that was not sure."""
    broker = conf.make_broker("default")
    server().make_group(f"copier-{journey.unique}")

    def wanted() -> list[Delivery]:
        hold, wait = timedelta(seconds=30), timedelta(seconds=1)
        found = broker.receive(f"copier-{journey.unique}", {topic: None}, limit=32, invisible_for=hold, wait=wait)
        return [one for one in found if one.headers[Header.NUMBER] == str(number)]

    [one] = wait_until(wanted, 120)
    copy = Outgoing(one.message_id, one.topic, one.body, one.key, one.tag, one.headers, token="copy:1:1:1")
    [half] = broker.send_halves([copy])
    broker.end([HalfRef(topic, half.half_id, one.message_id)], COMMIT)
    broker.close()


class TestARecorder:
    def test_that_was_killed_has_each_copy_of_each_message_once(self, journey: Journey, group: str):
        recorder = record(journey, group, failpoints=journey.kills(KILL))
        wait_until(lambda: RecordedTopic.objects.count() == 2, 120)
        journey.publish(journey.work, *WORK)
        journey.publish(journey.steps, *STEPS, key="a")
        journey.permit(KILL)
        journey.start("django", "outbox_relay")
        wait_until(lambda: count(Batch.objects.filter(state=State.SENT)) == len(WORK) + len(STEPS), 120)
        wait_until(lambda: journey.is_used(KILL), 120)
        assert recorder.wait(60) == -signal.SIGKILL
        since = now()
        assert not any(until and until > since for until in read_until())

        record(journey, group)
        wait_until(lambda: is_read_since(since), 120)
        # One that the killed recorder cannot have taken along: only then is its second copy told from a redelivery.
        journey.publish(journey.work, len(WORK))
        sent_again(journey, journey.work, len(WORK) + 1)
        since = now()
        wait_until(lambda: is_read_since(since), 120)

        topics = [journey.work, journey.steps]
        wait_until(lambda: copies(*topics).total() == sum(map(stored, topics)), 120)

        numbers = [*((journey.work, n) for n in range(len(WORK) + 1)), *((journey.steps, n) for n in STEPS)]
        found = copies(*topics)
        assert set(found) == {(topic, n + 1) for topic, n in numbers}
        assert found[journey.work, len(WORK) + 1] == 2
        for topic in topics:
            assert sum(n for (of, _), n in found.items() if of == topic) == stored(topic)
