"""How the outbox of one database stands: per topic, its processes, and what needs a person."""

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
from outbox.relay.splitter import ALARM_TRIES

SILENT_AFTER = timedelta(seconds=30)  # a process that is busy with one batch beats less often than each second
LATE_AFTER = timedelta(minutes=1)
FAILURES_WITHIN = timedelta(hours=1)
FAILURES_SHOWN = 20

# Waiting tickets are counted along an index, up to a million; batches along the indexes of unfinished and of dead ones.
# Messages, not batches: those that were split off count where they are now. A uuid7 begins with its milliseconds.
TOPICS = """
SELECT name, broker, type, is_paused, waiting, delayed, released, claimed, prepared, dead, tries,
    CASE WHEN oldest IS NOT NULL THEN greatest(0, extract(epoch FROM clock_timestamp())
        - ('x' || translate(left(oldest::text, 13), '-', ''))::bit(48)::bigint / 1000.0)::float8 END AS oldest_seconds
FROM (
    SELECT t.name, t.broker, t.type, t.paused AS is_paused,
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

PROCESSES = """
SELECT kind, host, pid, broker, consumer_group, lane, breaker, note,
    extract(epoch FROM clock_timestamp() - beat_at)::float8 AS silent_seconds
FROM outbox_process ORDER BY kind, host, pid, broker, consumer_group
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
FROM outbox_delivery WHERE failed_at > clock_timestamp() - %(window)s
GROUP BY 1, 2, 3 ORDER BY deliveries DESC, 1, 2, 3 LIMIT %(limit)s
"""

STRAYS = "SELECT EXISTS (SELECT FROM outbox_message_default)"


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """
    Counts of a topic's messages that are not sent yet.

    Args:
        prepared: decided; their half messages are being committed, or await the check-back.
        oldest_seconds: age of the oldest one that is to be sent now; None where there is none.
        tries: the most that one of them has failed.
    """

    name: str
    broker: str
    type: str
    is_paused: bool
    waiting: int
    delayed: int
    released: int
    claimed: int
    prepared: int
    dead: int
    tries: int
    oldest_seconds: float | None

    @property
    def unsent(self) -> int:
        """How many are on their way, or wait for it."""
        return self.waiting + self.delayed + self.released + self.claimed + self.prepared


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process that said it lives, `silent_seconds` ago."""

    kind: str
    host: str
    pid: int
    broker: str
    consumer_group: str
    lane: int | None
    breaker: str
    note: str
    silent_seconds: float

    @property
    def is_silent(self) -> bool:
        """Whether it should have been heard of since."""
        return self.silent_seconds > SILENT_AFTER.total_seconds()


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
        misconfigured: topic -> what only a person can set right at its broker.
        parked: topic -> half messages that their broker has stopped asking about.
        risks: what the settings of brokers accept to lose, in words.
        concerns: what needs a person, in words.
    """

    database: str
    topics: list[TopicStatus]
    processes: list[ProcessStatus]
    failures: list[FailureStatus]
    gaps: list[GapStatus]
    misconfigured: dict[str, str]
    parked: dict[str, int]
    dead_letters: list[DeadLetterCount]
    risks: list[str] = field(default_factory=list)
    concerns: list[str] = field(default_factory=list)


def read_status(connection: Connection, alias: str) -> Status:
    """Read how a database stands."""
    brokers = _read_brokers(connection, alias)
    status = Status(
        alias,
        connection.cursor(row_factory=class_row(TopicStatus)).execute(TOPICS).fetchall(),
        connection.cursor(row_factory=class_row(ProcessStatus)).execute(PROCESSES).fetchall(),
        _read_failures(connection),
        connection.cursor(row_factory=class_row(GapStatus)).execute(GAPS).fetchall(),
        dict(connection.execute(MISCONFIGURED, [SendStatus.MISCONFIGURED]).fetchall()),
        {topic: count for broker in brokers for topic, count in broker.parked.items()},
        [letters for broker in brokers for letters in broker.dead_letters],
        list(_risks()),
    )
    status.concerns.extend(_concerns(status))
    if connection.execute(STRAYS).fetchone() == (True,):
        status.concerns.append("Messages lie in the DEFAULT partition: see that outbox upkeep runs each hour.")
    for group in differing_groups(connection):
        status.concerns.append(
            f"Group {group!r}: its processes have handled different types or tags for more than an hour. "
            "Deploy the same code to all."
        )
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


def age(seconds: float | None) -> str:
    """Put an age into words: 0.4 s, 12 s, 3 min, 5 h, 2 d; nothing for None."""
    if seconds is None:
        return ""
    for limit, size, unit in ((10, 0, "s"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds:.1f} {unit}" if size == 0 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _read_failures(connection: Connection) -> list[FailureStatus]:
    arguments = {"dead_letter": Outcome.DEAD_LETTER, "window": FAILURES_WITHIN, "limit": FAILURES_SHOWN}
    return connection.cursor(row_factory=class_row(FailureStatus)).execute(FAILURES, arguments).fetchall()


def _concerns(status: Status) -> list[str]:
    found = []
    heard = {process.broker for process in status.processes if process.kind == "relay" and not process.is_silent}
    for topic in status.topics:
        if topic.dead:
            found.append(f"{topic.name}: {topic.dead} dead. See outbox_retry; --skip lets them rest.")
        if topic.name not in conf.settings().topics and topic.unsent:
            found.append(
                f'{topic.name}: {topic.unsent} messages, and OUTBOX["TOPICS"] has no such topic, so no relay takes them. '
                "Put it back until they are sent."
            )
        if topic.tries >= ALARM_TRIES:
            found.append(f"{topic.name}: a message has failed {topic.tries} times.")
        if (topic.oldest_seconds or 0) > LATE_AFTER.total_seconds() and not topic.is_paused:
            absence = "" if topic.broker in heard else f", and no relay of broker {topic.broker!r} was heard of"
            found.append(f"{topic.name}: the oldest message has waited for {topic.oldest_seconds:.0f} s{absence}.")
    for name, reason in status.misconfigured.items():
        found.append(f"{name}: {reason}")
    for process in status.processes:
        if process.breaker != "closed" and not process.is_silent:
            what = f"Broker {process.broker!r} gives no answer to the relay {process.host}:{process.pid}"
            found.append(f"{what}: its breaker is {process.breaker}.")
    for failure in status.failures:
        if failure.dead_letters:
            found.append(
                f"{failure.topic}: group {failure.consumer_group!r} gave up {failure.dead_letters} messages in the last "
                f"hour. {failure.error}"
            )
    for gap in status.gaps:
        found.append(f"{gap.topic}: group {gap.consumer_group!r} misses {gap.numbers} messages in {gap.gaps} gaps.")
    for name, count in status.parked.items():
        found.append(f"{name}: {count} half messages are parked, their check-back never answered.")
    return found
