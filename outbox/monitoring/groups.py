"""How the project's consumer groups stand: what waits for them at their brokers, who consumes, and at what pace."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

from outbox import conf
from outbox.brokers.base import Broker, DeadLetterCount
from outbox.brokers.capabilities import DeadLetters
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import Group, groups
from outbox.database import Connection
from outbox.errors import BrokerCannotTell, ConfigurationError, UnknownTopic
from outbox.message import TopicType
from outbox.monitoring.processes import ProcessStatus

ANSWER_WITHIN_SECONDS = 3.0  # whoever asks for the status has a time-out, too
LETTERS_COUNTED = 100  # a broker on a server has to read them to count them
PACE_WITHIN = timedelta(minutes=5)
LOOKED_AT = 10_000
LEAST_SECONDS = 30.0  # a pace of less time says little

# What each group has handled of late, of the newest inbox rows, along the index of their times: how many in how many seconds, and
# how long ago the last one was.
PACES = """
WITH newest AS MATERIALIZED (
    SELECT consumer_group, topic, extract(epoch FROM clock_timestamp() - handled_at)::float8 AS seconds
    FROM outbox_inbox ORDER BY handled_at DESC LIMIT %(limit)s
)
SELECT consumer_group, topic, count(*) FILTER (WHERE seconds <= %(window)s),
    coalesce(max(seconds) FILTER (WHERE seconds <= %(window)s), 0), min(seconds)
FROM newest GROUP BY 1, 2
"""

# Messages whose last delivery failed, of the newest such deliveries, and that the group has not handled since: they wait for the
# next one.
RETRYING = """
SELECT consumer_group, topic, count(*), max(fingerprint) FROM (
    SELECT DISTINCT ON (consumer_group, message_id) consumer_group, topic, message_id, outcome, fingerprint FROM (
        SELECT id, consumer_group, topic, message_id, outcome, fingerprint
        FROM outbox_delivery WHERE acted_by = '' ORDER BY id DESC LIMIT 10000) newest
    ORDER BY consumer_group, message_id, id DESC
) d
WHERE outcome = %s AND NOT EXISTS (
    SELECT FROM outbox_inbox i WHERE i.message_id = d.message_id AND i.consumer_group = d.consumer_group)
GROUP BY 1, 2
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
        idle_seconds: since it handled one of these topics; None where that is too long ago to be looked for.
        waits_seconds: for how long a message was sent and none was handled since; None where that is not known.
        retrying: messages that wait for a delivery after one that failed.
        error: what one of these deliveries failed with.
        can_tell: whether the broker says what waits.
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
    idle_seconds: float | None = None
    waits_seconds: float | None = None
    retrying: int = 0
    error: str = ""
    can_tell: bool = True
    dead_letters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pace:
    """What a group handles of a topic: how many of late in how many seconds, and since when nothing."""

    handled: int
    seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class _Answer:
    waiting: dict[str, int] = field(default_factory=dict)
    letters: dict[str, int] = field(default_factory=dict)
    trouble: str = ""
    can_tell: bool = True


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
    paces = {(name, topic): _Pace(*row) for name, topic, *row in rows}
    retrying = {(name, topic): row for name, topic, *row in connection.execute(RETRYING, [Outcome.RETRY]).fetchall()}
    sends = connection.execute(SENDS).fetchall()
    counted = {(kept.consumer_group, kept.topic): kept.letters for kept in letters}
    found = []
    for one, alias in mine:
        topics = sorted(one.topics_of(alias))
        places = [(one.name, topic) for topic in topics]
        answer = answers[one.name, alias]
        own_paces = [paces[place] for place in places if place in paces]
        failing = [retrying[place] for place in places if place in retrying]
        idle = min((pace.idle_seconds for pace in own_paces), default=None)
        consumers = [process for process in processes if process.does == ("consumer", alias, one.name)]
        found.append(
            GroupStatus(
                one.name,
                alias,
                topics,
                answer.waiting,
                answer.trouble,
                consumers=sum(not process.is_silent for process in consumers),
                silent_seconds=min((process.silent_seconds for process in consumers), default=None),
                per_minute=_per_minute(own_paces),
                idle_seconds=idle,
                waits_seconds=_waits(sends, topics, idle),
                retrying=sum(number for number, _ in failing),
                error=next((error for _, error in failing), ""),
                can_tell=answer.can_tell,
                dead_letters=answer.letters or {place[1]: counted[place] for place in places if place in counted},
            )
        )
    return found


def _per_minute(paces: Sequence[_Pace]) -> float:
    """Return the pace since the first message of the last minutes: an idle time before it says nothing."""
    seconds = max((pace.seconds for pace in paces), default=0.0)
    return 60 * sum(pace.handled for pace in paces) / max(seconds, LEAST_SECONDS)


def _waits(sends: Sequence[tuple[str, float]], topics: Sequence[str], idle: float | None) -> float | None:
    """Return for how long the oldest message waits that was sent after the group handled its last one; None: not known."""
    at_once = [topic for topic in topics if conf.topic_settings(topic).type is not TopicType.DELAY]
    return max((age for topic, age in sends if topic in at_once and (idle is None or age < idle)), default=None)


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
    asked = {alias: _Asking(alias, names) for alias, names in by_alias.items()}
    deadline = time.monotonic() + ANSWER_WITHIN_SECONDS
    for asking in asked.values():
        asking.join(max(0.0, deadline - time.monotonic()))
    return {(name, alias): asked[alias].found.get(name, _NO_ANSWER) for alias, names in by_alias.items() for name in names}


_NO_ANSWER = _Answer(trouble=f"No answer within {ANSWER_WITHIN_SECONDS:.0f} s")


class _Asking(threading.Thread):
    """Asks a broker for its groups; what was answered is there however long the rest takes. The process ends without it."""

    def __init__(self, alias: str, names: Sequence[str]) -> None:
        super().__init__(name=f"outbox status of broker {alias!r}", daemon=True)
        self.found: dict[str, _Answer] = {}
        self._alias = alias
        self._names = names
        self.start()

    def run(self) -> None:
        try:
            with closing(conf.make_broker(self._alias)) as broker:
                for name in self._names:
                    self.found[name] = _ask(broker, name)
        except Exception as error:  # whatever it is, the other brokers are shown
            trouble = _Answer(trouble=str(error).strip() or repr(error))
            self.found |= {name: trouble for name in self._names if name not in self.found}


def _ask(broker: Broker, group: str) -> _Answer:
    letters: Counter[str] = Counter()
    try:
        if broker.supports_replay and not broker.is_stored_in_database:
            letters.update(one.topic for one in DeadLetters.of(broker).dead_letters(group, limit=LETTERS_COUNTED))
        return _Answer(dict(sorted(broker.backlog(group).items())), dict(letters))
    except BrokerCannotTell:
        return _Answer(can_tell=False)
