"""A worker: receive, handle, tell the broker; in one thread, for one group and one broker, until it is stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

from django.db import InterfaceError, OperationalError, connections

from outbox import conf, database, signals
from outbox.brokers.base import Broker, Delivery
from outbox.conf.sections import ConsumerSettings
from outbox.consuming.handle import Outcome, Result, handle
from outbox.consuming.register import Group
from outbox.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

ACK_WITHIN_SECONDS = 0.1  # acknowledge together what was handled in this time
IDLE_SECONDS = 5.0  # a connection idle for longer is looked at before it is used
BACK_OFF_SECONDS = (0.2, 0.5, 1.0, 2.0)  # waits while database or broker are away; the last one stays
IDLE_WAIT = timedelta(milliseconds=200)  # nothing came in this time: idle


@dataclass(slots=True)
class Tally:
    """How many deliveries came to which outcome. `late`: acknowledged after their time, so handed out again."""

    handled: int = 0
    duplicates: int = 0
    passed_over: int = 0
    retried: int = 0
    dead_letters: int = 0
    late: int = 0

    def count(self, outcome: Outcome) -> None:
        name = _TALLIED[outcome]
        setattr(self, name, getattr(self, name) + 1)

    def __iadd__(self, other: Tally) -> Self:
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)
        return self


_TALLIED = {
    Outcome.HANDLED: "handled",
    Outcome.DUPLICATE: "duplicates",
    Outcome.PASSED_OVER: "passed_over",
    Outcome.RETRY: "retried",
    Outcome.DEAD_LETTER: "dead_letters",
}


def affordable(settings: ConsumerSettings, seconds_per_message: float) -> int:
    """Return how many messages can be handled in half of the time that the broker gives: a batch at most, and one at least."""
    messages = settings.invisible.total_seconds() / 2 / max(seconds_per_message, 1e-6)
    return max(1, min(settings.batch_size, int(messages)))


class Worker:
    """
    Handles what one broker has for a group, one message after the other, in the thread that calls `run` or `step`.

    Args:
        alias: the broker. It is created here, in the thread that uses it, and again after trouble with it.
        stop: set it, or call `stop()`, from any thread: the message being handled is finished, the rest handed back.

    Raises:
        UnknownTopic, ConfigurationError: the group's topics contradict the settings.
    """

    def __init__(self, group: Group, alias: str, *, stop: threading.Event | None = None) -> None:
        self.group = group
        self.alias = alias
        self.tally = Tally()
        self._topics = group.topics_of(alias)
        self._settings = conf.settings().consumer
        self._stop = stop or threading.Event()
        self._broker: Broker | None = None
        self._seconds_per_message = 0.0
        self._used_at = 0.0  # when the database last answered; 0: in doubt
        self._done: list[Delivery] = []

    def stop(self) -> None:
        """Have `run` return soon; from any thread."""
        self._stop.set()
        if (broker := self._broker) is not None:
            broker.interrupt()

    def run(
        self, *, until_idle: bool = False, once: bool = False, seconds: float | None = None, patience: float | None = None
    ) -> Tally:
        """
        Handle messages until stopped; outlast trouble with database and broker.

        Args:
            until_idle: return when nothing comes any more.
            once: return after one batch, or none.
            seconds: return after this time at the latest, the message being handled finished.
            patience: raise what is wrong when it has been wrong for so many seconds; by default outlast it.
        """
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        wait = IDLE_WAIT if until_idle or once else self._settings.wait
        troubles = 0
        well_at = time.monotonic()
        while not self._stop.is_set() and time.monotonic() < deadline:
            try:
                received = self.step(wait)
                troubles, well_at = 0, time.monotonic()
            except Exception as error:
                if patience is not None and time.monotonic() - well_at >= patience:
                    raise
                pause = BACK_OFF_SECONDS[min(troubles, len(BACK_OFF_SECONDS) - 1)]
                self._say(error, pause)
                troubles += 1
                self.close()
                self._stop.wait(min(pause, max(0, deadline - time.monotonic())))
            else:
                if once or (until_idle and not received):
                    break
        return self.tally

    def step(self, wait: timedelta) -> int:
        """
        Receive once and bring all that came to its outcome; give how many came.

        Raises:
            BrokerUnavailable, django.db.OperationalError: the broker or the database is out of reach. Nothing is lost:
                what was received is handed out again.
        """
        self._check_database()
        broker = self._connected()
        if self._stop.is_set():  # perhaps before there was a broker to interrupt
            return 0
        received_at = time.monotonic()  # before the call, for the broker counts from some moment within it
        limit = affordable(self._settings, self._seconds_per_message)
        deliveries = broker.receive(self.group.name, self._topics, limit=limit, invisible_for=self._settings.invisible, wait=wait)
        if not deliveries:
            return 0
        started_at = time.monotonic()
        self._handle_all(broker, deliveries, received_at + self._settings.invisible.total_seconds())
        self._seconds_per_message = (time.monotonic() - started_at) / len(deliveries)
        return len(deliveries)

    def close(self) -> None:
        """Let go of the broker; the next step makes a new one."""
        broker, self._broker = self._broker, None
        if broker is not None:
            try:
                broker.close()
            except Exception:
                logger.warning("Broker %r did not close well.", self.alias, exc_info=True)

    def _handle_all(self, broker: Broker, deliveries: Sequence[Delivery], visible_at: float) -> None:
        acked_at = time.monotonic()
        is_outage = False
        try:
            for delivery in deliveries:
                if self._stop.is_set() or is_outage:
                    broker.retry(delivery, timedelta(0))
                elif time.monotonic() < visible_at:  # later, it is another's
                    result = handle(self.group, delivery)
                    self._settle(broker, delivery, result)
                    is_outage = result.is_outage
                if time.monotonic() - acked_at > ACK_WITHIN_SECONDS:
                    self._ack(broker)
                    acked_at = time.monotonic()
        finally:
            self._ack(broker)
        self._used_at = 0.0 if is_outage else time.monotonic()

    def _settle(self, broker: Broker, delivery: Delivery, result: Result) -> None:
        self.tally.count(result.outcome)
        if result.is_busy:
            return
        if result.outcome is Outcome.RETRY:
            broker.retry(delivery, result.after)
        elif result.outcome is Outcome.DEAD_LETTER:
            if broker.dead_letter(delivery, result.reason):
                signals.dead_lettered.send_robust(
                    sender=Worker,
                    group=self.group.name,
                    message_id=delivery.message_id,
                    topic=delivery.topic,
                    reason=result.reason,
                )
        else:
            self._done.append(delivery)

    def _ack(self, broker: Broker) -> None:
        done, self._done = self._done, []
        if not done:
            return
        for delivery, is_acked in zip(done, broker.ack(done), strict=True):
            if not is_acked:
                self.tally.late += 1
                logger.warning(
                    "Message %s took group %r longer than OUTBOX[CONSUMER][INVISIBLE]; it is delivered again, and dropped.",
                    delivery.message_id,
                    self.group.name,
                )

    def _say(self, error: Exception, pause: float) -> None:
        """Log what went wrong: in a line where database or broker are away, which says all."""
        if isinstance(error, BrokerUnavailable | OperationalError | InterfaceError):
            text = "Group %r lost its database or broker %r, again in %s s: %s"
            logger.warning(text, self.group.name, self.alias, pause, str(error).strip())
        else:
            logger.error("Group %r of broker %r failed, again in %s s", self.group.name, self.alias, pause, exc_info=error)

    def _check_database(self) -> None:
        """
        Take no message while the database is away: its attempts would be spent for nothing.

        The connection is kept, whatever CONN_MAX_AGE says: opening one costs more than most messages.
        """
        if time.monotonic() - self._used_at > IDLE_SECONDS:
            database.drop_if_lost(self.group.using)
            connections[self.group.using].ensure_connection()
            self._used_at = time.monotonic()

    def _connected(self) -> Broker:
        if self._broker is None:
            self._broker = conf.make_broker(self.alias)
        return self._broker
