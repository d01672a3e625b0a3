"""Roles of rows, one by one. No session is needed."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from outbox.pipeline.spark.audit.recorded import micros, roles_of
from outbox.pipeline.spark.audit.unnumbered import Observations
from outbox.pipeline.spark.config import Archived, AuditedGroup, PipelineConfig, Source
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.transforms.roles import NONE, InGroup, Reach, Roles, Seen, of_group

NOW = datetime(2026, 3, 1, tzinfo=UTC)
LIVE = NOW - timedelta(days=7)
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


class TestATryThatFailed:
    ROWS = (("retry", LIVE - HOUR), ("retry", LIVE + HOUR), ("retry", None), ("waiting", LIVE - HOUR))

    def test_says_that_its_message_waits_as_long_as_somebody_may_have_it(self):
        (found,) = Roles(GROUPS, micros(NOW), live_micros=micros(LIVE)).of("failed_deliveries", failed_deliveries(*self.ROWS))

        assert found.tolist() == [NONE, WAITING, WAITING, WAITING]

    def test_says_so_of_a_message_without_a_number(self):
        saying = Observations(Roles(GROUPS, micros(NOW), live_micros=micros(LIVE)), frozenset("s"), micros(NOW))

        (found,) = saying.seen("failed_deliveries", failed_deliveries(*self.ROWS))

        assert found == [None, *["waits in cart"] * 3]

    @pytest.mark.parametrize(("live", "until"), [(LIVE, micros(LIVE)), (None, 0)])
    def test_may_be_tried_again_if_it_is_as_young_as_what_the_database_has(self, live, until):
        config = PipelineConfig(Source("nowhere"), groups=GROUPS, archived=Archived("/srv/lake", LIVE, 1.0, live))

        assert roles_of(config, History({}, frozenset("s"), NOW)).live_micros == until

    def test_says_so_for_ever_where_nothing_was_archived(self):
        (found,) = Roles(GROUPS, micros(NOW)).of("failed_deliveries", failed_deliveries(*self.ROWS))

        assert found.tolist() == [WAITING] * 4


class TestAnActOnADeadLetter:
    ROWS = tuple((outcome, LIVE) for outcome in ("dead letter", "replay asked", "replayed", "discard asked", "discarded"))

    def test_says_that_its_message_was_discarded_or_may_be_a_dead_letter_still(self):
        (found,) = Roles(GROUPS, micros(NOW)).of("failed_deliveries", failed_deliveries(*self.ROWS))

        dead, discarded = of_group(0, InGroup.DEAD_LETTER), of_group(0, InGroup.DISCARDED)
        assert found.tolist() == [dead, dead, NONE, dead, discarded]

    def test_says_so_of_a_message_without_a_number(self):
        saying = Observations(Roles(GROUPS, micros(NOW)), frozenset("s"), micros(NOW))

        (found,) = saying.seen("failed_deliveries", failed_deliveries(*self.ROWS))

        assert found == ["dead in cart", "dead in cart", None, "dead in cart", "dead in cart"]


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
