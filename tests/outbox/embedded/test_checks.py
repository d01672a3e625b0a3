"""The check loop: each check-back is counted first, and none holds a transaction open."""

from datetime import timedelta
from typing import Any

import pytest

from outbox.brokers.base import Ended
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, checks
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution
from tests.contracts.acts import Acts
from tests.contracts.harness import CHECK_AFTER, CHECK_INTERVAL, CHECK_LIMIT, EmbeddedHarness

ACTIVITY = """
SELECT state, xact_start FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'outbox embedded broker'
"""


def never(half: Half) -> Resolution:
    raise AssertionError("nobody is to be asked")


def use_up(broker: EmbeddedBroker, harness: EmbeddedHarness) -> None:
    """Check back until the half message is parked."""
    harness.pass_time(CHECK_AFTER)
    for _ in range(CHECK_LIMIT):
        assert broker.check_halves(lambda half: UNKNOWN) == 1
        harness.pass_time(CHECK_INTERVAL * 100)
    assert broker.check_halves(never) == 0


class TestCheckHalves:
    def test_counts_an_ask_though_the_process_dies_of_it(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        def die(half: Half) -> Resolution:
            raise SystemExit

        acts.half()
        harness.pass_time(CHECK_AFTER)
        with pytest.raises(SystemExit):
            broker.check_halves(die)
        asked: list[int] = []

        harness.pass_time(CHECK_INTERVAL)
        broker.check_halves(lambda half: asked.append(half.asked) or COMMIT)

        assert asked == [2]

    def test_holds_no_transaction_open_while_it_asks(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        acts.half()
        harness.pass_time(CHECK_AFTER)
        seen: list[Any] = []

        broker.check_halves(lambda half: seen.extend(connection.execute(ACTIVITY)) or UNKNOWN)

        assert seen == [("idle", None)]

    def test_waits_twice_as_long_each_time_up_to_sixteen_fold(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        broker = harness.open(CHECK_LIMIT=100)
        acts.half()
        harness.pass_time(CHECK_AFTER)
        waits: list[timedelta] = []

        for _ in range(7):
            assert broker.check_halves(lambda half: UNKNOWN) == 1
            ((ask_at,),) = connection.execute("SELECT ask_at FROM outbox_embedded_half").fetchall()
            waits.append(ask_at - harness.now)
            harness.now = ask_at

        assert waits == [CHECK_INTERVAL * factor for factor in (1, 2, 4, 8, 16, 16, 16)]

    def test_leaves_those_alone_that_were_asked_often_enough(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.half()
        harness.pass_time(CHECK_AFTER)
        connection.execute("UPDATE outbox_embedded_half SET asked = 3")

        due = checks.take_due(connection, limit=10, check_limit=3, interval=CHECK_INTERVAL, now=harness.now)

        assert due == []


class TestParkedHalf:
    def test_sends_one_alert(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, alerts: list[dict[str, Any]]):
        half = acts.half()

        use_up(broker, harness)
        harness.pass_time(timedelta(days=1))
        broker.check_halves(never)

        assert [alert["details"]["half_id"] for alert in alerts] == [half.half_id]
        assert "parked" in alerts[0]["reason"]

    def test_gets_check_backs_again_when_an_operator_resumes_them(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness
    ):
        half = acts.half()
        use_up(broker, harness)
        asked: list[int] = []

        assert broker.ask_again(half.half_id) is True
        broker.check_halves(lambda half: asked.append(half.asked) or COMMIT)

        assert asked == [1]
        assert acts.end(half) == [Ended.COMMITTED]

    def test_alone_can_be_asked_about_again(self, acts: Acts, broker: EmbeddedBroker):
        half = acts.half()

        assert broker.ask_again(half.half_id) is False


class TestCheckHalf:
    def test_asks_out_of_turn_and_ends_the_half_as_answered(self, acts: Acts, broker: EmbeddedBroker):
        half = acts.half()
        asked: list[int] = []

        answer = broker.check_half(lambda one: asked.append(one.asked) or COMMIT, half.half_id)

        assert (answer, asked) == (COMMIT, [1])
        assert [found.state for found in broker.find(half.message_id)] == ["visible"]

    def test_leaves_a_parked_half_parked_when_nothing_is_known(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness
    ):
        half = acts.half()
        use_up(broker, harness)
        asked: list[int] = []

        answer = broker.check_half(lambda one: asked.append(one.asked) or UNKNOWN, half.half_id)

        assert (answer, asked) == (UNKNOWN, [CHECK_LIMIT + 1])
        assert broker.check_halves(never) == 0
        assert broker.ask_again(half.half_id) is True

    def test_does_not_ask_about_a_half_that_has_ended(self, acts: Acts, broker: EmbeddedBroker):
        half = acts.half()
        acts.end(half, resolution=ROLLBACK)

        assert broker.check_half(never, half.half_id) is None
