"""
The meaning of Kafka's errors for a message, and for a call. docs/brokers/kafka.md has the tables for operators.

After an error that is in none of these tables, a message that was sent without a transaction is UNSURE: it may be stored. A
transaction that was not committed stores nothing, whatever the error, and its lane is opened again.
"""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException

from outbox.brokers.base import SendResult, SendStatus
from outbox.errors import BrokerMisconfigured, BrokerUnavailable

REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE: "larger than max.message.bytes of the topic, or message.max.bytes of CLIENT, allows",
    KafkaError.RECORD_LIST_TOO_LARGE: "larger than a segment of the topic",
    KafkaError.INVALID_RECORD: "not one that the topic takes; a compacted topic takes only messages with a key",
    KafkaError._INVALID_ARG: "not one that the client can send",
}

MISCONFIGURED = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: "Create the topic (manage.py outbox_topics --create), or correct its name.",
    KafkaError._UNKNOWN_TOPIC: "Create the topic (manage.py outbox_topics --create), or correct its name.",
    KafkaError._UNKNOWN_PARTITION: "The topic lacks a partition.",
    KafkaError.TOPIC_EXCEPTION: "Correct the topic's name.",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Allow this user Write on the topic.",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Allow this user Read on the group.",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "Another program's consumers are in this group, and share partitions out in another "
    "way. Give the group another name, or stop them.",
    KafkaError.GROUP_MAX_SIZE_REACHED: "Stop consumers of the group, or raise the cluster's group.max.size.",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Allow this user IdempotentWrite on the cluster.",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: 'Allow this user Write on transactional ids that begin with "outbox.", '
    'or set OPTIONS["TRANSACTIONS"] = False.',
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "Raise the cluster's transaction.max.timeout.ms.",
    KafkaError.INVALID_REPLICATION_FACTOR: "Start more nodes, or lower the cluster's default.replication.factor.",
    KafkaError.POLICY_VIOLATION: "A policy of the cluster forbids it.",
    KafkaError.SASL_AUTHENTICATION_FAILED: 'Correct user and password in OPTIONS["CLIENT"].',
    KafkaError._AUTHENTICATION: 'Correct "sasl.mechanism", user and password in OPTIONS["CLIENT"].',
    KafkaError._SSL: 'Correct the certificates in OPTIONS["CLIENT"].',
    KafkaError.UNSUPPORTED_SASL_MECHANISM: 'Correct "sasl.mechanism" in OPTIONS["CLIENT"].',
    KafkaError.SECURITY_DISABLED: "The cluster has no security.",
    KafkaError.DELEGATION_TOKEN_EXPIRED: 'Renew the delegation token in OPTIONS["CLIENT"].',
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: 'Correct "compression.type" in OPTIONS["CLIENT"].',
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: "Upgrade the cluster: Kafka 2.5 or later is needed.",
    KafkaError.UNSUPPORTED_VERSION: "Upgrade the cluster: Kafka 2.5 or later is needed.",
    KafkaError._UNSUPPORTED_FEATURE: "Upgrade the cluster: Kafka 2.5 or later is needed.",
}

# Errors of MISCONFIGURED that concern one topic only, so that a producer can go on with other topics.
OF_TOPIC = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
}

UNAVAILABLE = {
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._QUEUE_FULL,
    KafkaError._PURGE_QUEUE,
    KafkaError._INVALID_DIFFERENT_RECORD,  # another record of the same request was refused
    KafkaError.INVALID_TIMESTAMP,  # of the send, so a later send may succeed
    KafkaError.INVALID_MSG,  # damaged in transit
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNKNOWN_TOPIC_ID,  # until the client has refreshed its metadata
    KafkaError.NOT_CONTROLLER,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.CONCURRENT_TRANSACTIONS,  # the last transaction of the transactional id is still being ended
    KafkaError.STALE_BROKER_EPOCH,
    KafkaError.REBOOTSTRAP_REQUIRED,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
}

HINTS = {
    **MISCONFIGURED,
    KafkaError.INVALID_TIMESTAMP: "Correct the clock of this relay: it differs from Kafka's by more than the topic takes "
    "(message.timestamp.before.max.ms, message.timestamp.after.max.ms).",
}

# Errors of calls that waited for a connection. The client reports separately why there is none (`ConnectionErrors`).
CONNECTION = {KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._ALL_BROKERS_DOWN}
CHECK_PROTOCOL = 'If the servers are up, correct OPTIONS["SERVERS"], or "security.protocol" in OPTIONS["CLIENT"].'


def error_of(raised: BaseException) -> KafkaError | None:
    """Return the error in an exception of the client; None for another exception, such as SystemError after a fatal error."""
    return raised.args[0] if isinstance(raised, KafkaException) and isinstance(raised.args[0], KafkaError) else None


def describe(error: KafkaError | BaseException) -> str:
    """Return an error as text: its name and the client's description."""
    kafka_error = error if isinstance(error, KafkaError) else error_of(error)
    return f"{kafka_error.name()}: {kafka_error.str()}" if kafka_error is not None else str(error) or repr(error)


def send_result(error: KafkaError, topic: str, cause: KafkaError | None = None) -> SendResult:
    """
    Return the result of a message whose delivery failed. An error that is not in the tables leaves it UNSURE.

    Args:
        cause: the last error of the client's connections, which the delivery report does not contain.
    """
    code = error.code()
    if code in REFUSED:
        return SendResult(SendStatus.REFUSED, reason=f"Kafka refused the message, which is {REFUSED[code]} ({describe(error)}).")
    if code in MISCONFIGURED:
        reason = f"Kafka refused topic {topic!r} ({describe(error)}). {MISCONFIGURED[code]}"
        return SendResult(SendStatus.MISCONFIGURED, reason=reason)
    if cause is not None and code in CONNECTION:
        reason = f"Kafka did not take the message ({describe(cause)}). {HINTS.get(cause.code(), '')}".rstrip()
        return SendResult(SendStatus.UNAVAILABLE, reason=reason)
    status = SendStatus.UNAVAILABLE if code in UNAVAILABLE else SendStatus.UNSURE
    return SendResult(status, reason=f"Kafka did not take the message ({describe(error)}). {HINTS.get(code, '')}".rstrip())


def call_error(raised: BaseException, action: str, cause: KafkaError | None = None, *, hint: str = "") -> BrokerUnavailable:
    """
    Return the exception for a call that failed.

    Args:
        action: the action that failed, such as "read marker topic 'a'".
        cause: the last error of the client's connections, which the exception does not contain.
        hint: the remedy if a permission on a topic is missing.
    """
    error = error_of(raised)
    if cause is not None and (error is None or error.code() in CONNECTION):
        error = cause
    text = f"Kafka could not {action} ({describe(error or raised)})."
    if error is None:
        return BrokerUnavailable(text)
    if hint and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return BrokerMisconfigured(text, hint=hint)
    if error.code() in MISCONFIGURED:
        return BrokerMisconfigured(text, hint=MISCONFIGURED[error.code()])
    return BrokerUnavailable(text, hint=CHECK_PROTOCOL if error.code() in CONNECTION else "")
