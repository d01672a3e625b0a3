"""
The recorder: a separate consumer group that records the messages of a broker, for the audit.

It subscribes to all tags, and acknowledges a message after writing its row. If it is killed in between, the message is
delivered again. The audit must be able to tell such a redelivery from a second copy at the broker. So a row has the place of
the copy (queue and position), and the number of its delivery to the recorder. A place is recorded once; of deliveries other than
the first, the audit counts those that no earlier delivery explains (`outbox.pipeline.spark.statements`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import datetime, timedelta

import psycopg
from django.db import DEFAULT_DB_ALIAS

from outbox import conf, database
from outbox.brokers.base import Delivery
from outbox.brokers.capabilities import Receives
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.database import heartbeats
from outbox.database.identity import require_identity
from outbox.database.locks import Lock
from outbox.errors import BrokerUnavailable
from outbox.failpoints import failpoint
from outbox.message import TopicType

PAST_RETENTION = "recorded_at < %(before)s"
"""The rows that pruning deletes."""

GROUP = "outbox-recorder"  # of the database "default"
BATCH_SIZE = 500  # the maximum number of messages in one statement
HEARTBEAT_SECONDS = 10.0
BACKLOG_SECONDS = 1.0  # the interval of backlog requests to the broker
REDELIVERED_WITHIN = timedelta(seconds=10)  # an unfinished message is redelivered within this time after it becomes visible
STAND_BY_SECONDS = 1.0
FROZEN_SECONDS = 60.0  # the server ends the session of a recorder that is idle for longer, so that another one can take over

# One recorder per broker and group; others stand by until the lock is released, at the latest when its connection ends.
TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.RECORDER}, hashtext(%s))"

# A topic that is recorded by another group or broker than before is audited from now on.
BEGIN = """
INSERT INTO outbox_recorded_topic AS t (topic, broker, consumer_group)
SELECT topic, %(broker)s, %(group)s FROM unnest(%(topics)s::text[]) AS topic
ON CONFLICT (topic) DO UPDATE SET broker = excluded.broker, consumer_group = excluded.consumer_group,
    began_at = clock_timestamp(), read_until = NULL
WHERE (t.broker, t.consumer_group) <> (excluded.broker, excluded.consumer_group)
"""

RECORD = """
INSERT INTO outbox_recorded (topic, message_id, source, lane, number, key, tag, queue, pos, delivery_count, stored_at)
SELECT * FROM unnest(%s::text[], %s::uuid[], %s::text[], %s::smallint[], %s::bigint[], %s::text[], %s::text[], %s::text[],
    %s::bigint[], %s::int[], %s::timestamptz[])
ON CONFLICT (message_id, topic, queue, pos, delivery_count) DO NOTHING
"""

READ_UNTIL = """
UPDATE outbox_recorded_topic SET read_until = %(moment)s
WHERE topic = ANY(%(topics)s) AND (broker, consumer_group) = (%(broker)s, %(group)s)
  AND (read_until IS NULL OR read_until < %(moment)s)
"""

COUNT_READ = "SELECT count(*) FROM outbox_recorded_topic WHERE topic = ANY(%s) AND read_until >= %s"

NOW = "SELECT clock_timestamp()"
SET_IDLE_TIMEOUT = "SELECT set_config('idle_session_timeout', %s, false)"


def recorder_group(using: str) -> str:
    """Return the consumer group that records for a database, unless the command names another one."""
    return GROUP if using == DEFAULT_DB_ALIAS else f"{GROUP}-{using}"


class Recorder:
    """
    Records topics of one broker, in the thread that calls `run_once`.

    Everything up to a time T has been recorded if the group had no backlog at T, and every delivery it held at T has been written
    since. Deliveries that were lost with an earlier process or connection come back within `INVISIBLE` and a moment, so
    `read_until` does not advance until that time has passed.

    Args:
        alias: the broker's alias.
        group: the consumer group; no other database may use it.
        using: the database for the rows: the one whose outbox sends the messages.
        topics: the topics to record; by default all of the broker.
    """

    def __init__(self, alias: str, *, group: str, using: str, topics: Iterable[str] = ()) -> None:
        self.alias = alias
        self.group = group
        self.using = using
        self.topics = sorted(topics) or [topic.name for topic in conf.topics_of(alias)]
        self.received = 0  # deliveries
        self.written = 0  # those of them that were new rows
        self._fifo_topics = {name for name in self.topics if conf.topic_settings(name).type is TopicType.FIFO}
        self._invisible_for = conf.settings().consumer.invisible
        self._opened: tuple[Receives, database.Connection] | None = None
        self._settled_at = 0.0  # monotonic; until then, lost deliveries may still be invisible
        self._empty: deque[tuple[float, datetime, list[str]]] = deque()  # (monotonic, database time, topics without a backlog)
        self._check_backlog_at = self._heartbeat_at = 0.0

    def run_once(self, wait: timedelta | None = None) -> bool:
        """
        Receive once; write and acknowledge the deliveries. Return False if another recorder holds the lock.

        Raises:
            BrokerUnavailable, psycopg.Error: broker or database cannot be reached, or the broker refuses all topics, such as
            those of another project's group. The messages will be delivered again.
        """
        try:
            return self._record_once(conf.settings().consumer.wait if wait is None else wait)
        except (BrokerUnavailable, psycopg.Error):
            self.close()
            raise

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """
        Record until everything is read that the broker had at the start, or until stopped.

        Raises:
            BrokerUnavailable, psycopg.Error: broker or database cannot be reached. Or the broker refuses a topic, and everything
            of the others is read.
        """
        began: datetime | None = None
        while not is_stopped():
            if not self.run_once() or self._opened is None:
                time.sleep(STAND_BY_SECONDS)
                continue
            broker, connection = self._opened
            began = began or _now(connection)
            refusals = self._refusals(broker)
            topics = [topic for topic in self.topics if topic not in refusals]
            if connection.execute(COUNT_READ, [topics, began]).fetchone() == (len(topics),):
                if refusals:
                    raise BrokerUnavailable(next(iter(refusals.values())))
                return

    def close(self) -> None:
        """Close the connections to broker and database. The next `run_once` opens them again."""
        opened, self._opened = self._opened, None
        self._empty.clear()
        if opened is not None:
            broker, connection = opened
            with connection, closing(broker):
                if not connection.broken:
                    heartbeats.leave(connection, "recorder", broker=self.alias, consumer_group=self.group)

    def _record_once(self, wait: timedelta) -> bool:
        self._opened = self._opened or self._start()
        if self._opened is None:
            return False
        broker, connection = self._opened
        moment, begun = _now(connection), time.monotonic()
        deliveries = broker.receive(
            self.group, dict.fromkeys(self.topics), limit=BATCH_SIZE, invisible_for=self._invisible_for, wait=wait
        )
        if not deliveries and len(refusals := self._refusals(broker)) == len(self.topics):
            raise BrokerUnavailable(next(iter(refusals.values())))
        if deliveries:
            self._write(connection, deliveries)
            failpoint("recorder.after_write")
            broker.ack(deliveries)
            if time.monotonic() - begun > self._invisible_for.total_seconds() / 4 + wait.total_seconds():
                self._restart_settling()  # so slow that deliveries may have expired
        elif begun >= self._settled_at:
            self._write_read_until(broker, connection, moment, self.topics)
        self._maintain(broker, connection)
        return True

    def _start(self) -> tuple[Receives, database.Connection] | None:
        """Connect, and begin to record; None if another recorder holds the lock."""
        connection = database.connect_session(self.using, application_name="outbox recorder")
        if connection.execute(TRY_LOCK, [f"{self.alias} {self.group}"]).fetchone() != (True,):
            connection.close()
            return None
        patience = FROZEN_SECONDS + conf.settings().consumer.wait.total_seconds()
        connection.execute(SET_IDLE_TIMEOUT, [str(int(patience * 1000))])
        self._opened = broker, _ = Receives.of(conf.make_broker(self.alias)), connection
        broker.set_owner(self.group, *require_identity(connection))
        connection.execute(BEGIN, {"broker": self.alias, "group": self.group, "topics": self.topics})
        self._restart_settling()
        return self._opened

    def _write(self, connection: database.Connection, deliveries: Sequence[Delivery]) -> None:
        rows = [_row(delivery, is_fifo=delivery.topic in self._fifo_topics) for delivery in deliveries]
        self.received += len(rows)
        self.written += connection.execute(RECORD, [list(column) for column in zip(*rows, strict=True)]).rowcount

    def _restart_settling(self) -> None:
        self._empty.clear()
        self._settled_at = time.monotonic() + (self._invisible_for + REDELIVERED_WITHIN).total_seconds()

    def _maintain(self, broker: Receives, connection: database.Connection) -> None:
        now = time.monotonic()
        if now >= self._heartbeat_at:
            heartbeats.beat(connection, "recorder", broker=self.alias, consumer_group=self.group)
            self._heartbeat_at = now + HEARTBEAT_SECONDS
        if now >= self._check_backlog_at:
            self._check_backlog(broker, connection, now)
            self._check_backlog_at = time.monotonic() + BACKLOG_SECONDS

    def _check_backlog(self, broker: Receives, connection: database.Connection, now: float) -> None:
        """
        Ask the broker for the group's backlog, since on a busy topic `receive` never returns empty.

        What the client held at that moment has been written or handed back after half of the invisible duration.
        """
        while self._empty and self._empty[0][0] <= now - self._invisible_for.total_seconds() / 2:
            _, moment, topics = self._empty.popleft()
            self._write_read_until(broker, connection, moment, topics)
        moment = _now(connection)
        try:
            waiting = broker.backlog(self.group).waiting
        except BrokerUnavailable:  # not every broker can tell
            return
        if now >= self._settled_at and (empty := [topic for topic in self.topics if waiting.get(topic) == 0]):
            self._empty.append((now, moment, empty))

    def _write_read_until(
        self, broker: Receives, connection: database.Connection, moment: datetime, topics: Sequence[str]
    ) -> None:
        """Record how far topics are read, except those that the broker refuses, where unread messages may wait."""
        refusals = self._refusals(broker)
        known = [topic for topic in topics if topic not in refusals]
        connection.execute(READ_UNTIL, {"moment": moment, "topics": known, "broker": self.alias, "group": self.group})

    def _refusals(self, broker: Receives) -> dict[str, str]:
        """Return the topics to record that the broker cannot receive from as configured, each with the reason."""
        return {topic: reason for topic, reason in broker.refusals.items() if topic in self.topics}


def _now(connection: database.Connection) -> datetime:
    """Return the time by the clock of the database that also records when messages are sent."""
    now: datetime
    [(now,)] = connection.execute(NOW).fetchall()
    return now


def _row(delivery: Delivery, *, is_fifo: bool) -> tuple[object, ...]:
    """Return a delivery's row. On a fifo topic a message keeps its place, so each place is a copy, delivered once."""
    info = DeliveryInfo.of(delivery)
    delivery_count = 1 if is_fifo and delivery.pos is not None else info.delivery_count
    place = delivery.queue, delivery.pos, delivery_count, delivery.stored_at
    return info.topic, info.message_id, info.source, info.lane, info.number, delivery.key, delivery.tag, *place
