"""
The two topics that a consumer group has for each topic that it reads.

`<topic>.<group>.retry` has a partition for each step of a delay, so that the first record of a partition is always the first that
is due. `<topic>.<group>.dead` has the dead letters: compacted by the letter's id, one partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka.admin import NewTopic, TopicDescription

from outbox.brokers.kafka.options import MESSAGE_BYTES, KafkaOptions
from outbox.brokers.kafka.topics import create_topic, find_topic, read_settings, wait_for_leaders
from outbox.errors import BrokerMisconfigured

STEPS = (0.0, 10.0, 60.0, 600.0, 3600.0)  # seconds; the number of each is that of its partition
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
    mine = GroupTopics.of(topic, group)
    found = {one: find_topic(options, name, one, hint=ALLOW) for one in (mine.retry, mine.dead)}
    for one, description in found.items():
        if description is None:
            found[one] = create_group_topic(options, name, topic, group, one)
    retry = found[mine.retry]
    if retry is not None and len(retry.partitions) < len(STEPS):
        raise BrokerMisconfigured(
            f"Topic {mine.retry!r} has {len(retry.partitions)} partitions, and needs {len(STEPS)}: one for each step of a delay.",
            hint="Add partitions to it.",
        )


def new_group_topics(settings: Mapping[str, str], topic: str, group: str) -> dict[str, NewTopic]:
    """
    Return a group's topics as they are created, by name.

    Args:
        settings: those of the group's topic; empty where this user may not see them.
    """
    mine = GroupTopics.of(topic, group)
    copied = {setting: settings[setting] for setting in OF_SOURCE if setting in settings}
    if "max.message.bytes" in copied:
        copied["max.message.bytes"] = str(int(copied["max.message.bytes"]) + FOR_NOTE)
    size = copied.get("max.message.bytes", str(MESSAGE_BYTES + FOR_NOTE))
    return {
        mine.retry: NewTopic(mine.retry, len(STEPS), config=copied),
        mine.dead: NewTopic(mine.dead, 1, config={"max.message.bytes": size, "cleanup.policy": "compact"}),
    }


def create_group_topic(options: KafkaOptions, name: str, topic: str, group: str, mine: str) -> TopicDescription:
    """Create one of a group's topics. Raises as `ensure_group_topics`."""
    new = new_group_topics(read_settings(options, name, [topic])[topic], topic, group)[mine]
    compacted = ", cleanup.policy=compact" if new.config.get("cleanup.policy") == "compact" else ""
    create_topic(options, name, new, hint=CREATE.format(partitions=new.num_partitions, compacted=compacted))
    return wait_for_leaders(options, name, mine, range(new.num_partitions), hint=ALLOW)
