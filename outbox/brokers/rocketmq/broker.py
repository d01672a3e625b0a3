"""The RocketMQ broker: implements the `Broker` interface by delegating each call to one module of this package."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self

import grpc

from outbox.brokers.base import (
    Backlog,
    BrokerInterface,
    Delivery,
    EndSemantics,
    HalfRef,
    HalfStatus,
    Limits,
    Outgoing,
    SendGuarantee,
    SendResult,
    SendStatus,
    ServerResource,
    StoredCopy,
    TopicSpec,
)
from outbox.brokers.capabilities import AsksProducers, HasDeadLetterQueue, ListsResources
from outbox.brokers.options import read_options
from outbox.brokers.owners import GroupOwner, OwnedByAnother
from outbox.brokers.rocketmq import lookup, resources
from outbox.brokers.rocketmq.broker_checks import problems_of_brokers, problems_of_topics
from outbox.brokers.rocketmq.check_backs import CheckBackListener
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import half_id
from outbox.brokers.rocketmq.dead_letters import DeadLetterReader
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.half_lookup import HalfLookup
from outbox.brokers.rocketmq.options import RocketMQOptions, problems
from outbox.brokers.rocketmq.owners import NAME_SERVER_ERRORS, RocketMQOwners
from outbox.brokers.rocketmq.proxy_half_sender import ProxyHalfSender
from outbox.brokers.rocketmq.receiver import RocketMQReceiver
from outbox.brokers.rocketmq.remoting_half_sender import RemotingHalfSender
from outbox.brokers.rocketmq.remoting_sender import RemotingSender, wrong_type
from outbox.brokers.rocketmq.sender import SEND_SECONDS, ProxySender, RocketMQSender
from outbox.brokers.rocketmq.settlement import ORDERED_SUFFIX, Settlement, group_name
from outbox.brokers.rocketmq.statuses import status_of
from outbox.brokers.rocketmq.stubs import definition
from outbox.brokers.validation import known_topic, send_valid
from outbox.errors import BrokerCannotTell, BrokerUnavailable, UnsupportedByBroker
from outbox.findings import Finding, misconfigured, unavailable
from outbox.message import Half, Resolution, TopicType

SUBSCRIBE = "Subscribe to the topic with a consumer group of your own."


class RocketMQInterface(BrokerInterface, frozen=True):
    """How programs without the outbox read messages from RocketMQ."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        return cls("rocketmq", read_options(RocketMQOptions, options).endpoints.split(";"), reading=SUBSCRIBE)


class RocketMQBroker(AsksProducers, HasDeadLetterQueue, ListsResources):
    """
    Connects to the gRPC proxy of a RocketMQ 5 cluster and, for what the proxy does not offer, directly to the brokers.

    The brokers speak the remoting protocol, at port 10911. To end a half message is to commit it or roll it back.
    docs/brokers/rocketmq.md describes the guarantees.

    Args:
        clock: a monotonic clock in seconds, which measures the commit window.
        now: the current time in seconds since 1970, for the timestamps of messages and signatures.
    """

    system: ClassVar[str] = "rocketmq"
    interface = RocketMQInterface
    end_semantics = EndSemantics.STATELESS
    is_thread_safe: ClassVar[bool] = True  # all threads share one event loop with its connections
    supports_order: ClassVar[bool] = True
    supports_delay: ClassVar[bool] = True
    max_delay = timedelta(hours=24) - timedelta(minutes=5)  # the server's limit is one day; its clock may differ from this one

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
        self._client = RocketMQClient(self._settings, now, self.topics)
        proxy_sender = ProxySender(self._client, clock, now)
        remoting_sender = RemotingSender(self._client, clock, now)
        self._sender = RocketMQSender(proxy_sender, remoting_sender, clock)
        self._half_lookup = HalfLookup(self._client)
        self.confirms_ends = not self._settings.unconfirmed_ends  # only a broker's answer confirms an end; a proxy's does not
        self._half_sender = (
            RemotingHalfSender(remoting_sender, self._half_lookup, clock)
            if self.confirms_ends
            else ProxyHalfSender(proxy_sender, clock)
        )
        self._settlement = Settlement(self._client, self.topics)
        self._receiver = RocketMQReceiver(self._client, self.topics, self._settlement)
        self._dead_letters = DeadLetterReader(self._client, clock)
        self._owners = RocketMQOwners(self._client, clock)
        self._stopped = threading.Event()
        self._listener: CheckBackListener | None = None

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        """Return problems of OPTIONS. If there are none, report transaction topics whose OPTIONS lacks the brokers' addresses."""
        return problems(options) or problems_of_topics(read_options(RocketMQOptions, options), topics)

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """
        Return the limits: at least once, so a message may occasionally be stored twice.

        With UNCONFIRMED_ENDS, nothing confirms the commit of a half message, so topics of type transaction are UNCONFIRMED.
        """
        settings = read_options(RocketMQOptions, options)
        is_unconfirmed = topic.type is TopicType.TRANSACTION and settings.unconfirmed_ends
        return Limits(
            SendGuarantee.UNCONFIRMED if is_unconfirmed else SendGuarantee.AT_LEAST_ONCE,
            # The last message may start just before SEND_SECONDS are over, and take two requests: its route and itself.
            send=timedelta(seconds=SEND_SECONDS) + 2 * settings.request_timeout,
            check_back=settings.check_horizon,
        )

    def check(self) -> list[Finding]:
        """
        Return the problems of the options, the topics on the server, the brokers and their consumer groups.

        Brokers and consumer groups are checked only if OPTIONS has NAME_SERVERS or BROKER_ADDRESSES.
        """
        if findings := problems(self.options):
            return findings
        findings = problems_of_topics(self._settings, list(self.topics.values()))
        findings += [problem for topic in self.topics.values() if (problem := self._problem_of(topic))]
        findings += self._problems_of_owners()
        return [*findings, *self._client.run(problems_of_brokers(self._client, list(self.topics.values())))]

    def list_resources(self, *, sources: Collection[str], lanes: int, readers: Collection[str]) -> list[ServerResource]:
        """
        Return topics and groups, as each known broker has them.

        Raises:
            BrokerCannotTell: OPTIONS has neither NAME_SERVERS nor BROKER_ADDRESSES.
            BrokerUnavailable: a broker, or every name server, does not answer.
        """
        self._require_remoting("Listing topics and groups")
        return self._client.run(resources.list_resources(self._client, list(self.topics.values()), readers))

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send each message once. RocketMQ does not deduplicate: a message that is sent again with its id is stored again."""
        return send_valid(self, messages, lambda valid: self._sender.send(valid, self._specs_of(valid)))

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        return send_valid(self, messages, lambda valid: self._half_sender.send(valid, self._specs_of(valid)), is_half=True)

    def new_half_id(self, message_id: str) -> str:
        """Return a new half id; the server accepts any text."""
        return half_id(message_id)

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """Commit or roll back half messages at their places in the brokers' logs. An unknown place is looked up by the id."""
        if resolution is Resolution.UNKNOWN:
            raise ValueError("A half message is ended with COMMIT or ROLLBACK, not UNKNOWN.")
        return self._half_sender.end(halves, resolution, within)

    def look_up_halves(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        return self._half_sender.look_up(halves)

    def listen(
        self, ask: Callable[[Half], Resolution], *, on_other_answer: Callable[[Half, Resolution], None] | None = None
    ) -> None:
        topics = sorted(topic.name for topic in self.topics.values() if topic.type is TopicType.TRANSACTION)
        if topics and self._listener is None:
            self._listener = CheckBackListener(self._client, topics, ask, self._half_lookup, on_other_answer)

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages for a group, at most 32 per topic. A failing topic does not block the others."""
        for name in topics:
            known_topic(self.topics, name)
        may_receive = self._owners.may_receive(group)
        self.refusals = {topic: reason for reason in self._owners.refused.values() for topic in self.topics}
        if not may_receive:
            self._stopped.wait(wait.total_seconds())
            return []
        return self._receiver.receive(group, topics, limit=limit, invisible_for=invisible_for, wait=wait)

    def interrupt(self) -> None:
        """
        End the wait of the current `receive` and of all later ones.

        The server keeps a request without messages open for at least 5 s, so a consumer could otherwise not stop sooner.
        """
        self._stopped.set()
        self._receiver.interrupt()

    def set_owner(
        self, group: str, source: str, project: str, *, known_topics: Collection[str] = (), take_over: bool = False
    ) -> None:
        """
        Record the outbox (source) and project that own the group; with `take_over`, also on the name servers. See `owners.py`.

        Running consumers of the old owner continue to receive until they are restarted.
        """
        self._owners.set(group, GroupOwner.of(source, project))
        try:
            if take_over:
                self._owners.take_over(group)
        except NAME_SERVER_ERRORS as error:
            raise BrokerUnavailable(
                f"Not all name servers have stored the new owner of group {group!r}: {error}.",
                hint="Start them, or correct NAME_SERVERS, and take the group over again. "
                "Name servers that missed the change may still report the old owner.",
            ) from error

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Renew deliveries, for at most 12 hours. The server replaces the receipt of each; only the newest one is valid."""
        return self._settlement.renew(deliveries, invisible_for)

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        if dead_letters := [delivery for delivery in deliveries if delivery.dead_letter_reason]:
            self._dead_letters.ack(dead_letters)
        answers = iter(self._settlement.ack([delivery for delivery in deliveries if not delivery.dead_letter_reason]))
        return [bool(delivery.dead_letter_reason) or next(answers) for delivery in deliveries]

    def receive_dead_letters(self, group: str, topics: Collection[str], *, limit: int) -> list[Delivery]:
        """Receive from the server's dead-letter queues. Nothing if OPTIONS has neither NAME_SERVERS nor BROKER_ADDRESSES."""
        if not (self._client.remoting.is_configured and self._owners.may_receive(group)):
            return []
        server_groups = {group_name(group, known_topic(self.topics, topic)) for topic in topics}
        return self._dead_letters.receive(group, server_groups, topics, limit)

    def backlog(self, group: str) -> Backlog:
        """
        Count the messages that can be delivered now, and those in the server's dead-letter queues.

        Raises the same errors as `list_resources`.
        """
        self._require_remoting("backlog()")
        server_groups = {name: group_name(group, topic) for name, topic in self.topics.items()}
        topics_by_group = {
            server_group: self._client.run(lookup.topics_read_by(self._client, server_group))
            for server_group in set(server_groups.values())
        }
        waiting = {
            name: self._client.run(lookup.backlog(self._client, server_group, name))
            for name, server_group in server_groups.items()
            if name in topics_by_group[server_group]
        }
        return Backlog(waiting, self._dead_letters.count(set(server_groups.values()), self.topics))

    def forget_group(self, group: str, topics: Collection[str]) -> None:
        """Raise UnsupportedByBroker. Its hint has the command that deletes a group for all topics of the group."""
        raise UnsupportedByBroker(
            "The outbox cannot drop the messages that wait for a group on RocketMQ; they expire with the server's log.",
            hint="To drop them at once, for all topics of the group, run "
            f"mqadmin deleteSubGroup -n NAME_SERVER -c CLUSTER -g {group} -r true, and the same for {group}{ORDERED_SUFFIX}.",
        )

    def find(self, message_id: str) -> list[StoredCopy]:
        """Return the stored copies of a message; none if OPTIONS has neither NAME_SERVERS nor BROKER_ADDRESSES."""
        if not self._client.remoting.is_configured:
            return []
        return self._client.run(lookup.find(self._client, self.topics, message_id))

    def close(self) -> None:
        """Return messages to the server that `receive` has fetched but not returned yet, and close all connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._receiver.close()
        self._client.close()

    def _problems_of_owners(self) -> Iterator[Finding]:
        for group in self._owners.groups():
            try:
                self._owners.require(group)
            except OwnedByAnother as error:
                yield misconfigured(*error.args)
            except NAME_SERVER_ERRORS as error:
                yield unavailable(f"The name servers did not say who owns group {group!r}: {error}.", "Correct NAME_SERVERS.")

    def _require_remoting(self, caller: str) -> None:
        if not self._client.remoting.is_configured:
            raise BrokerCannotTell(
                f'{caller} needs OPTIONS["NAME_SERVERS"] (host:9876), to connect to the brokers\' remoting ports (10911).'
            )

    def _specs_of(self, messages: Sequence[Outgoing]) -> list[TopicSpec]:
        return [self.topics[message.topic] for message in messages]

    def _problem_of(self, topic: TopicSpec) -> Finding | None:
        try:
            queues = self._client.run(self._client.routes.of(topic.name))
        except (StatusError, grpc.aio.AioRpcError) as error:
            outcome = status_of(error)
            if outcome.status is not SendStatus.MISCONFIGURED:
                raise BrokerUnavailable(outcome.reason) from error
            return misconfigured(f"Topic {topic.name!r}: {outcome.reason}", "Create it: manage.py outbox_topics --create")
        if wrong_type(topic, queues):
            kinds = sorted({definition.MessageType.Name(kind) for queue in queues for kind in queue.proto.accept_message_types})
            return misconfigured(
                f"Topic {topic.name!r} has type {topic.type} in settings, but accepts {kinds} on the server.",
                "The type of an existing topic cannot be changed. Correct TYPE, or give the topic another name.",
            )
        return None
