"""The settings of the clients (of librdkafka) that the broker opens."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from outbox.brokers.kafka.options import MESSAGE_BYTES, KafkaOptions
from outbox.findings import Finding, risky_option, wrong_option

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

MESSAGE_TIMEOUT = timedelta(seconds=7)
# Kafka aborts the transaction of a killed relay after this time, if no other relay has opened its lane. Until then,
# read_committed consumers wait.
TRANSACTION_TIMEOUT = timedelta(seconds=20)
# The client repeats a request after 0.8 times this interval at the earliest.
RETRY_BACKOFF = timedelta(milliseconds=400)
# A member that has not polled for this time loses its partitions. While a handler runs, its delivery is renewed, which polls,
# too.
MAX_POLL_INTERVAL = timedelta(minutes=5)
ANSWER_SECONDS = 5.0  # the timeout of queries and commits


class ConnectionErrors:
    """Collects errors of a client's connections, such as a wrong password; a call that waits for a connection only times out."""

    def __init__(self) -> None:
        self._last: KafkaError | None = None
        self._is_cut_off = False

    def __call__(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._is_cut_off = True
        else:
            self._last = error

    def forget(self) -> None:
        """Forget all earlier errors."""
        self._last = None
        self._is_cut_off = False

    def was_cut_off(self, client: Producer) -> bool:
        """Return whether a client was once without any reachable server since its errors were last forgotten."""
        self.last(client)
        return self._is_cut_off

    def last(self, client: AdminClient | Consumer | Producer | None = None) -> KafkaError | None:
        """Return the last error. If a client is given, poll it first, since a client reports errors only while it is polled."""
        if client is not None:
            with suppress(KafkaException, SystemError):  # a fatal error, which the caller's last call has raised already
                client.poll(0)
        return self._last


def client_settings(options: KafkaOptions, name: str, errors: ConnectionErrors | None = None) -> dict[str, Any]:
    """Return the settings that all clients share."""
    return {
        **options.client,
        "bootstrap.servers": ",".join(options.servers),
        "client.id": name,
        "error_cb": errors or (lambda error: None),  # ignored, since each call also fails
        "log_level": 0,
    }


def producer_settings(options: KafkaOptions, name: str, errors: ConnectionErrors | None = None) -> dict[str, Any]:
    """Return the settings of an idempotent producer: it stores each message once, even if it repeats requests."""
    return {
        "partitioner": "murmur2_random",  # the same as that of Java's producers
        "linger.ms": 5,
        "queue.buffering.max.kbytes": 65_536,
        "message.max.bytes": MESSAGE_BYTES,
        **client_settings(options, name, errors),
        "enable.idempotence": True,
        "acks": "all",
        "message.timeout.ms": milliseconds(MESSAGE_TIMEOUT),
        "retry.backoff.ms": milliseconds(RETRY_BACKOFF),
        "topic.metadata.propagation.max.ms": 2000,
    }


def transactional_settings(
    options: KafkaOptions, name: str, transactional_id: str, errors: ConnectionErrors | None = None
) -> dict[str, Any]:
    """Return the settings of the producer of a lane."""
    return {
        **producer_settings(options, name, errors),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": milliseconds(TRANSACTION_TIMEOUT),
    }


def member_settings(options: KafkaOptions, name: str, group: str) -> dict[str, Any]:
    """Return the settings of a member of a consumer group, with the classic protocol or that of KIP-848."""
    is_classic = options.client.get("group.protocol", "classic") != "consumer"
    return {
        **({"partition.assignment.strategy": "cooperative-sticky"} if is_classic else {}),
        "queued.max.messages.kbytes": 16_384,  # the client's own buffer of fetched records
        "socket.timeout.ms": 10_000,
        "topic.metadata.refresh.interval.ms": 60_000,  # new partitions are found after this time
        **client_settings(options, name),
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",  # so partitions that are added later are read from their first message
        "max.poll.interval.ms": milliseconds(MAX_POLL_INTERVAL),
    }


def reader_settings(options: KafkaOptions, name: str) -> dict[str, Any]:
    """Return the settings of a consumer that reads partitions without a group."""
    return {
        **client_settings(options, name),
        "group.id": "unused",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",  # if the records at an offset were compacted away meanwhile
    }


def problems_of_client(options: KafkaOptions) -> list[Finding]:
    """Return settings in CLIENT that the Kafka client does not accept. No connection is opened."""
    text = _refusal(options)
    if not text:
        return []
    names = [name for name in options.client if not _refusal(options, without=name)]
    subject = " or ".join(f'OPTIONS["CLIENT"]["{name}"]' for name in names) or 'OPTIONS["CLIENT"]'
    hint = "Its names and values are those of librdkafka."
    finding = risky_option if ".location" in text else wrong_option  # certificates may be missing where the check runs
    return [finding(f"Kafka's client does not take {subject}: {text}.", hint)]


def _refusal(options: KafkaOptions, *, without: str = "") -> str:
    """Return the error of a client that is created with CLIENT, except one setting; "" if it accepts all."""
    chosen = KafkaOptions(servers=[], client={name: value for name, value in options.client.items() if name != without})
    try:
        Producer(transactional_settings(chosen, "check", "check"))
        Consumer(reader_settings(chosen, "check"))
    except KafkaException as error:
        return str(error.args[0].str()).strip().removeprefix("Failed to create producer: ")
    except (AttributeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def milliseconds(span: timedelta) -> int:
    """Return a duration in milliseconds, as librdkafka's settings require it."""
    return int(span.total_seconds() * 1000)
