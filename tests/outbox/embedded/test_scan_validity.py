"""After a scan, a consumer reads the queues that notifications name, and does not scan for each message."""

from datetime import timedelta

import pytest

from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, receiver, settlement
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.outbox.embedded.test_cost import MOMENT, NOTIFY, Statements

LONG = timedelta(seconds=8)

pytestmark = pytest.mark.usefixtures("unpolled")


@pytest.fixture
def broker(harness: EmbeddedHarness) -> EmbeddedBroker:
    """Return a broker with the server's clock, since a scan is not valid under a test's clock."""
    broker = harness.open(CLOCK=None)
    assert isinstance(broker, EmbeddedBroker)
    return broker


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    return Statements(monkeypatch)


@pytest.fixture
def other(harness: EmbeddedHarness, acts: Acts) -> Acts:
    """The broker of another process, which has sent before."""
    other = Acts(harness, harness.open(CLOCK=None))
    other.send_bodies(b"before")
    acts.broker.ack(acts.receive())
    return other


class TestLull:
    def test_asks_for_the_message_alone_and_finishes_it(
        self, acts: Acts, other: Acts, broker: EmbeddedBroker, statements: Statements
    ):
        acts.receive(wait=MOMENT)
        for _ in range(3):
            other.send_bodies(b"a")
            with statements.counted() as sent:
                broker.ack(acts.receive(wait=LONG))
                assert acts.receive(wait=MOMENT) == []

            assert sent == [receiver.READ_UNREAD, settlement.ACK]

    def test_reads_all_queues_it_is_told_of(self, acts: Acts, other: Acts):
        acts.receive(wait=MOMENT)
        for key in "abcdefgh":
            other.send_bodies(key.encode(), key=key)

        assert sorted(one.body for one in acts.receive(wait=LONG)) == sorted(key.encode() for key in "abcdefgh")

    def test_ends_when_an_acknowledgement_makes_the_next_message_of_a_key_due(
        self, acts: Acts, other: Acts, broker: EmbeddedBroker, statements: Statements
    ):
        acts.receive(TopicType.FIFO, wait=MOMENT)
        other.send_bodies(b"first", b"second", kind=TopicType.FIFO, key="k")
        broker.ack(acts.receive(TopicType.FIFO, wait=LONG))

        with statements.counted() as sent:
            [delivery] = acts.receive(TopicType.FIFO, wait=LONG)

        assert delivery.body == b"second"
        assert sent[0] == receiver.SCAN

    @pytest.mark.parametrize("asked", [{"group": "other group"}, {"kind": TopicType.TRANSACTION}, {"wait": timedelta()}], ids=str)
    def test_is_of_one_group_and_its_topics_and_of_who_waits(self, acts: Acts, other: Acts, statements: Statements, asked: dict):
        acts.receive(wait=MOMENT)

        with statements.counted() as sent:
            acts.receive(**{"wait": MOMENT, **asked})

        assert receiver.SCAN in sent

    def test_ends_when_it_is_told_to_look_at_all_there_is(
        self, acts: Acts, other: Acts, connection: Connection, statements: Statements
    ):
        acts.receive(wait=MOMENT)
        connection.execute(NOTIFY)

        with statements.counted() as sent:
            acts.receive(wait=MOMENT)

        assert sent[0] == receiver.SCAN

    def test_lasts_no_longer_than_the_time_to_the_next_message_that_is_due(self, acts: Acts, other: Acts):
        other.send_bodies(b"a")
        acts.receive(hold=timedelta(seconds=0.5))

        [again] = acts.receive(wait=LONG)

        assert again.body == b"a"

    def test_leaves_no_message_behind_that_it_was_not_told_of(
        self, acts: Acts, other: Acts, connection: Connection, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("outbox.embedded.wakeup.POLL_SECONDS", 0.3)
        acts.receive(wait=MOMENT)
        connection.execute("DELETE FROM outbox_embedded_wakeup")
        other.send_bodies(b"untold")

        [delivery] = acts.receive(wait=LONG)

        assert delivery.body == b"untold"
