"""The status of consumer groups: their backlog at brokers, their consumers, and their pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace
from psycopg.rows import namedtuple_row

from outbox import conf
from outbox.brokers.capabilities import Receives, StoredInDatabase
from outbox.consuming.register import Group, groups
from outbox.consuming.subscriptions import groups_without_code
from outbox.database import Connection
from outbox.errors import BrokerCannotTell, ConfigurationError, UnknownTopic
from outbox.message import TopicType
from outbox.models import State
from outbox.monitoring.deferred import DeferredCount
from outbox.monitoring.processes import ProcessStatus, is_replaced

ANSWER_WITHIN_SECONDS = 3.0  # shorter than the timeouts of probes and scrapes
PACE_WITHIN = timedelta(minutes=5)
ROW_LIMIT = 10_000  # the newest inbox rows, from which paces are computed
STOPPED_FOR_SECONDS = 600.0  # after a shorter idle time, a group's consumers may just be restarting during a deployment
KNOWN_AFTER_SECONDS = 30.0  # a server may take this long to report a group whose first consumer has started
MIN_SECONDS = 30.0  # a pace over less time is not reliable

# The pace of each group in each topic, from the newest inbox rows, read along the index of their times. `ended` is the number of
# messages that the group has handled or ignored within the window, `ignored` the number of those that it has ignored, and
# `seconds` the age of the first of them. `idle_seconds` is the age of the group's last row, which may be older than the window.
PACES = """
WITH newest AS MATERIALIZED (
    SELECT consumer_group, topic, delivery_count, extract(epoch FROM clock_timestamp() - handled_at)::float8 AS seconds
    FROM outbox_inbox ORDER BY handled_at DESC LIMIT %(limit)s
)
SELECT consumer_group, topic, count(*) FILTER (WHERE seconds <= %(window)s) AS ended,
    count(*) FILTER (WHERE seconds <= %(window)s AND delivery_count = 0) AS ignored,
    coalesce(max(seconds) FILTER (WHERE seconds <= %(window)s), 0) AS seconds, min(seconds) AS idle_seconds
FROM newest GROUP BY 1, 2
"""

# The topics of the newest SENT batches, and how long ago each was sent.
SENDS = f"""
SELECT t.name, extract(epoch FROM clock_timestamp() - b.sent_at)::float8
FROM (SELECT topic_id, sent_at FROM outbox_batch WHERE state = {State.SENT} ORDER BY id DESC LIMIT 1000) b
JOIN outbox_topic t ON t.id = b.topic_id
"""


class TopicProgress(msgspec.Struct, frozen=True):
    """
    The progress of a consumer group in one topic.

    Args:
        idle_seconds: seconds since the group handled a message of the topic; None if that is too long ago to be found.
        waits_seconds: seconds since the first send after the group's last handled message; None if no such send is known.
        per_minute, ignored_per_minute: messages of the topic that the group has handled, and that it has ignored without a
            handler, per minute in the last minutes.
        is_gone: the group has handled messages of the topic, but the broker no longer knows the group there.
    """

    idle_seconds: float | None = None
    waits_seconds: float | None = None
    is_gone: bool = False
    per_minute: float = 0.0
    ignored_per_minute: float = 0.0


class GroupStatus(msgspec.Struct, frozen=True):
    """
    The status of a consumer group at one broker.

    Args:
        waiting: topic -> number of messages that wait for the group at the broker, including those being handled. Empty if the
            group has never received.
        progress: topic -> the progress of the group.
        trouble: why the broker cannot be reached; "" if it can.
        consumers: number of processes with a recent heartbeat.
        silent_seconds: seconds since the newest heartbeat; None if there is none.
        oldest_seconds: the age of the consumer that started first.
        per_minute: messages that the group has handled or ignored per minute in the last minutes.
        can_tell: whether the broker can tell the backlog.
        refusals: topic -> why its consumers cannot receive from it as configured.
        deferred: topic -> its deferred messages, without topics that have none.
        given_up: topic -> number of messages that the broker moved to its dead-letter queue and no consumer has fetched.
        unhandled: topic -> number of waiting messages; only topics that neither this process nor a recent consumer handles.
        has_code: whether this process has a handler of the group.
    """

    consumer_group: str
    broker: str
    topics: list[str]
    waiting: dict[str, int] = msgspec.field(default_factory=dict)
    progress: dict[str, TopicProgress] = msgspec.field(default_factory=dict)
    trouble: str = ""
    consumers: int = 0
    silent_seconds: float | None = None
    oldest_seconds: float = 0.0
    per_minute: float = 0.0
    can_tell: bool = True
    refusals: dict[str, str] = msgspec.field(default_factory=dict)
    deferred: dict[str, DeferredCount] = msgspec.field(default_factory=dict)
    given_up: dict[str, int] = msgspec.field(default_factory=dict)
    unhandled: dict[str, int] = msgspec.field(default_factory=dict)
    has_code: bool = True

    @property
    def backlog(self) -> int:
        """The number of messages that wait, at the broker or deferred, in topics for which the group has handlers."""
        return (
            sum(self.waiting.values()) - sum(self.unhandled.values()) + sum(backlog.waiting for backlog in self.deferred.values())
        )


class _Facts(msgspec.Struct, frozen=True):
    """
    What the database knows about all groups.

    Args:
        paces: (group, topic) -> row of `PACES`.
        deferred: (group, topic) -> count of its deferred messages.
        sends: for each of the newest sends, its topic, and the seconds since then.
    """

    paces: dict[tuple[str, str], Any]
    deferred: dict[tuple[str, str], DeferredCount]
    sends: Sequence[tuple[str, float]]


def read_groups(
    connection: Connection,
    using: str,
    processes: Sequence[ProcessStatus],
    stored: Mapping[str, Collection[str]],
    deferred: Iterable[DeferredCount],
) -> list[GroupStatus]:
    """
    Return the status of the consumer groups whose inbox is in a database.

    Groups without code in this process are among them while messages wait for them, at the broker or deferred.

    Args:
        stored: alias of a broker that is stored in that database -> groups for which it keeps messages; of brokers that share
            tables, only the first.
    """
    wanted = [(group, alias) for group in groups().values() if group.using == using for alias in _brokers_of(group)]
    wanted += [(Group(name), alias) for name, alias in _without_code(connection, stored)]
    if not wanted:
        return []
    answers = _ask_brokers({(group.name, alias) for group, alias in wanted})
    facts = _read_facts(connection, deferred)
    statuses = (_complete(answers[group.name, alias], group, facts, processes) for group, alias in wanted)
    return [status for status in statuses if status.has_code or status.topics]


def _read_facts(connection: Connection, deferred: Iterable[DeferredCount]) -> _Facts:
    cursor = connection.cursor(row_factory=namedtuple_row)
    rows: list[Any] = cursor.execute(PACES, {"window": PACE_WITHIN.total_seconds(), "limit": ROW_LIMIT}).fetchall()
    return _Facts(
        {(row.consumer_group, row.topic): row for row in rows},
        {(count.consumer_group, count.topic): count for count in deferred if not count.reason},
        connection.execute(SENDS).fetchall(),
    )


def _complete(answer: GroupStatus, group: Group, facts: _Facts, processes: Sequence[ProcessStatus]) -> GroupStatus:
    """Return the status of a group: a broker's answer, completed with the facts from the database."""
    alias = answer.broker
    served = {topic for topic, settings in conf.settings().topics.items() if settings.broker == alias}
    deferred = {topic: count for (name, topic), count in facts.deferred.items() if name == group.name and topic in served}
    topics = sorted(group.topics_of(alias)) if group.consumers else _topics_of(answer, deferred)
    of_group = [process for process in processes if (process.kind, process.consumer_group) == ("consumer", group.name)]
    recent = [process for process in of_group if not (process.is_silent and is_replaced(process, processes))]
    consumers = [process for process in of_group if process.broker == alias]
    live = [process for process in consumers if not process.is_silent]
    return replace(
        answer,
        topics=topics,
        progress={topic: _progress(topic, facts, answer, live) for topic in topics},
        consumers=len(live),
        silent_seconds=min((process.silent_seconds for process in consumers), default=None),
        oldest_seconds=max((process.age_seconds for process in live), default=0.0),
        per_minute=_per_minute([facts.paces[group.name, topic] for topic in topics if (group.name, topic) in facts.paces]),
        refusals={topic: reason for process in live for topic, reason in process.refusals.items()},
        deferred=deferred,
        unhandled=_unhandled(group, answer, facts, recent),
        has_code=bool(group.consumers),
    )


def _without_code(connection: Connection, stored: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    """Yield the groups without code that the database knows, each with the brokers that may keep messages for it."""
    known = set(groups_without_code(connection))
    for alias in sorted({topic.broker for topic in conf.settings().topics.values()}):
        with suppress(ConfigurationError):  # its client is not installed, which check E003 reports
            kind = conf.broker_class(alias)
            shares_tables = issubclass(kind, StoredInDatabase) and alias not in stored  # with another broker, which is asked
            if not issubclass(kind, Receives) or shares_tables:
                continue
            of_broker = {group for group in stored.get(alias, ()) if group not in groups()}
            yield from ((name, alias) for name in sorted(known | of_broker))


def _topics_of(answer: GroupStatus, deferred: Iterable[str]) -> list[str]:
    """Return the topics in which messages wait for a group without code."""
    return sorted({*(topic for topic, waiting in answer.waiting.items() if waiting), *deferred})


def _unhandled(group: Group, answer: GroupStatus, facts: _Facts, recent: Sequence[ProcessStatus]) -> dict[str, int]:
    """
    Return the number of waiting messages of each topic that neither this process nor a recent consumer handles.

    Args:
        recent: the group's consumers at any broker that have sent a heartbeat and not deregistered, without replaced ones.
    """
    handled_topics = {*group.topics, *(topic for process in recent for topic in process.topics)}
    if not any(not process.is_silent for process in recent):  # then also topics that the group handled recently
        paces = [(topic, pace) for (name, topic), pace in facts.paces.items() if name == group.name]
        handled_topics |= {topic for topic, pace in paces if pace.idle_seconds < STOPPED_FOR_SECONDS}
    return {topic: waiting for topic, waiting in answer.waiting.items() if waiting and topic not in handled_topics}


def _per_minute(paces: Sequence[Any]) -> float:
    """Return the pace since the first message handled in the last minutes; idle time before it is not counted."""
    seconds: float = max([MIN_SECONDS, *(pace.seconds for pace in paces)])
    ended: int = sum(pace.ended for pace in paces)
    return 60 * ended / seconds


def _progress(topic: str, facts: _Facts, answer: GroupStatus, live: Sequence[ProcessStatus]) -> TopicProgress:
    pace = facts.paces.get((answer.consumer_group, topic))
    idle = pace.idle_seconds if pace else None
    is_known = any(topic in process.topics and process.age_seconds > KNOWN_AFTER_SECONDS for process in live)
    is_gone = is_known and pace is not None and topic not in answer.waiting and answer.can_tell and not answer.trouble
    total_per_minute = _per_minute([pace] if pace else [])
    ignored_per_minute = total_per_minute * pace.ignored / pace.ended if pace and pace.ended else 0.0
    waits_seconds = None
    if conf.topic_settings(topic).type is not TopicType.DELAY:
        waits_seconds = max((age for name, age in facts.sends if name == topic and (idle is None or age < idle)), default=None)
    return TopicProgress(idle, waits_seconds, is_gone, total_per_minute - ignored_per_minute, ignored_per_minute)


def _brokers_of(group: Group) -> list[str]:
    """Return the brokers of a group. If a system check reports an error about its topics or brokers, return none."""
    try:
        return [alias for alias in sorted(group.brokers) if group.topics_of(alias) and conf.broker_class(alias)]
    except (ConfigurationError, UnknownTopic):  # also if a broker's client is not installed, as in a process that only publishes
        return []


def _ask_brokers(wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], GroupStatus]:
    """
    Ask all brokers for their groups, each in a thread.

    If a broker does not answer in time, the answer says so.
    """
    by_alias: dict[str, list[str]] = {}
    for group, alias in sorted(wanted):
        by_alias.setdefault(alias, []).append(group)
    requests = {alias: _Request(alias, names) for alias, names in by_alias.items()}
    deadline = time.monotonic() + ANSWER_WITHIN_SECONDS
    for request in requests.values():
        request.join(max(0.0, deadline - time.monotonic()))
    return {(name, alias): requests[alias].answers[name] for alias, names in by_alias.items() for name in names}


class _Request(threading.Thread):
    """
    A thread that asks a broker about groups, one after the other. It does not keep the process from exiting.

    While it runs, `answers` may be read: until a group's answer has come, its entry says that there was none in time.
    """

    def __init__(self, alias: str, names: Sequence[str]) -> None:
        super().__init__(name=f"outbox status of broker {alias!r}", daemon=True)
        trouble = f"No answer within {ANSWER_WITHIN_SECONDS:.0f} s"
        self.answers = {name: GroupStatus(name, alias, [], trouble=trouble) for name in names}
        self._alias = alias
        self.start()

    def run(self) -> None:
        remaining = list(self.answers)
        try:
            with closing(Receives.of(conf.make_broker(self._alias))) as broker:
                while remaining:
                    self.answers[remaining[0]] = _ask(broker, remaining[0], self._alias)
                    del remaining[0]
        except Exception as error:  # any error, since it is shown beside the answers of other brokers
            trouble = str(error).strip() or repr(error)
            self.answers |= {name: GroupStatus(name, self._alias, [], trouble=trouble) for name in remaining}


def _ask(broker: Receives, group: str, alias: str) -> GroupStatus:
    try:
        waiting, dead_letters = broker.backlog(group)
    except BrokerCannotTell:
        return GroupStatus(group, alias, [], can_tell=False)
    return GroupStatus(group, alias, [], dict(sorted(waiting.items())), given_up=dict(dead_letters))
