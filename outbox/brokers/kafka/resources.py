"""What `outbox_topics` lists and creates: topics of messages and marker topics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import msgspec
from confluent_kafka import KafkaError
from confluent_kafka.admin import NewTopic, TopicDescription

from outbox.brokers.base import ServerResource
from outbox.brokers.kafka.client import milliseconds
from outbox.brokers.kafka.errors import MISCONFIGURED, describe
from outbox.brokers.kafka.marker import create_marker_topic, marker_topic, new_marker_topic
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.topics import create_topic, describe_topics, existing_topics, read_settings, wait_for_leaders
from outbox.message import TopicSpec, TopicType

DESCRIBE = "Allow this user Describe on it."
CREATE = "Allow this user Create on it, or create it with {settings}."
KEYS_WOULD_MOVE = (
    "With more partitions, its keys move to other ones, and later messages of a key may be read before earlier ones. Set QUEUES "
    "to {partitions}; or run outbox_pause {topic}, wait until outbox_status shows that every group has read all its messages, "
    "give it {wanted} partitions with kafka-topics.sh, and run outbox_pause --resume {topic}."
)
UNSEEN = "Its settings were not compared, because Kafka does not show them to this user. Allow this user DescribeConfigs."


class KafkaResource(msgspec.Struct, frozen=True):
    """
    A topic that the outbox needs.

    Args:
        new: the definition with which it is created.
        least: the minimum number of partitions.
        is_ordered: whether each key must stay in its partition.
    """

    kind: str
    new: NewTopic
    create: Callable[[], object]
    least: int
    is_ordered: bool = False


class KafkaResources:
    """The topics that the outbox needs in one cluster."""

    def __init__(self, options: KafkaOptions, name: str) -> None:
        self._options = options
        self._name = name

    def find(self, topics: Collection[TopicSpec], *, sources: Iterable[str], lanes: int) -> list[ServerResource]:
        """Return the topics that are needed, compared with those of the cluster. Arguments and errors as in `ListsResources`."""
        return self._compare([*map(self._topic, topics), *(self._marker(source, lanes) for source in sources)])

    def _topic(self, topic: TopicSpec) -> KafkaResource:
        new = NewTopic(topic.name, topic.queues, config={"retention.ms": str(milliseconds(topic.retention))})
        return KafkaResource("topic", new, partial(self._create, new), topic.queues, topic.type is TopicType.FIFO)

    def _create(self, new: NewTopic) -> None:
        settings = ", ".join(f"{setting}={value}" for setting, value in _wanted(new).items())
        create_topic(self._options, self._name, new, hint=CREATE.format(settings=settings))
        wait_for_leaders(self._options, self._name, new.topic, range(new.num_partitions), hint=DESCRIBE)

    def _marker(self, source: str, lanes: int) -> KafkaResource:
        topic = marker_topic(source)
        create = partial(create_marker_topic, self._options, self._name, topic, lanes)
        return KafkaResource("marker topic", new_marker_topic(topic, lanes), create, lanes + 1)

    def _compare(self, needed: Collection[KafkaResource]) -> list[ServerResource]:
        descriptions = describe_topics(self._options, self._name, [resource.new.topic for resource in needed])
        settings = read_settings(self._options, self._name, list(existing_topics(descriptions)))
        return [
            _compared(resource, descriptions[resource.new.topic], settings.get(resource.new.topic, {})) for resource in needed
        ]


def _compared(needed: KafkaResource, description: TopicDescription | KafkaError, settings: Mapping[str, str]) -> ServerResource:
    resource = partial(ServerResource, needed.kind, needed.new.topic, _wanted(needed.new), needed.create)
    if isinstance(description, KafkaError):
        if description.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return resource(exists=False)
        if description.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            return resource(exists=None, trouble=f"This user may not see it, or it does not exist. {DESCRIBE}")
        trouble = f"Kafka could not look it up ({describe(description)}). {MISCONFIGURED.get(description.code(), '')}".rstrip()
        return resource(exists=None, trouble=trouble)
    partitions = len(description.partitions)
    trouble = "" if settings else UNSEEN
    if needed.is_ordered and partitions < needed.least:
        trouble = KEYS_WOULD_MOVE.format(topic=needed.new.topic, partitions=partitions, wanted=needed.least)
    return resource(exists=True, differences=tuple(_differences(needed, partitions, settings)), trouble=trouble)


def _wanted(new: NewTopic) -> dict[str, str]:
    return {"partitions": str(new.num_partitions), **new.config}


def _differences(needed: KafkaResource, partitions: int, settings: Mapping[str, str]) -> Iterator[str]:
    if partitions < needed.least:
        yield f"{partitions} partitions, not {needed.least}"
    wanted = needed.new.config
    policy = settings.get("cleanup.policy", "")
    if settings and wanted.get("cleanup.policy", policy) != policy:
        yield f"cleanup.policy={policy}, not {wanted['cleanup.policy']}"
    if "delete" in policy and settings["retention.ms"] != wanted.get("retention.ms", settings["retention.ms"]):
        yield f"retention.ms={settings['retention.ms']}, not {wanted['retention.ms']}"
