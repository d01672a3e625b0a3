"""How the project's consumer groups stand: what waits for them at their brokers, who consumes, and at what pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

from outbox import conf
from outbox.brokers.base import DeadLetterCount
from outbox.brokers.capabilities import DeadLetters
from outbox.consuming.register import Group, groups
from outbox.database import Connection
from outbox.errors import BrokerUnavailable, ConfigurationError, UnknownTopic
from outbox.message import TopicType
from outbox.monitoring.processes import ProcessStatus

ANSWER_WITHIN_SECONDS = 3.0  # whoever asks for the status has a time-out, too
LETTERS_COUNTED = 100  # a broker on a server has to read them to count them
PACE_WITHIN = timedelta(minutes=5)
LOOKED_AT = 10_000

# What each group has handled of late, of the newest inbox rows, along the index of their times; in how many seconds; and how long
# ago the last one was.
PACES = """
WITH newest AS MATERIALIZED (
    SELECT consumer_group, extract(epoch FROM clock_timestamp() - handled_at)::float8 AS seconds
    FROM outbox_inbox ORDER BY handled_at DESC LIMIT %(limit)s
), span AS (
    SELECT CASE WHEN count(*) < %(limit)s THEN %(window)s ELSE least(%(window)s, max(seconds)) END AS seconds FROM newest
)
SELECT n.consumer_group, count(*) FILTER (WHERE n.seconds <= s.seconds), s.seconds, min(n.seconds)
FROM newest n, span s GROUP BY n.consumer_group, s.seconds
"""

# The newest batches that are SENT, and how long ago.
SENDS = """
SELECT t.name, extract(epoch FROM clock_timestamp() - b.sent_at)::float8
FROM (SELECT topic_id, sent_at FROM outbox_batch WHERE state = 3 ORDER BY id DESC LIMIT 1000) b
JOIN outbox_topic t ON t.id = b.topic_id
"""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """
    How a consumer group stands at one broker.

    Args:
        waiting: topic -> messages that wait for the group, those being handled included. Empty where it has never received.
        trouble: why the broker cannot be asked.
        consumers: processes that have sent a heartbeat of late.
        silent_seconds: since the newest heartbeat; None where none is known.
        per_minute: messages of all brokers that the group has handled, in the last minutes.
        waits_seconds: for how long a message was sent and none was handled since; None where that is not known.
        dead_letters: topic -> messages that the group gave up; of a broker on a server no more than 100 are counted.
    """

    consumer_group: str
    broker: str
    topics: list[str]
    waiting: dict[str, int] = field(default_factory=dict)
    trouble: str = ""
    consumers: int = 0
    silent_seconds: float | None = None
    per_minute: float = 0.0
    waits_seconds: float | None = None
    dead_letters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pace:
    """What a group handles a minute, and since when it has handled nothing."""

    per_minute: float = 0.0
    idle_seconds: float = float("inf")


@dataclass(frozen=True, slots=True)
class _Answer:
    waiting: dict[str, int] = field(default_factory=dict)
    letters: dict[str, int] = field(default_factory=dict)
    trouble: str = ""


def read_groups(
    connection: Connection, using: str, processes: Sequence[ProcessStatus], letters: Sequence[DeadLetterCount]
) -> list[GroupStatus]:
    """
    Read how the groups stand that keep their inbox in a database.

    Args:
        letters: dead letters that brokers keep in that database, which are not asked for again.
    """
    mine = [(one, alias) for one in groups().values() if one.using == using for alias in _brokers_of(one)]
    if not mine:
        return []
    answers = _ask_brokers({(one.name, alias) for one, alias in mine})
    rows = connection.execute(PACES, {"window": PACE_WITHIN.total_seconds(), "limit": LOOKED_AT}).fetchall()
    paces = {name: _Pace(60 * handled / seconds if seconds else 0.0, idle) for name, handled, seconds, idle in rows}
    sends = connection.execute(SENDS).fetchall()
    found = []
    for one, alias in mine:
        topics = sorted(one.topics_of(alias))
        at_once = [topic for topic in topics if conf.topic_settings(topic).type is not TopicType.DELAY]
        answer, pace = answers[one.name, alias], paces.get(one.name, _Pace())
        consumers = [process for process in processes if process.does == ("consumer", alias, one.name)]
        counted = {kept.topic: kept.letters for kept in letters if kept.consumer_group == one.name and kept.topic in topics}
        found.append(
            GroupStatus(
                one.name,
                alias,
                topics,
                answer.waiting,
                answer.trouble,
                consumers=sum(not process.is_silent for process in consumers),
                silent_seconds=min((process.silent_seconds for process in consumers), default=None),
                per_minute=pace.per_minute,
                waits_seconds=max((age for topic, age in sends if topic in at_once and age < pace.idle_seconds), default=None),
                dead_letters=answer.letters or counted,
            )
        )
    return found


def _brokers_of(group: Group) -> list[str]:
    """Return the brokers of a group; none where its topics contradict the settings, which a system check reports."""
    try:
        return [alias for alias in sorted(group.brokers) if group.topics_of(alias) and conf.broker_class(alias)]
    except (ConfigurationError, UnknownTopic):  # or a client is not installed here, as in a process that only publishes
        return []


def _ask_brokers(wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], _Answer]:
    """Ask each broker for its groups, all brokers at once. One that does not answer in time is reported so."""
    by_alias: dict[str, list[str]] = {}
    for group, alias in sorted(wanted):
        by_alias.setdefault(alias, []).append(group)
    pool = ThreadPoolExecutor(max_workers=len(by_alias), thread_name_prefix="outbox status")
    asked = {alias: pool.submit(_ask, alias, names) for alias, names in by_alias.items()}
    wait(asked.values(), timeout=ANSWER_WITHIN_SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    found = {}
    for alias, future in asked.items():
        answers = _answers(future)
        found.update({(name, alias): answers.get(name, _Answer(trouble=_NO_ANSWER)) for name in by_alias[alias]})
    return found


_NO_ANSWER = f"no answer within {ANSWER_WITHIN_SECONDS:.0f} s"


def _answers(future: Future[dict[str, _Answer]]) -> dict[str, _Answer]:
    return future.result() if future.done() else {}


def _ask(alias: str, names: Sequence[str]) -> dict[str, _Answer]:
    try:
        with closing(conf.make_broker(alias)) as broker:
            found = {}
            for name in names:
                letters: Counter[str] = Counter()
                if broker.supports_replay and not broker.is_stored_in_database:
                    letters.update(one.topic for one in DeadLetters.of(broker).dead_letters(name, limit=LETTERS_COUNTED))
                found[name] = _Answer(dict(sorted(broker.backlog(name).items())), dict(letters))
            return found
    except BrokerUnavailable as error:
        return dict.fromkeys(names, _Answer(trouble=str(error).strip()))
