"""Messages that retention deletes, and those that it keeps."""

from datetime import timedelta

from outbox.brokers.base import Ended
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, retention
from outbox.message import ROLLBACK, TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness

HALF = TopicType.TRANSACTION
RETENTION = timedelta(days=7)


def stored(connection: Connection) -> int:
    row = connection.execute("SELECT count(*) FROM outbox_embedded_message").fetchone()
    assert row is not None
    return int(row[0])


class TestPrune:
    def test_drops_what_every_group_has_finished(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        acts.send(*[acts.message() for _ in range(30)])
        for group in ("cart", "points"):
            broker.ack(acts.receive(group=group))

        harness.pass_time(RETENTION)

        assert broker.prune() == 30
        assert broker.prune() == 0
        assert stored(connection) == 0

    def test_drops_what_no_group_ever_asked_for(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        acts.send_bodies(b"a")

        harness.pass_time(RETENTION)

        assert broker.prune() == 1

    def test_keeps_everything_within_the_retention(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        acts.send_bodies(b"a")
        broker.ack(acts.receive())

        harness.pass_time(RETENTION - timedelta(seconds=1))

        assert broker.prune() == 0
        assert stored(connection) == 1

    def test_keeps_what_a_group_has_not_read(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        acts.receive(group="slow")
        acts.send_bodies(b"a")
        broker.ack(acts.receive(group="fast"))

        harness.pass_time(RETENTION * 2)

        assert broker.prune() == 0
        assert acts.bodies(group="slow") == [b"a"]

    def test_keeps_what_a_group_has_not_finished(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        acts.send_bodies(b"held", b"done")
        deliveries = {delivery.body: delivery for delivery in acts.receive()}
        broker.ack([deliveries[b"done"]])

        harness.pass_time(RETENTION * 2)

        assert broker.prune() == 1
        assert acts.bodies() == [b"held"]

    def test_looks_behind_what_it_keeps(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        acts.send(*[acts.message(key="one queue") for _ in range(retention.SLICE + 500)])
        deliveries = acts.receive(limit=2000)
        broker.ack(deliveries[retention.SLICE + 200 :])

        harness.pass_time(RETENTION)

        assert broker.prune() == 300

    def test_forgets_ends_after_the_retention_only(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        committed, rolled_back = acts.half(), acts.half()
        acts.end(committed)
        acts.end(rolled_back, resolution=ROLLBACK)

        harness.pass_time(RETENTION - timedelta(seconds=1))
        broker.prune()
        remembered = acts.end(committed, rolled_back)
        harness.pass_time(timedelta(seconds=1))
        broker.prune()

        assert remembered == [Ended.COMMITTED, Ended.ROLLED_BACK]
        assert acts.end(committed, rolled_back) == [Ended.NOT_FOUND] * 2

    def test_keeps_a_half_that_nobody_ended(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        half = acts.half()

        harness.pass_time(RETENTION * 10)
        broker.prune()

        assert acts.end(half) == [Ended.COMMITTED]

    def test_keeps_what_was_stored_since_an_end_that_is_not_confirmed(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        acts.send_bodies(b"before")
        harness.pass_time(timedelta(seconds=1))
        unconfirmed = harness.now
        half = acts.half()
        acts.end(half)
        acts.send_bodies(b"after")

        harness.pass_time(RETENTION * 2)

        assert broker.prune(keep_since=unconfirmed) == 1
        assert broker.prune(keep_since=unconfirmed) == 0
        assert stored(connection) == 2
        assert acts.end(half) == [Ended.COMMITTED]
        assert broker.prune() == 2

    def test_keeps_ends_since_one_that_is_not_confirmed(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        before, after = acts.half(), acts.half()
        acts.end(before, resolution=ROLLBACK)
        harness.pass_time(timedelta(seconds=1))
        unconfirmed = harness.now
        acts.end(after, resolution=ROLLBACK)

        harness.pass_time(RETENTION * 2)
        broker.prune(keep_since=unconfirmed)

        assert acts.end(before, after) == [Ended.NOT_FOUND, Ended.ROLLED_BACK]

    def test_drops_nothing_within_the_retention_for_a_later_end(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness
    ):
        acts.send_bodies(b"a")

        harness.pass_time(timedelta(hours=1))

        assert broker.prune(keep_since=harness.now) == 0


class TestForgetGroup:
    def test_lets_retention_go_on(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness):
        acts.receive(group="gone")
        acts.send_bodies(b"a")
        harness.pass_time(RETENTION)

        broker.forget_group("gone", broker.topics)

        assert broker.prune() == 1
        assert broker.backlog("gone").waiting == {}

    def test_has_the_group_begin_anew_if_it_comes_back(self, acts: Acts, broker: EmbeddedBroker):
        acts.send_bodies(b"a")
        broker.ack(acts.receive(group="gone"))

        broker.forget_group("gone", broker.topics)

        assert acts.bodies(group="gone") == [b"a"]
