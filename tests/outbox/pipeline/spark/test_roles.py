"""Roles of rows, one by one. No session is needed."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from outbox.pipeline.spark.audit import Observations
from outbox.pipeline.spark.cells import NONE, InGroup, Reach, Roles, Seen, micros, of_group
from outbox.pipeline.spark.config import AuditedGroup

NOW = datetime(2026, 3, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
GROUPS = [AuditedGroup("cart", ["orders"])]
WAITING = of_group(0, InGroup.WAITING)


def failed_deliveries(*rows):
    named = [{"source": "s", "topic": "orders", "number": None, "consumer_group": "cart", "outcome": a, "at": b} for a, b in rows]
    schema = pa.schema([(name, pa.string()) for name in ("source", "topic", "consumer_group", "outcome", "message_id")])
    return pa.RecordBatch.from_pylist(named, schema.append(pa.field("number", pa.int64())).append(AT))


def sent(at):
    row = {"topic": "bills", "claimed_at": at, "at": at}
    return pa.RecordBatch.from_pylist([row], pa.schema([("topic", pa.string()), ("claimed_at", AT.type), AT]))


AT = pa.field("at", pa.timestamp("us", "UTC"))


class TestAMessageThatAGroupHasNotHandled:
    ROWS = tuple((outcome, NOW) for outcome in ("waiting", "deferred", "dead", "discarded", "retry", "dead letter", "duplicate"))

    def test_waits_is_dead_or_was_discarded_whatever_the_log_says(self):
        (found,) = Roles(GROUPS, micros(NOW)).of("failed_deliveries", failed_deliveries(*self.ROWS))

        dead, discarded = of_group(0, InGroup.DEAD_LETTER), of_group(0, InGroup.DISCARDED)
        assert found.tolist() == [WAITING, WAITING, dead, discarded, NONE, NONE, NONE]

    def test_without_a_number_too(self):
        saying = Observations(Roles(GROUPS, micros(NOW)), frozenset("s"), micros(NOW))

        (found,) = saying.seen("failed_deliveries", failed_deliveries(*self.ROWS))

        assert found == ["waits in cart", "waits in cart", "dead in cart", "dead in cart", None, None, None]


class TestAMessageOfATopicOfTypeDelay:
    @pytest.mark.parametrize(
        ("sent_at", "role"),
        [
            (NOW - 9 * HOUR, Seen.UNSEEN),  # shown before the recorder began
            (NOW - 5 * HOUR, Seen.SENT_YOUNG),  # sent before it began, and hidden still, perhaps
            (NOW - 3 * HOUR, Seen.SENT_YOUNG),
            (NOW - HOUR / 2, Seen.UNREAD),
        ],
    )
    def test_may_be_hidden_when_the_recorder_begins(self, sent_at, role):
        reach = Reach(micros(NOW - 4 * HOUR), micros(NOW - HOUR), hidden=6 * 3600 * 10**6)

        assert Roles([], micros(NOW), {"bills": reach}).of_sent(sent(sent_at)).tolist() == [role]

    def test_is_not_hidden_in_a_topic_of_another_type(self):
        reach = Reach(micros(NOW - 4 * HOUR), micros(NOW - 6 * HOUR), hidden=0)

        assert Roles([], micros(NOW), {"bills": reach}).of_sent(sent(NOW - 5 * HOUR)).tolist() == [Seen.UNSEEN]
