"""OPTIONS of the Kafka broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from outbox.brokers.options import BrokerOptions, problems_with, read_address, read_options
from outbox.findings import Finding, wrong_option

MESSAGE_BYTES = 1_048_588  # Kafka's default of max.message.bytes, the size of a topic's largest record

FOR_HEADERS = 16 * 1024  # bytes that are reserved for the key and the headers of a message

# Settings of the client that CLIENT may not have, because the protocol depends on them, or another option sets them.
RESERVED = {
    "bootstrap.servers": 'Use OPTIONS["SERVERS"].',
    "acks": "All in-sync replicas confirm each message.",
    "enable.idempotence": "A message that the client repeats is stored once.",
    "transactional.id": "It is made of the outbox's id and the relay's lane.",
    "transaction.timeout.ms": "It must be shorter than the relay's lease.",
    "message.timeout.ms": "It must be shorter than the transaction's timeout.",
    "delivery.timeout.ms": "It must be shorter than the transaction's timeout.",
    "retry.backoff.ms": "A commit that takes nearly as long may have been sent twice, and closes its lane.",
    "isolation.level": "Messages and markers are read from committed transactions only.",
    "enable.auto.commit": "Offsets are committed after the handler's database transaction.",
    "group.id": "It is the group of the @consumer.",
    "partition.assignment.strategy": "It is cooperative-sticky, so that members keep their partitions when others join.",
    "auto.offset.reset": 'Use OPTIONS["START"].',
    "max.poll.interval.ms": "Deliveries are renewed in time for the broker's own interval, so a handler may run for any time.",
    "error_cb": "The broker sets its own callback.",
    "log_level": "The broker reports errors in its results.",
}


class KafkaOptions(BrokerOptions, frozen=True):
    """The addresses of the cluster, and settings of the client."""

    servers: list[str]  # host:port of some servers of the cluster; they name the others
    # False: for clusters that forbid transactional ids. Messages are then published at least once.
    transactions: bool = True
    # Where a consumer group that is new to a topic begins: at the first message in the topic, or after the last one.
    start: Literal["earliest", "latest"] = "earliest"
    # Further settings of librdkafka, such as "security.protocol", "sasl.username", "compression.type".
    client: dict[str, str | int | float | bool] = {}

    @property
    def body_bytes(self) -> int:
        """The maximum size of a body with `message.max.bytes` of CLIENT. The limit of a topic may be lower."""
        return int(self.client.get("message.max.bytes", MESSAGE_BYTES)) - FOR_HEADERS

    @property
    def compresses(self) -> bool:
        """Whether records are compressed, so that their size in a topic is not known before they are sent."""
        return any(self.client.get(name, "none") != "none" for name in ("compression.type", "compression.codec"))


def problems(raw: Mapping[str, Any]) -> list[Finding]:
    """Return wrong names and types of options; if there are none, wrong values."""
    if findings := problems_with(KafkaOptions, raw):
        return findings
    options = read_options(KafkaOptions, raw)
    findings = [
        wrong_option(f'OPTIONS["SERVERS"] has {server!r}, which is not host:port.', 'Write it like "kafka-1:9092".')
        for server in options.servers
        if (read_address(server) or (None, None))[1] is None
    ]
    if not options.servers:
        findings.append(wrong_option('OPTIONS["SERVERS"] is empty.', 'Name at least one server, such as "kafka-1:9092".'))
    findings.extend(
        wrong_option(f'OPTIONS["CLIENT"] sets {name!r}, which the outbox sets itself.', why)
        for name, why in RESERVED.items()
        if name in options.client
    )
    return findings
