"""The number of statements of a consumer for a message, a wakeup and a wait."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from outbox.database import Connection, OwnConnection
from outbox.embedded import EmbeddedBroker, receiver, settlement
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import wait_until

NOTIFY = "NOTIFY outbox_embedded"
MOMENT = timedelta(seconds=0.05)


class Statements:
    """The statements that brokers and tests have sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sent: list[str] = []
        execute = OwnConnection.execute

        def noted(connection: OwnConnection, query: str, *args: Any, **options: Any) -> Any:
            self._sent.append(query)
            return execute(connection, query, *args, **options)

        monkeypatch.setattr(OwnConnection, "execute", noted)

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """Yield a list to which each statement sent in the block is added."""
        self._sent.clear()
        yield self._sent


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    return Statements(monkeypatch)


class TestCost:
    """The statements for one message at a time, where they are most of a consumer's cost."""

    def test_of_one_message_to_a_waiting_consumer_is_four(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, statements: Statements
    ):
        acts.receive(wait=MOMENT)
        harness.open().send([acts.message()])

        with statements.counted() as sent:
            broker.ack(acts.receive(wait=MOMENT))
            acts.receive()

        assert sent == [receiver.SCAN, receiver.READ_UNREAD, settlement.ACK, receiver.SCAN]

    def test_of_a_message_on_an_ordered_topic_is_one_more(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, statements: Statements
    ):
        acts.receive(TopicType.FIFO, wait=MOMENT)
        harness.open().send([acts.message(TopicType.FIFO, key="a")])

        with statements.counted() as sent:
            [delivery] = acts.receive(TopicType.FIFO, wait=MOMENT)
            broker.ack([delivery])

        assert sent == [receiver.SCAN, receiver.READ_UNREAD, receiver.TAKE_DUE, settlement.ACK]

    @pytest.mark.usefixtures("unpolled")
    def test_of_being_told_in_vain_is_one(
        self, acts: Acts, harness: EmbeddedHarness, connection: Connection, statements: Statements
    ):
        acts.receive(wait=MOMENT)

        with statements.counted() as sent:
            waiting = threading.Thread(target=acts.receive, kwargs={"wait": timedelta(seconds=2)})
            waiting.start()
            for told in range(10):
                wait_until(lambda: sent.count(receiver.SCAN) > told)  # noqa: B023  (called before the next one)
                connection.execute(NOTIFY)
            waiting.join(10)

        assert set(sent) == {receiver.SCAN, NOTIFY}
        assert sent.count(receiver.SCAN) == 12  # one before, one for each, one at its end

    @pytest.mark.usefixtures("unpolled")
    def test_of_what_was_told_while_it_was_busy_is_next_to_nothing(
        self, acts: Acts, connection: Connection, statements: Statements, harness: EmbeddedHarness
    ):
        acts.receive(wait=MOMENT)
        for _ in range(50):
            connection.execute(NOTIFY)

        with statements.counted() as sent:
            acts.receive(wait=timedelta(seconds=0.3))

        assert set(sent) == {receiver.SCAN}
        assert len(sent) < 10  # of 50: what is still on its way is told together

    def test_of_closing_after_the_connection_broke_is_nothing(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, statements: Statements
    ):
        acts.receive(wait=MOMENT)
        harness.restart()
        with pytest.raises(BrokerUnavailable):
            acts.receive()

        with statements.counted() as sent:
            broker.close()

        assert sent == []

    def test_of_a_position_that_stayed_empty_is_paid_once(self, acts: Acts, statements: Statements):
        message = acts.message(key="one queue")
        acts.send(message)
        acts.send(message)
        acts.receive()
        acts.receive()

        with statements.counted() as sent:
            acts.receive()

        assert sent == [receiver.SCAN]
