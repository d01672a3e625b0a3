"""What the cluster says about topics: their partitions, and what this user may do with them."""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, TopicDescription

from outbox.brokers.kafka.client import ANSWER_SECONDS, ConnectionErrors, client_settings
from outbox.brokers.kafka.errors import OF_TOPIC, call_error, error_of
from outbox.brokers.kafka.options import KafkaOptions


def describe_topics(options: KafkaOptions, name: str, topics: Collection[str]) -> dict[str, TopicDescription | KafkaError]:
    """
    Return descriptions of topics; the error of a topic that is missing, or that this user may not see.

    Raises:
        BrokerUnavailable: the cluster does not answer.
    """
    errors = ConnectionErrors()
    admin = AdminClient(client_settings(options, name, errors))
    found: dict[str, TopicDescription | KafkaError] = {}
    if not topics:
        return found
    asked = admin.describe_topics(
        TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=ANSWER_SECONDS
    )
    for topic, answer in asked.items():
        try:
            found[topic] = answer.result(2 * ANSWER_SECONDS)
        except (KafkaException, TimeoutError) as raised:
            error = error_of(raised)
            if error is None or error.code() not in OF_TOPIC:
                raise call_error(raised, f"look the topic {topic!r} up", errors.last(admin)) from raised
            found[topic] = error
    return found


def may(topic: TopicDescription, operation: AclOperation) -> bool:
    """Return whether this user may do something with a topic. True where the cluster does not tell."""
    return not topic.authorized_operations or operation in topic.authorized_operations
