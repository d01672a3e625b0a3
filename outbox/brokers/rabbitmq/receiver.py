"""
Receives for consumer groups.

On topics without order there are two subscriptions to each queue. The *standing* one has a prefetch of 1, and stays while a
message of the queue is not settled: the server sends nothing more over it until then. Where messages come one by one it is the
only one, so that neither this message nor the next one waits for a round trip. It ends before its message is returned to the
queue, else the server would send it here again. The *extra* one brings more at once, and is cancelled as soon as something has
come: what was delivered until then is what a receive returns. If it stayed, it would fill this process with messages while a
handler runs. `basic.get` is slow: a quorum queue answers a few hundred of them in a second.

The standing one also brings messages back from a node that is lost. Before RabbitMQ 4.3, a quorum queue keeps what a cancelled
subscription has brought for a channel whose node went away, until its leader changes; but not where the channel has another
subscription that was not cancelled. So the message of the standing one is acknowledged last (`HeldDeliveries`). Without one this
process holds at most a message that a slow handler has begun: by then it has returned the others.

On ordered topics the subscription stays, since it is what
keeps all other processes from the queue; each has a channel of its own, so that one can be given up without the others.

Topics do not hinder each other: one whose queues the server declares with other arguments, or not at all, is named in
`refusals`. Its queues are read if they exist, so that they can be drained; but not those of another project's group.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial

import amqp
from amqp.exceptions import ChannelError, NotFound

from outbox.brokers.base import Delivery
from outbox.brokers.owners import OwnedByAnother
from outbox.brokers.rabbitmq.connection import LOST, RabbitMQConnection, describe
from outbox.brokers.rabbitmq.envelope import to_delivery
from outbox.brokers.rabbitmq.held import CONSUMER_MARGIN, HeldDeliveries
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.brokers.rabbitmq.ordered import WINDOW, Fetched, OrderedQueue
from outbox.brokers.rabbitmq.topology import MOST_AT_ONCE, group_queues, queue_name, state_of
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger, log_fields
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

UNCLAIMED_SECONDS = 1.0  # what came beyond the limit goes back to its queue, unless the next receive takes it before
LAST_SECONDS = 1.0  # the message of a standing subscription waits this long for the settlement of the others
DUE_SECONDS = 1.0  # a queue of due messages that was empty is looked at again after this time; delays count whole seconds
CHANNEL_SECONDS = 30.0  # a channel is not used for longer
COUNT_AFTER = 8  # receives in a row that brought one message, before the next one counts what waits
COUNT_SECONDS = 0.5  # a connection that is in use for longer is opened, or waits for an answer
DECLARE_SECONDS = 10.0  # a topic that the server refused is declared again after this time

Source = tuple[str, str]  # group and topic


class RabbitMQReceiver:
    """
    Receives over one connection.

    Args:
        topics: by name.
        declare: declares a group's queues of a topic over a channel; raises OwnedByAnother.
        clock: gives seconds; it never goes back.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        name: str,
        topics: Mapping[str, TopicSpec],
        declare: Callable[[amqp.Channel, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = RabbitMQConnection(options, name, on_tick=self._return_unclaimed)
        longest = options.consumer_timeout.total_seconds() * CONSUMER_MARGIN
        self.held = HeldDeliveries(
            self._connection, longest, clock, before_last=self._before_last, before_return=self._end_standing
        )
        self.refusals: dict[str, str] = {}  # topic -> why its queues cannot be declared
        self._topics = topics
        self._ordered = {topic.name for topic in topics.values() if topic.type is TopicType.FIFO}
        self._declare = declare
        self._clock = clock
        self._channel: amqp.Channel | None = None
        self._channel_until = 0.0  # by `monotonic`
        self._prefetch = 0  # of the next subscription over it
        self._standing: dict[str, str] = {}  # queue -> subscription that stays
        self._is_alone = False  # the last receive expected one message
        self._alone: tuple[str, frozenset[str]] | None = None  # group and topics whose messages come one by one
        self._uncounted = 0  # receives since the last one that was not alone, or counted what waits
        self._prefix = ""  # of receipts over it
        self._serial = 0
        self._channels = itertools.count(1)  # so that receipts differ where the server uses a channel's number again
        self._declared: dict[Source, float] = {}  # over the current connection -> when it is declared again, by `monotonic`
        self._refused: dict[Source, float] = {}  # queue that cannot be read -> when it is tried again
        self._fetched: list[Fetched] = []  # of topics without order, and not handed out yet
        self._windows: dict[Source, OrderedQueue] = {}
        self._postponed: dict[tuple[Source, str], float] = {}  # message -> when it is due; over lost connections
        self._passed_on: dict[Source, float] = {}  # queue that another process may have -> when this one subscribes again
        self._looked_at: dict[str, float] = {}  # queue of due messages that was empty -> when
        self._counted: dict[str, dict[str, int]] = {}  # group -> what it held when that was last counted
        self._first = 0  # the topic that is asked first, by turns
        self._is_interrupted = False

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages, waiting so long for the first. Raises BrokerUnavailable."""
        if not topics:
            return []
        try:
            self._give_up_windows()
            self._fetch(group, topics, limit, wait.total_seconds())
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not deliver: {describe(error)}.") from error
        with self._connection.lock:
            if self._serial != self._connection.serial:  # lost meanwhile; another process may have the messages
                return []
            fetched, self._fetched = _split(self._fetched, group, topics, limit)
            found = [self.held.hand_out(one, invisible_for) for one in fetched]
            return [*found, *self._take_ordered(group, topics, limit - len(found), invisible_for)]

    def pass_on(self, delivery: Delivery, after: timedelta) -> bool:
        """Return a message of an ordered topic, and then its queue, for another process; this one waits so long for it."""
        source = (delivery.group, delivery.topic)
        with self._connection.lock:
            if not self.held.give_back([delivery])[0]:
                return False
            self._windows[source].is_passed_on = True
            self._passed_on[source] = time.monotonic() + after.total_seconds()
            return True

    def leave_due(self, group: str, topic: str, after: timedelta) -> None:
        """
        Leave the queue of due messages to other processes at first, when a message comes there that was passed on.

        Else two processes may look there in turns in which it comes to the same one again and again.
        """
        _, due = group_queues(self._topics[topic], group)
        now = time.monotonic()
        with self._connection.lock:
            if self._looked_at.get(due, now) <= now:  # not later with each message: its own may come there, too
                self._looked_at[due] = now + after.total_seconds() + random.uniform(1, 3) * DUE_SECONDS  # noqa: S311

    def count_held(self, group: str) -> dict[str, int]:
        """Return the number of messages that were fetched for a group and are not settled, by topic; from any thread."""
        if self._connection.lock.acquire(timeout=COUNT_SECONDS):  # while it is held for longer, nothing is fetched or settled
            try:
                self._counted[group] = self._count_held(group) if self._serial == self._connection.serial else {}
            finally:
                self._connection.lock.release()
        return self._counted.get(group, {})

    def _count_held(self, group: str) -> dict[str, int]:
        found = self.held.count(group)
        found.update(one.delivery.topic for one in self._fetched if one.delivery.group == group)
        found.update({topic: len(window.entries) for (name, topic), window in self._windows.items() if name == group})
        return dict(found)

    def forget_declarations(self) -> None:
        """Declare queues again before they are read next."""
        with self._connection.lock:
            self._declared.clear()

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones; from any thread."""
        self._is_interrupted = True
        self._connection.wake()

    def close(self) -> None:
        """Close the connection; what is held goes back to its queues."""
        self._is_interrupted = True
        with self._connection.lock, suppress(*LOST):
            if self._serial == self._connection.serial:
                self.held.acknowledge_last()
        self._connection.close()

    def _give_up_windows(self) -> None:
        """
        End subscriptions of ordered topics that were passed on, or whose messages wait for so long behind their keys that the
        server would take them back soon. Their messages return to their queues. An empty one ends as `_new_channel` says.
        """
        with self._connection.lock:
            if self._serial != self._connection.serial:
                return
            oldest = self._clock() - self.held.longest / 2
            for source, window in list(self._windows.items()):
                is_old = not window.entries and time.monotonic() >= window.opened_at + CHANNEL_SECONDS
                if (window.is_passed_on or is_old or window.fetched_at() <= oldest) and not window.has_out():
                    self._keep_postponed(source, window)
                    del self._windows[source]
                    with self._connection.use():
                        window.channel.close()

    def _fetch(self, group: str, topics: Collection[str], limit: int, seconds: float) -> None:
        """Subscribe, wait so long for the first message that can be handed out, and cancel."""
        deadline = time.monotonic() + seconds
        self._is_alone = self._begin(group, topics)
        extra: dict[str, str] = {}
        is_over, is_first = False, True
        while not is_over:
            self._subscribe(group, topics, 1 if self._is_alone else limit, extra, may_renew=is_first)
            look_again_at = min((self._next_look(group, topic) for topic in topics), default=deadline)
            is_over = self._wait(group, topics, min(deadline, look_again_at)) or time.monotonic() >= deadline
            is_first = False
        self._cancel(group, topics, extra)
        self._uncounted = self._uncounted + 1 if self._is_alone else 0
        self._alone = (group, frozenset(topics)) if len(self._fetched) <= 1 else None

    def _begin(self, group: str, topics: Collection[str]) -> bool:
        """End standing subscriptions of other topics; return whether messages come one by one."""
        with self._connection.lock:
            is_alone = self._alone == (group, frozenset(topics)) and not self._fetched and not self.held.has_any
            if self._standing and self._serial == self._connection.serial:
                with self._connection.use():
                    is_alone = is_alone and not self._is_more_waiting()
                    asked = [queue for topic in topics for queue in group_queues(self._topics[topic], group)]
                    for queue in self._standing.keys() - asked:
                        self._end_standing(queue)
            return is_alone

    def _cancel(self, group: str, topics: Collection[str], extra: Mapping[str, str]) -> None:
        """
        Cancel subscriptions, except standing ones of queues of which a message is not settled.

        Without a message to hand out this waits for the answer: what the server had sent until then has come when it returns.
        """
        with self._connection.use():
            if self._channel is None or self._serial != self._connection.serial:
                return
            for tag in extra.values():
                self._channel.basic_cancel(tag)
            has_one = self._is_alone and bool(self._fetched)
            for topic in topics:
                for queue in group_queues(self._topics[topic], group):
                    if queue not in self._standing or self.held.has_unsettled(queue):
                        continue
                    self._channel.basic_cancel(self._standing.pop(queue), nowait=has_one)
                    if self.held.has_unsettled(queue):  # a message came meanwhile
                        self._standing[queue] = self._consume(self._channel, (group, topic), queue, 1, is_standing=True)

    def _is_more_waiting(self) -> bool:
        """Return whether messages wait in the queues that messages came from, one by one; only sometimes is the server asked."""
        if self._channel is None or self._uncounted < COUNT_AFTER:
            return False
        self._uncounted = 0
        states = [state_of(self._channel, queue) for queue in self._standing]
        if None in states:  # it was deleted, and the server has closed the channel, which py-amqp opens again
            self._standing.clear()
            self._prefetch = 0
        return any(state is None or state[0] for state in states)

    def _before_last(self, queue: str) -> None:
        if not self._is_alone:  # else it brings the next message
            self._end_standing(queue)

    def _end_standing(self, queue: str) -> None:
        """Cancel a standing subscription; the server knows it before anything that is sent over the channel later."""
        tag = self._standing.pop(queue, None)
        if tag is not None and self._channel is not None and self._serial == self._connection.serial:
            self._channel.basic_cancel(tag, nowait=True)

    def _subscribe(self, group: str, topics: Collection[str], limit: int, extra: dict[str, str], *, may_renew: bool) -> None:
        """Subscribe to queues that are not subscribed to, for a share of the limit from each topic. `extra`: queue -> tag."""
        with self._connection.use() as connection:
            channel = self._open_channel(connection, extra, may_renew=may_renew)
            self.held.return_expired()
            readable = [topic for topic in topics if self._is_readable(connection, group, topic)]
            for topic in readable:
                if topic in self._ordered:
                    self._subscribe_ordered(connection, group, topic)
            plain = [topic for topic in readable if topic not in self._ordered]
            left = limit - len(self._fetched)
            if not plain or left <= 0:
                return
            self._first += 1  # else the others' messages would always be those that are too many
            at = self._first % len(plain)
            sources = [(group, topic) for topic in [*plain[at:], *plain[:at]]]
            for source in sources:  # these first, so that the server fills them first
                self._subscribe_standing(channel, source)
            share = min(max(1, left // len(plain)), MOST_AT_ONCE)
            for source in sources:
                for queue in group_queues(self._topics[source[1]], group):
                    more = share if self.held.has_unsettled(queue, standing=True) else share - 1
                    if more and queue in self._standing and queue not in extra:
                        extra[queue] = self._consume(channel, source, queue, more, is_standing=False)

    def _subscribe_standing(self, channel: amqp.Channel, source: Source) -> None:
        group, topic = source
        queue, due = group_queues(self._topics[topic], group)
        if queue not in self._standing:
            self._standing[queue] = self._consume(channel, source, queue, 1, is_standing=True)
        if due not in self._standing and time.monotonic() >= self._next_look(group, topic):
            self._looked_at[due] = time.monotonic()
            self._standing[due] = self._consume(channel, source, due, 1, is_standing=True)

    def _consume(self, channel: amqp.Channel, source: Source, queue: str, prefetch: int, *, is_standing: bool) -> str:
        """Subscribe to a queue of a topic without order; return the tag."""
        if prefetch != self._prefetch:
            channel.basic_qos(0, prefetch, False)
            self._prefetch = prefetch
        note = partial(self._on_message, source, queue, is_standing)
        return self._subscribe_with(channel, source, queue, note)

    def _subscribe_with(self, channel: amqp.Channel, source: Source, queue: str, note: Callable[[amqp.Message], None]) -> str:
        """Subscribe to a queue; return the tag. A refusal is remembered, since it ends the connection for all."""
        try:
            return str(channel.basic_consume(queue, callback=note))
        except ChannelError as error:
            if not isinstance(error, NotFound):
                self._refuse(source, f"Queue {queue!r} cannot be read: {describe(error)}.")
            raise

    def _next_look(self, group: str, topic: str) -> float:
        """Return when the group's queue of due messages is read next; never, where it is read now or the topic is not read."""
        queue, *others = group_queues(self._topics[topic], group)
        if queue not in self._standing or all(due in self._standing for due in others):
            return float("inf")
        return min(self._looked_at.get(due, float("-inf")) + DUE_SECONDS for due in others)

    def _is_readable(self, connection: amqp.Connection, group: str, topic: str) -> bool:
        """Declare a group's queues of a topic, if that was not done; return whether there is a queue to read."""
        source = (group, topic)
        if time.monotonic() < self._refused.get(source, float("-inf")):
            return False
        if time.monotonic() < self._declared.get(source, float("-inf")):
            return True
        with closing(connection.channel()) as channel:  # the server closes it where it refuses
            try:
                self._declare(channel, group, topic)
            except OwnedByAnother as error:
                self._refuse(source, str(error))
                return False
            except ChannelError as error:
                self._refuse(source, f"Its queues for group {group!r} cannot be declared: {describe(error)}.")
                if not all(_exists(channel, queue) for queue in group_queues(self._topics[topic], group)):
                    return False
                del self._refused[source]  # there is something to read
                self._declared[source] = time.monotonic() + DECLARE_SECONDS
            else:
                self.refusals.pop(topic, None)
                self._declared[source] = float("inf")
        return True

    def _refuse(self, source: Source, reason: str) -> None:
        group, topic = source
        text = "Group %r cannot receive from topic %r as configured: %s"
        logger.error(text, group, topic, reason, extra=log_fields(group=group, topic=topic))
        self.refusals[topic] = reason
        self._refused[source] = time.monotonic() + DECLARE_SECONDS

    def _subscribe_ordered(self, connection: amqp.Connection, group: str, topic: str) -> None:
        source = (group, topic)
        if source in self._windows or time.monotonic() < self._passed_on.get(source, float("-inf")):
            return
        self._passed_on.pop(source, None)
        channel = connection.channel()
        window = self._windows[source] = OrderedQueue(channel)
        channel.basic_qos(0, WINDOW, False)
        prefix = f"{self._serial}.{next(self._channels)}"
        self._subscribe_with(channel, source, queue_name(topic, group), partial(self._on_ordered, source, window, prefix))

    def _wait(self, group: str, topics: Collection[str], deadline: float) -> bool:
        """Wait until a message can be handed out, at most until the deadline of `monotonic`; return whether it can."""
        serial = self._serial
        windows = [window for topic in topics if (window := self._windows.get((group, topic)))]
        again_at = [self._passed_on[group, topic] for topic in topics if (group, topic) in self._passed_on]
        deadline = min([deadline, *(at for at in again_at if at > time.monotonic())])

        def is_done() -> bool:
            return bool(self._fetched) or self._is_interrupted or serial != self._connection.serial or self._is_due(windows)

        while True:
            left = deadline - time.monotonic()
            with self._connection.lock:
                seconds = min(max(0, left), self._until_due(windows))
            self._connection.wait(seconds, is_done)
            with self._connection.lock:
                if is_done() or left <= 0:
                    return is_done()

    def _take_ordered(self, group: str, topics: Collection[str], limit: int, invisible_for: timedelta) -> list[Delivery]:
        found: list[Delivery] = []
        for topic in topics:
            if (window := self._windows.get((group, topic))) is not None:
                for fetched in window.take(limit - len(found), self._clock()):
                    found.append(self.held.hand_out(fetched, invisible_for, window))
        return found

    def _on_message(self, source: Source, queue: str, is_standing: bool, message: amqp.Message) -> None:
        self._looked_at.pop(queue, None)  # there may be more
        fetched = self._open(*source, self._prefix, message, queue, is_standing=is_standing)
        self.held.note(fetched)
        self._fetched.append(fetched)

    def _on_ordered(self, source: Source, window: OrderedQueue, prefix: str, message: amqp.Message) -> None:
        fetched = self._open(*source, prefix, message)
        window.add(fetched, self._postponed.pop((source, fetched.delivery.message_id), 0.0))

    def _open(
        self, group: str, topic: str, prefix: str, message: amqp.Message, queue: str = "", *, is_standing: bool = False
    ) -> Fetched:
        tag = message.delivery_info["delivery_tag"]
        delivery = to_delivery(message, group=group, topic=topic, receipt=f"{prefix}/{tag}")
        return Fetched(delivery, message.channel, tag, self._clock(), queue, is_standing)

    def _is_due(self, windows: Iterable[OrderedQueue]) -> bool:
        now = self._clock()
        return any((due_at := window.next_due_at()) is not None and due_at <= now for window in windows)

    def _until_due(self, windows: Iterable[OrderedQueue]) -> float:
        """Return how long it takes until a message is due that was to be retried later."""
        now = self._clock()
        return max(0, min((due_at - now for window in windows if (due_at := window.next_due_at()) is not None), default=1e6))

    def _return_unclaimed(self) -> None:
        """Return what nobody has claimed or renewed in time, and acknowledge what has waited for others, though nobody calls."""
        if self._serial != self._connection.serial:
            return
        self.held.acknowledge_last(LAST_SECONDS)
        self.held.return_expired()
        now = self._clock()
        unclaimed = [one for one in self._fetched if one.received_at + UNCLAIMED_SECONDS <= now]
        self._fetched = [one for one in self._fetched if one.received_at + UNCLAIMED_SECONDS > now]
        for one in unclaimed:
            self.held.reject(one)

    def _open_channel(self, connection: amqp.Connection, extra: dict[str, str], *, may_renew: bool) -> amqp.Channel:
        """Return the channel; where it is a new one, no subscription is left."""
        if self._channel is None or self._serial != self._connection.serial:
            self._standing.clear()
            extra.clear()
            self._fetched.clear()
            for source, window in self._windows.items():
                self._keep_postponed(source, window)
            self._windows.clear()
            self._declared.clear()
            self._channel = self._new_channel(connection)
            self._serial = self._connection.serial
            self.held.begin()
        elif may_renew and time.monotonic() >= self._channel_until and not self._fetched and not self.held.has_any:
            for tag in self._standing.values():
                self._channel.basic_cancel(tag)
            self._standing.clear()
            if not self._fetched:  # else what has come would come again
                self._channel.close()
                self._channel = self._new_channel(connection)
        return self._channel

    def _new_channel(self, connection: amqp.Connection) -> amqp.Channel:
        """
        Open a channel for topics without order; it is closed after a while, when nothing is held.

        When a node of a cluster is lost, so may be a delivery on its way. The queue holds it for the channel as long as that is
        open, and sends it again only with the next one of the same subscription, which may have ended.
        """
        self._channel_until = time.monotonic() + CHANNEL_SECONDS
        self._prefetch = 0
        self._prefix = f"{self._connection.serial}.{next(self._channels)}"
        return connection.channel()

    def _keep_postponed(self, source: Source, window: OrderedQueue) -> None:
        """Remember what is to be retried later, until it is fetched again, or due."""
        now = self._clock()
        self._postponed = {name: due_at for name, due_at in self._postponed.items() if due_at > now}
        self._postponed |= {(source, message_id): due_at for message_id, due_at in window.postponed(now)}


def _exists(channel: amqp.Channel, queue: str) -> bool:
    try:
        channel.queue_declare(queue, passive=True)
    except ChannelError:
        return False
    return True


def _split(messages: list[Fetched], group: str, topics: Collection[str], limit: int) -> tuple[list[Fetched], list[Fetched]]:
    """Split what has come into what is asked for now and the rest."""
    found: list[Fetched] = []
    rest: list[Fetched] = []
    for fetched in messages:
        is_wanted = fetched.delivery.group == group and fetched.delivery.topic in topics and len(found) < limit
        (found if is_wanted else rest).append(fetched)
    return found, rest
