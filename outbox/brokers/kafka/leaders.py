"""
Finds topics that have a partition without a leader.

A transaction with a record in such a partition can neither be committed nor aborted until there is a leader again, and until then
no relay can open its lane. So partitions are checked before a transaction begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from outbox.brokers.kafka.client import ANSWER_SECONDS, client_settings
from outbox.brokers.kafka.options import KafkaOptions

KNOWN_SECONDS = 1.0  # an answer about a topic is used for this time
NO_LEADER = "Partition {partition} of topic {topic!r} has no leader: the servers with its replicas are down. Its messages wait."


class PartitionLeaders:
    """Knows which topics lack a leader, from answers of the cluster that are at most KNOWN_SECONDS old."""

    def __init__(self, options: KafkaOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._admins: dict[int, AdminClient] = {}  # by process: a client does not work in a forked process
        self._known: dict[str, tuple[float, str]] = {}  # topic -> when to ask again, and its problem or ""

    def find_unavailable(self, topics: Collection[str]) -> dict[str, str]:
        """Return topics with a partition that has no leader, with the reason; none while the cluster does not answer."""
        now = time.monotonic()
        for topic in topics:
            if self._known.get(topic, (0.0, ""))[0] <= now:
                self._known[topic] = (now + KNOWN_SECONDS, self._ask(topic))
        return {topic: reason for topic in topics if (reason := self._known[topic][1])}

    def _ask(self, topic: str) -> str:
        """Return why a topic is unavailable; "" if each of its partitions has a leader, or if the cluster does not answer."""
        pid = os.getpid()
        try:
            if pid not in self._admins:
                self._admins[pid] = AdminClient(client_settings(self._options, self._name))
            metadata = self._admins[pid].list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
        except KafkaException:
            return ""  # the send will fail, and report the error
        leaderless = min((number for number, partition in metadata.partitions.items() if partition.leader < 0), default=None)
        return "" if leaderless is None else NO_LEADER.format(partition=leaderless, topic=topic)
