"""
Findings about the running system, for health, `outbox_status`, metrics, the admin's overview and the doctor.

Each finding names its cause and the next step. It disappears when its cause does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import psycopg
from psycopg.pq import TransactionStatus

from outbox import conf
from outbox.checks.celery import CONSUME as CONSUME_TASK
from outbox.checks.celery import SWEEP as SWEEP_TASK
from outbox.checks.celery import beat_entries, wakeup_app
from outbox.consuming.register import groups
from outbox.database import Connection, partitions
from outbox.database.heartbeats import BY_CELERY, STALE_AFTER, SWEEP, WAKEUP
from outbox.findings import Finding, Needs, rule, rules, unreachable_broker
from outbox.ids import first_id_at
from outbox.monitoring.blocking import read_blocking
from outbox.monitoring.groups import GroupStatus, TopicProgress
from outbox.monitoring.processes import ProcessStatus, is_replaced
from outbox.monitoring.status import Status, read_status
from outbox.monitoring.text import age, count, of_pause, of_unsent, wait
from outbox.relay.maintenance import MAINTENANCE
from outbox.relay.splitter import ALERT_FAILURES

LATE_SECONDS = 60.0  # a message that has waited for longer is late
PAUSED_SECONDS = 86_400.0  # a longer pause may have been forgotten
STUCK_SECONDS = 300.0  # a group that was idle for longer is stuck, if it is unknown for how long messages have waited
SLOW_MINUTES = 10  # a group is slow if its backlog takes longer at the pace of the last minutes

# If a database is read-only, processes cannot store heartbeats, and nothing is sent or handled. So these findings are left out
# then: they are consequences.
FOLLOW_FROM_READ_ONLY = {
    "outbox.no_relay",
    "outbox.no_checker",
    "outbox.no_consumer",
    "outbox.no_worker",
    "outbox.no_beat",
    "outbox.process_silent",
    "outbox.process_fails",
    "outbox.late",
    "outbox.group_stuck",
    "outbox.group_slow",
}


def read_attention(connection: Connection, alias: str) -> list[Finding]:
    """Return the findings about a database; brokers on a server are asked, each for a few seconds at most."""
    return list(find_attention(connection, read_status(connection, alias)))


def find_attention(connection: Connection, status: Status) -> Iterator[Finding]:
    """Yield the findings that are not silenced; causes come before their effects, or instead of them."""
    is_in_autocommit = connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE
    for rule_ in rules(Needs.STATUS, Needs.DATABASE):
        try:
            if rule_.needs is Needs.STATUS:
                findings = list(rule_.find(status))
            else:
                # A savepoint keeps an error of the rule from aborting a transaction of the caller.
                with nullcontext() if is_in_autocommit else connection.transaction():
                    findings = list(rule_.find(status, connection))
        except Exception as error:
            if connection.closed or isinstance(error, psycopg.errors.LockNotAvailable):
                raise  # the database is unreachable, or a session locks its tables; the caller reports both
            findings = [rule_.failed(error)]
        for finding in findings:
            if not finding.is_silenced() and not (status.is_read_only and finding.id in FOLLOW_FROM_READ_ONLY):
                yield finding


@rule("outbox.read_only", needs=Needs.STATUS)
def _read_only(status: Status) -> Iterator[Finding]:
    """
    read_only: The database accepts no writes.
        Set `default_transaction_read_only = off`, or find out why the server is read-only, such as a full disk.
    """
    if status.is_read_only:
        cause = "It accepts no writes, so nothing is published, sent or handled, and processes send no heartbeats."
        step = "Set default_transaction_read_only = off, or find out why the server is read-only, such as a full disk."
        yield Finding("outbox.read_only", f"database {status.database!r}", cause, step)


@rule("outbox.broker_away", needs=Needs.STATUS)
def _unreachable_brokers(status: Status) -> Iterator[Finding]:
    """
    broker_away: A relay cannot send to a broker, or the broker cannot be reached.
        Start the broker, or correct its OPTIONS. Messages wait; none is lost.
    """
    unreachable: dict[str, tuple[str, str]] = {}
    for process in status.processes:
        if process.breaker != "closed" and not process.is_silent:
            error = next((topic.error for topic in status.topics if topic.broker == process.broker and topic.error), "")
            unreachable[process.broker] = no_answer(process), error
    for group in status.groups:
        if group.trouble:
            unreachable[group.broker] = "It cannot be reached.", group.trouble
    for alias, (cause, error) in sorted(unreachable.items()):
        yield unreachable_broker(alias, cause, error)


def no_answer(relay: ProcessStatus) -> str:
    """Return the sentence about a relay whose sends fail."""
    return f"The relay {relay.name} gets no answer: its circuit breaker is {relay.breaker}."


@rule("outbox.no_relay", "outbox.no_checker", needs=Needs.STATUS)
def _missing_relays(status: Status) -> Iterator[Finding]:
    """
    no_relay: No relay of a broker has sent a heartbeat for 8 s.
        Start `outbox_relay`, or check that Celery's worker and beat run.
    no_checker: No process that answers the broker's check-backs is running any more.
        Start `outbox_relay` or `outbox_checker`.
    """
    for alias in _aliases():
        relays, checkers = status.processes_of("relay", alias), status.processes_of("checker", alias)
        if all(relay.is_silent for relay in relays):
            yield no_relay(alias, relays)
        if checkers and all(checker.is_silent for checker in checkers):
            seconds, cause = _absence("checker", checkers)
            cause += " Half messages whose commit was lost stay hidden."
            step = "Start outbox_relay or outbox_checker."
            yield Finding("outbox.no_checker", f"broker {alias!r}", cause, step, seconds=seconds)


def _aliases() -> list[str]:
    return sorted({topic.broker for topic in conf.settings().topics.values()})


def no_relay(alias: str, relays: list[ProcessStatus]) -> Finding:
    """Return the finding that no relay of a broker is running; `relays` are its silent ones, the newest heartbeat first."""
    step = "Start outbox_relay, or check that Celery's worker and beat run. Messages wait meanwhile."
    seconds, cause = _absence("relay", relays)
    return Finding("outbox.no_relay", f"broker {alias!r}", cause, step, seconds=seconds)


def _absence(kind: str, known: list[ProcessStatus]) -> tuple[float | None, str]:
    """Return the seconds since the newest heartbeat, None if none is known, and a sentence that no process is running."""
    if not known:
        return None, f"No {kind} is running."
    seconds = known[0].silent_seconds
    return seconds, f"No {kind} is running: the last heartbeat came {age(seconds)} ago, from {known[0].name}."


HAS_MESSAGES = "SELECT EXISTS (SELECT FROM outbox_message WHERE id >= %s AND id < %s AND topic_id <> 0)"


@rule("outbox.no_worker", needs=Needs.DATABASE)
def _untaken_wakeups(status: Status, connection: Connection) -> Iterator[Finding]:
    """
    no_worker: Commits send wakeups to Celery, and no worker takes them; long-running relays send the messages.
        Start a worker with `--queues outbox`, or set `CELERY_WAKEUP` to `False`. The doctor asks the workers themselves.
    """
    # A worker that takes a wakeup runs a relay, and the row of its heartbeat is kept for STALE_AFTER. If there is no such row,
    # although messages were published within STALE_AFTER and more than a minute ago, then no worker takes wakeups.
    relays = [process for process in status.processes if process.kind in ("relay", WAKEUP)]
    has_long_running = any(relay.note != BY_CELERY and not relay.is_silent for relay in relays)
    if not has_long_running or any(relay.note == BY_CELERY for relay in relays) or not any(wakeup_app()):
        return
    now = datetime.now(UTC)
    grace = timedelta(seconds=LATE_SECONDS)
    if connection.execute(HAS_MESSAGES, [first_id_at(now - STALE_AFTER + grace), first_id_at(now - grace)]).fetchone() == (True,):
        queue = conf.settings().celery_queue
        cause = "Commits send wakeups to it, and no worker of Celery takes them. Long-running relays send the messages."
        step = 'Start a worker of Celery for this queue, or set OUTBOX["CELERY_WAKEUP"] = False. The doctor asks the workers.'
        yield Finding("outbox.no_worker", f"queue {queue!r}", cause, step)


@rule("outbox.no_beat", needs=Needs.STATUS)
def _missing_beat(status: Status) -> Iterator[Finding]:
    """
    no_beat: Celery's beat sends no sweep, although its schedule has one, so workers relay on wakeups alone.
        Start `celery beat`.
    """
    for alias in _aliases() if beat_entries(SWEEP_TASK) else ():
        relays = status.live("relay", alias)
        sweeps = status.processes_of(SWEEP, alias)
        is_sweep_expected = any(relay.note == BY_CELERY and relay.age_seconds > relay.beats_within for relay in relays)
        if is_sweep_expected and all(relay.note == BY_CELERY for relay in relays) and all(sweep.is_silent for sweep in sweeps):
            seconds = min((sweep.silent_seconds for sweep in sweeps), default=None)
            since = f" for {age(seconds)}" if sweeps else ""
            cause = f"Celery's beat has sent no sweep{since}: messages whose wakeup was lost wait, and there is no maintenance."
            step = "Start celery beat, or correct CELERY_BEAT_SCHEDULE."
            yield Finding("outbox.no_beat", f"broker {alias!r}", cause, step, seconds=seconds)


@rule("outbox.servers_differ", needs=Needs.STATUS)
def _differing_servers(status: Status) -> Iterator[Finding]:
    """
    servers_differ: The settings of a process name another server for a broker than the settings of the broker's relays, so
    messages of one do not reach the other.
        Set the same `OUTBOX["BROKERS"]` for both; silence the finding if both names mean the same server.
    """
    for alias in _aliases():
        relays = {relay.server: relay for relay in status.live("relay", alias) if relay.server}
        for process in status.processes:
            if process.broker != alias or process.is_silent or not process.server or not relays or process.server in relays:
                continue
            server, relay = min(relays.items(), key=lambda known: known[0])
            cause = f"The {process.kind} {process.name} uses {process.server}, and the relay {relay.name} sends to {server}."
            step = f'Give both processes the same OUTBOX["BROKERS"]["{alias}"], and restart them.'
            yield Finding("outbox.servers_differ", process.subject, cause, step)


@rule("outbox.process_fails", needs=Needs.STATUS)
def _failing_processes(status: Status) -> Iterator[Finding]:
    """
    process_fails: A relay, consumer, check-back loop or checker is running but cannot do its work; the finding quotes the error.
        Correct what the error names, such as a missing permission. The process tries again automatically.
    """
    unreachable = {finding.obj for finding in _unreachable_brokers(status)}  # which explains errors of loops that use them
    reported: set[tuple[str, str, str]] = set()  # several relays of one process report the same other loops
    for process in status.processes:
        for loop, error in sorted(process.errors.items()):
            if process.is_silent or loop == MAINTENANCE or (loop != "relay" and f"broker {process.broker!r}" in unreachable):
                continue
            shared = (process.name, loop, error)
            if shared in reported:
                continue
            if loop not in (process.kind, "search for gaps"):
                reported.add(shared)
            yield process_fails(process, loop)


def process_fails(process: ProcessStatus, loop: str) -> Finding:
    """Return the finding about a failing loop of a process."""
    step = "Correct what the error names, such as a permission or a setting; the process tries again automatically."
    cause = f"The {loop} of process {process.name} fails."
    return Finding("outbox.process_fails", process.subject, cause, step, error=process.errors[loop])


@rule("outbox.process_silent", needs=Needs.STATUS)
def _silent_processes(status: Status) -> Iterator[Finding]:
    """
    process_silent: One of several processes was killed or is frozen, and others do its work.
        Restart it.
    """
    for process in status.processes:
        has_others = any(other.does == process.does and not other.is_silent for other in status.processes)
        # If there are no others, the rules about missing relays, checkers, consumers and workers report it.
        is_reported = process.kind in ("relay", SWEEP, WAKEUP, "checker", "consumer") and not has_others
        if process.is_silent and not is_reported and not is_replaced(process, status.processes):
            seconds = process.silent_seconds
            cause = f"The {process.kind} {process.name} has sent no heartbeat for {age(seconds)}."
            step = "It was killed or is frozen: start it again, or kill it."
            yield Finding("outbox.process_silent", process.subject, cause, step, seconds=seconds)


@rule("outbox.rejected", "outbox.paused", "outbox.unknown_topic", "outbox.misconfigured", "outbox.send_fails", needs=Needs.STATUS)
def _blocked_topics(status: Status) -> Iterator[Finding]:
    """
    rejected: Messages are dead: the broker rejected them, their rows are gone, or nothing tells whether they were published.
        `outbox_replay --unsent --all`, or `--discard`.
    paused: A topic has been paused for more than a day.
        `outbox_pause TOPIC --resume`.
    unknown_topic: Messages wait in a topic that the settings do not have.
        Restore the topic until they are sent.
    misconfigured: A topic, a group, a permission or a setting is missing or wrong at the broker, or the queue of a group was
    deleted.
        Correct it at the broker; restart the group's consumers, then run the audit.
    send_fails: Sending a message has failed ten times.
        See the error on the message's page in the admin, and correct its cause.
    """
    for topic in status.topics:
        subject = f"topic {topic.name!r}"
        if topic.dead:
            verb = "is" if topic.dead == 1 else "are"
            cause = f"{count(topic.dead, 'message')} {verb} dead: rejected, without a row, or perhaps published."
            command = f"outbox_replay --unsent --topic {topic.name}{of_unsent(status.database)}"
            step = f"See the reasons with {command}; correct them, then add --all to send again, or --all --discard."
            yield Finding("outbox.rejected", subject, cause, step)
        if topic.is_paused and (topic.paused_seconds or 0) > PAUSED_SECONDS:
            cause = f"It is {topic.pause}. {wait(topic.unsent)}."
            yield paused(topic.name, cause, topic.paused_seconds, using=status.database)
        if topic.name not in conf.settings().topics:
            if topic.unsent:
                yield unknown_topic(topic.name, topic.unsent, topic.oldest_seconds)
        elif topic.name in status.misconfigured:
            step = "Correct what the error names, at the broker or in the settings. The relay sends again within 30 s."
            cause = "The topic is not configured correctly at the broker."
            yield Finding("outbox.misconfigured", subject, cause, step, error=status.misconfigured[topic.name])
        elif topic.failures >= ALERT_FAILURES:
            step = "See the error on the message's page, and correct its cause. The relay retries automatically."
            yield Finding("outbox.send_fails", subject, f"A message has failed {topic.failures} times.", step)


def paused(topic: str, cause: str, seconds: float | None, *, using: str) -> Finding:
    """Return the finding about a topic that is paused in a database."""
    step = f"End the pause with outbox_pause {topic}{of_pause(using)} --resume."
    return Finding("outbox.paused", f"topic {topic!r}", cause, step, seconds=seconds)


def unknown_topic(topic: str, messages: int, seconds: float | None = None) -> Finding:
    """Return the finding about messages that wait in a topic that the settings do not have."""
    cause = f'{wait(messages)}, but OUTBOX["TOPICS"] has no such topic, so no relay sends them.'
    step = "Restore the topic in settings until they are sent."
    return Finding("outbox.unknown_topic", f"topic {topic!r}", cause, step, seconds=seconds)


@rule("outbox.late", needs=Needs.STATUS)
def _late_topics(status: Status) -> Iterator[Finding]:
    """
    late: A message has waited for more than a minute.
        [Ask why](../how-to/watch.md#why-is-this-message-not-out-yet).
    """
    for topic in status.topics:
        is_known = topic.name in conf.settings().topics or not topic.unsent
        if (topic.oldest_seconds or 0) > LATE_SECONDS and not topic.is_paused and is_known:
            cause = f"The oldest message has waited for {age(topic.oldest_seconds)}."
            step = f"See why with outbox_status --message {topic.oldest_id}."
            yield Finding("outbox.late", f"topic {topic.name!r}", cause, step, seconds=topic.oldest_seconds)


@rule("outbox.misconfigured", "outbox.no_handler", "outbox.given_up", needs=Needs.STATUS)
def _undelivered_messages(status: Status) -> Iterator[Finding]:
    """
    no_handler: Messages of a topic wait for a group that has no handler for them in this release, and no consumer of another
    release has taken them in the last hour; or deferred messages are due, and no live process has a handler for them.
        Start the consumers of the release that has the handler, or restore the handler until they are handled; if it was removed
        for good, [drop the messages](../how-to/deploy.md#remove-a-consumer-group).
    given_up: The broker moved messages of a group to its dead-letter queue, and no consumer has fetched them.
        Start the group's consumers, which store them as dead letters.
    """
    for group in status.groups:
        subject = f"group {group.consumer_group!r}"
        for topic, reason in sorted(group.refusals.items()):
            cause = f"The broker does not serve topic {topic!r} as configured; other topics are not affected."
            step = "Correct the settings or the queue: the doctor says how."
            yield Finding("outbox.misconfigured", subject, cause, step, error=reason)
        for topic in sorted(topic for topic, progress in group.progress.items() if progress.is_gone):
            cause = f"The broker no longer knows the group in topic {topic!r}: its queue was deleted, with the messages in it."
            step = (
                "Start or restart the group's consumers, which declare the queue. The lost messages become a gap when later ones "
                "arrive; outbox_replay --lost lists them."
            )
            yield Finding("outbox.misconfigured", subject, cause, step)
        for topic, number in sorted(group.unhandled.items()):
            cause = f"{wait(number, topic)}, and no handler takes them."
            step = (
                "Start the consumers of the release that has one, or restore it until they are handled. If it was removed for "
                f"good, drop them: outbox_forget {group.consumer_group} --topic {topic}."
            )
            yield Finding("outbox.no_handler", subject, cause, step)
        for topic, number in sorted(group.given_up.items()):
            cause = (
                f"The broker moved {count(number, 'message')} of topic {topic!r} to its dead-letter queue, and no consumer has "
                "fetched them."
            )
            step = (
                "Start the group's consumers, which store them as dead letters. If consumers are running, discard dead letters "
                "of the topic: consumers fetch no more while there are 10,000."
            )
            yield Finding("outbox.given_up", subject, cause, step)


@rule("outbox.no_consumer", needs=Needs.STATUS)
def _missing_consumers(status: Status) -> Iterator[Finding]:
    """
    no_consumer: Messages wait for a group, at the broker or deferred, and no consumer of it is running. The doctor also names
    groups for which no message waits.
        `outbox_consume --group NAME`.
    """
    for group in status.groups:
        waiting = group.backlog
        has_sent = any(topic.has_sent for topic in status.topics if topic.name in group.topics)
        has_never_received = group.has_code and not group.waiting and not group.trouble and has_sent
        if group.consumers or not (waiting or has_never_received):
            continue
        backlog = "the group has never received a message" if group.can_tell else "the broker cannot tell the backlog"
        backlog = wait(waiting) if waiting or group.waiting else backlog
        yield no_consumer(group.consumer_group, backlog, group.silent_seconds, has_code=group.has_code)


def no_consumer(group: str, backlog: str, silent_seconds: float | None, *, has_code: bool) -> Finding:
    """Return the finding that no consumer of a group is running. `backlog`: a clause about its messages, such as "it waits"."""
    last = "none sends heartbeats" if silent_seconds is None else f"silent for {age(silent_seconds)}"
    is_in_beat = any(group in (entry.get("args") or ()) for entry in beat_entries(CONSUME_TASK))
    or_celery = ", or check that Celery's worker and beat run" if is_in_beat else ""
    step = f"Start outbox_consume --group {group}{or_celery}."
    if not has_code:
        step = "Start the consumers of the release that has the group. If it was removed for good, outbox_forget drops them."
    cause = f"No consumer is running ({last}), and {backlog}."
    return Finding("outbox.no_consumer", f"group {group!r}", cause, step, seconds=silent_seconds)


@rule("outbox.group_stuck", "outbox.group_fails", "outbox.group_slow", needs=Needs.STATUS)
def _progress(status: Status) -> Iterator[Finding]:
    """
    group_stuck: A handler has been running for a minute, and longer than its `time_limit`; or messages of a topic wait, and none
    of them was handled for a minute; or deferred messages have been due for a minute.
        Look for what the handler waits for, and set a `time_limit`.
    group_fails: Messages of a topic have failed for more than a minute, whatever else the group handles.
        Correct the handler.
    group_slow: At the pace of the last minutes, the backlog takes more than ten minutes.
        Start more consumers, or use `batch_size`.
    """
    for group in status.groups:
        live = status.live("consumer", group.broker, group.consumer_group)
        if not group.consumers or (live and all(process.error for process in live)):  # reported by another rule
            continue
        subject = f"group {group.consumer_group!r}"
        hanging = {process.handling.topic: process for process in live if process.handling and process.hangs}
        within_limit = {
            process.handling.topic
            for process in live
            if process.handling and process.handling.limit_seconds and not process.hangs
        }
        stuck = [finding for _, process in sorted(hanging.items()) for finding in hangs(process)]
        for topic, progress in sorted(group.progress.items()):
            stuck += _find_stuck(group, subject, topic, progress, is_explained=topic in {*hanging, *within_limit})
        waiting = group.backlog
        if not stuck and group.per_minute and waiting > group.per_minute * SLOW_MINUTES:
            takes = age(60 * waiting / group.per_minute)
            cause = f"{wait(waiting)}; at {group.per_minute:.0f} a minute, as in the last minutes, that takes {takes}."
            stuck.append(Finding("outbox.group_slow", subject, cause, "Start more consumers, or set batch_size of a handler."))
        yield from stuck


def hangs(process: ProcessStatus) -> Iterator[Finding]:
    """Yield the finding about a consumer's handler, if it has been running for too long."""
    if (handling := process.handling) and process.hangs:
        message = f"message {handling.message_id} of topic {handling.topic!r}"
        cause = f"{handling.handler} has been handling {message} for {age(handling.seconds)}."
        step = "Find out what it waits for, and set its time_limit. If that is its usual time, set a longer time_limit."
        yield Finding("outbox.group_stuck", process.subject, cause, step, seconds=handling.seconds)


def _find_stuck(
    group: GroupStatus, subject: str, topic: str, progress: TopicProgress, *, is_explained: bool
) -> Iterator[Finding]:
    """
    Yield why a group that has consumers makes no progress in a topic, or with some of the topic's messages.

    Args:
        is_explained: whether a running handler explains why the topic's messages wait: it is within its time limit, or hangs,
            which another finding reports.
    """
    waiting = group.waiting.get(topic, 0)
    deferred = group.deferred.get(topic)
    if deferred and (deferred.failing_seconds or 0) > LATE_SECONDS:
        verb = "waits" if deferred.failing == 1 else "wait"
        cause = (
            f"{count(deferred.failing, 'message')} of topic {topic!r} failed and {verb} for a retry; the first one was deferred "
            f"{age(deferred.failing_seconds)} ago."
        )
        step = "Correct the handler. Failed messages are handled again automatically."
        yield Finding("outbox.group_fails", subject, cause, step, error=deferred.error, seconds=deferred.failing_seconds)
        return
    late_seconds = deferred.late_seconds if deferred and not deferred.without_code else None
    if (late_seconds or 0) > LATE_SECONDS and not is_explained:
        cause = f"Deferred messages of topic {topic!r} have been due for {age(late_seconds)}."
        step = "Start more consumers, or look for a handler that hangs, and set its time_limit."
        yield Finding("outbox.group_stuck", subject, cause, step, seconds=late_seconds)
        return
    stuck_seconds = progress.waits_seconds or 0.0
    # `waits_seconds` is known for recent sends only. Otherwise, the time since the group handled a message of the topic counts;
    # if that is unknown, too, the age of the oldest consumer, since consumers that have just started are not stuck.
    idle = group.oldest_seconds if progress.idle_seconds is None else progress.idle_seconds
    if waiting > group.consumers and idle > STUCK_SECONDS:
        stuck_seconds = max(stuck_seconds, idle)
    if stuck_seconds > LATE_SECONDS and waiting and not is_explained:
        cause = f"{wait(waiting, topic)}, and {count(group.consumers, 'consumer')} handled none for {age(stuck_seconds)}."
        step = "Look for a handler that hangs, and set its time_limit; or for an ordered key that waits for a failed message."
        yield Finding("outbox.group_stuck", subject, cause, step, seconds=stuck_seconds)


@rule("outbox.dead_letters", "outbox.no_handler", "outbox.max_deferred", needs=Needs.STATUS)
def _deferred_messages(status: Status) -> Iterator[Finding]:
    """
    dead_letters: A group has dead letters, which are not handled again automatically.
        Correct the cause, then `outbox_replay`, or discard.
    max_deferred: A group has deferred half as many messages of a topic as `MAX_DEFERRED` allows. At that limit, it receives
    nothing from the topic until half of them are gone.
        Correct the handler, or start more consumers.
    """
    max_deferred = conf.settings().consumer.max_deferred
    # Counts with the reason "" are for all reasons together. They include groups that this process has no code for.
    for deferred in (backlog for backlog in status.deferred if not backlog.reason):
        name, topic = deferred.consumer_group, deferred.topic
        subject = f"group {name!r}"
        if deferred.dead:
            cause = f"{count(deferred.dead, 'message')} of topic {topic!r} failed for good."
            step = f"Correct the cause, then run outbox_replay --group {name}, or discard them."
            error, seconds = deferred.error_of_dead, deferred.dead_seconds
            yield Finding("outbox.dead_letters", subject, cause, step, error=error, seconds=seconds)
        if deferred.without_code:
            cause = f"{count(deferred.without_code, 'deferred message')} of topic {topic!r}, and no live process has a handler."
            step = (
                "Start the consumers of the release that has one. If it was removed for good, discard them: outbox_replay "
                f"--group {name} --topic {topic} --state 'no handler' --discard --all."
            )
            yield Finding("outbox.no_handler", subject, cause, step)
        if deferred.counted * 2 >= max_deferred:
            begins = "consumers receive" if deferred.counted >= max_deferred else f"at {max_deferred:,}, consumers receive"
            effect = f"{begins} nothing from the topic until half of them are gone"
            cause = f"{count(deferred.counted, 'deferred message')} of topic {topic!r} wait; {effect}."
            step = 'Correct the handler, start more consumers, or raise OUTBOX["CONSUMER"]["MAX_DEFERRED"].'
            yield Finding("outbox.max_deferred", subject, cause, step, error=deferred.error)


BLOCKED_SECONDS = 5.0  # publishers, relays and consumers keep each other waiting only for milliseconds

# A long transaction keeps VACUUM from removing dead rows, in all tables. Searches for due deferred messages then have to skip
# many dead rows.
LONG_TRANSACTION = timedelta(minutes=10)
LONG_TRANSACTIONS = """
SELECT pid, coalesce(application_name, ''), coalesce(usename, ''), coalesce(state, ''),
    extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
    AND xact_start < clock_timestamp() - %s ORDER BY xact_start
"""


@rule("outbox.blocked", "outbox.long_transaction", needs=Needs.DATABASE)
def _blocking_sessions(status: Status, connection: Connection) -> Iterator[Finding]:
    """
    blocked: A session holds locks for which publishers of a key, relays or consumers have waited for more than 5 s. The finding
    names the session, and the sessions that wait for it.
        Commit or roll back in that session, or end it with the command that the finding names.
    long_transaction: A transaction has been open for more than 10 minutes. It keeps VACUUM from removing dead rows, which slows
    down consumers.
        End the transaction.
    """
    yield from read_blocking(connection, seconds=BLOCKED_SECONDS)
    row = connection.execute(LONG_TRANSACTIONS, [LONG_TRANSACTION]).fetchone()
    if row is not None:
        pid, application, user, state, seconds = row
        cause = f"A transaction of {user} ({application or 'no name'}, {state}) has been open for {age(seconds)}."
        step = f"It slows down consumers. End it, if necessary with SELECT pg_terminate_backend({pid})."
        yield Finding("outbox.long_transaction", f"session {pid}", cause, step, seconds=seconds)


@rule("outbox.gap", "outbox.ignored", "outbox.parked", "outbox.code_differs", needs=Needs.STATUS)
def _recorded_problems(status: Status) -> Iterator[Finding]:
    """
    gap: Messages of some numbers did not reach a group, and the broker no longer has them for the group.
        [See them, and deliver them again](../how-to/replay.md#messages-that-a-group-lost-or-ignored): `outbox_replay --lost`.
    ignored: Messages of a type arrived in the last hour, and no group of the database handled them, because the groups that read
    the topic had no handler for the type.
        Add or restore a handler, then [`outbox_replay --ignored
        --all`](../how-to/replay.md#messages-that-a-group-lost-or-ignored).
    parked: Half messages are neither committed nor rolled back, and the broker no longer sends check-backs about them.
        Check back about them in the admin.
    code_differs: The processes of a group have had different code for an hour.
        Deploy the same code to all.
    """
    for gap in status.gaps:
        cause = f"{count(gap.numbers, 'message')} of topic {gap.topic!r} did not arrive, in {count(gap.gaps, 'gap')}."
        step = f"See them with outbox_replay --lost --group {gap.consumer_group}; add --all to deliver them to the group again."
        yield Finding("outbox.gap", f"group {gap.consumer_group!r}", cause, step, seconds=gap.seconds)
    for ignored in status.ignored:
        if any(group.using != status.database and ignored.topic in group.topics for group in groups().values()):
            continue  # the inbox of such a group is in another database, so it may have handled them
        cause = (
            f"{count(ignored.messages, 'message')} of type {ignored.type!r} came in the last hour, and no group handled "
            f"{'it' if ignored.messages == 1 else 'them'}: {', '.join(sorted(ignored.groups))} had no handler."
        )
        step = "Add or restore a handler of the type, deploy it, and deliver them with outbox_replay --ignored --all."
        yield Finding("outbox.ignored", f"topic {ignored.topic!r}", cause, step)
    for topic, parked in status.parked.items():
        cause = f"{count(parked, 'half message')} neither committed nor rolled back: the broker sends no more check-backs."
        yield Finding("outbox.parked", f"topic {topic!r}", cause, "Check back about each in the admin, under half messages.")
    for group in status.differing_groups:
        cause = "Its processes have subscribed to different types or tags for more than an hour."
        yield Finding("outbox.code_differs", f"group {group!r}", cause, "Deploy the same code to all of them.")


@rule("outbox.no_maintenance", needs=Needs.DATABASE)
def _maintenance(status: Status, connection: Connection) -> Iterator[Finding]:
    """
    no_maintenance: Tomorrow's partition is missing, daily partitions are kept two days past their retention, or maintenance
    fails.
        Check that a relay, or beat's `outbox-maintenance`, runs; if relays do not own the tables, [run `outbox_maintenance`
        as their owner](../how-to/deploy.md#roles).
    """
    errors = {
        process.errors[MAINTENANCE] for process in status.processes if MAINTENANCE in process.errors and not process.is_silent
    }
    causes = ["Maintenance fails."] if errors else []
    if status.lacks_tomorrow:
        causes.append("Tomorrow's partition does not exist.")
    if status.overdue:
        days = count(len(status.overdue), "day")
        causes.append(f"Messages of {days} are kept past their retention, from {status.overdue[0]} on.")
    subject, step = f"database {status.database!r}", "Check that outbox_relay runs, or beat's entry outbox-maintenance"
    if causes:
        run = f"run outbox_maintenance as {partitions.rights(connection).owner!r}, the owner of the tables"
        error = " ".join(sorted(errors))
        yield Finding(
            "outbox.no_maintenance", subject, " ".join(causes), f"{step}; or {run}, which prints the error.", error=error
        )
    if status.has_strays:
        cause = "Messages are in the DEFAULT partition, because the partition of their day does not exist."
        step = f"{step}; if they are of a day to come, correct the clock of their publisher."
        yield Finding("outbox.no_maintenance", subject, cause, step)
