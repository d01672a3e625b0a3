"""The Kafka broker: the contract, each call handed to its module."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from confluent_kafka import Producer

from outbox.brokers.base import Outgoing, Problem, SendResult, SendStatus, TopicSpec
from outbox.brokers.capabilities import SendOnly, TransactionalSends
from outbox.brokers.kafka.client import ANSWER_SECONDS, ConnectionErrors, problems_of_client, producer_settings
from outbox.brokers.kafka.lanes import KafkaLanes, undone
from outbox.brokers.kafka.options import MESSAGE_BYTES, KafkaOptions, problems
from outbox.brokers.kafka.producing import FLUSH_SECONDS, ProducerLost, produce
from outbox.brokers.kafka.server_checks import KafkaServerChecks
from outbox.brokers.options import read_options
from outbox.brokers.validation import validate

NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
FOR_HEADERS = 16 * 1024


class KafkaBroker(SendOnly, TransactionalSends):
    """
    Publishes one-phase messages to Kafka 2.5 and later; docs/brokers/kafka.md says what it promises.

    A relay sends in transactions of its lane, so that readers of committed messages see each message once. With
    OPTIONS["TRANSACTIONS"] = False, messages are published at least once.
    """

    system: ClassVar[str] = "kafka"
    supports_order: ClassVar[bool] = True
    max_body_bytes = MESSAGE_BYTES - FOR_HEADERS

    def __init__(self, alias: str, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> None:
        super().__init__(alias, options, topics)
        self._settings = read_options(KafkaOptions, options)
        self._name = f"outbox {alias}"
        self._producers: dict[int, Producer] = {}  # by process: a producer does not work in a forked process
        self._errors = ConnectionErrors()
        self._lanes = KafkaLanes(self._settings, self._name)
        self.supports_transactional_sends = self._settings.transactions

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> list[Problem]:
        """Return what is wrong with the OPTIONS, without a connection."""
        return problems(options) or problems_of_client(read_options(KafkaOptions, options))

    @classmethod
    def check_topics(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec]) -> list[Problem]:
        """Return topics whose names Kafka does not take."""
        return [
            Problem(
                f"Kafka has no topic of the name {topic.name!r}.",
                "A name has 1 to 249 letters, digits, dots, underscores and hyphens.",
            )
            for topic in topics
            if not NAME.fullmatch(topic.name) or topic.name in (".", "..")
        ]

    @classmethod
    def max_send_duration(cls, options: Mapping[str, Any]) -> timedelta:
        """Return how long a transaction may take: to look topics up, to store messages and marker, and to commit."""
        return timedelta(seconds=2 * FLUSH_SECONDS + ANSWER_SECONDS)

    def check(self) -> list[Problem]:
        """Return what is wrong with the options, and with the topics on the cluster."""
        if found := [*self.check_options(self.options), *self.check_topics(self.options, list(self.topics.values()))]:
            return found
        return KafkaServerChecks(self._settings, self._name).problems_of_topics(sorted(self.topics))

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Send messages and wait for the delivery reports of all; without transactions, so at least once."""
        rejected = self._reject(messages)
        wanted = [index for index in range(len(messages)) if index not in rejected]
        results = dict(zip(wanted, self._produce([messages[index] for index in wanted]), strict=True))
        too_large = [index for index, result in results.items() if result.status is SendStatus.REFUSED]
        if len(too_large) > 1:  # Kafka refuses a batch of records as a whole
            results |= {index: self._produce([messages[index]])[0] for index in too_large}
        return [rejected.get(index) or results[index] for index in range(len(messages))]

    def open_lane(self, source: str, lane: int) -> str | None:
        """Take a lane over: its transactional id, and partition `lane` of the outbox's marker topic."""
        return self._lanes.open(source, lane)

    def is_lane_open(self, lane: int) -> bool:
        """Return whether the lane was opened here, and each transaction since was committed without delay."""
        return self._lanes.is_open(lane)

    def fence_lane(self, source: str, lane: int) -> str | None:
        """Fence out the holder of a lane's transactional id."""
        return self._lanes.fence(source, lane)

    def send_transaction(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """Send messages and the lane's marker in one transaction."""
        if rejected := self._reject(messages):
            return undone(messages, rejected)
        return self._lanes.send(lane, messages, marker)

    def check_lanes(self, source: str, lanes: int) -> list[Problem]:
        """Return what is wrong with the marker topic of an outbox, and whether this user may send its transactions."""
        checks = KafkaServerChecks(self._settings, self._name)
        return [*checks.problems_of_lanes(source, lanes), *self._lanes.problems(source)]

    def close(self) -> None:
        """Throw all producers away."""
        self._producers.clear()
        self._lanes.close()

    def _reject(self, messages: Sequence[Outgoing]) -> dict[int, SendResult]:
        """Return the results of messages that break a rule."""
        checked = (validate(one, self.topics, is_half=False, max_body_bytes=self.max_body_bytes) for one in messages)
        return {index: rejection for index, rejection in enumerate(checked) if rejection is not None}

    def _open_producer(self) -> Producer:
        pid = os.getpid()
        if pid not in self._producers:
            self._producers[pid] = Producer(producer_settings(self._settings, self._name, self._errors))
        return self._producers[pid]

    def _produce(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        self._errors.forget()
        try:
            return produce(self._open_producer(), messages, errors=self._errors) if messages else []
        except ProducerLost as error:
            self._producers.pop(os.getpid(), None)
            return [SendResult(SendStatus.UNSURE, reason=f"The producer failed ({error}).")] * len(messages)
