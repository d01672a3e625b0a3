"""Describes topics of the cluster (partitions, settings, and permissions of this user), and creates topics."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, NewTopic, ResourceType, TopicDescription

from outbox.brokers.kafka.client import ANSWER_SECONDS, ConnectionErrors, client_settings
from outbox.brokers.kafka.errors import CONNECTION, MISCONFIGURED, OF_TOPIC, call_error, error_of
from outbox.brokers.kafka.options import KafkaOptions
from outbox.errors import BrokerMisconfigured, BrokerUnavailable

CREATE_SECONDS = 10.0


def describe_topics(options: KafkaOptions, name: str, topics: Collection[str]) -> dict[str, TopicDescription | KafkaError]:
    """
    Return topic -> its description; instead, the error if the topic is missing, or if this user may not see it.

    Raises:
        BrokerUnavailable: the cluster does not answer.
    """
    errors = ConnectionErrors()
    admin = AdminClient(client_settings(options, name, errors))
    descriptions: dict[str, TopicDescription | KafkaError] = {}
    if not topics:
        return descriptions
    asked = admin.describe_topics(
        TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=ANSWER_SECONDS
    )
    for topic, answer in asked.items():
        try:
            descriptions[topic] = answer.result(2 * ANSWER_SECONDS)
        except (KafkaException, TimeoutError) as raised:
            error = error_of(raised)
            if error is None or error.code() not in OF_TOPIC:
                raise call_error(raised, f"look the topic {topic!r} up", errors.last(admin)) from raised
            descriptions[topic] = error
    return descriptions


def existing_topics(descriptions: Mapping[str, TopicDescription | KafkaError]) -> dict[str, TopicDescription]:
    """Return the descriptions of topics that exist and that this user may see."""
    return {topic: description for topic, description in descriptions.items() if not isinstance(description, KafkaError)}


def is_allowed(topic: TopicDescription, operation: AclOperation) -> bool:
    """Return whether this user has a permission on a topic. True if the cluster does not report permissions."""
    return not topic.authorized_operations or operation in topic.authorized_operations


def find_topic(options: KafkaOptions, name: str, topic: str, *, hint: str) -> TopicDescription | None:
    """
    Return the description of a topic; None if there is no such topic.

    Args:
        hint: the remedy if a permission is missing.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: this user may not see the topic.
    """
    description = describe_topics(options, name, [topic])[topic]
    if not isinstance(description, KafkaError):
        return description
    if description.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return None
    raise call_error(KafkaException(description), f"look the topic {topic!r} up", hint=hint)


def create_topic(options: KafkaOptions, name: str, new: NewTopic, *, hint: str) -> None:
    """
    Create a topic, unless it exists.

    Args:
        hint: the remedy if this user may not create it, or if the error is not in MISCONFIGURED.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: the cluster did not create the topic.
    """
    errors = ConnectionErrors()
    admin = AdminClient(client_settings(options, name, errors))
    try:
        admin.create_topics([new], request_timeout=CREATE_SECONDS)[new.topic].result(2 * CREATE_SECONDS)
    except (KafkaException, TimeoutError) as error:
        cause = error_of(error)
        if cause is None or cause.code() in CONNECTION:
            raise call_error(error, f"create the topic {new.topic!r}", errors.last(admin)) from error
        if cause.code() != KafkaError.TOPIC_ALREADY_EXISTS:
            text = f"Topic {new.topic!r} does not exist, and Kafka did not create it ({cause.str()})."
            is_denied = cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
            raise BrokerMisconfigured(text, hint=hint if is_denied else MISCONFIGURED.get(cause.code(), hint)) from error


def wait_for_leaders(options: KafkaOptions, name: str, topic: str, partitions: Collection[int], *, hint: str) -> TopicDescription:
    """
    Wait until partitions of a new topic have leaders, and return its description. Numbers that the topic lacks are ignored.

    Raises:
        BrokerUnavailable: the cluster does not answer, or a partition has no leader after CREATE_SECONDS.
        BrokerMisconfigured: this user may not see the topic.
    """
    deadline = time.monotonic() + CREATE_SECONDS
    while True:
        description = find_topic(options, name, topic, hint=hint)
        if description:
            leaders = [description.partitions[n].leader for n in partitions if n < len(description.partitions)]
            if all(leader is not None and leader.id >= 0 for leader in leaders):
                return description
        if time.monotonic() > deadline:
            raise BrokerUnavailable(f"Topic {topic!r} was created, but has no leader after {CREATE_SECONDS:g} s.")
        time.sleep(0.05)


def read_settings(options: KafkaOptions, name: str, topics: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """Return the settings of topics; an empty mapping if this user may not see them, or the cluster does not report them."""
    if not topics:
        return {}
    admin = AdminClient(client_settings(options, name))
    asked = admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, topic) for topic in topics], request_timeout=ANSWER_SECONDS
    )
    settings: dict[str, Mapping[str, str]] = {}
    for resource, answer in asked.items():
        try:
            settings[resource.name] = {setting: str(entry.value) for setting, entry in answer.result(2 * ANSWER_SECONDS).items()}
        except (KafkaException, TimeoutError):
            settings[resource.name] = {}
    return settings
