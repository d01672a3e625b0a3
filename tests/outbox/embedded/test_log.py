"""Positions become visible in order: no message becomes visible before an offset."""

import threading
import uuid
from datetime import timedelta

from outbox import database
from outbox.database import Connection
from outbox.embedded import EmbeddedBroker, log
from outbox.embedded.rows import EmbeddedRow
from outbox.embedded.topics import write_topics
from outbox.message import TopicType
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.waiting import run_at_once, wait_until

NORMAL = TopicType.NORMAL


def rows(topic_id: int, queues: list[int]) -> list[EmbeddedRow]:
    return [(topic_id, queue, str(uuid.uuid4()), "", "", "", "{}", b"x") for queue in queues]


def is_blocked(connection: Connection, pid: int) -> bool:
    row = connection.execute("SELECT pg_blocking_pids(%s) <> '{}'", [pid]).fetchone()
    return bool(row and row[0])


class TestSend:
    def test_makes_a_later_writer_wait_so_that_a_reader_misses_nothing(
        self, acts: Acts, harness: EmbeddedHarness, connection: Connection
    ):
        topic = write_topics(connection, harness.topics.values())[harness.topic(NORMAL)]
        log.send(connection, rows(topic.id, [0]), now=harness.now)
        late, other = database.connect("default"), database.connect("default")
        later = threading.Thread(target=log.send, args=(other, rows(topic.id, [0])), kwargs={"now": harness.now})

        with late, other:
            with late.transaction():
                log.send(late, rows(topic.id, [0]), now=harness.now)
                later.start()
                wait_until(lambda: is_blocked(connection, other.info.backend_pid) or not later.is_alive())
                meanwhile = acts.receive()
            later.join(10)
            rest = acts.receive()

        assert len(meanwhile) == 1
        assert len(rest) == 2

    def test_takes_its_queues_in_one_order_so_that_writers_do_not_deadlock(
        self, harness: EmbeddedHarness, connection: Connection
    ):
        topic = write_topics(connection, harness.topics.values())[harness.topic(NORMAL)]

        def write(queues: list[int]) -> None:
            with database.connect("default") as mine:
                for _ in range(150):
                    log.send(mine, rows(topic.id, queues), now=harness.now)

        run_at_once(write, [0, 1, 2, 3], [3, 2, 1, 0])

    def test_loses_nothing_to_a_reader_among_many_writers(self, acts: Acts, harness: EmbeddedHarness):
        done = threading.Event()
        sent: list[str] = []

        def write() -> None:
            mine = harness.open()
            for _ in range(60):
                messages = [acts.message(NORMAL) for _ in range(3)]
                assert all(outcome.status == "accepted" for outcome in mine.send(messages))
                sent.extend(message.message_id for message in messages)

        writers = [threading.Thread(target=write) for _ in range(4)]
        for writer in writers:
            writer.start()
        watcher = threading.Thread(target=lambda: [writer.join(30) for writer in writers] and done.set())
        watcher.start()
        received: list[str] = []
        while not done.is_set() or acts.waiting():
            found = acts.receive(limit=20, wait=timedelta(seconds=0.05))
            acts.broker.ack(found)
            received.extend(delivery.message_id for delivery in found)
        watcher.join(10)

        assert sorted(received) == sorted(sent)

    def test_gives_each_position_once(self, broker: EmbeddedBroker, acts: Acts, connection: Connection):
        messages = [acts.message(NORMAL, key=str(n % 7)) for n in range(200)]
        acts.send(*messages)

        found = connection.execute("SELECT queue, array_agg(pos ORDER BY pos) FROM outbox_embedded_message GROUP BY queue")

        assert all(positions == list(range(1, len(positions) + 1)) for _, positions in found)
