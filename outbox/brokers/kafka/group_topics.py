"""
The two topics that a consumer group has for each topic that it reads.

`<topic>.<group>.retry` has a partition for each step of a delay, so that the first record of a partition is always the first that
is due. `<topic>.<group>.dead` has the dead letters: compacted by the letter's id, one partition.
"""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka.admin import NewTopic

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
    if missing := [one for one, description in found.items() if description is None]:
        settings = _settings_of_copies(options, name, topic)
        size = settings.get("max.message.bytes", str(MESSAGE_BYTES + FOR_NOTE))
        new = {
            mine.retry: NewTopic(mine.retry, len(STEPS), config=settings),
            mine.dead: NewTopic(mine.dead, 1, config={"max.message.bytes": size, "cleanup.policy": "compact"}),
        }
        compacted = {mine.retry: "", mine.dead: ", cleanup.policy=compact"}
        for one in missing:
            count = new[one].num_partitions
            create_topic(options, name, new[one], hint=CREATE.format(partitions=count, compacted=compacted[one]))
            found[one] = wait_for_leaders(options, name, one, range(count), hint=ALLOW)
    retry = found[mine.retry]
    if retry is not None and len(retry.partitions) < len(STEPS):
        raise BrokerMisconfigured(
            f"Topic {mine.retry!r} has {len(retry.partitions)} partitions, and needs {len(STEPS)}: one for each step of a delay.",
            hint="Add partitions to it.",
        )


def _settings_of_copies(options: KafkaOptions, name: str, topic: str) -> dict[str, str]:
    """Return the settings that the copies of a topic's records need; none where this user may not ask."""
    found = read_settings(options, name, [topic])[topic]
    settings = {setting: found[setting] for setting in OF_SOURCE if setting in found}
    if "max.message.bytes" in settings:
        settings["max.message.bytes"] = str(int(settings["max.message.bytes"]) + FOR_NOTE)
    return settings
