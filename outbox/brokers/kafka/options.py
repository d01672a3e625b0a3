"""OPTIONS of the Kafka broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from outbox.brokers.options import BrokerOptions, problems_with, read_address, read_options
from outbox.findings import Finding, wrong_option

MESSAGE_BYTES = 1_048_588  # the largest record of a topic, unless its max.message.bytes is set

FOR_HEADERS = 16 * 1024  # bytes that key and headers of a message take at most

# Settings of the client on which the protocol depends, or which have an option of their own.
RESERVED = {
    "bootstrap.servers": 'Use OPTIONS["SERVERS"].',
    "acks": "All in-sync replicas confirm each message.",
    "enable.idempotence": "A message that the client repeats is stored once.",
    "transactional.id": "It is made of the outbox's id and the relay's lane.",
    "transaction.timeout.ms": "It must be shorter than the relay's lease.",
    "message.timeout.ms": "It must be shorter than the transaction's time-out.",
    "delivery.timeout.ms": "It must be shorter than the transaction's time-out.",
    "retry.backoff.ms": "By it the client tells a commit that may have been sent twice.",
    "isolation.level": "Markers are read from committed transactions only.",
    "enable.auto.commit": "Offsets are committed after the database.",
    "group.id": "It is that of the @consumer.",
    "partition.assignment.strategy": "Members keep their partitions when others come: cooperative-sticky.",
    "auto.offset.reset": 'Use OPTIONS["START"].',
    "max.poll.interval.ms": "A renewed delivery is held for any time.",
    "error_cb": "The broker has one.",
    "log_level": "Errors are in the results.",
}


class KafkaOptions(BrokerOptions, frozen=True):
    """Where the cluster is, and how the client is set up."""

    servers: list[str]  # host:port of some brokers of the cluster, which name the others
    # False: for clusters that forbid transactional ids. Messages are then published at least once.
    transactions: bool = True
    # Where a consumer group that is new to a topic begins: with the first message that the topic has, or behind the last one.
    start: Literal["earliest", "latest"] = "earliest"
    # Further settings of librdkafka, such as "security.protocol", "sasl.username", "compression.type".
    client: dict[str, str | int | float | bool] = {}

    @property
    def body_bytes(self) -> int:
        """The limit that `message.max.bytes` of CLIENT leaves to a body; a topic may take less."""
        return int(self.client.get("message.max.bytes", MESSAGE_BYTES)) - FOR_HEADERS

    @property
    def compresses(self) -> bool:
        """Whether records are compressed, so that their size in a topic is not known before."""
        return any(self.client.get(name, "none") != "none" for name in ("compression.type", "compression.codec"))


def problems(raw: Mapping[str, Any]) -> list[Finding]:
    """Return what is wrong with the options: names and types first, then values."""
    if findings := problems_with(KafkaOptions, raw):
        return findings
    options = read_options(KafkaOptions, raw)
    findings = [
        wrong_option(f'OPTIONS["SERVERS"] has {server!r}, which is not host:port.', 'Write it like "kafka-1:9092".')
        for server in options.servers
        if (read_address(server) or (None, None))[1] is None
    ]
    if not options.servers:
        findings.append(wrong_option('OPTIONS["SERVERS"] is empty.', 'Name one broker at least, like "kafka-1:9092".'))
    findings.extend(
        wrong_option(f'OPTIONS["CLIENT"] sets {name!r}, which the outbox sets itself.', why)
        for name, why in RESERVED.items()
        if name in options.client
    )
    return findings
