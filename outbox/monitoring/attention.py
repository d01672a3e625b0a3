"""
The list of what needs attention, for health, `outbox_status`, metrics and the overview.

Each entry has its cause and the next step. It disappears when its cause does.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

from psycopg import pq

from outbox import conf
from outbox.checks.celery import CONSUME as CONSUME_TASK
from outbox.checks.celery import SWEEP as SWEEP_TASK
from outbox.checks.celery import beat_entries, wakeup_app
from outbox.consuming.register import groups
from outbox.database import Connection, partitions
from outbox.database.heartbeats import BY_CELERY, STALE_AFTER, SWEEP, WAKEUP, Handling
from outbox.extensions import Extension, extensions
from outbox.findings import Finding, broker_away
from outbox.ids import first_id_at
from outbox.logs import line_of
from outbox.monitoring.blocking import read_blocking
from outbox.monitoring.groups import GroupStatus, TopicProgress
from outbox.monitoring.processes import ProcessStatus, is_replaced
from outbox.monitoring.status import Status, TopicStatus, read_status
from outbox.monitoring.text import age, count
from outbox.relay.maintenance import MAINTENANCE
from outbox.relay.splitter import ALERT_FAILURES

LATE_AFTER = timedelta(minutes=1)
PAUSED_FOR = timedelta(days=1)  # after which a pause may be forgotten
STUCK_AFTER = timedelta(minutes=5)  # where it is unknown since when a message waits
SLOW_AFTER = timedelta(minutes=10)  # of work in the backlog, at the pace of the last minutes


# Transactions keep dead rows of all tables, beside which deferred messages are found slowly.
LONG_TRANSACTIONS = """
SELECT pid, coalesce(application_name, ''), coalesce(usename, ''), coalesce(state, ''),
    extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
    AND xact_start < clock_timestamp() - %s ORDER BY xact_start
"""
LONG_TRANSACTION = timedelta(minutes=10)
BLOCKED_SECONDS = 5.0  # publishers, relays and consumers wait for each other for milliseconds

HAS_MESSAGES = "SELECT EXISTS (SELECT FROM outbox_message WHERE id >= %s AND id < %s AND topic_id <> 0)"


class AttentionKind(enum.StrEnum):
    """The ids of findings about the running system, beside those of extensions."""

    READ_ONLY = "outbox.read_only"
    NO_RELAY = "outbox.no_relay"
    NO_CHECKER = "outbox.no_checker"
    NO_CONSUMER = "outbox.no_consumer"
    NO_HANDLER = "outbox.no_handler"
    NO_WORKER = "outbox.no_worker"
    NO_BEAT = "outbox.no_beat"
    PROCESS_SILENT = "outbox.process_silent"
    PROCESS_FAILS = "outbox.process_fails"
    BROKER_AWAY = "outbox.broker_away"
    MISCONFIGURED = "outbox.misconfigured"
    UNKNOWN_TOPIC = "outbox.unknown_topic"
    LATE = "outbox.late"
    SEND_FAILS = "outbox.send_fails"
    REJECTED = "outbox.rejected"
    PARKED = "outbox.parked"
    PAUSED = "outbox.paused"
    GROUP_STUCK = "outbox.group_stuck"
    GROUP_SLOW = "outbox.group_slow"
    GROUP_FAILS = "outbox.group_fails"
    DEAD_LETTERS = "outbox.dead_letters"
    MOST_DEFERRED = "outbox.most_deferred"
    GIVEN_UP = "outbox.given_up"
    BLOCKED = "outbox.blocked"
    LONG_TRANSACTION = "outbox.long_transaction"
    GAP = "outbox.gap"
    IGNORED = "outbox.ignored"
    CODE_DIFFERS = "outbox.code_differs"
    NO_MAINTENANCE = "outbox.no_maintenance"
    EXTENSION_FAILS = "outbox.extension_fails"


# A database without writes has no heartbeats, and nothing is sent or handled.
FOLLOW_FROM_READ_ONLY = {
    AttentionKind.NO_RELAY,
    AttentionKind.NO_CHECKER,
    AttentionKind.NO_CONSUMER,
    AttentionKind.NO_WORKER,
    AttentionKind.NO_BEAT,
    AttentionKind.PROCESS_SILENT,
    AttentionKind.PROCESS_FAILS,
    AttentionKind.LATE,
    AttentionKind.GROUP_STUCK,
    AttentionKind.GROUP_SLOW,
}


def read_attention(connection: Connection, alias: str) -> list[Finding]:
    """Return what needs attention in a database; brokers on a server are asked, each for a few seconds at most."""
    return list(find_attention(connection, read_status(connection, alias)))


def find_attention(connection: Connection, status: Status) -> Iterator[Finding]:
    """Yield what needs attention and is not silenced; causes come before their effects, or instead of them."""
    for finding in _find_all(connection, status):
        if not finding.is_silenced() and not (status.is_read_only and finding.id in FOLLOW_FROM_READ_ONLY):
            yield finding


def _find_all(connection: Connection, status: Status) -> Iterator[Finding]:
    yield from _read_only(status)
    away = list(_brokers(status))
    yield from away
    yield from _relays(status)
    yield from _untaken(connection, status)
    yield from _beat(status)
    yield from _failing(status, {broker.obj for broker in away})
    yield from _silent(status)
    for topic in status.topics:
        yield from _topic(topic, status)
    for group in status.groups:
        yield from _group(group, status)
    yield from _deferred(status)
    for session in read_blocking(connection, seconds=BLOCKED_SECONDS):
        yield Finding(AttentionKind.BLOCKED, session.subject, session.cause, session.step)
    yield from _long_transactions(connection)
    yield from _records(status)
    yield from _maintenance(connection, status)
    for extension in extensions():
        yield from _of_extension(extension, connection, status)


def _read_only(status: Status) -> Iterator[Finding]:
    """Yield a database without writes. No process can send heartbeats to it, so all of them seem to be gone."""
    if status.is_read_only:
        cause = "It accepts no writes, so nothing is published, sent or handled, and processes send no heartbeats."
        step = "Set default_transaction_read_only = off, or see why the server was made read-only, such as a full disk."
        yield Finding(AttentionKind.READ_ONLY, f"database {status.database!r}", cause, step)


def _brokers(status: Status) -> Iterator[Finding]:
    """Yield each unavailable broker once, whether relays or consumer groups cannot reach it."""
    away: dict[str, tuple[str, str]] = {}
    for process in status.processes:
        if process.breaker != "closed" and not process.is_silent:
            error = next((topic.error for topic in status.topics if topic.broker == process.broker and topic.error), "")
            away[process.broker] = f"The relay {process.name} gets no answer: its breaker is {process.breaker}.", error
    for group in status.groups:
        if group.trouble:
            away[group.broker] = "It cannot be reached.", group.trouble
    for alias, (cause, error) in sorted(away.items()):
        yield broker_away(alias, cause, error)


def _relays(status: Status) -> Iterator[Finding]:
    for alias in sorted({topic.broker for topic in conf.settings().topics.values()}):
        relays = [one for one in status.processes if one.does == ("relay", alias, "")]
        if not any(not one.is_silent for one in relays):
            step = "Start outbox_relay, or check that Celery's worker and beat run. Messages wait meanwhile."
            yield Finding(AttentionKind.NO_RELAY, f"broker {alias!r}", _absence("relay", relays), step)
        checkers = [one for one in status.processes if one.does == ("checker", alias, "")]
        if checkers and not any(not one.is_silent for one in checkers):
            cause = f"{_absence('checker', checkers)} Half messages whose commit was lost stay hidden."
            yield Finding(AttentionKind.NO_CHECKER, f"broker {alias!r}", cause, "Start outbox_relay or outbox_checker.")


def _untaken(connection: Connection, status: Status) -> Iterator[Finding]:
    """
    Yield that no worker of Celery takes the wakeups that commits send.

    A worker that takes one runs a relay, whose heartbeat is kept for `STALE_AFTER`. So messages that are older than a minute and
    newer than that, without such a heartbeat, show that no worker takes them.
    """
    relays = [one for one in status.processes if one.kind in ("relay", WAKEUP)]
    is_long_running = any(one.note != BY_CELERY and not one.is_silent for one in relays)
    if not is_long_running or any(one.note == BY_CELERY for one in relays) or not any(wakeup_app()):
        return
    now = datetime.now(UTC)
    bounds = [first_id_at(now - STALE_AFTER + LATE_AFTER), first_id_at(now - LATE_AFTER)]
    if connection.execute(HAS_MESSAGES, bounds).fetchone() == (True,):
        queue = conf.settings().celery_queue
        cause = (
            f"Commits send wakeups to Celery's queue {queue!r}, and no worker takes them. Long-running relays send the messages."
        )
        step = 'Start a worker of Celery for this queue, or set OUTBOX["CELERY_WAKEUP"] = False. The doctor asks the workers.'
        yield Finding(AttentionKind.NO_WORKER, f"database {status.database!r}", cause, step)


def _beat(status: Status) -> Iterator[Finding]:
    """Yield that Celery's beat sends no sweep, where wakeups alone have a worker relay."""
    if not beat_entries(SWEEP_TASK):
        return
    for alias in sorted({topic.broker for topic in conf.settings().topics.values()}):
        relays = [one for one in status.processes if one.does == ("relay", alias, "") and not one.is_silent]
        sweeps = [one for one in status.processes if one.does == (SWEEP, alias, "")]
        known = [one for one in relays if one.note == BY_CELERY and one.age_seconds > one.beats_within]
        if not known or len([one for one in relays if one.note == BY_CELERY]) < len(relays):
            continue
        if not any(not one.is_silent for one in sweeps):
            since = f" for {age(min(one.silent_seconds for one in sweeps))}" if sweeps else ""
            cause = f"Celery's beat has sent no sweep{since}: messages whose wakeup was lost wait, and there is no maintenance."
            yield Finding(
                AttentionKind.NO_BEAT, f"broker {alias!r}", cause, "Start celery beat, or correct CELERY_BEAT_SCHEDULE."
            )


def _absence(kind: str, known: list[ProcessStatus]) -> str:
    if not known:
        return f"No {kind} is running."
    last = known[0]
    return f"No {kind} is running: the last heartbeat came {age(last.silent_seconds)} ago, from {last.name}."


def _failing(status: Status, away: Collection[str]) -> Iterator[Finding]:
    """Yield the loops of live processes whose last step failed, except for brokers that are away."""
    step = "Correct what the error names, such as a permission or a setting; it tries again by itself."
    named: set[tuple[str, str, str]] = set()  # the relays of a process share its other loops
    for process in status.processes:
        subject = f"group {process.consumer_group!r}" if process.consumer_group else f"broker {process.broker!r}"
        for loop, error in sorted(process.errors.items()):
            if process.is_silent or loop == MAINTENANCE or (loop != "relay" and f"broker {process.broker!r}" in away):
                continue
            shared = (process.name, loop, error)
            if shared in named:
                continue
            if loop not in (process.kind, "search for gaps"):
                named.add(shared)
            cause = f"The {loop} of process {process.name} fails."
            yield Finding(AttentionKind.PROCESS_FAILS, subject, cause, step, error=error)


def _silent(status: Status) -> Iterator[Finding]:
    """Yield processes that were killed or are frozen, if others do their work; if none does, another entry says so."""
    for process in status.processes:
        has_others = any(one.does == process.does and not one.is_silent for one in status.processes)
        is_reported = process.kind in ("relay", SWEEP, WAKEUP, "checker", "consumer") and not has_others
        if process.is_silent and not is_reported and not is_replaced(process, status.processes):
            cause = f"The {process.kind} {process.name} has sent no heartbeat for {age(process.silent_seconds)}."
            where = f"group {process.consumer_group!r}" if process.consumer_group else f"broker {process.broker!r}"
            yield Finding(AttentionKind.PROCESS_SILENT, where, cause, "It was killed or is frozen: start it again, or kill it.")


def _topic(topic: TopicStatus, status: Status) -> Iterator[Finding]:
    subject = f"topic {topic.name!r}"
    if topic.dead:
        cause = f"{count(topic.dead, 'message')} cannot be sent: rejected by the broker, or without a row."
        one_topic = f"outbox_replay --unsent --topic {topic.name}"
        step = f"See the reasons with {one_topic}; correct them, then add --all to send again, or --all --discard."
        yield Finding(AttentionKind.REJECTED, subject, cause, step)
    if topic.is_paused and (topic.paused_seconds or 0) > PAUSED_FOR.total_seconds():
        cause = f"It is {topic.pause}. {count(topic.unsent, 'message')} {'waits' if topic.unsent == 1 else 'wait'}."
        yield Finding(AttentionKind.PAUSED, subject, cause, f"End the pause with outbox_pause {topic.name} --resume.")
    if topic.name not in conf.settings().topics and topic.unsent:
        verb = "waits" if topic.unsent == 1 else "wait"
        cause = f'{count(topic.unsent, "message")} {verb}, but OUTBOX["TOPICS"] has no such topic: no relay sends there.'
        yield Finding(AttentionKind.UNKNOWN_TOPIC, subject, cause, "Restore the topic in settings until they are sent.")
        return
    if topic.name in status.misconfigured:
        step = "Correct what the error names, at the broker or in the settings. The relay sends again within 30 s."
        cause = "The topic is not configured correctly at the broker."
        yield Finding(AttentionKind.MISCONFIGURED, subject, cause, step, error=status.misconfigured[topic.name])
    elif topic.failures >= ALERT_FAILURES:
        step = "See the error on the message's page, and correct its cause. The relay retries automatically."
        yield Finding(AttentionKind.SEND_FAILS, subject, f"A message has failed {topic.failures} times.", step)
    if (topic.oldest_seconds or 0) > LATE_AFTER.total_seconds() and not topic.is_paused:
        cause = f"The oldest message has waited for {age(topic.oldest_seconds)}."
        step = f"See why with outbox_status --message {topic.oldest_id}."
        yield Finding(AttentionKind.LATE, subject, cause, step)


def _group(group: GroupStatus, status: Status) -> Iterator[Finding]:
    subject = f"group {group.consumer_group!r}"
    for topic, reason in sorted(group.refusals.items()):
        cause = f"The broker does not serve topic {topic!r} as configured; other topics go on."
        step = "Correct the settings or the queue: the doctor says how."
        yield Finding(AttentionKind.MISCONFIGURED, subject, cause, step, error=reason)
    for topic, progress in sorted(group.progress.items()):
        if progress.is_gone:
            cause = f"The broker has nothing of it in topic {topic!r} any more: its queue was deleted, with the messages in it."
            step = (
                "Start or restart its consumers, which declare it. The lost messages are a gap when later ones have arrived; "
                "outbox_replay --lost lists them."
            )
            yield Finding(AttentionKind.MISCONFIGURED, subject, cause, step)
    for topic, number in sorted(group.unhandled.items()):
        cause = f"{count(number, 'message')} of topic {topic!r} {'waits' if number == 1 else 'wait'}, and no handler takes them."
        step = (
            "Start the consumers of the release that has one, or restore it until they are handled. If it was removed for good, "
            f"drop them: outbox_forget {group.consumer_group} --topic {topic}."
        )
        yield Finding(AttentionKind.NO_HANDLER, subject, cause, step)
    for topic, number in sorted(group.given_up.items()):
        cause = f"The broker's server gave up {count(number, 'message')} of topic {topic!r}, and no consumer has fetched them."
        step = "Start its consumers, which store them as dead letters; where they run, discard dead letters of the topic."
        yield Finding(AttentionKind.GIVEN_UP, subject, cause, step)
    waiting = group.backlog
    wait = f"{count(waiting, 'message')} {'waits' if waiting == 1 else 'wait'}"
    consumers = _consumers(group, status)
    if consumers and all(one.error for one in consumers):  # another entry says why
        return
    if group.consumers:
        hanging = {one.handling.topic: one.handling for one in consumers if one.handling and one.hangs}
        within_limit = {one.handling.topic for one in consumers if one.handling and one.handling.limit_seconds and not one.hangs}
        stuck = [_hangs(subject, one) for _, one in sorted(hanging.items())]
        for topic, progress in sorted(group.progress.items()):
            stuck += _stuck(group, subject, topic, progress, is_explained=topic in {*hanging, *within_limit})
        yield from stuck or _slow(group, subject, waiting, wait)
    elif waiting or (group.has_code and not group.waiting and not group.trouble and _has_sent(group, status)):
        last = "none sends heartbeats" if group.silent_seconds is None else f"silent for {age(group.silent_seconds)}"
        backlog = "the group has never received" if group.can_tell else "the broker cannot tell the backlog"
        cause = f"No consumer is running ({last}), and {wait if waiting or group.waiting else backlog}."
        if not group.has_code:
            step = "Start the consumers of the release that has the group. If it was removed for good, outbox_forget drops them."
            yield Finding(AttentionKind.NO_CONSUMER, subject, cause, step)
            return
        by_beat = any(group.consumer_group in (entry.get("args") or ()) for entry in beat_entries(CONSUME_TASK))
        or_celery = ", or check that Celery's worker and beat run" if by_beat else ""
        yield Finding(
            AttentionKind.NO_CONSUMER, subject, cause, f"Start outbox_consume --group {group.consumer_group}{or_celery}."
        )


def _slow(group: GroupStatus, subject: str, waiting: int, wait: str) -> Iterator[Finding]:
    if group.per_minute and waiting > group.per_minute * SLOW_AFTER.total_seconds() / 60:
        takes = age(60 * waiting / group.per_minute)
        cause = f"{wait}; at {group.per_minute:.0f} a minute, as in the last minutes, that takes {takes}."
        yield Finding(AttentionKind.GROUP_SLOW, subject, cause, "Start more consumers, or set batch_size of a handler.")


def _consumers(group: GroupStatus, status: Status) -> list[ProcessStatus]:
    """Return the live consumers of a group."""
    return [one for one in status.processes if one.does == ("consumer", group.broker, group.consumer_group) and not one.is_silent]


def _hangs(subject: str, one: Handling) -> Finding:
    cause = f"{one.handler} has been handling message {one.message_id} of topic {one.topic!r} for {age(one.seconds)}."
    step = "Find out what it waits for, and set its time_limit. If that is its usual time, set a longer time_limit."
    return Finding(AttentionKind.GROUP_STUCK, subject, cause, step)


def _stuck(group: GroupStatus, subject: str, topic: str, progress: TopicProgress, *, is_explained: bool) -> Iterator[Finding]:
    """
    Yield why a group that has consumers makes no progress in a topic, or with some messages of it.

    Args:
        is_explained: an entry about the topic says what the others wait for.
    """
    waiting = group.waiting.get(topic, 0)
    deferred = group.deferred.get(topic)
    if deferred and (deferred.failing_seconds or 0) > LATE_AFTER.total_seconds():
        verb = "waits" if deferred.failing == 1 else "wait"
        cause = (
            f"{count(deferred.failing, 'message')} of topic {topic!r} failed and {verb} for a retry; the first one was deferred "
            f"{age(deferred.failing_seconds)} ago."
        )
        step = "Correct the handler. Failed messages are handled again automatically."
        yield Finding(AttentionKind.GROUP_FAILS, subject, cause, step, error=deferred.error)
        return
    late_seconds = deferred.late_seconds if deferred and not deferred.without_code else None
    if (late_seconds or 0) > LATE_AFTER.total_seconds() and not is_explained:
        cause = f"Deferred messages of topic {topic!r} have been due for {age(late_seconds)}."
        step = "Start more consumers, or look for a handler that hangs, and set its time_limit."
        yield Finding(AttentionKind.GROUP_STUCK, subject, cause, step)
        return
    late = progress.waits_seconds or 0.0
    # `waits_seconds` knows the newest sends only, and a process that has just started has handled none.
    idle = group.oldest_seconds if progress.idle_seconds is None else progress.idle_seconds
    if waiting > group.consumers and idle > STUCK_AFTER.total_seconds():
        late = max(late, idle)
    if late > LATE_AFTER.total_seconds() and waiting and not is_explained:
        verb = "waits" if waiting == 1 else "wait"
        cause = (
            f"{count(waiting, 'message')} of topic {topic!r} {verb}, and {count(group.consumers, 'consumer')} handled none "
            f"for {age(late)}."
        )
        step = "Look for a handler that hangs, and set its time_limit; or for an ordered key that waits for a failed message."
        yield Finding(AttentionKind.GROUP_STUCK, subject, cause, step)


def _has_sent(group: GroupStatus, status: Status) -> bool:
    """Return whether any message was sent to the topics of a group."""
    return any(topic.has_sent for topic in status.topics if topic.name in group.topics)


def _deferred(status: Status) -> Iterator[Finding]:
    """Yield what is wrong with the deferred messages of all groups, including groups that this process no longer has."""
    most = conf.settings().consumer.most_deferred
    for deferred in status.deferred:
        if deferred.reason:
            continue
        name, topic = deferred.consumer_group, deferred.topic
        subject = f"group {name!r}"
        if deferred.dead:
            cause = f"{count(deferred.dead, 'message')} of topic {topic!r} failed for good."
            step = f"Correct the cause, then run outbox_replay --group {name}, or discard them."
            yield Finding(AttentionKind.DEAD_LETTERS, subject, cause, step, error=deferred.error_of_dead)
        if deferred.without_code:
            cause = f"{count(deferred.without_code, 'deferred message')} of topic {topic!r}, and no live process has a handler."
            step = (
                "Start the consumers of the release that has one. If it was removed for good, discard them: outbox_replay "
                f"--group {name} --topic {topic} --discard --all."
            )
            yield Finding(AttentionKind.NO_HANDLER, subject, cause, step)
        if deferred.counted * 2 >= most:
            limit = "its consumers do not receive the topic until half of them are gone"
            limit = limit if deferred.counted >= most else f"at {most:,}, consumers do not receive the topic"
            cause = f"{count(deferred.counted, 'deferred message')} of topic {topic!r} wait; {limit}."
            step = 'Correct the handler, start more consumers, or raise OUTBOX["CONSUMER"]["MOST_DEFERRED"].'
            yield Finding(AttentionKind.MOST_DEFERRED, subject, cause, step, error=deferred.error)


def _long_transactions(connection: Connection) -> Iterator[Finding]:
    """Yield the oldest transaction, where it has been open for long."""
    row = connection.execute(LONG_TRANSACTIONS, [LONG_TRANSACTION]).fetchone()
    if row is not None:
        pid, application, user, state, seconds = row
        cause = f"A transaction of {user} ({application or 'no name'}, {state}) has been open for {age(seconds)}."
        step = f"It slows down consumers. End it, by SELECT pg_terminate_backend({pid}) if need be."
        yield Finding(AttentionKind.LONG_TRANSACTION, f"session {pid}", cause, step)


def _records(status: Status) -> Iterator[Finding]:
    for gap in status.gaps:
        cause = f"{count(gap.numbers, 'message')} of topic {gap.topic!r} did not arrive, in {count(gap.gaps, 'gap')}."
        step = f"See them with outbox_replay --lost --group {gap.consumer_group}; add --all to deliver them to the group again."
        yield Finding(AttentionKind.GAP, f"group {gap.consumer_group!r}", cause, step)
    for ignored in status.ignored:
        if any(one.using != status.database and ignored.topic in one.topics for one in groups().values()):
            continue  # another database may have the row of a group that has handled them
        cause = (
            f"{count(ignored.messages, 'message')} of type {ignored.type!r} came in the last hour, and no group handled "
            f"{'it' if ignored.messages == 1 else 'them'}: {', '.join(sorted(ignored.groups))} had no handler."
        )
        step = "Add or restore a handler of the type, deploy it, and deliver them with outbox_replay --ignored --all."
        yield Finding(AttentionKind.IGNORED, f"topic {ignored.topic!r}", cause, step)
    for topic, parked in status.parked.items():
        cause = f"{count(parked, 'half message')} without an end: the broker sends no more check-backs."
        yield Finding(AttentionKind.PARKED, f"topic {topic!r}", cause, "Check back about each in the admin, under half messages.")
    for group in status.differing_groups:
        cause = "Its processes have subscribed to different types or tags for more than an hour."
        yield Finding(AttentionKind.CODE_DIFFERS, f"group {group!r}", cause, "Deploy the same code to all of them.")


def _maintenance(connection: Connection, status: Status) -> Iterator[Finding]:
    """Yield what the maintenance has left undone, and its error if a relay knows one."""
    errors = {one.errors[MAINTENANCE] for one in status.processes if MAINTENANCE in one.errors and not one.is_silent}
    causes = ["The maintenance fails."] if errors else []
    if status.lacks_tomorrow:
        causes.append("The partition for tomorrow does not exist.")
    if status.overdue:
        days = count(len(status.overdue), "day")
        causes.append(f"Messages of {days} are kept past their retention, from {status.overdue[0]} on.")
    if causes:
        run = f"run outbox_maintenance as {partitions.rights(connection).owner!r}, the owner of the tables"
        step = f"Check that outbox_relay runs, or beat's entry outbox-maintenance; or {run}, which prints the error."
        subject, error = f"database {status.database!r}", " ".join(sorted(errors))
        yield Finding(AttentionKind.NO_MAINTENANCE, subject, " ".join(causes), step, error=error)
    if status.has_strays:
        cause = "Messages are in the DEFAULT partition, because the partition of their day does not exist."
        step = "Check that outbox_relay runs, or beat's entry outbox-maintenance."
        yield Finding(AttentionKind.NO_MAINTENANCE, f"database {status.database!r}", cause, step)


def _of_extension(extension: Extension, connection: Connection, status: Status) -> list[Finding]:
    """Return what an extension finds; where it fails, that, and nothing else of the list is lost."""
    is_free = connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE
    try:
        with nullcontext() if is_free else connection.transaction():  # a savepoint: the caller's transaction goes on
            return list(extension.find_attention(connection, status.database))
    except Exception as error:
        if connection.closed:
            raise  # the database is away
        subject = f"extension {type(extension).__qualname__} in database {status.database!r}"
        cause = "It fails when it is asked what needs attention."
        step = "Correct what its error names; where its tables are missing, run manage.py migrate."
        return [Finding(AttentionKind.EXTENSION_FAILS, subject, cause, step, error=line_of(error))]
