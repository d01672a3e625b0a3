"""Half messages beyond the contract: ends are remembered, and at most one copy becomes visible."""

import threading

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Ended, HalfRef
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, halves
from outbox.errors import BrokerUnavailable
from outbox.message import COMMIT, ROLLBACK, Resolution, TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import wait_until_it_blocks

HALF = TopicType.TRANSACTION

BROKERS_CONNECTIONS = """
SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox embedded broker' AND datname = current_database()
"""

SOURCE = "urn:uuid:here"


def half_from(acts: Acts, source: str) -> HalfRef:
    """Store a half message with the source of a database."""
    [half] = acts.send_halves(acts.message(HALF, headers={"ce-source": source}))
    return replace(half, source=source)


class TestNewHalfId:
    def test_is_drawn_anew_where_the_connection_broke_unseen(self, broker: EmbeddedBroker, connection: Connection):
        broker.new_half_id("m")
        for (pid,) in connection.execute(BROKERS_CONNECTIONS):
            connection.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

        assert broker.new_half_id("m").isdecimal()

    def test_says_that_the_database_is_away(self, harness: EmbeddedHarness):
        with pytest.raises(BrokerUnavailable):
            harness.open_unreachable().new_half_id("m")


class TestEnd:
    def test_shows_a_message_once_though_two_halves_of_it_are_committed(self, acts: Acts, broker: EmbeddedBroker):
        message = acts.message(HALF)
        first, second = acts.send_halves(message, message)
        acts.end(first)

        ended = acts.end(second)
        again = acts.end(second, resolution=ROLLBACK)

        assert ended == again == [Ended.COMMITTED]
        assert len(acts.receive(HALF)) == 1
        assert [found.state for found in broker.find(message.message_id)] == ["visible"]

    def test_shows_a_message_once_when_both_halves_end_in_one_batch(self, acts: Acts):
        message = acts.message(HALF)
        both = acts.send_halves(message, message)

        assert acts.end(*both) == [Ended.COMMITTED] * 2

        assert acts.end(*both, resolution=ROLLBACK) == [Ended.COMMITTED] * 2
        assert len(acts.receive(HALF)) == 1

    def test_lets_a_message_be_sent_again_after_its_rollback(self, acts: Acts):
        message = acts.message(HALF)
        [first] = acts.send_halves(message)
        acts.end(first, resolution=ROLLBACK)

        [second] = acts.send_halves(message)

        assert acts.end(second) == [Ended.COMMITTED]
        assert acts.end(first) == [Ended.ROLLED_BACK]
        assert len(acts.receive(HALF)) == 1

    def test_hears_of_an_end_that_was_under_way(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        half = acts.half()
        answers: list[list[Ended | None]] = []
        second = threading.Thread(target=lambda: answers.append(acts.end(half, resolution=ROLLBACK)))

        with connection.transaction():
            halves.end(connection, [half], COMMIT, now=harness.now)
            second.start()
            wait_until_it_blocks(connection)
        second.join(10)

        assert answers == [[Ended.COMMITTED]]

    def test_keeps_the_order_of_the_batch(self, acts: Acts):
        messages = [acts.message(HALF, key="one queue", body=b"%d" % n) for n in range(50)]

        acts.end(*reversed(acts.send_halves(*messages)))

        assert acts.bodies(HALF) == [b"%d" % n for n in range(50)]

    @pytest.mark.parametrize("resolution", [COMMIT, ROLLBACK])
    @pytest.mark.parametrize("other", [{"message_id": "another"}, {"source": "urn:uuid:another"}])
    def test_does_not_know_the_number_of_another_half(
        self, acts: Acts, connection: Connection, resolution: Resolution, other: dict[str, str]
    ):
        half = half_from(acts, SOURCE)

        assert acts.end(replace(half, **other), resolution=resolution) == [Ended.NOT_FOUND]

        assert acts.end(half) == [Ended.COMMITTED]
        assert acts.end(replace(half, **other), resolution=resolution) == [Ended.NOT_FOUND]

    @pytest.mark.parametrize("resolution", [COMMIT, ROLLBACK])
    def test_tells_two_halves_of_one_number_apart(self, acts: Acts, resolution: Resolution):
        half = half_from(acts, SOURCE)
        lost = replace(half, message_id="another")

        ended = acts.end(lost, half, lost, resolution=resolution)

        assert [one is Ended.NOT_FOUND for one in ended] == [True, False, True]

    def test_need_not_know_the_source(self, acts: Acts):
        half = half_from(acts, SOURCE)

        assert acts.end(replace(half, source="")) == [Ended.COMMITTED]

    def test_keeps_no_body_of_what_was_rolled_back(self, acts: Acts, connection: Connection):
        acts.end(acts.half(), resolution=ROLLBACK)

        assert connection.execute("SELECT body FROM outbox_embedded_half").fetchall() == [(b"",)]
