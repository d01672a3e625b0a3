"""A real Kafka for the contract. Deliveries expire by the harness' clock."""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from outbox.brokers.base import Broker, Delivery, TopicSpec
from outbox.brokers.kafka import KafkaBroker
from outbox.brokers.kafka.receiver import GroupMember
from outbox.message import TopicType
from tests.contracts.real_time import RealTimeHarness
from tests.kafka_node import server

SECONDS = 30
SESSION_SECONDS = 6  # until the partitions of a member that was killed go to another one: the server's least


def admin(address: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": address, "log_level": 0})


class PatientKafka(KafkaBroker):
    """Receives all that is there: a member fetches by and by, and is given its partitions a moment after its first call."""

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        if set(topics) <= self.topics.keys():
            self._fetch_all(self._member(group), topics, limit)
        return super().receive(group, topics, limit=limit, invisible_for=invisible_for, wait=wait)

    def _fetch_all(self, member: GroupMember, topics: Collection[str], limit: int) -> None:
        member._largest_batch = max(member._largest_batch, limit)
        with member._polling:
            member._subscribe(topics)
        began = time.monotonic()
        while time.monotonic() - began < SECONDS and not self._is_kept_waiting(member):
            member._fetch(topics, 1000, 0.05)
            if self._has_fetched_all(member):
                return

    def _is_kept_waiting(self, member: GroupMember) -> bool:
        """Return whether it is not a member yet, since another one does not call, or was killed, or the group is another's."""
        if any("belongs to" in reason for reason in member.refusals.values()):
            return True
        if member._partitions:
            return False
        client = admin(self._settings.servers[0])
        with suppress(KafkaException):  # its coordinator may not be ready
            return len(client.describe_consumer_groups([member.group])[member.group].result(SECONDS).members) > 1
        return False

    def _has_fetched_all(self, member: GroupMember) -> bool:
        partitions = {TopicPartition(*key): partition for key, partition in member._partitions.items()}
        client = admin(self._settings.servers[0])  # kept until the answers are there
        ends = client.list_offsets(
            {place: OffsetSpec.latest() for place in partitions}, isolation_level=IsolationLevel.READ_COMMITTED
        )
        with suppress(KafkaException):  # on a busy machine, no broker may be known to lead a partition
            return bool(partitions) and all(
                partition.is_paused
                or max(member._consumer.position([place])[0].offset, partition.position or 0)
                >= ends[place].result(SECONDS).offset
                for place, partition in partitions.items()
            )
        return False


class KafkaHarness(RealTimeHarness):
    broker_class = PatientKafka
    marks: ClassVar = [pytest.mark.kafka, pytest.mark.timeout(120)]
    lateness = timedelta(seconds=20)
    ends_late = True
    can_restart = True
    keeps_owners = "a prefix of its own for its groups"
    gives_back_at_once = True
    moves_between_members = False
    reassigns_queues = True

    def __init__(self) -> None:
        super().__init__()
        self.topics = {kind: self.topics[kind] for kind in (TopicType.NORMAL, TopicType.FIFO)}
        client = admin(server().address)
        for created in client.create_topics([NewTopic(one.name, 4) for one in self.topics.values()]).values():
            created.result(SECONDS)

    def open(self, **options: Any) -> Broker:
        return self._open({**self.options(), **options}, list(self.topics.values()))

    def _open(self, options: dict[str, Any], topics: Sequence[TopicSpec]) -> Broker:
        broker = self.broker_class("default", options, topics, clock=lambda: self.now.timestamp())
        self._opened.append(broker)
        return broker

    def options(self) -> dict[str, Any]:
        return {"SERVERS": [server().address], "CLIENT": {"session.timeout.ms": SESSION_SECONDS * 1000}}

    def options_elsewhere(self) -> dict[str, Any]:
        return self.options()

    def restart(self) -> None:
        server().kill()
        server().start()

    def open_unreachable(self) -> Broker:
        return self.open(SERVERS=["127.0.0.1:1"])

    def close(self) -> None:
        super().close()
        client = admin(server().address)
        with suppress(KafkaException):  # the server may be away
            names = list(client.list_topics(timeout=SECONDS).topics)
            mine = tuple(one.name for one in self.topics.values())
            found = [name for name in names if name.startswith(mine)]
            for deleted in client.delete_topics(found).values() if found else ():  # new ones may not be listed yet
                deleted.result(SECONDS)
