"""Look-ups of half messages in the tables of the embedded broker."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from outbox.brokers.base import HalfRef, HalfStatus
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker
from outbox.message import ROLLBACK, UNKNOWN, TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import CHECK_AFTER, CHECK_INTERVAL, CHECK_LIMIT, EmbeddedHarness

HALF = TopicType.TRANSACTION
RETENTION = timedelta(days=7)
SOURCE = "urn:uuid:here"


@pytest.fixture
def half(acts: Acts, harness: EmbeddedHarness) -> HalfRef:
    """A half message with the source of a database, decided just now."""
    [half] = acts.send_halves(acts.message(HALF, headers={"ce-source": SOURCE}))
    return replace(half, source=SOURCE, decided_at=harness.now)


def look_up(broker: EmbeddedBroker, half: HalfRef) -> HalfStatus:
    [standing] = broker.look_up_halves([half])
    return standing


def forget(connection: Connection) -> None:
    """Delete the broker's messages, as a restore from an older backup does."""
    connection.execute("TRUNCATE outbox_embedded_half, outbox_embedded_message")


class TestVisible:
    def test_is_a_message_whose_half_was_committed(self, acts: Acts, broker: EmbeddedBroker, half: HalfRef):
        acts.end(half)

        assert look_up(broker, half) is HalfStatus.VISIBLE

    def test_is_a_message_that_another_half_of_it_has_shown(self, acts: Acts, broker: EmbeddedBroker):
        message = acts.message(HALF)
        shown, undecided = acts.send_halves(message, message)
        acts.end(shown)

        assert look_up(broker, undecided) is HalfStatus.VISIBLE

    def test_is_a_second_half_whose_message_was_pruned_since(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        message = acts.message(HALF)
        both = acts.send_halves(message, message)
        acts.end(*both)
        connection.execute("TRUNCATE outbox_embedded_message")

        assert sorted(broker.look_up_halves([replace(half, decided_at=harness.now) for half in both])) == [
            HalfStatus.GONE,
            HalfStatus.VISIBLE,
        ]

    def test_is_not_the_message_of_another_database(self, acts: Acts, broker: EmbeddedBroker, half: HalfRef):
        acts.end(half)

        assert look_up(broker, replace(half, source="urn:uuid:another")) is HalfStatus.GONE
        assert look_up(broker, replace(half, source="")) is HalfStatus.VISIBLE


class TestHidden:
    def test_is_a_half_that_is_parked(self, broker: EmbeddedBroker, harness: EmbeddedHarness, half: HalfRef):
        harness.pass_time(CHECK_AFTER)
        for _ in range(CHECK_LIMIT + 1):
            broker.check_halves(lambda half: UNKNOWN)
            harness.pass_time(CHECK_INTERVAL * 100)

        assert look_up(broker, half) is HalfStatus.HIDDEN

    def test_is_not_the_half_of_another_message_with_its_number(self, broker: EmbeddedBroker, half: HalfRef):
        assert look_up(broker, replace(half, message_id="another")) is HalfStatus.GONE


class TestNeither:
    @pytest.mark.parametrize(
        ("ago", "standing"),
        [
            (timedelta(0), HalfStatus.GONE),
            (RETENTION - timedelta(minutes=2), HalfStatus.GONE),
            (RETENTION - timedelta(seconds=30), HalfStatus.UNPROVEN),  # clocks may differ
            (RETENTION * 2, HalfStatus.UNPROVEN),
        ],
    )
    def test_proves_something_within_the_retention_only(
        self,
        broker: EmbeddedBroker,
        harness: EmbeddedHarness,
        connection: Connection,
        half: HalfRef,
        ago: timedelta,
        standing: HalfStatus,
    ):
        forget(connection)

        assert look_up(broker, replace(half, decided_at=harness.now - ago)) is standing

    @pytest.mark.parametrize("unknown", [{"decided_at": None}, {"topic": "another"}])
    def test_proves_nothing_where_it_is_not_known_how_long_it_would_be_kept(
        self, broker: EmbeddedBroker, connection: Connection, half: HalfRef, unknown: dict[str, Any]
    ):
        forget(connection)

        assert look_up(broker, replace(half, **unknown)) is HalfStatus.UNPROVEN

    def test_is_proved_by_a_rollback_however_old(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, half: HalfRef
    ):
        acts.end(half, resolution=ROLLBACK)

        harness.pass_time(RETENTION * 2)

        assert look_up(broker, half) is HalfStatus.GONE
        assert look_up(broker, replace(half, decided_at=None)) is HalfStatus.GONE
