"""
The two topics that a consumer group has for each topic that it reads.

`<topic>.<group>.retry` has a partition for each step of a delay, so that the first record of a partition is always the first that
is due. `<topic>.<group>.dead` has the dead letters: compacted by the letter's id, one partition.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from outbox.brokers.kafka.client import ANSWER_SECONDS, client_settings
from outbox.brokers.kafka.errors import call_error, describe, error_of
from outbox.brokers.kafka.options import KafkaOptions
from outbox.errors import BrokerMisconfigured

STEPS = (0.0, 10.0, 60.0, 600.0, 3600.0)  # seconds; the number of each is that of its partition
CREATE_SECONDS = 10.0
FOR_NOTE = 16 * 1024  # bytes that a copy has more than its record
OF_SOURCE = ("max.message.bytes", "retention.ms")  # settings that the new topics take from the group's topic

ALLOW = "Allow this user Create, Read and Write on the topic."
CREATE = (
    "Create it with {partitions} partitions{compacted} and as many replicas as the group's topic has, or allow this user Create "
    "on it."
)


@dataclass(frozen=True, slots=True)
class GroupTopics:
    """The names of a group's own topics beside one that it reads."""

    retry: str
    dead: str

    @classmethod
    def of(cls, topic: str, group: str) -> GroupTopics:
        return cls(f"{topic}.{group}.retry", f"{topic}.{group}.dead")


def step_of(seconds: float) -> int:
    """Return the number of the longest step that is not longer than a delay."""
    return max((number for number, step in enumerate(STEPS) if step <= seconds), default=0)


def ensure_group_topics(options: KafkaOptions, name: str, topic: str, group: str) -> None:
    """
    Create a group's topics where they are missing.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: one may not be created here, or has too few partitions.
    """
    admin = AdminClient(client_settings(options, name))
    mine = GroupTopics.of(topic, group)
    found = {one: count_partitions(admin, one) for one in (mine.retry, mine.dead)}
    if missing := [one for one, count in found.items() if not count]:
        settings = _settings_of(admin, topic)
        new = {
            mine.retry: NewTopic(mine.retry, len(STEPS), config=settings),
            mine.dead: NewTopic(
                mine.dead,
                1,
                config={
                    "max.message.bytes": settings.get("max.message.bytes", str(1_048_588 + FOR_NOTE)),
                    "cleanup.policy": "compact",
                },
            ),
        }
        _create(admin, [new[one] for one in missing])
        found |= {one: _wait_for_leaders(admin, one) for one in missing}
    if found[mine.retry] < len(STEPS):
        raise BrokerMisconfigured(
            f"Topic {mine.retry!r} has {found[mine.retry]} partitions, and needs {len(STEPS)}: one for each step of a delay.",
            hint="Add partitions to it.",
        )


def count_partitions(admin: AdminClient, topic: str) -> int:
    """Return the number of a topic's partitions; 0 where there is no such topic. Raises BrokerUnavailable."""
    try:
        found = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics.get(topic)
    except KafkaException as error:
        raise call_error(error, f"look the topic {topic!r} up", hint=ALLOW) from error
    if found is None or (found.error is not None and found.error.name() == "UNKNOWN_TOPIC_OR_PART"):
        return 0
    if found.error is not None and not found.partitions:
        raise call_error(KafkaException(found.error), f"look the topic {topic!r} up", hint=ALLOW)
    return len(found.partitions)


def _create(admin: AdminClient, topics: list[NewTopic]) -> None:
    created = admin.create_topics(topics, request_timeout=CREATE_SECONDS)
    for new in topics:
        try:
            created[new.topic].result(2 * CREATE_SECONDS)
        except (KafkaException, TimeoutError) as error:
            cause = error_of(error)
            if cause is None or cause.name() != "TOPIC_ALREADY_EXISTS":  # another member was first
                compacted = ", cleanup.policy=compact" if "cleanup.policy" in (new.config or {}) else ""
                raise BrokerMisconfigured(
                    f"Topic {new.topic!r} does not exist, and Kafka did not create it ({describe(error)}).",
                    hint=CREATE.format(partitions=new.num_partitions, compacted=compacted),
                ) from error


def _settings_of(admin: AdminClient, topic: str) -> dict[str, str]:
    """Return the settings that a topic's copies need; none where this user may not ask."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        found = admin.describe_configs([resource], request_timeout=ANSWER_SECONDS)[resource].result(2 * ANSWER_SECONDS)
    except (KafkaException, TimeoutError):
        return {}
    settings = {name: found[name].value for name in OF_SOURCE if name in found}
    if "max.message.bytes" in settings:
        settings["max.message.bytes"] = str(int(settings["max.message.bytes"]) + FOR_NOTE)
    return settings


def _wait_for_leaders(admin: AdminClient, topic: str) -> int:
    """Wait until all partitions of a new topic have a leader; return their number."""
    deadline = time.monotonic() + CREATE_SECONDS
    while time.monotonic() < deadline:
        found = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics.get(topic)
        if found is not None and found.partitions and all(one.leader >= 0 for one in found.partitions.values()):
            return len(found.partitions)
        time.sleep(0.05)
    return count_partitions(admin, topic)
