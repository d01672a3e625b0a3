"""Deliveries whose messages are gone; a group that begins during a prune gets none."""

import threading
from datetime import timedelta

import pytest

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.embedded import EmbeddedBroker
from outbox.message import TopicType
from tests.contracts.acts import INVISIBLE, Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import wait_until, wait_until_it_blocks

FIFO = TopicType.FIFO
RETENTION = timedelta(days=7)

LOST = "DELETE FROM outbox_embedded_message WHERE message_id = ANY(%s)"
ORPHANS = """
SELECT count(*) FROM outbox_embedded_delivery d WHERE NOT EXISTS (
    SELECT FROM outbox_embedded_message m WHERE m.topic_id = d.topic_id AND m.queue = d.queue AND m.pos = d.pos)
"""
HOLD_ONE = "SELECT FROM outbox_embedded_message WHERE pos = 1 FOR UPDATE"
WAIT_FOR_A_PRUNE = f"SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND classid = {Lock.BROKER_TOPIC} AND NOT granted"


class TestAMessageThatIsGone:
    def test_is_no_longer_waited_for(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection):
        lost, _ = acts.send_bodies(b"lost", b"kept")
        acts.receive(hold=INVISIBLE)
        connection.execute(LOST, [[lost.message_id]])
        harness.pass_time(INVISIBLE)

        assert acts.bodies() == [b"kept"]
        assert acts.waiting() == 1

    def test_is_reported(
        self,
        acts: Acts,
        harness: EmbeddedHarness,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ):
        sent = acts.send_bodies(b"a", b"b", b"c")
        acts.receive(hold=INVISIBLE)
        connection.execute(LOST, [[message.message_id for message in sent[1:]]])
        harness.pass_time(INVISIBLE)

        acts.receive()

        [record] = caplog.records
        assert record.levelname == "ERROR"
        said = record.getMessage()
        assert f"Group 'group' will not handle 2 messages of topic {harness.topic(TopicType.NORMAL)!r}" in said
        assert "positions 2 to 3" in said

    def test_holds_back_no_key(self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection):
        acts.send(*[acts.message(FIFO, key=f"key {n % 3}") for n in range(26)])
        acts.receive(FIFO, hold=INVISIBLE)
        connection.execute("TRUNCATE outbox_embedded_message")
        acts.send(*[acts.message(FIFO, key=f"key {n % 3}", body=b"%d" % n) for n in range(30)])
        harness.pass_time(INVISIBLE)
        found: list[int] = []

        while deliveries := acts.receive(FIFO):
            found += [int(delivery.body) for delivery in deliveries]
            broker.ack(deliveries)

        assert sorted(found) == list(range(30))
        assert acts.waiting(FIFO) == 0

    def test_may_still_be_acknowledged_by_who_handles_it(
        self, acts: Acts, broker: EmbeddedBroker, harness: EmbeddedHarness, connection: Connection
    ):
        lost, held = acts.send_bodies(b"lost", b"held")
        deliveries = {one.body: one for one in acts.receive(hold=INVISIBLE)}
        broker.renew([deliveries[b"held"]], INVISIBLE * 3)
        connection.execute(LOST, [[lost.message_id, held.message_id]])
        harness.pass_time(INVISIBLE)

        acts.receive()

        assert broker.ack([deliveries[b"held"]]) == [True]


class TestAGroupThatBeginsDuringAPrune:
    def test_reads_nothing_that_is_dropped(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.send(*[acts.message(key="one queue") for _ in range(10)])
        harness.pass_time(RETENTION)
        acts.send_bodies(b"young", key="one queue")
        pruning = threading.Thread(target=harness.open().prune)
        found: list[bytes] = []
        new = harness.open()
        beginning = threading.Thread(target=lambda: found.extend(one.body for one in acts.receive(group="new", broker=new)))

        with connection.transaction():
            connection.execute(HOLD_ONE)
            pruning.start()
            wait_until_it_blocks(connection)
            beginning.start()
            wait_until(lambda: connection.execute(WAIT_FOR_A_PRUNE).fetchone() or not beginning.is_alive())
        pruning.join(20)
        beginning.join(20)

        assert found == [b"young"]
        assert connection.execute(ORPHANS).fetchone() == (0,)

    def test_is_not_waited_for(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.send(*[acts.message() for _ in range(10)])
        harness.pass_time(RETENTION)
        pruning = harness.open()

        with connection.transaction():
            connection.execute(f"SELECT pg_advisory_xact_lock_shared({Lock.BROKER_TOPIC}, id) FROM outbox_embedded_topic")
            meanwhile = pruning.prune()

        assert meanwhile == 0
        assert pruning.prune() == 10
