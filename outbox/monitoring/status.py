"""The status of the outbox in one database: topics, consumer groups, processes. `attention.py` derives findings from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace
from psycopg.rows import class_row

from outbox import conf
from outbox.brokers.base import SendStatus
from outbox.brokers.capabilities import StoredInDatabase
from outbox.consuming.subscriptions import differing_groups
from outbox.database import Connection, partitions
from outbox.errors import ConfigurationError
from outbox.ids import topic_number
from outbox.message import Header, read_headers
from outbox.models import UNFINISHED, State
from outbox.monitoring.deferred import DeferredCount, read_deferred
from outbox.monitoring.groups import GroupStatus, read_groups
from outbox.monitoring.processes import ProcessStatus, read_processes
from outbox.monitoring.promises import Promise, promise_of
from outbox.monitoring.text import pause
from outbox.relay.maintenance import overdue

FAILURES_WITHIN = timedelta(hours=1)
FAILURES_SHOWN = 20

# The topics, each with the numbers of its messages in each state that is not final, and of dead ones. Tickets are counted along
# an index, up to a million; batches are read along the partial indexes of unfinished and of dead batches. A message that was
# split off counts in its current batch. A topic that messages refer to, but that has no row, is named by its id; since there may
# be very many tickets, their topic ids are read in steps along the index (`waiting`). The age of a message is by the database's
# clock; if the message row is gone, it is computed from the message's id, which contains a time of the publisher's clock.
TOPICS = f"""
WITH RECURSIVE waiting (topic_id) AS (
    SELECT min(topic_id) FROM outbox_ticket UNION ALL
    SELECT (SELECT min(topic_id) FROM outbox_ticket WHERE topic_id > waiting.topic_id) FROM waiting WHERE topic_id IS NOT NULL
), b AS MATERIALIZED (
    SELECT topic_id, max(failures) FILTER (WHERE state IN {UNFINISHED}) AS failures,
        sum(n) FILTER (WHERE state = {State.RELEASED}) AS released,
        sum(n) FILTER (WHERE state = {State.CLAIMED}) AS claimed,
        sum(n) FILTER (WHERE state = {State.PREPARED}) AS prepared, sum(n) FILTER (WHERE state = {State.DEAD}) AS dead,
        max(id) FILTER (WHERE state = {State.RELEASED} AND last_error <> '') AS newest_failed,
        (array_agg(message_ids[1] ORDER BY message_ids[1]) FILTER (WHERE state IN {UNFINISHED}))[1] AS oldest
    FROM (
        SELECT id, topic_id, state, failures, last_error, message_ids, cardinality(message_ids) - cardinality(split) AS n
        FROM outbox_batch WHERE state IN {UNFINISHED} OR state = {State.DEAD}) counted
    GROUP BY topic_id
), t AS (
    SELECT id, name, broker, type, paused, paused_at, paused_by, pause_reason FROM outbox_topic UNION ALL
    SELECT topic_id, '#' || topic_id, '', '', false, NULL, '', '' FROM (
        SELECT topic_id FROM waiting WHERE topic_id IS NOT NULL UNION SELECT topic_id FROM outbox_delayed UNION
        SELECT topic_id FROM b) known
    WHERE NOT EXISTS (SELECT FROM outbox_topic WHERE id = topic_id)
)
SELECT name, broker, type, is_paused, paused_by, pause_reason, paused_seconds, has_sent,
    waiting, delayed, released, claimed, prepared, dead, failures, error,
    oldest::text AS oldest_id,
    extract(epoch FROM clock_timestamp() - coalesce((SELECT created_at FROM outbox_message WHERE id = oldest),
        to_timestamp(('x' || translate(left(oldest::text, 13), '-', ''))::bit(48)::bigint / 1000.0)))::float8 AS oldest_seconds
FROM (
    SELECT t.name, t.broker, t.type, t.paused AS is_paused, t.paused_by, t.pause_reason,
        extract(epoch FROM clock_timestamp() - t.paused_at)::float8 AS paused_seconds,
        EXISTS (SELECT FROM outbox_lane WHERE topic_id = t.id) AS has_sent,
        (SELECT count(*) FROM (SELECT FROM outbox_ticket WHERE topic_id = t.id LIMIT 1000000) ticket) AS waiting,
        (SELECT count(*) FROM outbox_delayed WHERE topic_id = t.id) AS delayed,
        coalesce(b.released, 0) AS released, coalesce(b.claimed, 0) AS claimed, coalesce(b.prepared, 0) AS prepared,
        coalesce(b.dead, 0) AS dead, coalesce(b.failures, 0) AS failures,
        coalesce((SELECT last_error FROM outbox_batch WHERE id = b.newest_failed), '') AS error,
        least(b.oldest, (SELECT message_id FROM outbox_ticket WHERE topic_id = t.id ORDER BY pos LIMIT 1)) AS oldest
    FROM t LEFT JOIN b ON b.topic_id = t.id
) topic ORDER BY name
"""

# The messages of the newest 1,000 inbox rows of the last hour that say that a group ignored a message (delivery count 0), each
# with these groups. Messages that another group of this database has handled or deferred, or that an operator has discarded, are
# left out.
IGNORED = """
WITH ignored AS MATERIALIZED (
    SELECT message_id, consumer_group FROM outbox_inbox
    WHERE delivery_count = 0 AND handled_at > clock_timestamp() - interval '1 hour' ORDER BY handled_at DESC LIMIT 1000
)
SELECT t.name, m.headers, array_agg(i.consumer_group)
FROM ignored i JOIN outbox_message m ON m.id = i.message_id JOIN outbox_topic t ON t.id = m.topic_id AND t.id <> 0
WHERE NOT EXISTS (SELECT FROM outbox_inbox o WHERE o.message_id = m.id AND o.delivery_count > 0)
    AND NOT EXISTS (SELECT FROM outbox_deferred d WHERE d.message_id = m.id)
    AND NOT EXISTS (SELECT FROM outbox_operator_act a WHERE a.message_id = m.id AND a.act = 'discarded')
GROUP BY m.id, t.name, m.headers
"""

GAPS = """
SELECT consumer_group, topic, count(*) AS gaps, sum(last_number - first_number + 1)::bigint AS numbers,
    extract(epoch FROM clock_timestamp() - min(found_at))::float8 AS seconds
FROM outbox_gap WHERE closed_at IS NULL GROUP BY 1, 2 ORDER BY 1, 2
"""

# Topics with a batch whose last send failed because the broker, and not a message, is configured wrongly; each with an error.
MISCONFIGURED = f"""
SELECT t.name, max(b.last_error) FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id
WHERE b.state = {State.RELEASED} AND EXISTS (
    SELECT FROM outbox_failed_send a WHERE a.batch_id = b.id AND a.attempt = b.attempt AND a.verdict = %s)
GROUP BY 1 ORDER BY 1
"""

# Recent failed deliveries, grouped by the fingerprint of their error.
FAILURES = """
SELECT consumer_group, topic, fingerprint AS error, count(*) AS deliveries, count(DISTINCT message_id) AS messages,
    count(*) FILTER (WHERE outcome = 'dead letter') AS dead_letters,
    extract(epoch FROM clock_timestamp() - max(failed_at))::float8 AS newest_seconds
FROM outbox_failed_delivery WHERE failed_at > clock_timestamp() - %s
GROUP BY 1, 2, 3 ORDER BY deliveries DESC, 1, 2, 3 LIMIT %s
"""

# Answers to check-backs of the last hour.
CHECK_BACKS = """
SELECT answer, count(*) FROM outbox_check_back WHERE answered_at > clock_timestamp() - interval '1 hour' GROUP BY 1 ORDER BY 1
"""

IS_READ_ONLY = "SELECT current_setting('transaction_read_only') = 'on'"

# Whether messages are in the DEFAULT partition (strays), and whether the database is read-only.
STRAYS = f"SELECT EXISTS (SELECT FROM outbox_message_default), ({IS_READ_ONLY})"


class TopicStatus(msgspec.Struct, frozen=True):
    """
    The status of a topic, with the numbers of its messages in each state before SENT, and of dead ones.

    Args:
        paused_seconds: for how long it has been paused; None if it is not, or the time was not recorded.
        waiting, delayed, claimed, dead: numbers of messages in these states.
        released: number of messages that were not sent and are claimed again, because they failed or their relay stopped.
        prepared: number of decided messages whose half messages are being committed, or await a check-back.
        has_sent: whether a message of the topic was ever claimed.
        oldest_id, oldest_seconds: id and age of the oldest message that is to be sent now; None if there is none.
        failures: the highest number of counted failures of an unfinished batch.
        error: the last error of the newest released batch that has failed; "" if there is none.
    """

    name: str
    broker: str
    type: str
    is_paused: bool
    paused_by: str
    pause_reason: str
    paused_seconds: float | None
    has_sent: bool
    oldest_id: str | None
    waiting: int
    delayed: int
    released: int
    claimed: int
    prepared: int
    dead: int
    failures: int
    error: str
    oldest_seconds: float | None

    @property
    def pause(self) -> str:
        """A text that says by whom, for how long and why the topic is paused, as far as known; "" if it is not paused."""
        return pause(self.paused_by, self.paused_seconds, self.pause_reason) if self.is_paused else ""

    @property
    def unsent(self) -> int:
        """The number of messages that are not sent yet."""
        return self.waiting + self.delayed + self.released + self.claimed + self.prepared


class IgnoredType(msgspec.Struct):
    """Messages of a type that came in the last hour and that no group of a database handled. `groups` had no handler for it."""

    topic: str
    type: str
    messages: int = 0
    groups: set[str] = msgspec.field(default_factory=set)


class GapStatus(msgspec.Struct, frozen=True):
    """The open gaps of a group in a topic, with the count of missing numbers, and the seconds since the first gap was found."""

    consumer_group: str
    topic: str
    gaps: int
    numbers: int
    seconds: float


class FailureStatus(msgspec.Struct, frozen=True):
    """Failed deliveries of the last hour with the same fingerprint. `messages` counts distinct messages."""

    consumer_group: str
    topic: str
    error: str
    deliveries: int
    messages: int
    dead_letters: int
    newest_seconds: float


class Status(msgspec.Struct, frozen=True):
    """
    The status of one database.

    Args:
        misconfigured: topic -> error that an operator has to correct at its broker.
        parked: topic -> number of half messages whose check-backs have stopped.
        deferred: the deferred messages of all groups, including groups that this process has no code for.
        differing_groups: groups whose processes have had different code for longer than a deployment takes.
        has_strays: whether messages are in the DEFAULT partition.
        lacks_tomorrow: whether the partition of tomorrow does not exist.
        overdue: days of messages that are kept past their retention, oldest first.
        check_backs: answer -> number of check-backs in the last hour.
        risks: possible losses with the settings of brokers, a sentence each.
        promises: topic -> the promises about its messages, for topics in settings whose broker's client is installed.
        is_read_only: whether transactions are read-only by default, so that nothing can be published.
    """

    database: str
    topics: list[TopicStatus]
    processes: list[ProcessStatus]
    groups: list[GroupStatus]
    failures: list[FailureStatus]
    gaps: list[GapStatus]
    ignored: list[IgnoredType]
    misconfigured: dict[str, str]
    parked: dict[str, int]
    deferred: list[DeferredCount]
    differing_groups: list[str]
    has_strays: bool
    lacks_tomorrow: bool
    overdue: list[date]
    check_backs: dict[str, int]
    risks: list[str] = msgspec.field(default_factory=list)
    promises: dict[str, Promise] = msgspec.field(default_factory=dict)
    is_read_only: bool = False

    def processes_of(self, kind: str, broker: str, group: str = "") -> list[ProcessStatus]:
        """Return the processes of a kind, broker and consumer group, the newest heartbeat first."""
        return [process for process in self.processes if process.does == (kind, broker, group)]

    def live(self, kind: str, broker: str, group: str = "") -> list[ProcessStatus]:
        """Return the processes of a kind, broker and consumer group that are not silent, the newest heartbeat first."""
        return [process for process in self.processes_of(kind, broker, group) if not process.is_silent]


def read_status(connection: Connection, alias: str) -> Status:
    """Return the status of a database; brokers on a server are asked, each for a few seconds at most."""
    brokers = _read_brokers(connection, alias)
    deferred = read_deferred(connection)
    processes = read_processes(connection)
    stored_groups = {broker: names for broker, (_, names) in brokers.items()}
    groups = read_groups(connection, alias, processes, stored_groups, deferred)
    has_strays, cannot_write = connection.execute(STRAYS).fetchone() or (False, False)
    days = partitions.days(connection)
    return Status(
        alias,
        _read_topics(connection),
        processes,
        groups,
        connection.cursor(row_factory=class_row(FailureStatus)).execute(FAILURES, [FAILURES_WITHIN, FAILURES_SHOWN]).fetchall(),
        connection.cursor(row_factory=class_row(GapStatus)).execute(GAPS).fetchall(),
        _read_ignored(connection),
        dict(connection.execute(MISCONFIGURED, [SendStatus.MISCONFIGURED]).fetchall()),
        {topic: count for parked, _ in brokers.values() for topic, count in parked.items()},
        deferred,
        differing_groups(connection),
        has_strays,
        partitions.lacks_tomorrow(days),
        overdue(days),
        dict(connection.execute(CHECK_BACKS).fetchall()),
        list(_risks()),
        _promises(),
        cannot_write,
    )


def _read_topics(connection: Connection) -> list[TopicStatus]:
    """Return topics that have a row, or that messages refer to; without a row, with name and broker from settings, if known."""
    topic_statuses = connection.cursor(row_factory=class_row(TopicStatus)).execute(TOPICS).fetchall()
    names = {f"#{topic_number(name)}": name for name in conf.settings().topics}
    for index, topic in enumerate(topic_statuses):
        if name := names.get(topic.name):
            topic_statuses[index] = replace(topic, name=name, broker=conf.settings().topics[name].broker)
    return topic_statuses


def is_read_only(connection: Connection) -> bool:
    """Return whether the database makes the transactions of this connection read-only."""
    return connection.execute(IS_READ_ONLY).fetchone() == (True,)


def _read_brokers(connection: Connection, alias: str) -> dict[str, tuple[dict[str, int], list[str]]]:
    """
    Return the status of each broker that is stored in this database; of brokers that share tables, only of the first.

    A status has two parts: topic -> number of half messages whose check-backs have stopped, and the groups for which the broker
    keeps messages. Both are empty for a broker that is stored in another database.
    """
    broker_statuses: dict[str, tuple[dict[str, int], list[str]]] = {}
    for name in sorted({topic.broker for topic in conf.settings().topics.values()}):
        try:
            kind = conf.broker_class(name)
        except ConfigurationError:  # its client is not installed, as in a process that only publishes; check E003 reports it
            continue
        if issubclass(kind, StoredInDatabase):
            status = kind.read_status(alias, connection) if conf.database_of_broker(name) == alias else ({}, [])
            if status not in broker_statuses.values():
                broker_statuses[name] = status
    return broker_statuses


def _risks() -> Iterator[str]:
    """Yield the possible losses with the settings of brokers, a sentence each."""
    for name, broker in conf.settings().brokers.items():
        with suppress(ConfigurationError):  # check E003 reports it
            for problem in conf.broker_class(name).check_settings(broker.options, conf.topics_of(name)):
                yield f"Broker {name!r}: {problem.text}"


def _promises() -> dict[str, Promise]:
    """Return the promises about each topic whose broker's client is installed; check E003 reports the others."""
    promises = {}
    for topic in sorted(conf.settings().topics):
        with suppress(ConfigurationError):
            promises[topic] = promise_of(topic)
    return promises


def _read_ignored(connection: Connection) -> list[IgnoredType]:
    by_type: dict[tuple[str, str], IgnoredType] = {}
    for topic, headers, names in connection.execute(IGNORED).fetchall():
        type_name = read_headers(headers).get(Header.TYPE, "")
        ignored = by_type.setdefault((topic, type_name), IgnoredType(topic, type_name))
        ignored.messages += 1
        ignored.groups.update(names)
    return [by_type[key] for key in sorted(by_type)]


MINUTES = 60
ROW_LIMIT = 50_000  # a chart reads at most this many messages, and this many inbox rows

# The number of messages published in each minute, by the time in their ids (uuid7). The newest are read along the primary key.
PUBLISHED = """
SELECT least(%(last)s, (('x' || translate(left(id::text, 13), '-', ''))::bit(48)::bigint - %(start)s) / 60000)::int, count(*)
FROM (SELECT id FROM outbox_message WHERE id >= %(first_id)s ORDER BY id DESC LIMIT %(limit)s) newest
GROUP BY 1 ORDER BY 1
"""

# The number of messages handled in each minute, once for each group. The newest inbox rows are read along the index of their
# times.
HANDLED = """
SELECT least(%(last)s, floor(extract(epoch FROM handled_at - %(begin)s) / 60))::int, count(*)
FROM (
    SELECT handled_at FROM outbox_inbox WHERE handled_at >= %(begin)s AND delivery_count > 0
    ORDER BY handled_at DESC LIMIT %(limit)s
) newest
GROUP BY 1 ORDER BY 1
"""


def read_throughput(connection: Connection, *, now: datetime) -> tuple[list[int | None], list[int | None]]:
    """Return how many messages were published, and how many handled, in each minute of the last hour, oldest first."""
    begin = now - timedelta(minutes=MINUTES)
    start = int(begin.timestamp() * 1000)
    arguments = {"begin": begin, "start": start, "first_id": UUID(int=start << 80), "last": MINUTES - 1, "limit": ROW_LIMIT}
    published = _by_minute(connection.execute(PUBLISHED, arguments).fetchall())
    return published, _by_minute(connection.execute(HANDLED, arguments).fetchall())


def _by_minute(counts: list[tuple[Any, ...]]) -> list[int | None]:
    """Return one count per minute; None for minutes that were not read, or not completely, because of `ROW_LIMIT`."""
    known = dict(counts)
    cut_at = min(known) if sum(known.values()) >= ROW_LIMIT else -1
    return [known.get(minute, 0) if minute > cut_at else None for minute in range(MINUTES)]
