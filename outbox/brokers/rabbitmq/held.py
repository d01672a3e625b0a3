"""
What was handed out and is not settled.

RabbitMQ knows no time after which a delivery comes again: it belongs to its channel until it is acknowledged or the channel
is gone. So the time is kept here: a delivery that is not renewed in time goes back to its queue, by the thread that sends the
heartbeats if by nobody else. A process that dies or freezes loses its connection, and with it all its deliveries.

The message of a standing subscription is acknowledged after all others of its queue, but soon in any case: so the server holds
nothing that was not begun without a subscription that stands (`receiver.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from amqp import spec

from outbox.brokers.base import Delivery
from outbox.brokers.rabbitmq.connection import LOST, RabbitMQConnection, describe
from outbox.brokers.rabbitmq.ordered import Fetched, OrderedQueue
from outbox.errors import BrokerUnavailable

CONSUMER_MARGIN = 0.9  # of CONSUMER_TIMEOUT: later the server would take back all that came over the channel


@dataclass(slots=True)
class HeldDelivery:
    """A fetched message that was handed out. `window`: that of its queue, on ordered topics."""

    fetched: Fetched
    expires_at: float
    window: OrderedQueue | None = None


class HeldDeliveries:
    """
    The deliveries of one connection. Any thread may call; each call holds the connection's lock.

    Args:
        longest: seconds after which no delivery is renewed.
        clock: gives seconds; it never goes back.
        before_last: called with a queue of which all messages are settled, but for what is acknowledged next.
        before_return: called with its queue before a message is returned that the standing subscription would bring back.
    """

    def __init__(
        self,
        connection: RabbitMQConnection,
        longest: float,
        clock: Callable[[], float],
        *,
        before_last: Callable[[str], None],
        before_return: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self.longest = longest
        self._clock = clock
        self._before_last = before_last
        self._before_return = before_return
        self._serial = 0
        self._held: dict[str, HeldDelivery] = {}  # by receipt
        self._unsettled: defaultdict[str, dict[int, Fetched]] = defaultdict(dict)  # queue -> by delivery tag
        self._last: defaultdict[str, dict[int, float]] = defaultdict(dict)  # of these, what is acknowledged last -> since when

    def begin(self) -> None:
        """Begin with a new connection; what was held over the last one is gone."""
        self._held.clear()
        self._unsettled.clear()
        self._last.clear()
        self._serial = self._connection.serial

    def note(self, fetched: Fetched) -> None:
        """Note a message of a topic without order that has come."""
        self._unsettled[fetched.queue][fetched.tag] = fetched

    def has_unsettled(self, queue: str, *, standing: bool = False) -> bool:
        """Return whether the server waits for the settlement of a message from that queue, or of the standing subscription's."""
        return any(one.is_standing or not standing for one in self._unsettled[queue].values())

    def hand_out(self, fetched: Fetched, invisible_for: timedelta, window: OrderedQueue | None = None) -> Delivery:
        """Hold a delivery for that time from now."""
        expires_at = self._clock() + invisible_for.total_seconds()
        self._held[fetched.delivery.receipt] = HeldDelivery(fetched, expires_at, window)
        return fetched.delivery

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that time from now. None for one that is gone, or that the server will take back before."""
        with self._connection.lock:
            self.return_expired()
            until = self._clock() + invisible_for.total_seconds()
            found: list[Delivery | None] = []
            for held in map(self._find, deliveries):
                if held is None or until > held.fetched.received_at + self.longest:
                    found.append(None)
                else:
                    held.expires_at = until
                    found.append(held.fetched.delivery)
            return found

    @property
    def has_any(self) -> bool:
        """Whether a delivery is held."""
        return bool(self._held)

    def is_held(self, delivery: Delivery) -> bool:
        """Return whether a delivery can still be settled."""
        with self._connection.lock:
            self.return_expired()
            return self._find(delivery) is not None

    def ack(self, deliveries: Iterable[Delivery]) -> list[bool]:
        """
        Acknowledge deliveries, that of a standing subscription later. False for one that is gone.

        Raises:
            BrokerUnavailable: the connection was lost; the messages are delivered again.
        """
        return self._settle(deliveries, self._acknowledge)

    def give_back(self, deliveries: Iterable[Delivery]) -> list[bool]:
        """Return messages to their queues; otherwise as `ack`."""
        return self._settle(deliveries, self._return)

    def postpone(self, delivery: Delivery, after: timedelta) -> bool:
        """
        Keep a message for that time; otherwise as `ack`.

        A message of an ordered topic is then delivered again by this process. Any other is returned to its queue, at the latest
        before the server would take it back.
        """
        due_at = self._clock() + after.total_seconds()
        return self._settle([delivery], lambda held: self._postpone(held, due_at))[0]

    def count(self, group: str) -> Counter[str]:
        """Return the number of messages of topics without order that are held for a group, by topic."""
        held = [one.fetched.delivery for one in self._held.values() if one.window is None]
        return Counter(one.topic for one in held if one.group == group)

    def return_expired(self) -> None:
        """Return deliveries that were not renewed in time."""
        now = self._clock()
        for receipt, held in [(receipt, one) for receipt, one in self._held.items() if one.expires_at <= now]:
            del self._held[receipt]
            try:
                self._return(held)
            except LOST:
                self._connection.drop()  # then all go back
                return

    def acknowledge_last(self, seconds: float = 0.0) -> None:
        """Acknowledge what has waited for others of its queue for so long."""
        until = self._clock() - seconds
        for queue in [queue for queue, last in self._last.items() if any(since <= until for since in last.values())]:
            self._acknowledge_last(queue)

    def reject(self, fetched: Fetched) -> None:
        """Return a message that was not handed out to its queue."""
        if fetched.is_standing or not self.has_unsettled(fetched.queue, standing=True):
            self._before_return(fetched.queue)
        fetched.channel.basic_reject(fetched.tag, requeue=True)
        del self._unsettled[fetched.queue][fetched.tag]
        self._end(fetched.queue)

    def _settle(self, deliveries: Iterable[Delivery], settle: Callable[[HeldDelivery], None]) -> list[bool]:
        found = []
        try:
            with self._connection.lock:
                self.return_expired()
                for held in map(self._find, deliveries):
                    found.append(held is not None)
                    if held is not None:
                        del self._held[held.fetched.delivery.receipt]
                        settle(held)
        except LOST as error:
            self._connection.drop()
            raise BrokerUnavailable(f"RabbitMQ did not take the answer: {describe(error)}.") from error
        return found

    def _acknowledge(self, held: HeldDelivery) -> None:
        fetched = held.fetched
        if held.window is not None:
            _send_ack(fetched)
            held.window.remove(fetched.tag)
            return
        if fetched.is_standing:
            self._last[fetched.queue][fetched.tag] = self._clock()
        else:
            _send_ack(fetched)
            del self._unsettled[fetched.queue][fetched.tag]
        self._end(fetched.queue)

    def _end(self, queue: str) -> None:
        """Acknowledge what has waited for all others of a queue, if these are settled."""
        if len(self._last[queue]) == len(self._unsettled[queue]):
            self._acknowledge_last(queue)

    def _acknowledge_last(self, queue: str) -> None:
        self._before_last(queue)
        for tag in self._last.pop(queue, {}):
            _send_ack(self._unsettled[queue].pop(tag))

    def _return(self, held: HeldDelivery, due_at: float = 0.0) -> None:
        """Return a message to its queue; one of an ordered topic to its window, since it would come back to this process."""
        if held.window is None:
            self.reject(held.fetched)
        else:
            held.window.put_back(held.fetched.tag, due_at)
            self._connection.wake()

    def _postpone(self, held: HeldDelivery, due_at: float) -> None:
        if held.window is not None:
            self._return(held, due_at)
            return
        held.expires_at = min(due_at, held.fetched.received_at + self.longest)
        self._held[f"{held.fetched.delivery.receipt} postponed"] = held  # nobody has this receipt

    def _find(self, delivery: Delivery) -> HeldDelivery | None:
        """Return a delivery that is still ours."""
        return self._held.get(delivery.receipt) if self._serial == self._connection.serial else None


def _send_ack(fetched: Fetched) -> None:
    fetched.channel.send_method(spec.Basic.Ack, "Lb", (fetched.tag, False))
