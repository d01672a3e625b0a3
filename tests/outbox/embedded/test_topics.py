"""Topics are created at first use, once, and keep their type."""

import threading

from msgspec.structs import replace

from outbox.brokers.base import Broker, SendStatus
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker
from outbox.embedded.topics import write_topics
from outbox.findings import BROKER_WEAK
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness


def other(harness: EmbeddedHarness, **changes: object) -> EmbeddedBroker:
    """Open a broker whose normal topic has these settings."""
    spec = harness.topics[TopicType.NORMAL]
    broker = harness.open()
    broker.topics[spec.name] = replace(spec, **changes)
    assert isinstance(broker, EmbeddedBroker)
    return broker


class TestTopic:
    def test_is_created_once_by_many_at_once(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        statuses: list[SendStatus] = []
        start = threading.Barrier(4)

        def first_use(broker: Broker) -> None:
            start.wait(10)
            statuses.extend(outcome.status for outcome in broker.send([acts.message()]))

        threads = [threading.Thread(target=first_use, args=(harness.open(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

        assert statuses == [SendStatus.ACCEPTED] * 4
        assert connection.execute("SELECT count(*) FROM outbox_embedded_topic").fetchone() == (len(TopicType),)

    def test_keeps_its_type(self, acts: Acts, harness: EmbeddedHarness):
        acts.send(acts.message())
        broker = other(harness, type=TopicType.TRANSACTION)

        [outcome] = broker.send_halves([acts.message()])
        [problem] = broker.check()

        assert outcome.status is SendStatus.MISCONFIGURED
        assert problem.id != BROKER_WEAK
        assert "of type transaction in settings and of type normal" in problem.text

    def test_keeps_its_number_of_queues(self, acts: Acts, harness: EmbeddedHarness, connection: Connection):
        acts.send(acts.message())
        broker = other(harness, queues=16)

        [problem] = broker.check()
        stored = write_topics(connection, broker.topics.values())[harness.topic(TopicType.NORMAL)]

        assert problem.id == BROKER_WEAK
        assert stored.queues == 4

    def test_keeps_a_key_in_one_queue(self, acts: Acts, connection: Connection):
        for _ in range(5):
            acts.send(*[acts.message(key=f"key {n}") for n in range(20)])

        found = connection.execute("SELECT key, count(DISTINCT queue) FROM outbox_embedded_message GROUP BY key").fetchall()

        assert len(found) == 20
        assert {queues for _, queues in found} == {1}

    def test_spreads_messages_without_a_key_over_its_queues(self, acts: Acts, connection: Connection):
        for _ in range(100):
            acts.send(acts.message())

        assert connection.execute("SELECT count(DISTINCT queue) FROM outbox_embedded_message").fetchone() == (4,)
