"""
Workers: receive, handle, settle; each in one thread, for one group and one broker, until it is stopped.

A worker plans the order in which it handles received messages, and which it handles together, and counts deliveries by their
outcome. `ConsumerThreads` runs the workers of some groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

from django.db import connections

from outbox import conf, database, signals
from outbox.brokers.base import Broker, Delivery
from outbox.consuming import outcome, subscriptions
from outbox.consuming.delivery_info import DeliveryInfo, fields_of
from outbox.consuming.handle import handle, handle_together, ignore
from outbox.consuming.lease_thread import Held, LeaseThread, affordable, forget_worker, new_worker_name, note_worker
from outbox.consuming.outcome import HandlingResult, Outcome
from outbox.consuming.owners import set_owner
from outbox.consuming.read import find_consumer
from outbox.consuming.register import Consumer, Group
from outbox.database import heartbeats, loop_errors
from outbox.database.guarded import guarded_transaction
from outbox.database.heartbeats import BY_CELERY
from outbox.database.loop_errors import Loop
from outbox.errors import BrokerUnavailable, InboxRefused, KeptByClient, NotMigrated, UnknownMessageType
from outbox.logs import get_logger, log_fields
from outbox.message import TopicType
from outbox.outages import BACKOFF, OUTAGES

logger = get_logger(__name__)

ACK_WITHIN_SECONDS = 0.1  # messages handled within this time are acknowledged together
IDLE_SECONDS = 5.0  # a connection that was idle for longer is checked before it is used
IDLE_WAIT = timedelta(milliseconds=200)  # no message within this time: idle
PATIENCE_SECONDS = 15.0  # with --until-idle or --once, an outage that lasts longer ends the command


@dataclass(slots=True)
class Counts:
    """The number of deliveries by outcome. `late`: settled too late for the broker, which delivers the message again."""

    handled: int = 0
    duplicates: int = 0
    ignored: int = 0
    retried: int = 0
    handed_back: int = 0
    dead_letters: int = 0
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
    Outcome.RETRY: "retried",
    Outcome.HANDED_BACK: "handed_back",
    Outcome.DEAD_LETTER: "dead_letters",
}


class Worker:
    """
    Handles the messages that one broker has for a group, in the thread that calls `run` or `step`.

    Args:
        alias: the broker. A client is made in the thread that uses it, and again after an error.
        stop: set it, or call `stop()`, from any thread: the current message is finished, the rest handed back.
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
        self._broker: Broker | None = None
        self._name = new_worker_name()
        self._loop = Loop("consumer", group.using, alias, group.name, self._name)
        self._inbox_loop = self._loop._replace(thread=f"inbox of {self._name}")
        self._note = BY_CELERY if is_task else ""
        self._lease_thread = self._new_lease_thread()
        self._most_at_once = max([self._settings.batch_size, *(one.batch_size or 1 for one in group.consumers.values())])
        self._seconds_per_message = 0.0
        self._used_at = 0.0  # when the database last answered; 0: unknown
        self._announced_at = float("-inf")
        self._has_unended = False  # the end of a run may not be recorded, since the database was away

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
                    self._stop.wait(min(pause, max(0, deadline - time.monotonic())))
                else:
                    if once or (until_idle and not received):
                        break
        finally:
            for loop in (self._loop, self._inbox_loop):
                loop_errors.clear(loop)
        return self.counts

    def step(self, wait: timedelta) -> int:
        """
        Receive once and handle all received messages; return their number.

        Raises:
            NotMigrated: the database has no tables of the outbox, or is read-only.
            BrokerUnavailable, django.db.OperationalError: the broker or the database cannot be reached. Nothing is lost: received
                messages are delivered again.
        """
        self._check_database()
        self._announce()
        broker = self._connected()
        if self._stop.is_set():  # `stop` may have come before there was a broker to interrupt
            return 0
        received_at = time.monotonic()  # before the call, since the broker's time begins within it
        invisible = self._settings.invisible
        limit = affordable(self._most_at_once, invisible, self._seconds_per_message)
        deliveries = broker.receive(self.group.name, self._topics, limit=limit, invisible_for=invisible, wait=wait)
        if not deliveries:
            return 0
        started_at = time.monotonic()
        try:
            works = plan(self.group, deliveries)
        except Exception:  # the database is away
            broker.release(deliveries)
            raise
        self._lease_thread.hold(broker, works, received_at=received_at)
        handled = self._handle_all(broker)
        # A slow message is remembered for some receives, so that fewer are received and handed back.
        self._seconds_per_message = max((time.monotonic() - started_at) / max(1, handled), self._seconds_per_message / 2)
        return len(deliveries)

    def close(self) -> None:
        """Close the broker; the next step makes a new client."""
        self._lease_thread.close()
        self._lease_thread = self._new_lease_thread()
        self._used_at = 0.0
        forget_worker(self.alias, self.group.name, self._name)
        broker, self._broker = self._broker, None
        if broker is not None:
            try:
                broker.close()
            except Exception:
                logger.warning("Closing the broker %r failed.", self.alias, exc_info=True, extra=log_fields(broker=self.alias))

    def _handle_all(self, broker: Broker) -> int:
        """Handle the received deliveries; return their number. The rest is handed back, also after an error."""
        acked_at = time.monotonic()
        handled = 0
        try:
            while not self._stop.is_set() and (taken := self._lease_thread.take()):
                handled += len(taken)
                if taken[0].delivery.delivery_count > 1:  # it may kill this process: acknowledge the others first
                    self._ack(broker)
                is_outage = self._handle(broker, taken)
                if self._is_ordered(taken[0].delivery) or time.monotonic() - acked_at > ACK_WITHIN_SECONDS:
                    self._ack(broker)  # the next message of its key may be waiting
                    acked_at = time.monotonic()
                self._used_at = 0.0 if is_outage else time.monotonic()
                if is_outage:
                    break
        finally:
            self._end_all(broker)
        return handled

    def _handle(self, broker: Broker, taken: Sequence[Held]) -> bool:
        """Handle deliveries together and settle them; return whether the database went away."""
        deliveries = [held.delivery for held in taken]
        if len(deliveries) > 1 and find_consumer(self.group, deliveries[0]) is None:
            results = ignore(self.group, deliveries)
        elif len(deliveries) > 1:
            results = handle_together(self.group, deliveries, self._lease_thread)
        else:
            results = [handle(self.group, deliveries[0], self._lease_thread)]
        is_outage = any(result.is_outage for result in results)
        self._has_unended |= is_outage  # before settling, since the broker may be away too
        if any(not result.is_outage for result in results):  # a step without messages says nothing about the inbox
            loop_errors.clear(self._inbox_loop)
        try:
            for held, result in zip(taken, results, strict=True):
                self._settle(broker, held, result)
        finally:
            for result in results:
                if result.ends_with is not None:
                    raise result.ends_with
        return is_outage

    def _leave_session(self) -> None:
        """Close Django's connection: a handler may have left a setting in its session that has the database refuse."""
        connection = connections[self.group.using]
        if not connection.in_atomic_block:  # of a test
            if connection.connection is not None:
                connection.connection.close()  # a pool of Django's would keep the session
            connection.close()

    def _settle(self, broker: Broker, held: Held, result: HandlingResult) -> None:
        if result.outcome in (Outcome.HANDLED, Outcome.DUPLICATE, Outcome.IGNORED):
            self.counts.add(result.outcome)
            self._lease_thread.done(held)
            return
        delivery = self._lease_thread.end(held)
        if result.is_busy:
            self.counts.add(result.outcome)
            return
        try:
            if result.outcome is Outcome.DEAD_LETTER:
                is_ended = broker.dead_letter(delivery, result.reason)
            elif result.is_for_others:
                is_ended = broker.pass_on(delivery, result.after)
            else:
                is_ended = broker.retry(delivery, result.after)
        except KeptByClient as error:
            logger.warning("Message %s: %s", delivery.message_id, error, extra=fields_of(delivery))
            return
        except BrokerUnavailable:
            raise
        except Exception:
            text = "Message %s could not be settled; it will be delivered again."
            logger.exception(text, delivery.message_id, extra=fields_of(delivery))
            return
        self.counts.add(result.outcome)  # not before: where the broker did not take it, it comes again
        if not is_ended:
            self._note_late(delivery)
        elif result.outcome is Outcome.DEAD_LETTER:
            self._note_dead(delivery, result.reason)

    def _note_dead(self, delivery: Delivery, reason: str) -> None:
        if delivery.message_id:
            with guarded_transaction(self.group.using):
                outcome.record_decision(DeliveryInfo.of(delivery), self.group.using, given_up=reason, has_letter=True)
        signals.dead_lettered.send_robust(
            sender=Worker, group=self.group.name, message_id=delivery.message_id, topic=delivery.topic, reason=reason
        )

    def _note_late(self, delivery: Delivery) -> None:
        self.counts.late += 1
        text = (
            "Message %s was settled too late by group %r: the broker delivers it again. If this happens often, increase "
            'OUTBOX["CONSUMER"]["INVISIBLE"].'
        )
        logger.warning(text, delivery.message_id, self.group.name, extra=fields_of(delivery))

    def _end_all(self, broker: Broker) -> None:
        """Acknowledge handled messages and hand the rest back."""
        left = self._lease_thread.end_waiting()
        try:
            self._ack(broker)
        finally:
            if left:
                self.counts.handed_back += len(left)
                broker.release(left)

    def _ack(self, broker: Broker) -> None:
        if done := self._lease_thread.end_done():
            for delivery, is_acked in zip(done, broker.ack(done), strict=True):
                if not is_acked:
                    self._note_late(delivery)

    def _is_ordered(self, delivery: Delivery) -> bool:
        return conf.topic_settings(delivery.topic).type is TopicType.FIFO

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
        if self._has_unended:
            with guarded_transaction(self.group.using):
                outcome.end_runs_of(self._name, self.group.using)
            self._has_unended = False

    def _announce(self) -> None:
        """Send a heartbeat with the subscriptions of this process, before the first receive and then periodically."""
        if time.monotonic() - self._announced_at > heartbeats.BEAT_SECONDS:
            with guarded_transaction(self.group.using):
                subscriptions.beat(self.group, self.alias, note=self._note)
            self._announced_at = time.monotonic()

    def _new_lease_thread(self) -> LeaseThread:
        return LeaseThread(self._stop, self._name, beat=self._beat_beside if self._note else None)

    def _beat_beside(self) -> None:
        """Send a heartbeat while a handler runs, over a connection of its own."""
        limits = {"statement_timeout": "1s", "lock_timeout": "1s"}  # this thread also renews deliveries
        with database.connect(
            self.group.using, application_name="outbox heartbeat", settings=limits, connect_timeout=1
        ) as connection:
            subscriptions.beat(self.group, self.alias, note=self._note, over=connection)

    def _connected(self) -> Broker:
        if self._broker is None:
            broker = conf.make_broker(self.alias)
            set_owner(broker, self.group.name, self.group.using)
            self._broker = broker
            note_worker(self.alias, self.group.name, self._name, self._broker, self._lease_thread)
        return self._broker


def plan(group: Group, deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """
    Return deliveries in the order of work, in lists that are handled together.

    First deliveries come first. Redelivered messages whose last run has not ended come last: if one of them kills the process,
    the others are done.
    """
    first = [delivery for delivery in deliveries if delivery.delivery_count == 1]
    again = [delivery for delivery in deliveries if delivery.delivery_count > 1]
    return [*_together(group, first), *([one] for one in _by_risk(group, again))]


def _by_risk(group: Group, deliveries: list[Delivery]) -> list[Delivery]:
    if len(deliveries) < 2:
        return deliveries
    ids = [DeliveryInfo.of(one).message_id for one in deliveries]
    unended = outcome.unended_runs(group.name, ids, group.using)
    return [one for _, one in sorted(zip(ids, deliveries, strict=True), key=lambda pair: pair[0] in unended)]


def _together(group: Group, deliveries: list[Delivery]) -> Iterator[list[Delivery]]:
    """Group deliveries of handlers with a batch size, and those without a handler; all others stay alone."""
    collected: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        try:
            consumer = find_consumer(group, delivery)
        except UnknownMessageType:
            yield [delivery]
            continue
        if consumer and not consumer.batch_size:
            yield [delivery]
            continue
        work = collected.setdefault(consumer.subject if consumer else "", [])
        work.append(delivery)
        if _is_full(work, consumer):
            yield collected.pop(consumer.subject if consumer else "")
    yield from collected.values()


def _is_full(work: list[Delivery], consumer: Consumer | None) -> bool:
    return consumer is not None and len(work) == consumer.batch_size


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
        found: dict[str, Counts] = {}
        for worker in self.workers:
            counts = found.setdefault(worker.group.name, Counts())
            counts += worker.counts
        return found

    def _work(self, worker: Worker, until_idle: bool, once: bool) -> None:
        try:
            worker.run(until_idle=until_idle, once=once, patience=PATIENCE_SECONDS if until_idle or once else None)
        except BaseException as error:  # an interrupt in a thread reaches nobody by itself
            self._failures.append(error)
            self._stop.set()
        finally:
            worker.close()
            connections.close_all()
