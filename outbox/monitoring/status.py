"""How the outbox of one database stands: per topic and consumer group, its processes, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from psycopg.rows import class_row

from outbox import conf
from outbox.brokers.base import BrokerStatus, DeadLetterCount, SendStatus
from outbox.brokers.capabilities import StoredInDatabase
from outbox.consuming.outcome import Outcome
from outbox.consuming.wants import differing_groups
from outbox.database import Connection
from outbox.errors import ConfigurationError
from outbox.monitoring.attention import Attention, find
from outbox.monitoring.groups import GroupStatus, read_groups
from outbox.monitoring.processes import ProcessStatus, read_processes
from outbox.monitoring.text import age

FAILURES_WITHIN = timedelta(hours=1)
FAILURES_SHOWN = 20

# Waiting tickets are counted along an index, up to a million; batches along the indexes of unfinished and of dead ones.
# Messages, not batches: those that were split off count where they are now. A uuid7 begins with its milliseconds.
TOPICS = """
SELECT name, broker, type, is_paused, paused_by, pause_reason, paused_seconds, has_sent,
    waiting, delayed, released, claimed, prepared, dead, tries,
    oldest::text AS oldest_id,
    CASE WHEN oldest IS NOT NULL THEN greatest(0, extract(epoch FROM clock_timestamp())
        - ('x' || translate(left(oldest::text, 13), '-', ''))::bit(48)::bigint / 1000.0)::float8 END AS oldest_seconds
FROM (
    SELECT t.name, t.broker, t.type, t.paused AS is_paused, t.paused_by, t.pause_reason,
        extract(epoch FROM clock_timestamp() - t.paused_at)::float8 AS paused_seconds,
        EXISTS (SELECT FROM outbox_lane WHERE topic_id = t.id) AS has_sent,
        (SELECT count(*) FROM (SELECT FROM outbox_ticket WHERE topic_id = t.id LIMIT 1000000) k) AS waiting,
        (SELECT count(*) FROM outbox_delayed WHERE topic_id = t.id) AS delayed,
        coalesce(b.released, 0) AS released, coalesce(b.claimed, 0) AS claimed, coalesce(b.prepared, 0) AS prepared,
        coalesce(b.dead, 0) AS dead, coalesce(b.tries, 0) AS tries,
        least(b.oldest, (SELECT message_id FROM outbox_ticket WHERE topic_id = t.id ORDER BY pos LIMIT 1)) AS oldest
    FROM outbox_topic t LEFT JOIN (
        SELECT topic_id, max(tries) FILTER (WHERE state < 3) AS tries,
            sum(n) FILTER (WHERE state = 0) AS released, sum(n) FILTER (WHERE state = 1) AS claimed,
            sum(n) FILTER (WHERE state = 2) AS prepared, sum(n) FILTER (WHERE state = 4) AS dead,
            (array_agg(message_ids[1] ORDER BY message_ids[1]) FILTER (WHERE state < 3))[1] AS oldest
        FROM (
            SELECT topic_id, state, tries, message_ids, cardinality(message_ids) - cardinality(split) AS n
            FROM outbox_batch WHERE state IN (0, 1, 2) OR state = 4) o
        GROUP BY topic_id
    ) b ON b.topic_id = t.id
    WHERE t.id <> 0
) s ORDER BY name
"""

GAPS = """
SELECT consumer_group, topic, count(*) AS gaps, sum(last_number - first_number + 1)::bigint AS numbers
FROM outbox_gap WHERE closed_at IS NULL GROUP BY 1, 2 ORDER BY 1, 2
"""

# Topics that the broker's set-up, not a message, keeps from being sent.
MISCONFIGURED = """
SELECT t.name, max(b.last_error) FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id
WHERE b.state = 0 AND EXISTS (
    SELECT FROM outbox_attempt a WHERE a.batch_id = b.id AND a.attempt = b.attempt AND a.verdict = %s)
GROUP BY 1 ORDER BY 1
"""

# Deliveries that failed of late, those that look alike together.
FAILURES = """
SELECT consumer_group, topic, fingerprint AS error, count(*) AS deliveries, count(DISTINCT message_id) AS messages,
    count(*) FILTER (WHERE outcome = %(dead_letter)s) AS dead_letters,
    extract(epoch FROM clock_timestamp() - max(failed_at))::float8 AS newest_seconds
FROM outbox_delivery WHERE failed_at > clock_timestamp() - %(window)s AND acted_by = ''
GROUP BY 1, 2, 3 ORDER BY deliveries DESC, 1, 2, 3 LIMIT %(limit)s
"""

# Answers to check-backs of the last hour.
CHECK_BACKS = """
SELECT answer, count(*) FROM outbox_check_back WHERE answered_at > clock_timestamp() - interval '1 hour' GROUP BY 1 ORDER BY 1
"""

STRAYS = "SELECT EXISTS (SELECT FROM outbox_message_default)"


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """
    Counts of a topic's messages that are not sent yet.

    Args:
        paused_seconds: since when it is paused; None where it is not, or nobody wrote it down.
        prepared: decided; their half messages are being committed, or await the check-back.
        has_sent: whether a message of the topic was ever claimed.
        oldest_id, oldest_seconds: of the oldest one that is to be sent now; None where there is none.
        tries: the most that one of them has failed.
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
    tries: int
    oldest_seconds: float | None

    @property
    def pause(self) -> str:
        """Return "paused", by whom, for how long and why, as far as that is known; empty where it is not."""
        if not self.is_paused:
            return ""
        by = f" by {self.paused_by}" if self.paused_by else ""
        since = f" for {age(self.paused_seconds)}" if self.paused_seconds is not None else ""
        return f"paused{by}{since}" + (f": {self.pause_reason}" if self.pause_reason else "")

    @property
    def unsent(self) -> int:
        """How many are not sent yet."""
        return self.waiting + self.delayed + self.released + self.claimed + self.prepared


@dataclass(frozen=True, slots=True)
class GapStatus:
    """Open gaps of a group in a topic, and how many numbers are missing in them."""

    consumer_group: str
    topic: str
    gaps: int
    numbers: int


@dataclass(frozen=True, slots=True)
class FailureStatus:
    """Failed deliveries of the last hour that look alike. `messages`: so many different ones."""

    consumer_group: str
    topic: str
    error: str
    deliveries: int
    messages: int
    dead_letters: int
    newest_seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    """
    How one database stands.

    Args:
        misconfigured: topic -> what only an operator can set right at its broker.
        parked: topic -> half messages that their broker has stopped asking about.
        risks: what the settings of brokers accept to lose, in words.
        differing_groups: groups whose processes have had different code for longer than a deployment takes.
        has_strays: whether messages lie in the partition of no day.
        check_backs: answer -> check-backs of the last hour.
    """

    database: str
    topics: list[TopicStatus]
    processes: list[ProcessStatus]
    groups: list[GroupStatus]
    failures: list[FailureStatus]
    gaps: list[GapStatus]
    misconfigured: dict[str, str]
    parked: dict[str, int]
    dead_letters: list[DeadLetterCount]
    differing_groups: list[str]
    has_strays: bool
    check_backs: dict[str, int]
    risks: list[str] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)


def read_status(connection: Connection, alias: str) -> Status:
    """Read how a database stands; brokers on a server are asked, each for a few seconds at most."""
    brokers = _read_brokers(connection, alias)
    letters = [letters for broker in brokers for letters in broker.dead_letters]
    processes = read_processes(connection)
    status = Status(
        alias,
        connection.cursor(row_factory=class_row(TopicStatus)).execute(TOPICS).fetchall(),
        processes,
        read_groups(connection, alias, processes, letters),
        _read_failures(connection),
        connection.cursor(row_factory=class_row(GapStatus)).execute(GAPS).fetchall(),
        dict(connection.execute(MISCONFIGURED, [SendStatus.MISCONFIGURED]).fetchall()),
        {topic: count for broker in brokers for topic, count in broker.parked.items()},
        letters,
        differing_groups(connection),
        connection.execute(STRAYS).fetchone() == (True,),
        dict(connection.execute(CHECK_BACKS).fetchall()),
        list(_risks()),
    )
    status.attention.extend(find(connection, status))
    return status


def _read_brokers(connection: Connection, alias: str) -> list[BrokerStatus]:
    """Return what brokers keep in this database; several may share one, and then say the same."""
    found: list[BrokerStatus] = []
    settings = conf.settings()
    for name in sorted({topic.broker for topic in settings.topics.values()}):
        broker = settings.brokers[name]
        try:
            kind = conf.broker_class(name)
        except ConfigurationError:  # its client is not installed here, as in a process that only publishes; E003 says so
            continue
        if kind.is_stored_in_database:
            status = StoredInDatabase.of(kind).read_status(broker.options, alias, connection)
            if status not in found:
                found.append(status)
    return found


def _risks() -> Iterator[str]:
    """Return what the settings of brokers accept to lose."""
    for name, broker in conf.settings().brokers.items():
        with suppress(ConfigurationError):  # E003 says so
            for problem in conf.broker_class(name).check_topics(broker.options, conf.topics_of(name)):
                yield f"Broker {name!r}: {problem.text}"


def _read_failures(connection: Connection) -> list[FailureStatus]:
    arguments = {"dead_letter": Outcome.DEAD_LETTER, "window": FAILURES_WITHIN, "limit": FAILURES_SHOWN}
    return connection.cursor(row_factory=class_row(FailureStatus)).execute(FAILURES, arguments).fetchall()
