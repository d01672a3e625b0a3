"""
The recorder: a consumer group of its own that writes down what a broker shows, for the audit to read.

It subscribes to everything, whatever the tags, and acknowledges what it has written. Killed between the two, it is handed
the message again. That must not look like a second copy at the broker; nor may a second copy look like that. So a row
names the place of the copy, and which delivery to the recorder it was: a place is written down once, and of deliveries
other than the first the audit counts those that no earlier one explains (`outbox.pipeline.spark.sources.statements`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import psycopg

from outbox import conf, database
from outbox.brokers.base import Broker, Delivery
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.database import heartbeats
from outbox.database.locks import Lock
from outbox.errors import BrokerUnavailable
from outbox.failpoints import failpoint
from outbox.message import TopicType

PAST_RETENTION = "recorded_at < %(before)s"
"""Rows that the prune deletes."""

AT_ONCE = 500  # messages in one statement, at most
BEAT_SECONDS = 10.0
LOOK_SECONDS = 1.0  # how often it is asked what the broker still has for the recorder
RETURNED_WITHIN = timedelta(seconds=10)  # so long after its time a message that nobody finished may take to be shown again
STAND_BY_SECONDS = 1.0
FROZEN_SECONDS = 60.0  # one that has done nothing for so long, but for waiting at its broker, makes way for another

# One recorder of a broker at a time; another stands by until the lock is free, which it is when the connection ends.
TAKE_TURN = f"SELECT pg_try_advisory_lock({Lock.RECORDER}, hashtext(%s))"

# A topic that another group, or broker, begins to record is judged from then on.
BEGIN = """
INSERT INTO outbox_recorded_topic AS t (topic, broker, consumer_group)
SELECT topic, %(broker)s, %(group)s FROM unnest(%(topics)s::text[]) AS topic
ON CONFLICT (topic) DO UPDATE SET broker = excluded.broker, consumer_group = excluded.consumer_group,
    began_at = clock_timestamp(), read_until = NULL
WHERE (t.broker, t.consumer_group) <> (excluded.broker, excluded.consumer_group)
"""

RECORD = """
INSERT INTO outbox_recorded (topic, message_id, source, lane, number, key, tag, queue, pos, nth, stored_at)
SELECT * FROM unnest(%s::text[], %s::uuid[], %s::text[], %s::smallint[], %s::bigint[], %s::text[], %s::text[], %s::text[],
    %s::bigint[], %s::int[], %s::timestamptz[])
ON CONFLICT (message_id, topic, queue, pos, nth) DO NOTHING
"""

READ_UNTIL = """
UPDATE outbox_recorded_topic SET read_until = %(moment)s
WHERE topic = ANY(%(topics)s) AND (broker, consumer_group) = (%(broker)s, %(group)s)
  AND (read_until IS NULL OR read_until < %(moment)s)
"""

HAS_READ = "SELECT count(*) FROM outbox_recorded_topic WHERE topic = ANY(%s) AND read_until >= %s"

NOW = "SELECT clock_timestamp()"
END_IDLE = "SELECT set_config('idle_session_timeout', %s, false)"


@dataclass(slots=True)
class Recorded:
    """How many deliveries were taken, and how many of them written down: the others' places were known."""

    taken: int = 0
    written: int = 0


class Recorder:
    """
    Records one broker's topics, in the thread that calls `turn`.

    How far it has come is sure at the time T if nothing was left for the group at T, and all that it held then has been
    written since. Whatever an earlier process, or a broken connection, took along comes back within `INVISIBLE` and a
    moment; so nothing is said until that time has passed.

    Args:
        alias: the broker.
        group: the consumer group; no other database may record with it.
        using: the database of the rows: that of the outbox which sends the messages.
        topics: those of the broker's that are recorded; by default all.
    """

    def __init__(self, alias: str, *, group: str, using: str, topics: Iterable[str] = ()) -> None:
        self.alias = alias
        self.group = group
        self.using = using
        self.topics = sorted(topics) or [topic.name for topic in conf.topics_of(alias)]
        self.total = Recorded()
        self._lasting = {name for name in self.topics if conf.topic_settings(name).type is TopicType.FIFO}
        self._hold = conf.settings().consumer.invisible
        self._broker: Broker | None = None
        self._connection: database.Connection | None = None
        self._sure_at = 0.0  # by the monotonic clock: before it, something may be held that nobody will write
        self._empty: deque[tuple[float, datetime, list[str]]] = deque()  # at these moments nothing was left of these topics
        self._look_at = self._beat_at = 0.0

    def turn(self, wait: timedelta | None = None) -> bool:
        """
        Receive once, write and acknowledge what came; False where another recorder is at work, and this one stands by.

        Raises:
            BrokerUnavailable, psycopg.Error: broker or database is out of reach. Nothing is lost: the messages come again.
        """
        try:
            return self._turn(conf.settings().consumer.wait if wait is None else wait)
        except (BrokerUnavailable, psycopg.Error):
            self.close()
            raise

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """
        Record until all is read that the broker had when this began, or until stopped.

        Raises:
            BrokerUnavailable, psycopg.Error: broker or database is out of reach.
        """
        began: datetime | None = None
        while not is_stopped():
            if not self.turn():
                time.sleep(STAND_BY_SECONDS)
                continue
            began = began or self._now()
            if self._has_read(began):
                return

    def close(self) -> None:
        """Let go of broker and database; the next turn takes them up again."""
        broker, connection = self._broker, self._connection
        self._broker = self._connection = None
        self._empty.clear()
        try:
            if broker is not None:
                broker.close()
        finally:
            if connection is not None:
                with connection:
                    if not connection.broken:
                        heartbeats.leave(connection, "recorder", broker=self.alias, consumer_group=self.group)

    def _turn(self, wait: timedelta) -> bool:
        if self._connection is None and not self._take_up():
            return False
        assert self._broker is not None
        moment, begun = self._now(), time.monotonic()
        deliveries = self._broker.receive(
            self.group, dict.fromkeys(self.topics), limit=AT_ONCE, invisible_for=self._hold, wait=wait
        )
        if deliveries:
            self._write(deliveries)
            failpoint("recorder.after_write")
            self._broker.ack(deliveries)
            if time.monotonic() - begun > self._hold.total_seconds() / 4 + wait.total_seconds():
                self._doubt()  # so slow that something may have been handed back
        elif begun >= self._sure_at:
            self._say_read(moment, self.topics)
        self._maintain()
        return True

    def _take_up(self) -> bool:
        connection = database.connect_session(self.using, application_name="outbox recorder")
        if connection.execute(TAKE_TURN, [f"{self.alias} {self.group}"]).fetchone() != (True,):
            connection.close()
            return False
        patience = FROZEN_SECONDS + conf.settings().consumer.wait.total_seconds()
        connection.execute(END_IDLE, [str(int(patience * 1000))])
        self._connection = connection
        self._broker = conf.make_broker(self.alias)
        connection.execute(BEGIN, {"broker": self.alias, "group": self.group, "topics": self.topics})
        self._doubt()
        return True

    def _write(self, deliveries: Sequence[Delivery]) -> None:
        rows = [_row(delivery, is_lasting=delivery.topic in self._lasting) for delivery in deliveries]
        assert self._connection is not None
        self.total.taken += len(rows)
        self.total.written += self._connection.execute(RECORD, [list(column) for column in zip(*rows, strict=True)]).rowcount

    def _doubt(self) -> None:
        self._empty.clear()
        self._sure_at = time.monotonic() + (self._hold + RETURNED_WITHIN).total_seconds()

    def _maintain(self) -> None:
        now = time.monotonic()
        assert self._connection is not None
        if now >= self._beat_at:
            heartbeats.beat(self._connection, "recorder", broker=self.alias, consumer_group=self.group)
            self._beat_at = now + BEAT_SECONDS
        if now >= self._look_at:
            self._look(now)
            self._look_at = time.monotonic() + LOOK_SECONDS

    def _look(self, now: float) -> None:
        """
        Ask the broker what it still has for the group, since in a busy topic no call comes back empty.

        What its client held at that moment is written, or handed back, in half of the time that messages stay hidden.
        """
        while self._empty and self._empty[0][0] <= now - self._hold.total_seconds() / 2:
            _, moment, topics = self._empty.popleft()
            self._say_read(moment, topics)
        assert self._broker is not None
        moment = self._now()
        try:
            waiting = self._broker.backlog(self.group)
        except BrokerUnavailable:  # some brokers cannot tell under some options
            return
        if now >= self._sure_at and (empty := [topic for topic in self.topics if waiting.get(topic) == 0]):
            self._empty.append((now, moment, empty))

    def _say_read(self, moment: datetime, topics: Sequence[str]) -> None:
        assert self._connection is not None
        values = {"moment": moment, "topics": list(topics), "broker": self.alias, "group": self.group}
        self._connection.execute(READ_UNTIL, values)

    def _has_read(self, moment: datetime) -> bool:
        assert self._connection is not None
        return self._connection.execute(HAS_READ, [self.topics, moment]).fetchone() == (len(self.topics),)

    def _now(self) -> datetime:
        """Return the time of the database that says when messages were sent."""
        assert self._connection is not None
        row = self._connection.execute(NOW).fetchone()
        assert row is not None
        now: datetime = row[0]
        return now


def _row(delivery: Delivery, *, is_lasting: bool) -> tuple[object, ...]:
    """Return a delivery's row. Where a message never leaves its place, each place is a copy, whichever delivery this is."""
    one = DeliveryInfo.of(delivery)
    nth = 1 if is_lasting and delivery.pos is not None else one.nth
    place = delivery.queue, delivery.pos, nth, delivery.stored_at
    return one.topic, one.message_id, one.source, one.lane, one.number, delivery.key, delivery.tag, *place
