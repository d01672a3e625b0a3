"""
Workers: run what is due of the deferred messages, receive, handle, acknowledge; each in one thread, for one group and one broker.

A worker plans the order in which it handles received messages, and which it handles together, and counts deliveries by their
outcome. A message that it cannot handle is deferred, and acknowledged, too. `ConsumerThreads` runs the workers of some groups.
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
from outbox.brokers.capabilities import GivesUp, Receives
from outbox.consuming import deferred, limits, subscriptions
from outbox.consuming.deferred import Deferral, Reason
from outbox.consuming.delivery_info import fields_of, order_key_of
from outbox.consuming.doubt import Doubt
from outbox.consuming.handle import defer, handle, handle_together, ignore
from outbox.consuming.handler import own_statements
from outbox.consuming.holdings import Holdings, note_worker
from outbox.consuming.lease_thread import Held, LeaseThread, affordable, new_worker_name
from outbox.consuming.outcome import RELEASED, HandlingResult, Outcome
from outbox.consuming.owners import introduce
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

ACK_WITHIN_SECONDS = 0.1  # messages handled within this time are acknowledged together
IDLE_SECONDS = 5.0  # a connection that was idle for longer is checked before it is used
IDLE_WAIT = timedelta(milliseconds=200)  # no message within this time: idle
PATIENCE_SECONDS = 15.0  # with --until-idle or --once, an outage that lasts longer ends the command
LOOK_SECONDS = 1.0  # interval of looks for due messages where the last one found none
SWEEP_SECONDS = 2.0
LONGEST_WAIT_SECONDS = 2.0  # of a receive, since other workers defer messages, too
GIVEN_UP_AT_ONCE = 20  # messages that the server gave up, in a second


class Counts(msgspec.Struct):
    """
    The number of deliveries, and of runs of deferred messages, by outcome.

    `late`: acknowledged too late for the broker, which delivers the message again.
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
        alias: the broker. A client is made in the thread that uses it, and again after an error.
        stop: set it, or call `stop()`, from any thread: the current message is finished, the rest deferred.
        is_task: it runs inside a Celery task, where it has to send heartbeats while a handler runs.

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
        self._inbox_loop = self._loop._replace(thread=f"inbox of {self._name}")
        self._note = BY_CELERY if is_task else ""
        self._lease_thread = self._new_lease_thread()
        self._most_at_once = max([self._settings.batch_size, *(other.batch_size or 1 for other in group.consumers.values())])
        self._limits = limits.TopicLimits(group, self._topics)
        self._subscriptions = subscriptions.subscriptions_of(group)
        self._seconds_per_message = 0.0
        self._used_at = 0.0  # when the database last answered; 0: unknown
        self._announced_at = float("-inf")
        self._looked_at = self._swept_at = self._given_up_at = float("-inf")
        self._due_at = 0.0  # when the next deferred message is due
        self._unended: list[tuple[int, int]] = []  # runs whose end could not be written, since the database was away
        self._probe_bytes: int | None = None  # the size of the message that the database did not take
        self._behind: set[str | None] = set()  # keys of which a received message was deferred: later ones have to wait, too

    def stop(self) -> None:
        """Ask `run` to return soon; from any thread."""
        self._stop.set()
        if (broker := self._broker) is not None:
            broker.interrupt()

    def run(
        self, *, until_idle: bool = False, once: bool = False, seconds: float | None = None, patience: float | None = None
    ) -> Counts:
        """
        Handle messages until stopped. After an error of database or broker, try again.

        Args:
            until_idle: return when no more messages come.
            once: return after the first receive.
            seconds: return after this time, when the current message is finished.
            patience: raise an error that has lasted for this many seconds; by default try again for ever.
        """
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        wait = IDLE_WAIT if until_idle or once else self._settings.wait
        troubles = 0
        well_at = time.monotonic()
        try:
            while not self._stop.is_set() and time.monotonic() < deadline:
                try:
                    received = self.step(wait)
                    loop_errors.clear(self._loop)
                    troubles, well_at = 0, time.monotonic()
                except Exception as error:
                    is_refused = isinstance(error, InboxRefused)
                    loop_errors.note(self._inbox_loop if is_refused else self._loop, error)
                    if is_refused or database.refuses_all(error):
                        self._leave_session()
                    if patience is not None and time.monotonic() - well_at >= patience:
                        raise
                    pause = (BACKOFF(troubles) if isinstance(error, OUTAGES) else BACKOFF.limit).total_seconds()
                    self._say(error, pause)
                    troubles += 1
                    self.close()
                    self._pause(min(pause, max(0, deadline - time.monotonic())), goes_on=isinstance(error, BrokerUnavailable))
                else:
                    if once or (until_idle and not received):
                        break
        finally:
            for loop in (self._loop, self._inbox_loop):
                loop_errors.clear(loop)
        return self.counts

    def step(self, wait: timedelta) -> int:
        """
        Run what is due of the deferred messages, then receive once and handle all received messages; return their number.

        Raises:
            NotMigrated: the database has no tables of the outbox, or is read-only.
            BrokerUnavailable, django.db.OperationalError: the broker or the database cannot be reached. Nothing is lost: received
                messages are delivered again.
        """
        ran = self._run_due()
        broker = self._connected()
        if self._stop.is_set():  # `stop` may have come before there was a broker to interrupt
            return ran
        given_up = self._receive_given_up(broker)
        topics = self._limits.open_topics()
        to_next = max(0.0, self._due_at - time.monotonic())
        wait = min(wait, timedelta(seconds=min(LONGEST_WAIT_SECONDS, to_next)))
        if not topics:
            self._stop.wait(wait.total_seconds())
            return ran + given_up
        received_at = time.monotonic()  # before the call, since the broker's time begins within it
        invisible = self._settings.invisible
        limit = affordable(self._most_at_once, invisible, self._seconds_per_message)
        deliveries = broker.receive(self.group.name, topics, limit=limit, invisible_for=invisible, wait=wait)
        if deliveries:
            self._handle_received(broker, deliveries, received_at)
        return ran + given_up + len(deliveries)

    def close(self) -> None:
        """Close the broker; the next step makes a new client."""
        self._lease_thread.close()
        self._lease_thread = self._new_lease_thread()
        self._used_at = 0.0
        broker, self._broker = self._broker, None
        if broker is not None:
            try:
                broker.close()
            except Exception:
                logger.warning("Closing the broker %r failed.", self.alias, exc_info=True, extra=log_fields(broker=self.alias))

    def holdings(self) -> Holdings:
        """Return which topics the worker cannot receive from, and the handler that it runs; from any thread."""
        broker = self._broker
        return {**self._limits.refusals(), **(broker.refusals if broker else {})}, self._lease_thread.running()

    def _pause(self, seconds: float, *, goes_on: bool) -> None:
        """Wait after an error; while the broker is away (`goes_on`), deferred messages are run."""
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            if goes_on:
                try:
                    self._run_due()
                except Exception:  # the next step tells of it
                    goes_on = False
            left = min(left, max(0.0, until - time.monotonic()))
            self._stop.wait(min(left, LOOK_SECONDS) if goes_on else left)

    def _run_due(self) -> int:
        """Prepare the database, then run deferred messages that are due, a batch at most; return their number."""
        self._check_database()
        self._announce()
        self._recover()
        now = time.monotonic()
        if now < min(self._looked_at + LOOK_SECONDS, self._due_at):
            return 0
        number = 0
        if self._look_for_due():
            while number < self._settings.batch_size and not self._stop.is_set() and self._run_one():
                number += 1
        if number:
            self._due_at = 0.0  # look again at once
        return number

    def _run_one(self) -> bool:
        """Run the deferred message that has been due for the longest time; return whether there was one."""
        doubt = Doubt()
        try:
            taken = deferred.take(self.group.name, self._subscriptions, self.group.using, may_doubt=doubt.is_mine)
            if taken is None:
                return False
            if taken.crashes:  # it may have killed a process
                consumer = self.group.find(taken.delivery.topic, taken.type, taken.delivery.tag)
                doubt.extend(consumer.time_limit if consumer else None)
            else:
                doubt.end()
            result = run_deferred(self.group, taken, self._lease_thread)
        finally:
            doubt.end()
        self.counts.add(result.outcome)
        if result.outcome is Outcome.RELEASED:
            self._unended.append((taken.id, taken.runs))
            self._note_outage(taken.delivery)
        else:
            self._used_at = time.monotonic()
        if result.ends_with is not None:
            raise result.ends_with
        return True

    def _look_for_due(self) -> bool:
        """Return whether a deferred message is due, note when the next one is, and wake those that nobody else wakes."""
        self._looked_at = time.monotonic()
        is_due, is_asleep, seconds = deferred.look(self.group.name, self.group.using)
        self._due_at = float("inf") if seconds is None else self._looked_at + seconds
        if is_asleep and self._looked_at - self._swept_at > SWEEP_SECONDS:
            deferred.sweep(self.group.using)
            self._swept_at = self._looked_at
        return is_due

    def _receive_given_up(self, broker: Receives) -> int:
        """Store what the server gave up as dead letters; return their number."""
        if not GivesUp.has(broker) or time.monotonic() - self._given_up_at < LOOK_SECONDS:
            return 0
        self._given_up_at = time.monotonic()
        topics = limits.topics_with_room(self.group, self._topics)
        given_up = GivesUp.of(broker).receive_given_up(self.group.name, topics, limit=GIVEN_UP_AT_ONCE) if topics else []
        results = defer(
            self.group, [(delivery, Deferral(Reason.SERVER, is_dead=True, error=delivery.given_up)) for delivery in given_up]
        )
        known = []
        for delivery, result in zip(given_up, results, strict=True):
            self.counts.add(result.outcome)
            if result.outcome is Outcome.RELEASED:  # it comes again
                self._note_outage(delivery)
                continue
            known.append(delivery)
            if result.outcome is Outcome.DEAD_LETTER:
                names = {"group": self.group.name, "message_id": delivery.message_id, "topic": delivery.topic}
                signals.dead_lettered.send_robust(sender=Consumer, reason=delivery.given_up, **names)
        if known:
            broker.ack(known)
        return len(given_up)

    def _handle_received(self, broker: Receives, deliveries: Sequence[Delivery], received_at: float) -> None:
        self._behind = set()
        started_at = time.monotonic()
        self._lease_thread.hold(broker, plan(self.group, deliveries), received_at=received_at)
        handled = self._handle_all(broker)
        # A slow message is remembered for some receives, so that fewer are received and deferred.
        self._seconds_per_message = max((time.monotonic() - started_at) / max(1, handled), self._seconds_per_message / 2)

    def _handle_all(self, broker: Receives) -> int:
        """Handle the received deliveries; return their number. After an outage the rest is released, after a stop deferred."""
        acked_at = time.monotonic()
        handled = 0
        is_outage, ends_with = False, None
        try:
            while not (is_outage or ends_with or self._stop.is_set()) and (taken := self._lease_thread.take()):
                handled += len(taken)
                is_outage = True  # where an error leaves this block
                results = self._handle([held.delivery for held in taken])
                is_outage = self._settle(taken, results)
                ends_with = next((result.ends_with for result in results if result.ends_with), None)
                self._used_at = 0.0 if is_outage else time.monotonic()
                if time.monotonic() - acked_at > ACK_WITHIN_SECONDS:
                    self._ack(broker)
                    acked_at = time.monotonic()
        finally:
            self._end_all(broker, is_outage=is_outage)
        if ends_with is not None:
            raise ends_with
        return handled

    def _handle(self, deliveries: list[Delivery]) -> list[HandlingResult]:
        """Handle deliveries that were planned together."""
        first = deliveries[0]
        if len(deliveries) == 1:
            if order_key_of(first) in self._behind:
                return defer(self.group, [(first, Deferral.unhandled(Reason.BEHIND, first))])
            return [handle(self.group, first, self._lease_thread)]
        if find_consumer(self.group, first) is None:
            return ignore(self.group, deliveries)
        if first.delivery_count > 1:
            return defer(self.group, [(delivery, Deferral.unhandled(Reason.AGAIN, delivery)) for delivery in deliveries])
        return handle_together(self.group, deliveries, self._lease_thread)

    def _settle(self, taken: Sequence[Held], results: Sequence[HandlingResult]) -> bool:
        """Count results, and mark known messages to be acknowledged; return whether the database is away."""
        is_outage = False
        for held, result in zip(taken, results, strict=True):
            if result.outcome is Outcome.RELEASED:
                is_outage = True
                self._note_outage(held.delivery)
                continue
            self.counts.add(result.outcome)
            loop_errors.clear(self._inbox_loop)  # a step without messages says nothing about the inbox
            self._lease_thread.done(held)
            if result.outcome is Outcome.DEFERRED:
                self._due_at = 0.0
            if result.is_failure:
                self._limits.note_failure(held.delivery.topic)
            if result.order_key is not None:
                self._behind.add(result.order_key)
        return is_outage

    def _note_outage(self, delivery: Delivery) -> None:
        self._used_at = 0.0
        self._probe_bytes = len(delivery.body)

    def _leave_session(self) -> None:
        """Close Django's connection: a handler may have left a setting in its session that has the database refuse."""
        connection = connections[self.group.using]
        if not connection.in_atomic_block:  # of a test
            if connection.connection is not None:
                connection.connection.close()  # a pool of Django's would keep the session
            connection.close()

    def _note_late(self, delivery: Delivery) -> None:
        self.counts.late += 1
        text = (
            "Message %s was settled too late by group %r: the broker delivers it again. If this happens often, increase "
            'OUTBOX["CONSUMER"]["INVISIBLE"].'
        )
        logger.warning(text, delivery.message_id, self.group.name, extra=fields_of(delivery))

    def _end_all(self, broker: Receives, *, is_outage: bool) -> None:
        """Acknowledge what is known. Defer the rest and acknowledge it, too, or release it if the database is away."""
        left = self._lease_thread.end_waiting()
        stopped = [(delivery, Deferral.unhandled(Reason.STOP, delivery)) for delivery in left]
        results = [RELEASED] * len(left) if is_outage else defer(self.group, stopped)
        for result in results:
            self.counts.add(result.outcome)
        is_known = [result.outcome is not Outcome.RELEASED for result in results]
        try:
            self._ack(broker, list(compress(left, is_known)))
        finally:
            if not all(is_known):
                broker.release([delivery for delivery, known in zip(left, is_known, strict=True) if not known])

    def _ack(self, broker: Receives, more: Sequence[Delivery] = ()) -> None:
        if done := [*self._lease_thread.end_done(), *more]:
            for delivery, is_acked in zip(done, broker.ack(done), strict=True):
                if not is_acked:
                    self._note_late(delivery)

    def _unload(self, waiting: Sequence[Delivery], done: Sequence[Delivery]) -> None:
        """Defer what waits behind a slow handler, over a connection of its own, and acknowledge that and what is done."""
        limits_ = {"statement_timeout": "1s", "lock_timeout": "1s"}  # this thread also renews deliveries
        if waiting:
            with database.connect(
                self.group.using, application_name="outbox slow handler", settings=limits_, connect_timeout=1
            ) as connection:
                deferrals = [(delivery, Deferral.unhandled(Reason.SLOW, delivery)) for delivery in waiting]
                deferred.defer(connection, self.group.name, deferrals)
            self.counts.deferred += len(waiting)
        if (broker := self._broker) is not None:
            broker.ack([*waiting, *done])

    def _say(self, error: Exception, pause: float) -> None:
        """Log an error, without a traceback where database or broker are away."""
        extra = log_fields(group=self.group.name, broker=self.alias, database=self.group.using)
        if isinstance(error, NotMigrated):
            logger.warning("Group %r waits: %s", self.group.name, error, extra=extra)
        elif isinstance(error, InboxRefused):
            text = "Group %r waits: the database refuses what is written about its messages: %s"
            logger.error(text, self.group.name, error, extra=extra)
        elif isinstance(error, OUTAGES):
            text = "Group %r lost its database or broker %r, next try in %.1f s: %s"
            logger.warning(text, self.group.name, self.alias, pause, str(error).strip(), extra=extra)
        else:
            text = "Group %r of broker %r failed, next try in %.1f s"
            logger.error(text, self.group.name, self.alias, pause, exc_info=error, extra=extra)

    def _check_database(self) -> None:
        """
        Check that the database is there before messages are received.

        The connection is kept whatever CONN_MAX_AGE is: opening one costs more than handling most messages.
        """
        if time.monotonic() - self._used_at > IDLE_SECONDS:
            database.drop_if_lost(self.group.using)
            connections[self.group.using].ensure_connection()
            if not self._used_at:
                database.ensure_fit(self.group.using, database.raw(self.group.using))
            self._used_at = time.monotonic()

    def _recover(self) -> None:
        """After an outage, write what could not be written. Raises where the database would refuse a message as before."""
        if self._probe_bytes is not None:
            with own_statements():
                deferred.probe(self.group.name, os.urandom(self._probe_bytes), self.group.using)
            self._probe_bytes = None
        if self._unended:
            deferred.end_late(self._unended, self.group.using)
            self._unended = []

    def _announce(self) -> None:
        """Send a heartbeat with the subscriptions of this process, before the first receive and then periodically."""
        if time.monotonic() - self._announced_at > heartbeats.BEAT_SECONDS:
            with guarded_transaction(self.group.using):
                subscriptions.beat(self.group, self.alias, note=self._note)
            self._announced_at = time.monotonic()

    def _new_lease_thread(self) -> LeaseThread:
        is_in_test = connections[self.group.using].in_atomic_block  # whose rows no other connection may write
        beat, unload = self._beat_beside if self._note else None, None if is_in_test else self._unload
        return LeaseThread(self._stop, self._name, beat=beat, unload=unload)

    def _beat_beside(self) -> None:
        """Send a heartbeat while a handler runs, over a connection of its own."""
        limits = {"statement_timeout": "1s", "lock_timeout": "1s"}  # this thread also renews deliveries
        with database.connect(
            self.group.using, application_name="outbox heartbeat", settings=limits, connect_timeout=1
        ) as connection:
            subscriptions.beat(self.group, self.alias, note=self._note, over=connection)

    def _connected(self) -> Receives:
        if self._broker is None:
            broker = Receives.of(conf.make_broker(self.alias))
            introduce(broker, self.group)
            self._broker = broker
            note_worker(self.alias, self.group.name, self._name, self)
        return self._broker


def plan(group: Group, deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """
    Return deliveries in the order of work, in lists that are handled together.

    On topics without order, first those that no handler takes, and those that were delivered before, which are ignored or
    deferred together; then all others in the order received, which on ordered topics is that of their keys.
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
        self._failures: list[BaseException] = []
        self.workers = [
            Worker(group, alias, stop=self._stop) for group in groups for alias in group.brokers for _ in range(threads)
        ]
        self.threads: list[threading.Thread] = []

    def start(self, *, until_idle: bool = False, once: bool = False) -> None:
        """
        Start the threads. Each ends when it is stopped, with `until_idle` when no message comes, with `once` after one batch.

        With `until_idle` or `once`, a longer outage of database or broker ends all threads; otherwise they wait until it is over.
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
        """Ask each worker to finish its message and end; from any thread."""
        for worker in self.workers:
            worker.stop()

    def is_working(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def join(self) -> None:
        """
        Wait until all threads have ended.

        Raises:
            BaseException: what ended a worker that was not stopped.
        """
        for thread in self.threads:
            thread.join()
        for failure in self._failures:
            raise failure

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
        except BaseException as error:  # an interrupt in a thread must be propagated
            self._failures.append(error)
            self._stop.set()
        finally:
            worker.close()
            connections.close_all()
