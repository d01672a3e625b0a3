"""
Workers: each runs in one thread, for one group and one broker. A worker runs deferred messages that are due; then it receives
messages, handles them, and acknowledges them.

A worker plans in which order it handles received messages, and which of them together, and counts deliveries by their outcome. A
message that it cannot handle is deferred: stored in the group's database, to be run later, and acknowledged, too. Some servers
move messages to a dead-letter queue after many deliveries; a worker fetches these messages and stores them as dead letters of the
group. `ConsumerThreads` runs the workers of some groups.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import compress
from typing import Self

import msgspec
from django.db import connections
from msgspec.structs import asdict

from outbox import conf, database, signals
from outbox.brokers.base import Delivery
from outbox.brokers.capabilities import HasDeadLetterQueue, Receives
from outbox.consuming import deferred, limits, subscriptions
from outbox.consuming.deferred import Deferral, Reason
from outbox.consuming.delivery_info import fields_of, order_key_of
from outbox.consuming.doubt import Doubt
from outbox.consuming.handle import defer, handle, handle_together, ignore
from outbox.consuming.handler import inbox_statements
from outbox.consuming.holdings import Holdings, register_worker
from outbox.consuming.lease_thread import Held, LeaseThread, affordable, new_worker_name
from outbox.consuming.outcome import RELEASED, HandlingResult, Outcome
from outbox.consuming.owners import set_owner_and_topics
from outbox.consuming.read import find_consumer
from outbox.consuming.register import Consumer, Group
from outbox.consuming.run_deferred import run_deferred
from outbox.database import heartbeats, loop_errors
from outbox.database.guarded import guarded_transaction
from outbox.database.heartbeats import BY_CELERY
from outbox.database.loop_errors import Loop
from outbox.errors import BrokerUnavailable, InboxRefused, NotMigrated, UnknownMessageType
from outbox.logs import get_logger, log_fields
from outbox.message import TopicType
from outbox.outages import BACKOFF, OUTAGES

logger = get_logger(__name__)

ACK_WITHIN_SECONDS = 0.1  # messages that are handled within this time are acknowledged together
IDLE_SECONDS = 5.0  # a database connection that was idle for longer is checked before it is used
IDLE_WAIT = timedelta(milliseconds=200)  # with --until-idle or --once, a receive waits for a message for this time
PATIENCE_SECONDS = 15.0  # with --until-idle or --once, an outage that lasts longer ends the command
POLL_SECONDS = 1.0  # minimum interval of queries for due messages if none was due, and of queries of the server's dead letters
SWEEP_SECONDS = 2.0  # minimum interval of `deferred.sweep`
MAX_WAIT_SECONDS = 2.0  # maximum wait of a receive, since messages that other workers defer may become due meanwhile
MAX_DEAD_LETTERS = 20  # maximum number of messages in one query of the server's dead letters


class Counts(msgspec.Struct):
    """
    The number of deliveries, and of runs of deferred messages, by outcome.

    `late`: deliveries that were acknowledged after they had expired at the broker, which delivers the message again.
    """

    handled: int = 0
    duplicates: int = 0
    ignored: int = 0
    deferred: int = 0
    dead_letters: int = 0
    released: int = 0
    late: int = 0

    def add(self, outcome: Outcome) -> None:
        name = _FIELDS[outcome]
        setattr(self, name, getattr(self, name) + 1)

    def __iadd__(self, other: Counts) -> Self:
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)
        return self


_FIELDS = {
    Outcome.HANDLED: "handled",
    Outcome.DUPLICATE: "duplicates",
    Outcome.IGNORED: "ignored",
    Outcome.DEFERRED: "deferred",
    Outcome.DEAD_LETTER: "dead_letters",
    Outcome.RELEASED: "released",
}


class Worker:
    """
    Handles the messages that one broker has for a group, in the thread that calls `run` or `step`.

    Args:
        alias: the broker. Its client is made in the thread of `run` or `step`, and again after an error.
        stop: an event. When any thread sets it, or calls `stop()`, the worker finishes the current message and defers the others.
        is_task: the worker runs in a Celery task. No other thread of that process sends the worker's heartbeats, so the lease
            thread sends them while a handler runs.

    Raises:
        UnknownTopic, ConfigurationError: the group's topics contradict the settings.
    """

    def __init__(self, group: Group, alias: str, *, stop: threading.Event | None = None, is_task: bool = False) -> None:
        self.group = group
        self.alias = alias
        self.counts = Counts()
        self._topics = group.topics_of(alias)
        self._settings = conf.settings().consumer
        self._stop = stop or threading.Event()
        self._broker: Receives | None = None
        self._name = new_worker_name()
        self._loop = Loop("consumer", group.using, alias, group.name, self._name)
        self._inbox_loop = self._loop._replace(thread=f"inbox of {self._name}")  # its errors are refused writes to the inbox
        self._heartbeat_note = BY_CELERY if is_task else ""
        self._lease_thread = self._new_lease_thread()
        self._max_messages = max([self._settings.batch_size, *(other.batch_size or 1 for other in group.consumers.values())])
        self._limits = limits.TopicLimits(group, self._topics)
        self._subscriptions = subscriptions.subscriptions_of(group)
        self._seconds_per_message = 0.0  # how long it takes to handle a message, estimated from the last receives
        self._database_used_at = 0.0  # when the database last answered; 0: check the connection before its next use
        self._heartbeat_at = float("-inf")
        self._due_checked_at = self._swept_at = self._given_up_checked_at = float("-inf")
        self._due_at = 0.0  # when the next deferred message is due; 0 if one may be due now
        self._unrecorded_runs: list[tuple[int, int]] = []  # (id, runs) of runs that ended while the database was unavailable
        self._probe_bytes: int | None = None  # after an outage: the size of the body that could not be stored
        self._deferred_keys: set[str | None] = set()  # order keys of which a message was deferred since the last receive

    def stop(self) -> None:
        """Ask `run` to return soon; may be called from any thread."""
        self._stop.set()
        if (broker := self._broker) is not None:
            broker.interrupt()

    def run(
        self, *, until_idle: bool = False, once: bool = False, seconds: float | None = None, patience: float | None = None
    ) -> Counts:
        """
        Handle messages until stopped. After an error of database or broker, try again.

        Args:
            until_idle: return when a receive brings no message and no deferred message is due.
            once: return after the first receive.
            seconds: return after this time; the current message is finished first.
            patience: raise the error if no step has succeeded for this many seconds; by default try again forever.
        """
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        wait = IDLE_WAIT if until_idle or once else self._settings.wait
        failures = 0
        last_success_at = time.monotonic()
        try:
            while not self._stop.is_set() and time.monotonic() < deadline:
                try:
                    received = self.step(wait)
                    loop_errors.clear(self._loop)
                    failures, last_success_at = 0, time.monotonic()
                except Exception as error:
                    is_refused = isinstance(error, InboxRefused)
                    loop_errors.record(self._inbox_loop if is_refused else self._loop, error)
                    if is_refused or database.refuses_all(error):
                        self._end_session()
                    if patience is not None and time.monotonic() - last_success_at >= patience:
                        raise
                    pause = (BACKOFF(failures) if isinstance(error, OUTAGES) else BACKOFF.limit).total_seconds()
                    self._log_error(error, pause)
                    failures += 1
                    self.close()
                    self._pause(min(pause, max(0, deadline - time.monotonic())), may_run_due=isinstance(error, BrokerUnavailable))
                else:
                    if once or (until_idle and not received):
                        break
        finally:
            for loop in (self._loop, self._inbox_loop):
                loop_errors.clear(loop)
        return self.counts

    def step(self, wait: timedelta) -> int:
        """
        Run deferred messages that are due, then receive once and handle all received messages.

        Args:
            wait: the maximum time to wait for a message.

        Returns:
            The number of messages that were run, received, or fetched from the server's dead-letter queue.

        Raises:
            NotMigrated: the database has no tables of the outbox, or is read-only.
            BrokerUnavailable, django.db.OperationalError: the broker or the database cannot be reached. No message is lost:
                the broker delivers unacknowledged messages again.
        """
        number_run = self._run_due()
        broker = self._open_broker()
        if self._stop.is_set():  # perhaps before there was a broker for `stop` to interrupt
            return number_run
        dead_letters = self._receive_dead_letters(broker)
        topics = self._limits.open_topics()
        until_due = max(0.0, self._due_at - time.monotonic())
        wait = min(wait, timedelta(seconds=min(MAX_WAIT_SECONDS, until_due)))
        if not topics:
            self._stop.wait(wait.total_seconds())
            return number_run + dead_letters
        received_at = time.monotonic()  # before the call, since INVISIBLE begins at a time during the call
        invisible = self._settings.invisible
        limit = affordable(self._max_messages, invisible, self._seconds_per_message)
        deliveries = broker.receive(self.group.name, topics, limit=limit, invisible_for=invisible, wait=wait)
        if deliveries:
            self._handle_received(broker, deliveries, received_at)
        return number_run + dead_letters + len(deliveries)

    def close(self) -> None:
        """Close the broker's client and the lease thread; the next step makes new ones."""
        self._lease_thread.close()
        self._lease_thread = self._new_lease_thread()
        self._database_used_at = 0.0
        broker, self._broker = self._broker, None
        if broker is not None:
            try:
                broker.close()
            except Exception:
                logger.warning("Closing the broker %r failed.", self.alias, exc_info=True, extra=log_fields(broker=self.alias))

    def holdings(self) -> Holdings:
        """Return the topics that the broker does not serve, with the reasons, and the running handler; for any thread."""
        broker = self._broker
        return dict(broker.refusals) if broker else {}, self._lease_thread.running()

    def _pause(self, seconds: float, *, may_run_due: bool) -> None:
        """Wait after an error; with `may_run_due` (only the broker is unavailable), run due deferred messages meanwhile."""
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (remaining := until - time.monotonic()) > 0:
            if may_run_due:
                try:
                    self._run_due()
                except Exception:  # if the cause remains, the next `step` raises it again
                    may_run_due = False
            remaining = min(remaining, max(0.0, until - time.monotonic()))
            self._stop.wait(min(remaining, POLL_SECONDS) if may_run_due else remaining)

    def _run_due(self) -> int:
        """Check the database, send a heartbeat, recover from outages, run at most BATCH_SIZE due messages; return how many."""
        self._check_database()
        self._send_heartbeat()
        self._recover()
        now = time.monotonic()
        if now < min(self._due_checked_at + POLL_SECONDS, self._due_at):
            return 0
        number = 0
        if self._check_due():
            while number < self._settings.batch_size and not self._stop.is_set() and self._run_one():
                number += 1
        if number:
            self._due_at = 0.0  # more may be due, so the next step queries without waiting
        return number

    def _run_one(self) -> bool:
        """Run the deferred message that has been due for the longest time; return whether there was one."""
        doubt = Doubt()
        try:
            taken = deferred.take(self.group.name, self._subscriptions, self.group.using, may_doubt=doubt.is_granted)
            if taken is None:
                return False
            if taken.crashes:  # the message is in doubt, so this thread keeps the permission while the handler runs
                consumer = self.group.find(taken.delivery.topic, taken.type, taken.delivery.tag)
                doubt.extend(consumer.time_limit if consumer else None)
            else:
                doubt.end()
            result = run_deferred(self.group, taken, self._lease_thread)
        finally:
            doubt.end()
        self.counts.add(result.outcome)
        if result.outcome is Outcome.RELEASED:
            self._unrecorded_runs.append((taken.id, taken.runs))
            self._remember_outage(taken.delivery)
        else:
            self._database_used_at = time.monotonic()
        if result.error_to_raise is not None:
            raise result.error_to_raise
        return True

    def _check_due(self) -> bool:
        """
        Return whether a deferred message is due, and remember when the next one will be due.

        If messages are asleep, also sweep at most every SWEEP_SECONDS: the process that should wake them may have died.
        """
        self._due_checked_at = time.monotonic()
        is_due, is_asleep, seconds = deferred.check_due(self.group.name, self.group.using)
        self._due_at = float("inf") if seconds is None else self._due_checked_at + seconds
        if is_asleep and self._due_checked_at - self._swept_at > SWEEP_SECONDS:
            deferred.sweep(self.group.using)
            self._swept_at = self._due_checked_at
        return is_due

    def _receive_dead_letters(self, broker: Receives) -> int:
        """Store messages of the server's dead-letter queue as dead letters, acknowledge those stored; return how many came."""
        if not HasDeadLetterQueue.has(broker) or time.monotonic() - self._given_up_checked_at < POLL_SECONDS:
            return 0
        self._given_up_checked_at = time.monotonic()
        topics = limits.topics_with_room(self.group, self._topics)
        dead_letters = (
            HasDeadLetterQueue.of(broker).receive_dead_letters(self.group.name, topics, limit=MAX_DEAD_LETTERS) if topics else []
        )
        results = defer(
            self.group,
            [(delivery, Deferral(Reason.SERVER, is_dead=True, error=delivery.dead_letter_reason)) for delivery in dead_letters],
        )
        known = []
        for delivery, result in zip(dead_letters, results, strict=True):
            self.counts.add(result.outcome)
            if result.outcome is Outcome.RELEASED:  # the message stays at the server, and is received again
                self._remember_outage(delivery)
                continue
            known.append(delivery)
            if result.outcome is Outcome.DEAD_LETTER:
                names = {"group": self.group.name, "message_id": delivery.message_id, "topic": delivery.topic}
                signals.dead_lettered.send_robust(sender=Consumer, reason=delivery.dead_letter_reason, **names)
        if known:
            broker.ack(known)
        return len(dead_letters)

    def _handle_received(self, broker: Receives, deliveries: Sequence[Delivery], received_at: float) -> None:
        self._deferred_keys = set()
        started_at = time.monotonic()
        self._lease_thread.hold(broker, plan(self.group, deliveries), received_at=received_at)
        handled = self._handle_all(broker)
        # After a slow message, the next receives have a lower limit, so that fewer messages are deferred behind slow ones.
        self._seconds_per_message = max((time.monotonic() - started_at) / max(1, handled), self._seconds_per_message / 2)

    def _handle_all(self, broker: Receives) -> int:
        """Handle the held deliveries; return how many. Release the rest after an outage, defer the rest after a stop."""
        acked_at = time.monotonic()
        handled = 0
        is_outage, error_to_raise = False, None
        try:
            while not (is_outage or error_to_raise or self._stop.is_set()) and (taken := self._lease_thread.take()):
                handled += len(taken)
                is_outage = True  # in case `_handle` raises an error, so that the rest is released
                results = self._handle([held.delivery for held in taken])
                is_outage = self._settle(taken, results)
                error_to_raise = next((result.error_to_raise for result in results if result.error_to_raise), None)
                self._database_used_at = 0.0 if is_outage else time.monotonic()
                if time.monotonic() - acked_at > ACK_WITHIN_SECONDS:
                    self._ack(broker)
                    acked_at = time.monotonic()
        finally:
            self._settle_rest(broker, is_outage=is_outage)
        if error_to_raise is not None:
            raise error_to_raise
        return handled

    def _handle(self, deliveries: list[Delivery]) -> list[HandlingResult]:
        """Handle a list of deliveries from `plan`: one delivery, or several that are ignored, deferred or handled together."""
        first = deliveries[0]
        if len(deliveries) == 1:
            if order_key_of(first) in self._deferred_keys:
                return defer(self.group, [(first, Deferral.unhandled(Reason.BEHIND, first))])
            return [handle(self.group, first, self._lease_thread)]
        if find_consumer(self.group, first) is None:
            return ignore(self.group, deliveries)
        if first.delivery_count > 1:
            return defer(self.group, [(delivery, Deferral.unhandled(Reason.AGAIN, delivery)) for delivery in deliveries])
        return handle_together(self.group, deliveries, self._lease_thread)

    def _settle(self, taken: Sequence[Held], results: Sequence[HandlingResult]) -> bool:
        """Count results, and mark deliveries as done, except RELEASED ones; return whether there is one (the database failed)."""
        is_outage = False
        for held, result in zip(taken, results, strict=True):
            if result.outcome is Outcome.RELEASED:
                is_outage = True
                self._remember_outage(held.delivery)
                continue
            self.counts.add(result.outcome)
            loop_errors.clear(self._inbox_loop)  # not in `run`: a step without messages does not show that inbox writes succeed
            self._lease_thread.done(held)
            if result.outcome is Outcome.DEFERRED:
                self._due_at = 0.0
            if result.is_failure:
                self._limits.count_failure(held.delivery.topic)
            if result.order_key is not None:
                self._deferred_keys.add(result.order_key)
        return is_outage

    def _remember_outage(self, delivery: Delivery) -> None:
        self._database_used_at = 0.0
        self._probe_bytes = len(delivery.body)

    def _end_session(self) -> None:
        """
        Close Django's connection, and end its session at the server.

        If a handler has changed a setting of the session, such as its role, the database may refuse all writes in this session.
        """
        connection = connections[self.group.using]
        if not connection.in_atomic_block:  # in a test, closing would lose the transaction around it
            if connection.connection is not None:
                connection.connection.close()  # with a pool, Django's own close() would keep the session for reuse
            connection.close()

    def _report_late(self, delivery: Delivery) -> None:
        self.counts.late += 1
        text = (
            "Group %r acknowledged message %s too late, so the broker delivers it again. If this happens often, increase "
            'OUTBOX["CONSUMER"]["INVISIBLE"].'
        )
        logger.warning(text, self.group.name, delivery.message_id, extra=fields_of(delivery))

    def _settle_rest(self, broker: Receives, *, is_outage: bool) -> None:
        """Acknowledge done deliveries. Defer and acknowledge the others; release those that the database could not store."""
        remaining = self._lease_thread.end_waiting()
        stopped = [(delivery, Deferral.unhandled(Reason.STOP, delivery)) for delivery in remaining]
        results = [RELEASED] * len(remaining) if is_outage else defer(self.group, stopped)
        for result in results:
            self.counts.add(result.outcome)
        is_known = [result.outcome is not Outcome.RELEASED for result in results]
        try:
            self._ack(broker, list(compress(remaining, is_known)))
        finally:
            if not all(is_known):
                broker.release([delivery for delivery, known in zip(remaining, is_known, strict=True) if not known])

    def _ack(self, broker: Receives, more: Sequence[Delivery] = ()) -> None:
        if done := [*self._lease_thread.end_done(), *more]:
            for delivery, is_acked in zip(done, broker.ack(done), strict=True):
                if not is_acked:
                    self._report_late(delivery)

    def _defer_waiting(self, waiting: Sequence[Delivery], done: Sequence[Delivery]) -> None:
        """Defer `waiting` deliveries over another connection, and acknowledge `waiting` and `done` ones, in the lease thread."""
        settings = {"statement_timeout": "1s", "lock_timeout": "1s"}  # short, since the lease thread also renews deliveries
        if waiting:
            with database.connect(
                self.group.using, application_name="outbox slow handler", settings=settings, connect_timeout=1
            ) as connection:
                deferrals = [(delivery, Deferral.unhandled(Reason.SLOW, delivery)) for delivery in waiting]
                deferred.defer(connection, self.group.name, deferrals)
            self.counts.deferred += len(waiting)
        if (broker := self._broker) is not None:
            broker.ack([*waiting, *done])

    def _log_error(self, error: Exception, pause: float) -> None:
        """Log an error, and that the worker tries again after `pause`; without a traceback if the cause is known."""
        extra = log_fields(group=self.group.name, broker=self.alias, database=self.group.using)
        if isinstance(error, NotMigrated):
            logger.warning("Group %r waits: %s", self.group.name, error, extra=extra)
        elif isinstance(error, InboxRefused):
            text = "Group %r waits, since the database refuses every write to its inbox and deferred messages: %s"
            logger.error(text, self.group.name, error, extra=extra)
        elif isinstance(error, OUTAGES):
            text = "Group %r cannot reach its database or broker %r, and tries again in %.1f s: %s"
            logger.warning(text, self.group.name, self.alias, pause, str(error).strip(), extra=extra)
        else:
            text = "A worker of group %r at broker %r failed, and tries again in %.1f s."
            logger.error(text, self.group.name, self.alias, pause, exc_info=error, extra=extra)

    def _check_database(self) -> None:
        """
        Raise an error if the database is unavailable, before messages are received.

        The connection is kept regardless of CONN_MAX_AGE: opening another one takes longer than handling most messages.
        """
        if time.monotonic() - self._database_used_at > IDLE_SECONDS:
            database.drop_if_lost(self.group.using)
            connections[self.group.using].ensure_connection()
            if not self._database_used_at:
                database.ensure_fit(self.group.using, database.raw(self.group.using))
            self._database_used_at = time.monotonic()

    def _recover(self) -> None:
        """After an outage, raise an error if the database still cannot store a message of `_probe_bytes`; record ends of runs."""
        if self._probe_bytes is not None:
            with inbox_statements():
                deferred.probe(self.group.name, os.urandom(self._probe_bytes), self.group.using)
            self._probe_bytes = None
        if self._unrecorded_runs:
            deferred.end_late(self._unrecorded_runs, self.group.using)
            self._unrecorded_runs = []

    def _send_heartbeat(self) -> None:
        """Send a heartbeat with the subscriptions of this process: before the first receive, and then periodically."""
        if time.monotonic() - self._heartbeat_at > heartbeats.BEAT_SECONDS:
            with guarded_transaction(self.group.using):
                subscriptions.beat(self.group, self.alias, note=self._heartbeat_note)
            self._heartbeat_at = time.monotonic()

    def _new_lease_thread(self) -> LeaseThread:
        is_in_test = connections[self.group.using].in_atomic_block  # another connection would not see the rows of the test
        beat, unload = self._beat_separately if self._heartbeat_note else None, None if is_in_test else self._defer_waiting
        return LeaseThread(self._stop, self._name, beat=beat, unload=unload)

    def _beat_separately(self) -> None:
        """Send a heartbeat while a handler runs, over a separate connection."""
        limits = {"statement_timeout": "1s", "lock_timeout": "1s"}  # short, since the lease thread also renews deliveries
        with database.connect(
            self.group.using, application_name="outbox heartbeat", settings=limits, connect_timeout=1
        ) as connection:
            subscriptions.beat(self.group, self.alias, note=self._heartbeat_note, over=connection)

    def _open_broker(self) -> Receives:
        if self._broker is None:
            broker = Receives.of(conf.make_broker(self.alias))
            set_owner_and_topics(broker, self.group)
            self._broker = broker
            register_worker(self.alias, self.group.name, self._name, self)
        return self._broker


def plan(group: Group, deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """
    Return deliveries in the order in which they are handled, in lists that are handled together.

    The first two lists are of unordered topics: deliveries that no handler takes, which are ignored together, and redeliveries,
    which are deferred together. The others follow in the order in which they were received, which keeps the messages of a key in
    order; a batch comes when it is complete, and incomplete batches come last.
    """
    ignored: list[Delivery] = []
    again: list[Delivery] = []
    works: list[list[Delivery]] = []
    batches: dict[str, list[Delivery]] = {}  # by the subject of their handler
    for delivery in deliveries:
        if not delivery.message_id or conf.topic_settings(delivery.topic).type is TopicType.FIFO:
            works.append([delivery])
            continue
        try:
            consumer = find_consumer(group, delivery)
        except UnknownMessageType:
            works.append([delivery])
            continue
        if consumer is None:
            ignored.append(delivery)
        elif delivery.delivery_count > 1:
            again.append(delivery)
        elif not consumer.batch_size:
            works.append([delivery])
        else:
            batch = batches.setdefault(consumer.subject, [])
            batch.append(delivery)
            if len(batch) == consumer.batch_size:
                works.append(batches.pop(consumer.subject))
    return [work for work in (ignored, again, *works, *batches.values()) if work]


class ConsumerThreads:
    """
    Runs `threads` workers for each group and broker.

    Raises:
        UnknownTopic, ConfigurationError: a group's topics contradict the settings.
    """

    def __init__(self, groups: Sequence[Group], threads: int = 1) -> None:
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.workers = [
            Worker(group, alias, stop=self._stop) for group in groups for alias in group.brokers for _ in range(threads)
        ]
        self.threads: list[threading.Thread] = []

    def start(self, *, until_idle: bool = False, once: bool = False) -> None:
        """
        Start the threads. Each runs until it is stopped; with `until_idle` until no message comes; with `once` for one receive.

        With `until_idle` or `once`, an outage longer than PATIENCE_SECONDS ends all threads; otherwise they wait for its end.
        """
        for worker in self.workers:
            name = f"Consumer of group {worker.group.name!r}, broker {worker.alias!r}"
            thread = threading.Thread(target=self._work, args=(worker, until_idle, once), name=name, daemon=True)
            self.threads.append(thread)
            thread.start()

    def targets(self) -> set[tuple[str, str, str]]:
        """Return the database, broker and group of each worker."""
        return {(worker.group.using, worker.alias, worker.group.name) for worker in self.workers}

    def stop(self) -> None:
        """Ask each worker to finish its current message and end; may be called from any thread."""
        for worker in self.workers:
            worker.stop()

    def is_working(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self) -> None:
        """
        Wait until all threads have ended.

        Raises:
            BaseException: the first error that ended a worker.
        """
        for thread in self.threads:
            thread.join()
        for error in self._errors:
            raise error

    def counts(self) -> dict[str, Counts]:
        """Return the counts of outcomes by group."""
        totals: dict[str, Counts] = {}
        for worker in self.workers:
            counts = totals.setdefault(worker.group.name, Counts())
            counts += worker.counts
        return totals

    def _work(self, worker: Worker, until_idle: bool, once: bool) -> None:
        try:
            worker.run(until_idle=until_idle, once=once, patience=PATIENCE_SECONDS if until_idle or once else None)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, so that `join` raises them
            self._errors.append(error)
            self._stop.set()
        finally:
            worker.close()
            connections.close_all()
