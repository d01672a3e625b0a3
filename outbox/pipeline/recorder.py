"""
The recorder: a separate consumer group that records the messages of a broker, for the audit.

It subscribes to all tags, and acknowledges a message after it has written its row. If it is killed in between, the message is
redelivered. The audit must be able to tell such a redelivery from a second copy at the broker. So a row has the position of the
copy at the broker (queue and pos), and the number of its delivery to the recorder. `RECORDED` in
`outbox.pipeline.spark.statements` counts the copies.
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
from outbox.logs import storable
from outbox.message import TopicType

PAST_RETENTION = "recorded_at < %(before)s"
"""The SQL condition of the rows that pruning deletes."""

DEFAULT_GROUP = "outbox-recorder"  # for the database "default"
BATCH_SIZE = 500  # the maximum number of messages in one statement
HEARTBEAT_SECONDS = 10.0
BACKLOG_SECONDS = 1.0  # the interval in which the broker is asked for the backlog
REDELIVERED_WITHIN = timedelta(seconds=10)  # a message is redelivered within this time after it has become visible again
STAND_BY_SECONDS = 1.0  # the interval in which a recorder that stands by tries to get the lock
FROZEN_SECONDS = 60.0  # the server ends the session of a recorder that is idle for longer, so that another one can take over

# One recorder per broker and group holds this lock. Others stand by until it is released, at the latest when its connection ends.
TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.RECORDER}, hashtext(%s))"

# A topic that another group or broker has recorded before begins anew, so that it is audited from now on.
BEGIN_TOPICS = """
INSERT INTO outbox_recorded_topic AS t (topic, broker, consumer_group)
SELECT topic, %(broker)s, %(group)s FROM unnest(%(topics)s::text[]) AS topic
ON CONFLICT (topic) DO UPDATE SET broker = excluded.broker, consumer_group = excluded.consumer_group,
    began_at = clock_timestamp(), read_until = NULL
WHERE (t.broker, t.consumer_group) <> (excluded.broker, excluded.consumer_group)
"""

# A delivery that was recorded before is skipped.
RECORD = """
INSERT INTO outbox_recorded (topic, message_id, source, lane, number, key, tag, queue, pos, delivery_count, stored_at)
SELECT * FROM unnest(%s::text[], %s::uuid[], %s::text[], %s::smallint[], %s::bigint[], %s::text[], %s::text[], %s::text[],
    %s::bigint[], %s::int[], %s::timestamptz[])
ON CONFLICT (message_id, topic, queue, pos, delivery_count) DO NOTHING
"""

# Topics that another group or broker has begun to record meanwhile are left unchanged.
READ_UNTIL = """
UPDATE outbox_recorded_topic SET read_until = %(time)s
WHERE topic = ANY(%(topics)s) AND (broker, consumer_group) = (%(broker)s, %(group)s)
  AND (read_until IS NULL OR read_until < %(time)s)
"""

# The number of topics that are recorded up to a time.
COUNT_READ = "SELECT count(*) FROM outbox_recorded_topic WHERE topic = ANY(%s) AND read_until >= %s"

NOW = "SELECT clock_timestamp()"
SET_IDLE_TIMEOUT = "SELECT set_config('idle_session_timeout', %s, false)"


def recorder_group(using: str) -> str:
    """Return the consumer group that records for a database, unless the command names another one."""
    return DEFAULT_GROUP if using == DEFAULT_DB_ALIAS else f"{DEFAULT_GROUP}-{using}"


class Recorder:
    """
    Records topics of one broker, in the thread that calls `run_once`.

    All messages up to a time T are recorded if the group had no backlog at T, and each delivery that was unacknowledged at T has
    been written since. An earlier process or connection may have left unacknowledged deliveries. They are redelivered within
    `INVISIBLE` and `REDELIVERED_WITHIN`, so `read_until` does not advance before that time has passed.

    Args:
        alias: the broker's alias.
        group: the consumer group; recorders of other databases must use other groups.
        using: the database whose outbox sends the messages; the rows are written there.
        topics: the topics to record; by default all topics of the broker.
    """

    def __init__(self, alias: str, *, group: str, using: str, topics: Iterable[str] = ()) -> None:
        self.alias = alias
        self.group = group
        self.using = using
        self.topics = sorted(topics) or [topic.name for topic in conf.topics_of(alias)]
        self.received = 0  # deliveries
        self.written = 0  # rows, one for each delivery that was not recorded yet
        self._fifo_topics = {name for name in self.topics if conf.topic_settings(name).type is TopicType.FIFO}
        self._invisible_for = conf.settings().consumer.invisible
        self._opened: tuple[Receives, database.Connection] | None = None
        self._redelivered_by = 0.0  # the monotonic time by which unfinished deliveries of earlier processes are redelivered
        # Each check of the backlog: its time (monotonic, and by the database's clock), and the topics that had no backlog.
        self._caught_up: deque[tuple[float, datetime, list[str]]] = deque()
        self._check_backlog_at = self._heartbeat_at = 0.0

    def run_once(self, wait: timedelta | None = None) -> bool:
        """
        Receive once, then write and acknowledge the deliveries. Return False if another recorder holds the lock.

        Raises:
            BrokerUnavailable, psycopg.Error: broker or database cannot be reached, or the broker refuses all topics, for example
                because the group belongs to another project. The messages will be redelivered.
        """
        try:
            return self._record_once(conf.settings().consumer.wait if wait is None else wait)
        except (BrokerUnavailable, psycopg.Error):
            self.close()
            raise

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """
        Record until all messages that the broker had at the start are recorded, or until `is_stopped` returns True.

        Raises:
            BrokerUnavailable, psycopg.Error: broker or database cannot be reached; or the broker refuses a topic, and all
                messages of the other topics are recorded.
        """
        started_at: datetime | None = None
        while not is_stopped():
            if not self.run_once() or self._opened is None:
                time.sleep(STAND_BY_SECONDS)
                continue
            broker, connection = self._opened
            started_at = started_at or _now(connection)
            refusals = self._refusals(broker)
            topics = [topic for topic in self.topics if topic not in refusals]
            if connection.execute(COUNT_READ, [topics, started_at]).fetchone() == (len(topics),):
                if refusals:
                    raise BrokerUnavailable(next(iter(refusals.values())))
                return

    def close(self) -> None:
        """Close the connections to broker and database. The next `run_once` opens them again."""
        opened, self._opened = self._opened, None
        self._caught_up.clear()
        if opened is not None:
            broker, connection = opened
            with connection, closing(broker):
                if not connection.broken:
                    heartbeats.delete_heartbeat(connection, "recorder", broker=self.alias, consumer_group=self.group)

    def _record_once(self, wait: timedelta) -> bool:
        self._opened = self._opened or self._connect()
        if self._opened is None:
            return False
        broker, connection = self._opened
        asked_at, started = _now(connection), time.monotonic()
        deliveries = broker.receive(
            self.group, dict.fromkeys(self.topics), limit=BATCH_SIZE, invisible_for=self._invisible_for, wait=wait
        )
        if not deliveries and len(refusals := self._refusals(broker)) == len(self.topics):
            raise BrokerUnavailable(next(iter(refusals.values())))
        if deliveries:
            self._write(connection, deliveries)
            failpoint("recorder.after_write")
            broker.ack(deliveries)
            if time.monotonic() - started > self._invisible_for.total_seconds() / 4 + wait.total_seconds():
                self._await_redeliveries()  # deliveries may have expired meanwhile
        elif started >= self._redelivered_by:
            self._write_read_until(broker, connection, asked_at, self.topics)
        self._maintain(broker, connection)
        return True

    def _connect(self) -> tuple[Receives, database.Connection] | None:
        """Connect to database and broker, and begin to record. None: another recorder holds the lock."""
        connection = database.connect_session(self.using, application_name="outbox recorder")
        if connection.execute(TRY_LOCK, [f"{self.alias} {self.group}"]).fetchone() != (True,):
            connection.close()
            return None
        idle_limit = FROZEN_SECONDS + conf.settings().consumer.wait.total_seconds()
        connection.execute(SET_IDLE_TIMEOUT, [str(int(idle_limit * 1000))])
        self._opened = broker, _ = Receives.of(conf.make_broker(self.alias)), connection
        broker.set_owner(self.group, *require_identity(connection))
        connection.execute(BEGIN_TOPICS, {"broker": self.alias, "group": self.group, "topics": self.topics})
        self._await_redeliveries()
        return self._opened

    def _write(self, connection: database.Connection, deliveries: Sequence[Delivery]) -> None:
        rows = [_row(delivery, is_fifo=delivery.topic in self._fifo_topics) for delivery in deliveries]
        self.received += len(rows)
        self.written += connection.execute(RECORD, [list(column) for column in zip(*rows, strict=True)]).rowcount

    def _await_redeliveries(self) -> None:
        self._caught_up.clear()
        self._redelivered_by = time.monotonic() + (self._invisible_for + REDELIVERED_WITHIN).total_seconds()

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
        Ask the broker for the group's backlog, because on a busy topic `receive` never returns nothing.

        Half of the invisible duration after time T, the client has written or released all deliveries that it held at T. So then,
        topics without a backlog at T are recorded as read up to T.
        """
        while self._caught_up and self._caught_up[0][0] <= now - self._invisible_for.total_seconds() / 2:
            _, asked_at, topics = self._caught_up.popleft()
            self._write_read_until(broker, connection, asked_at, topics)
        asked_at = _now(connection)
        try:
            waiting = broker.backlog(self.group).waiting
        except BrokerUnavailable:  # not every broker knows the backlog
            return
        if now >= self._redelivered_by and (topics := [topic for topic in self.topics if waiting.get(topic) == 0]):
            self._caught_up.append((now, asked_at, topics))

    def _write_read_until(
        self, broker: Receives, connection: database.Connection, asked_at: datetime, topics: Sequence[str]
    ) -> None:
        """
        Record that topics are read up to a time, except topics that the broker refuses, because unread messages may wait in them.
        """
        refusals = self._refusals(broker)
        accepted = [topic for topic in topics if topic not in refusals]
        connection.execute(READ_UNTIL, {"time": asked_at, "topics": accepted, "broker": self.alias, "group": self.group})

    def _refusals(self, broker: Receives) -> dict[str, str]:
        """Return the topics to record that the broker refuses to receive from as configured -> the reason."""
        return {topic: reason for topic, reason in broker.refusals.items() if topic in self.topics}


def _now(connection: database.Connection) -> datetime:
    """Return the database's time. Its clock also determines when messages are marked as sent."""
    now: datetime
    [(now,)] = connection.execute(NOW).fetchall()
    return now


def _row(delivery: Delivery, *, is_fifo: bool) -> tuple[object, ...]:
    """
    Return the row of a delivery.

    On a fifo topic, a redelivered message keeps its position, so each position is one copy: its delivery_count is recorded as 1.
    """
    info = DeliveryInfo.of(delivery)
    delivery_count = 1 if is_fifo and delivery.pos is not None else info.delivery_count
    key_and_tag = storable(delivery.key), storable(delivery.tag)
    position = delivery.queue, delivery.pos, delivery_count, delivery.stored_at
    return info.topic, info.message_id, info.source, info.lane, info.number, *key_and_tag, *position
