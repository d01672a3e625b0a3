"""The RocketMQ broker: the contract, each call handed to its room."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import grpc

from outbox.brokers.base import (
    DeadLetter,
    Delivery,
    EndSemantics,
    HalfRef,
    HalfStatus,
    Outgoing,
    Problem,
    SendResult,
    SendStatus,
    StoredCopy,
    TopicSpec,
)
from outbox.brokers.capabilities import AsksProducers, DeadLetters
from outbox.brokers.options import read_options
from outbox.brokers.rocketmq import dead_letters, lookup
from outbox.brokers.rocketmq.checks import Checks
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.envelope import half_id
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.expectations import problems_of_brokers, problems_of_topics
from outbox.brokers.rocketmq.halves import Halves
from outbox.brokers.rocketmq.options import RocketMQOptions, problems
from outbox.brokers.rocketmq.port_sender import PortSender, wrong_type
from outbox.brokers.rocketmq.producer import SEND_SECONDS, Producer, ProxySender
from outbox.brokers.rocketmq.receiver import Reading
from outbox.brokers.rocketmq.settlement import Finishing, group_name
from outbox.brokers.rocketmq.statuses import status_of
from outbox.brokers.rocketmq.stubs import definition
from outbox.brokers.rocketmq.unanswered import Unanswered
from outbox.brokers.rocketmq.unconfirmed import UnconfirmedHalves
from outbox.brokers.validation import known_topic, validate
from outbox.errors import BrokerCannotTell, BrokerUnavailable
from outbox.message import Half, Resolution, TopicType


class RocketMQBroker(AsksProducers, DeadLetters):
    """
    Speaks with the brokers of a RocketMQ 5 at their own ports, and with its gRPC proxy.

    What it promises stands in docs/brokers/rocketmq.md.

    Args:
        clock: returns seconds and never goes back; the commit window is measured by it.
        now: returns seconds since 1970, by which messages and signatures are stamped.
    """

    system: ClassVar[str] = "rocketmq"
    end_semantics = EndSemantics.STATELESS
    is_thread_safe: ClassVar[bool] = True  # sends and ends of all threads share the connections, in a loop of their own
    supports_order: ClassVar[bool] = True
    supports_delay: ClassVar[bool] = True
    max_delay = timedelta(hours=24) - timedelta(minutes=5)  # the server's limit is a day, by its own clock

    def __init__(
        self,
        alias: str,
        options: Mapping[str, Any],
        topics: Sequence[TopicSpec],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(RocketMQOptions, options)
        self.commit_window = self._settings.commit_window
        self.check_horizon = self._settings.check_horizon
        self._client = Client(self._settings, now, self.topics)
        proxies = ProxySender(self._client, clock, now)
        ports = PortSender(self._client, clock, now)
        self._producer = Producer(proxies, ports, clock)
        self._unanswered = Unanswered(self._client)
        is_at_port = not self._settings.unconfirmed_ends
        self._halves = Halves(ports, self._unanswered, clock) if is_at_port else UnconfirmedHalves(proxies, clock)
        self._finishing = Finishing(self._client, self.topics)
        self._reading = Reading(self._client, self.topics, self._finishing)
        self._checks: Checks | None = None

    @property
    def confirms_ends(self) -> bool:
        """Whether an accepted end has surely taken effect: a broker's own port has answered it, no proxy."""
        return not self._settings.unconfirmed_ends

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> list[Problem]:
        """Return what is wrong with the OPTIONS, without a connection."""
        return problems(options)

    @classmethod
    def check_topics(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> list[Problem]:
        """Return what OPTIONS lack for half messages: the brokers' own ports."""
        return problems_of_topics(read_options(RocketMQOptions, options), topics)

    @classmethod
    def max_send_duration(cls, options: Mapping[str, Any]) -> timedelta:
        """Return how long a send of one batch may take: the last message that is begun may ask for its route first."""
        return timedelta(seconds=SEND_SECONDS) + 2 * read_options(RocketMQOptions, options).request_timeout

    @classmethod
    def max_check_back_age(cls, options: Mapping[str, Any]) -> timedelta:
        """Return up to which age a half message may be asked about."""
        return read_options(RocketMQOptions, options).check_horizon

    def check(self) -> list[Problem]:
        """
        Return what is wrong with the options; which topics the server does not have, or has with another type; and which
        settings of brokers, and of the groups that read our topics, do not fit, where the brokers' own ports are known.
        """
        if found := self.check_options(self.options):
            return found
        found = self.check_topics(self.options, list(self.topics.values()))
        found += [problem for topic in self.topics.values() if (problem := self._problem_of(topic))]
        return [*found, *self._client.run(problems_of_brokers(self._client, list(self.topics.values())))]

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send messages, each once; one with a known id is another message to RocketMQ."""
        return self._look_and_send(messages, self._producer.send, is_half=False)

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Store half messages, each once."""
        return self._look_and_send(messages, self._halves.send, is_half=True)

    def new_half_id(self, message_id: str) -> str:
        """Make a fresh id; the server takes any text."""
        return half_id(message_id)

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """Commit or roll back half messages by their places; one without a place is looked up by its id."""
        if resolution is Resolution.UNKNOWN:
            raise ValueError("A half message is ended with COMMIT or ROLLBACK, not UNKNOWN.")
        return self._halves.end(halves, resolution, within)

    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return where half messages stand, as far as can be asked."""
        return self._halves.look_up(halves)

    def listen(self, ask: Callable[[Half], Resolution], *, note_sent: Callable[[Half, Resolution], None] | None = None) -> None:
        """Call `ask` whenever the server asks about a half message, until the broker is closed."""
        topics = sorted(topic.name for topic in self.topics.values() if topic.type is TopicType.TRANSACTION)
        if topics and self._checks is None:
            self._checks = Checks(self._client, topics, ask, self._unanswered, note_sent)

    def receive(
        self,
        group: str,
        topics: Collection[str],
        *,
        limit: int,
        invisible_for: timedelta,
        wait: timedelta,
    ) -> list[Delivery]:
        """
        Take messages for a group, 32 of a topic at most. A topic in trouble is left alone for a moment, and the others go on.
        """
        for name in topics:
            known_topic(self.topics, name)
        return self._reading.receive(group, topics, limit=limit, invisible_for=invisible_for, wait=wait)

    def interrupt(self) -> None:
        """End the wait of a `receive` under way: the server keeps its request open for 5 s at least."""
        self._reading.interrupt()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries longer, 12 hours at most. The server answers with new receipts; only the newest ends a delivery."""
        return self._finishing.renew(deliveries, invisible_for)

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Finish deliveries that are still held. False where the server gave no answer while it answered about others, too."""
        return self._finishing.ack(deliveries)

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """Release a delivery. Its message is due again after the given time, at most 12 hours."""
        return self._finishing.retry(delivery, after)

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Move the message to the topic %DLQ% of the group. The reason stands in our own record of the try."""
        return self._finishing.dead_letter(delivery)

    def dead_letters(self, group: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return what a group gave up, without reasons. Raises BrokerUnavailable where no broker's own port is known."""
        self._require_ports("dead_letters()")
        return self._client.run(dead_letters.dead_letters(self._client, group, self._server_groups(group), limit))

    def replay(self, group: str, letters: Sequence[str]) -> int:
        """Send copies of dead letters to their group alone, attempts from 1."""
        self._require_ports("replay()")
        return self._client.run(dead_letters.replay(self._client, group, self._server_groups(group), set(letters)))

    def discard(self, group: str, letters: Sequence[str]) -> int:
        """Mark dead letters, so that they are listed no more; the server's log keeps them for its time."""
        self._require_ports("discard()")
        return self._client.run(dead_letters.discard(self._client, self._server_groups(group), set(letters)))

    def backlog(self, group: str) -> dict[str, int]:
        """Return, per topic, what a group has not been handed yet. Raises BrokerUnavailable as `dead_letters`."""
        self._require_ports("backlog()")
        server_groups = {name: group_name(group, topic) for name, topic in self.topics.items()}
        read = {one: self._client.run(lookup.topics_read_by(self._client, one)) for one in set(server_groups.values())}
        return {
            name: self._client.run(lookup.backlog(self._client, server_group, name))
            for name, server_group in server_groups.items()
            if name in read[server_group]
        }

    def find(self, message_id: str, *, half: HalfRef | None = None) -> list[StoredCopy]:
        """Look a message up by its keys, and its half message by its place, where a broker's own port is known."""
        if not self._client.ports.are_known:
            return []
        return self._client.run(lookup.find(self._client, self.topics, message_id, half))

    def close(self) -> None:
        """Close channels and end the thread."""
        if self._checks is not None:
            self._checks.close()
            self._checks = None
        self._reading.close()
        self._client.close()

    def _server_groups(self, group: str) -> set[str]:
        return {group_name(group, topic) for topic in self.topics.values()}

    def _require_ports(self, what: str) -> None:
        if not self._client.ports.are_known:
            raise BrokerCannotTell(f'{what} needs OPTIONS["NAME_SERVERS"] (host:9876), to ask the brokers\' own ports (10911).')

    def _look_and_send(
        self,
        messages: Sequence[Outgoing],
        act: Callable[[Sequence[Outgoing], Sequence[TopicSpec]], list[SendResult]],
        *,
        is_half: bool,
    ) -> list[SendResult]:
        limit = self.max_body_bytes
        rejections = [validate(one, self.topics, is_half=is_half, max_body_bytes=limit) for one in messages]
        good = [one for one, rejection in zip(messages, rejections, strict=True) if rejection is None]
        answers = iter(act(good, [self.topics[one.topic] for one in good]) if good else ())
        return [rejection or next(answers) for rejection in rejections]

    def _problem_of(self, topic: TopicSpec) -> Problem | None:
        hint = f"Create it: mqadmin updateTopic -t {topic.name} -a +message.type={topic.type.upper()}"
        try:
            queues = self._client.run(self._client.routes.of(topic.name))
        except (StatusError, grpc.aio.AioRpcError) as error:
            outcome = status_of(error)
            if outcome.status is not SendStatus.MISCONFIGURED:
                raise BrokerUnavailable(outcome.reason) from error
            return Problem(f"Topic {topic.name!r}: {outcome.reason}", hint)
        if wrong_type(topic, queues):
            kinds = sorted({definition.MessageType.Name(kind) for queue in queues for kind in queue.proto.accept_message_types})
            return Problem(f"Topic {topic.name!r} is of type {topic.type} here, and takes {kinds} at the server.", hint)
        return None
