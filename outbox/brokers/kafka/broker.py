"""The Kafka broker, whose calls are implemented by the other modules of this package."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, TypeVar

from confluent_kafka import Producer

from outbox.brokers.base import (
    Backlog,
    Delivery,
    GroupPosition,
    Limits,
    Outgoing,
    SendGuarantee,
    SendResult,
    SendStatus,
    ServerResource,
    TopicSpec,
)
from outbox.brokers.capabilities import ListsResources, Seeks, SpeaksKafka, TransactionalSends
from outbox.brokers.kafka import groups
from outbox.brokers.kafka.asyncapi import KafkaInterface
from outbox.brokers.kafka.client import ANSWER_SECONDS, ConnectionErrors, problems_of_client, producer_settings
from outbox.brokers.kafka.lanes import KafkaLanes, aborted_results
from outbox.brokers.kafka.leaders import PartitionLeaders
from outbox.brokers.kafka.options import KafkaOptions, problems
from outbox.brokers.kafka.receiver import GroupMember
from outbox.brokers.kafka.resources import KafkaResources
from outbox.brokers.kafka.sender import FLUSH_SECONDS, ProducerLost, produce
from outbox.brokers.kafka.server_checks import KafkaServerChecks
from outbox.brokers.options import read_options
from outbox.brokers.owners import GroupOwner, GroupOwners
from outbox.brokers.validation import known_topic, send_valid, validate
from outbox.errors import BrokerUnavailable
from outbox.findings import BROKER_WEAK, Finding, wrong_option

T = TypeVar("T")

NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class KafkaBroker(Seeks, TransactionalSends, SpeaksKafka, ListsResources):
    """
    Publishes one-phase messages to Kafka 2.5 and later, and reads with its consumer groups; see docs/brokers/kafka.md.

    A relay sends in transactions of its lane, so that read_committed consumers see each message once. With
    OPTIONS["TRANSACTIONS"] = False, messages are published at least once.

    Args:
        clock: seconds since 1970, by which deliveries expire.
    """

    system: ClassVar[str] = "kafka"
    interface = KafkaInterface
    supports_order: ClassVar[bool] = True

    def __init__(
        self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec], *, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(KafkaOptions, options)
        self.max_body_bytes = self._settings.body_bytes
        self._name = f"outbox {alias}"
        self._clock = clock
        self._producers: dict[int, Producer] = {}  # by process: a producer does not work in a forked process
        self._errors = ConnectionErrors()
        self._members: dict[str, GroupMember] = {}
        self._owners = GroupOwners()
        self._known_topics: dict[str, frozenset[str]] = {}
        self._is_interrupted = self._is_closed = False
        self._lanes = KafkaLanes(self._settings, self._name)
        self._leaders = PartitionLeaders(self._settings, self._name)
        if not self._settings.transactions:
            self.lacks = (*self.lacks, TransactionalSends)

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        """Return problems of the OPTIONS. If there are none, return topics whose names Kafka does not allow."""
        invalid_names = [
            wrong_option(
                f"Kafka does not allow a topic with the name {topic.name!r}.",
                "A name has 1 to 249 letters, digits, dots, underscores and hyphens.",
            )
            for topic in topics
            if not NAME.fullmatch(topic.name) or topic.name in (".", "..")
        ]
        return problems(options) or problems_of_client(read_options(KafkaOptions, options)) or invalid_names

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """
        Return the limits: read_committed consumers see a message once, unless transactions are off.

        The time of a send is that of a transaction: it looks topics up, stores messages and marker, and commits.
        """
        settings = read_options(KafkaOptions, options)
        guarantee = SendGuarantee.ONCE_COMMITTED if settings.transactions else SendGuarantee.AT_LEAST_ONCE
        send = timedelta(seconds=2 * FLUSH_SECONDS + ANSWER_SECONDS)
        return Limits(guarantee, send=send, body_bytes=settings.body_bytes)

    def check(self) -> list[Finding]:
        """Return problems of the options and on the cluster. Lanes are checked only if all problems of topics are weak ones."""
        if findings := self.check_settings(self.options, list(self.topics.values())):
            return findings
        checks = KafkaServerChecks(self._settings, self._name)
        groups_of = {name: topic.groups for name, topic in self.topics.items()}
        findings = [*checks.problems_of_topics(sorted(self.topics)), *checks.problems_of_groups(groups_of, self._owners)]
        if all(finding.id == BROKER_WEAK for finding in findings):
            for source, lanes in self.checked_lanes.items():
                findings += [*checks.problems_of_lanes(source, lanes), *self._lanes.problems(source)]
        return findings

    def list_resources(self, *, sources: Collection[str], lanes: int, readers: Collection[str]) -> list[ServerResource]:
        """Return the topics of messages and, with transactions, the marker topics."""
        resources = KafkaResources(self._settings, self._name)
        sources_of_markers = sources if self._settings.transactions else ()
        return resources.find(list(self.topics.values()), sources=sources_of_markers, lanes=lanes)

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send messages without a transaction, so at least once, and wait for all delivery reports."""
        return send_valid(self, messages, self._send)

    def open_lane(self, source: str, lane: int) -> str | None:
        """Take a lane over with its transactional id, and return the last record in its partition of the marker topic."""
        return self._lanes.open(source, lane)

    def is_lane_open(self, lane: int) -> bool:
        return self._lanes.is_open(lane)

    def read_lane_marker(self, source: str, lane: int) -> str | None:
        """Return the marker of a lane; None if there is no marker, or no marker topic."""
        return self._lanes.look_at(source, lane)

    def find_unavailable(self, topics: Collection[str]) -> dict[str, str]:
        """Return topics with a partition that has no leader: Kafka cannot end a transaction there."""
        return self._leaders.find_unavailable(topics)

    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        if rejected := self._reject(messages):
            return aborted_results(messages, rejected)
        return self._lanes.send(lane, messages, marker)

    def set_owner(
        self, group: str, source: str, project: str, *, known_topics: Collection[str] = (), take_over: bool = False
    ) -> None:
        """
        Set the owner of a group. A member stores it in the metadata of each offset that it commits.

        With `take_over`, it is stored now in the metadata of all committed offsets. Kafka allows that only while the group has no
        members.
        """
        owner = GroupOwner.of(source, project)
        self._owners.set(group, owner)
        self._known_topics[group] = frozenset(known_topics)
        if take_over:
            groups.take_over(self._settings, self._name, group, self.topics, owner)

    def seek(
        self,
        group: str,
        topics: Collection[str],
        to: datetime | Literal["first", "last"],
        *,
        confirm: Callable[[list[GroupPosition]], object],
    ) -> list[GroupPosition]:
        positions = groups.find_positions(self._settings, self._name, group, topics, to)
        moved = [position for position in positions if position.pos != position.wanted]
        if moved:
            confirm(moved)
            groups.seek(self._settings, self._name, group, moved, self._owners.get(group))
        return moved

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages as a member of the group. This broker client joins the group with the first call."""
        for topic in topics:
            known_topic(self.topics, topic)
        member = self._member(group)
        try:
            return member.receive(topics, limit=limit, invisible_for=invisible_for, wait=wait)
        finally:
            self.refusals = {**member.refusals, **member.unfinished}

    def interrupt(self) -> None:
        self._is_interrupted = True
        for member in list(self._members.values()):
            member.interrupt()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that time from now, unless this client has lost their partitions."""
        return self._by_group(deliveries, lambda member, of_group: member.renew(of_group, invisible_for))

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Make deliveries available again at once. This client receives them, as long as it keeps their partitions."""
        for group in {delivery.group for delivery in deliveries}:
            self._member(group).release([delivery for delivery in deliveries if delivery.group == group])

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge messages, and commit the group's offsets."""
        return self._by_group(deliveries, lambda member, of_group: member.ack(of_group))

    def backlog(self, group: str) -> Backlog:
        """Return the number of records from the group's committed offsets on, by topic."""
        return Backlog(groups.count_backlog(self._settings, self._name, group, self.topics))

    def close(self) -> None:
        self._is_closed = self._is_interrupted = True
        for member in list(self._members.values()):
            member.close()
        self._producers.clear()
        self._lanes.close()

    def _member(self, group: str) -> GroupMember:
        """
        Return this client's member of a group, a new one if the earlier one has failed for good.

        Raises BrokerUnavailable if the broker is closed.
        """
        if self._is_closed:
            raise BrokerUnavailable("The broker is closed.")
        if group in self._members and self._members[group].has_failed:
            self._members.pop(group).close()
        if group not in self._members:
            member = GroupMember(self._settings, self._name, group, self.topics, self._clock)
            member.owner = self._owners.get(group)
            member.known_topics = self._known_topics.get(group, frozenset())
            if self._is_interrupted:
                member.interrupt()
            self._members[group] = member
        return self._members[group]

    def _by_group(self, deliveries: Sequence[Delivery], call: Callable[[GroupMember, list[Delivery]], Sequence[T]]) -> list[T]:
        """Make a call for the deliveries of each group; return the answers in the order of the deliveries."""
        results: dict[int, T] = {}
        for group in {delivery.group for delivery in deliveries}:
            of_group = {index: delivery for index, delivery in enumerate(deliveries) if delivery.group == group}
            results |= dict(zip(of_group, call(self._member(group), list(of_group.values())), strict=True))
        return [results[index] for index in range(len(deliveries))]

    def _reject(self, messages: Sequence[Outgoing]) -> dict[int, SendResult]:
        """Return results for invalid messages, by their index."""
        checked = (validate(message, self.topics, is_half=False, max_body_bytes=self.max_body_bytes) for message in messages)
        return {index: rejection for index, rejection in enumerate(checked) if rejection is not None}

    def _send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        results = self._produce(messages)
        too_large = [index for index, result in enumerate(results) if result.status is SendStatus.REFUSED]
        if len(too_large) > 1:  # Kafka refuses a batch of records as a whole
            for index in too_large:
                [results[index]] = self._produce([messages[index]])
        return results

    def _produce(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        self._errors.forget()
        pid = os.getpid()
        try:
            if pid not in self._producers:
                self._producers[pid] = Producer(producer_settings(self._settings, self._name, self._errors))
            return produce(self._producers[pid], messages, errors=self._errors)
        except ProducerLost as error:
            self._producers.pop(pid, None)
            return [SendResult(SendStatus.UNSURE, reason=f"The producer failed ({error}).")] * len(messages)
