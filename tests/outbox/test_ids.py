"""Times in message ids."""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID

from outbox.ids import LAST_DAY, day_of, first_id, first_id_at, made_at, published_at
from tests.factories import message_id

DAY = date(2001, 2, 3)
NOON = datetime(2001, 2, 3, 12, tzinfo=UTC)


class TestDayOf:
    def test_returns_the_utc_day_of_a_uuid7(self):
        assert day_of(message_id(NOON)) == DAY

    def test_divides_days_at_midnight(self):
        midnight = datetime(2001, 2, 3, tzinfo=UTC)

        assert first_id(DAY) <= message_id(midnight)
        assert message_id(midnight - timedelta(milliseconds=1)) < first_id(DAY)

    def test_returns_the_last_day_for_an_id_without_a_date(self):
        assert day_of(UUID(int=2**128 - 1)) == LAST_DAY


class TestMadeAt:
    def test_returns_the_time_to_the_millisecond(self):
        half_past = NOON + timedelta(minutes=30, milliseconds=7)

        assert made_at(first_id_at(half_past)) == made_at(message_id(half_past)) == half_past

    def test_returns_the_last_day_for_an_id_without_a_time(self):
        assert made_at(UUID(int=2**128 - 1)) == datetime(9999, 12, 30, tzinfo=UTC)


class TestPublishedAt:
    def test_returns_the_time_to_the_millisecond(self):
        half_past = NOON + timedelta(minutes=30, milliseconds=7)

        assert published_at(str(message_id(half_past))) == "2001-02-03T12:30:00.007Z"
