"""The results of messages after errors of the database."""

import random
import re
import string
import threading
from datetime import timedelta

import pytest
from msgspec.structs import replace

from outbox.brokers.base import HalfRef, SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker
from outbox.errors import BrokerUnavailable
from outbox.message import COMMIT, TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.outbox.embedded.conftest import LINE, missing
from tests.waiting import wait_until_it_blocks

LOCK_QUEUES = "LOCK TABLE outbox_embedded_queue, outbox_embedded_half IN ACCESS EXCLUSIVE MODE"

STATES = """
SELECT state FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'outbox embedded broker'
"""

END_BROKERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'outbox embedded broker'
"""


class TestAnswers:
    @pytest.mark.parametrize("call", ["send", "send_halves", "end"])
    def test_unsure_when_the_connection_is_lost_in_the_middle(
        self, acts: Acts, broker: EmbeddedBroker, connection: Connection, call: str
    ):
        acts.receive()
        outcomes: list[SendResult] = []
        calls = {
            "send": lambda: broker.send([acts.message()]),
            "send_halves": lambda: broker.send_halves([acts.message(TopicType.TRANSACTION)]),
            "end": lambda: broker.end([HalfRef("t", "1", "m")], COMMIT),
        }
        under_way = threading.Thread(target=lambda: outcomes.extend(calls[call]()))

        with connection.transaction():
            connection.execute(LOCK_QUEUES)
            under_way.start()
            pid = wait_until_it_blocks(connection)
            connection.execute("SELECT pg_terminate_backend(%s)", [pid])
            under_way.join(10)

        assert [outcome.status for outcome in outcomes] == [SendStatus.UNSURE]
        acts.send(acts.message())

    def test_unavailable_when_a_statement_takes_too_long(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        broker = harness.open(STATEMENT_TIMEOUT=timedelta(milliseconds=200))
        acts.receive(broker=broker)

        with connection.transaction():
            connection.execute(LOCK_QUEUES)
            outcomes = broker.send([acts.message()])

        assert [outcome.status for outcome in outcomes] == [SendStatus.UNAVAILABLE]
        assert "timeout" in outcomes[0].reason

    def test_misconfigured_when_the_tables_are_missing(self, acts: Acts, broker: EmbeddedBroker, connection: Connection):
        with missing(connection, "outbox_embedded_half"):
            [outcome] = broker.send_halves([acts.message(TopicType.TRANSACTION)])

        assert outcome.status is SendStatus.MISCONFIGURED
        assert LINE in outcome.reason

    def test_refused_for_the_one_that_cannot_be_stored_and_accepted_for_the_rest(self, acts: Acts, broker: EmbeddedBroker):
        too_long_for_the_index = "".join(random.choices(string.printable, k=20_000))
        messages = [acts.message() for _ in range(9)]
        messages[4] = replace(messages[4], message_id=too_long_for_the_index)

        outcomes = broker.send(messages)

        statuses = [outcome.status for outcome in outcomes]
        assert statuses == [SendStatus.ACCEPTED] * 4 + [SendStatus.REFUSED] + [SendStatus.ACCEPTED] * 4
        assert len(acts.receive()) == 8


class TestCallsWithoutOutcomes:
    def test_raise_when_the_database_is_away(self, acts: Acts, harness: EmbeddedHarness):
        broker = harness.open_unreachable()

        with pytest.raises(BrokerUnavailable):
            acts.receive(broker=broker)
        with pytest.raises(BrokerUnavailable):
            broker.backlog("group")

    def test_name_the_line_that_is_missing_where_the_tables_are(self, acts: Acts, broker: EmbeddedBroker, connection: Connection):
        with missing(connection, "outbox_embedded_topic"), pytest.raises(BrokerUnavailable, match=re.escape(LINE)):
            acts.receive()

    def test_report_missing_tables_as_a_problem_and_not_as_an_outage(self, broker: EmbeddedBroker, connection: Connection):
        with missing(connection, "outbox_embedded_topic"):
            [problem] = broker.check()

        assert f"{problem.text} {problem.hint}" == LINE

    def test_raise_when_the_connection_is_lost_and_work_again_after_it(
        self, acts: Acts, broker: EmbeddedBroker, connection: Connection
    ):
        acts.send_bodies(b"a")
        connection.execute(END_BROKERS)

        with pytest.raises(BrokerUnavailable):
            acts.receive()

        assert acts.bodies() == [b"a"]


class TestConnection:
    def test_is_not_djangos(self, acts: Acts, broker: EmbeddedBroker, connection: Connection):
        acts.send_bodies(b"a")

        row = connection.execute("SELECT count(*) FROM outbox_embedded_message").fetchone()

        assert row == (1,)  # seen from outside while the test's own transaction is open

    def test_knows_no_transaction(self, broker: EmbeddedBroker, connection: Connection):
        broker.backlog("group")

        assert connection.execute(STATES).fetchall() == [("idle",)]
