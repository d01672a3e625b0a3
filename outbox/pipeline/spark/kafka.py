"""
Read the topics of Kafka with Spark's source for Kafka, in isolation level read_committed.

    topic orders, partition 0, offset 7; headers ce_lane 1, ce_number 3, outbox-id 01a1…
        ->  broker: source, topic orders, lane 1, number 3, message_id 01a1…, key, queue 0, pos 7, at

First, the driver records the first and last offset of each partition, and the committed offsets of the groups, with Kafka's
Python client. Only then are the snapshots of the databases taken. So the outbox's snapshot has all messages that Spark reads
later, and the inbox's snapshot has all messages that a group had finished by then.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.config import KafkaCluster
from outbox.pipeline.spark.history import FRAMES, LATEST_TIME, RecordedTimes
from outbox.pipeline.spark.lake import EPOCH

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


ANSWER_SECONDS = 30.0
POLL_SECONDS = 1.0
NO_GROUP = {"group.id": "unused", "enable.auto.commit": False}  # a consumer must name a group, and this one joins none
URN = "urn:uuid:"  # the header ce_source is this prefix and the source id of the outbox
AFTER_UNFINISHED = (
    "after an unfinished transaction in partition {partition}, which began at {time}, so read_committed consumers wait for its "
    "end. kafka-transactions.sh find-hanging lists transactions that no producer will end"
)

Partition = tuple[str, int]  # topic and number
Bounds = Mapping[Partition, tuple[int, int]]


@dataclass(frozen=True)
class KafkaSnapshot:
    """
    The offsets of a cluster at one moment.

    Args:
        bounds: partition -> the offset of its first record, and its last stable offset, where read_committed consumers stop.
        recorded: topic -> the span of time for which the topic has all messages that were sent to it.
        finished: group -> partition -> the offset that the group has committed; it has finished all records before it.
    """

    cluster: KafkaCluster
    bounds: Bounds
    recorded: Mapping[str, RecordedTimes]
    finished: Mapping[str, Mapping[Partition, int]]

    @classmethod
    def of(cls, cluster: KafkaCluster) -> KafkaSnapshot:
        """
        Record the offsets that a cluster has now.

        Raises:
            HistoryError: the cluster does not answer, or this user may not read a topic or a group.
        """
        settings = {**cluster.client, "log_level": 0, "error_cb": lambda error: None}
        try:
            admin = AdminClient(settings)
            partitions = _partitions(admin, sorted(cluster.topics))
            finished = {
                group: _finished(settings, group, [partition for partition in partitions if partition[0] in waiting])
                for group, waiting in cluster.waiting.items()
            }
            bounds = _bounds(admin, partitions)
            recorded = {topic: _recorded(admin, settings, topic, bounds) for topic in cluster.topics}
        except (KafkaException, TimeoutError) as error:
            raise HistoryError(f"Broker {cluster.name!r} cannot be read: {_text(error)}") from error
        return cls(cluster, bounds, recorded, finished)

    def messages(self, spark: SparkSession) -> Iterator[DataFrame]:
        """Yield the cluster's part of the frame `broker`."""
        records = self._read(spark, self.bounds)
        if records is not None:
            columns = {"queue": F.col("partition"), "pos": F.col("offset"), "at": F.col("timestamp")}
            yield _identified(records).withColumns(columns).select(*FRAMES["broker"].names)

    def waiting(self, spark: SparkSession) -> Iterator[DataFrame]:
        """Yield a part of the frame `failed_deliveries` for each group: the messages that Kafka still has for it."""
        for group, finished in self.finished.items():
            bounds = {
                partition: (max(offset, self.bounds[partition][0]), self.bounds[partition][1])
                for partition, offset in finished.items()
            }
            records = self._read(spark, bounds)
            if records is None:
                continue
            columns = {
                "consumer_group": F.lit(group),
                "delivery_count": F.lit(0),
                "outcome": F.lit("waiting"),
                "at": F.col("timestamp"),
            }
            yield _identified(records).withColumns(columns).select(*FRAMES["failed_deliveries"].names)

    def _read(self, spark: SparkSession, bounds: Bounds) -> DataFrame | None:
        """Return the committed records between the given offsets of partitions; None if there are no offsets between them."""
        begins: dict[str, dict[str, int]] = defaultdict(dict)
        ends: dict[str, dict[str, int]] = defaultdict(dict)
        for (topic, partition), (begin, end) in bounds.items():
            if begin < end:
                begins[topic][str(partition)], ends[topic][str(partition)] = begin, end
        if not begins:
            return None
        options = {f"kafka.{name}": value for name, value in self.cluster.java.items()}
        options |= {
            "kafka.isolation.level": "read_committed",
            "assign": json.dumps({topic: [int(partition) for partition in partitions] for topic, partitions in begins.items()}),
            "startingOffsets": json.dumps(begins),
            "endingOffsets": json.dumps(ends),
            "includeHeaders": "true",
        }
        return spark.read.format("kafka").options(**options).load()


def _partitions(admin: AdminClient, topics: Sequence[str]) -> list[Partition]:
    """Return the partitions of the topics that exist."""
    partitions: list[Partition] = []
    for topic, answer in admin.describe_topics(TopicCollection(list(topics)), request_timeout=ANSWER_SECONDS).items():
        try:
            partitions += [(topic, partition.id) for partition in answer.result(ANSWER_SECONDS).partitions]
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise HistoryError(f"Topic {topic!r} cannot be read. Allow this user Read on it.") from error
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return sorted(partitions)


def _finished(settings: Mapping[str, Any], group: str, partitions: Sequence[Partition]) -> dict[Partition, int]:
    """Return partition -> the offset that a group has committed; 0 if it has committed none."""
    if not partitions:
        return {}
    offsets = {}
    with closing(Consumer({**settings, **NO_GROUP, "group.id": group})) as member:
        for committed in member.committed([TopicPartition(*partition) for partition in partitions], timeout=ANSWER_SECONDS):
            if committed.error is not None:
                raise KafkaException(committed.error)
            offsets[committed.topic, committed.partition] = max(0, committed.offset)
    return offsets


def _bounds(admin: AdminClient, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
    """Return partition -> its first offset and its last stable offset."""
    first = _offsets(admin, partitions, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)
    end = _offsets(admin, partitions, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
    return {partition: (first[partition], max(first[partition], end[partition])) for partition in partitions}


def _offsets(
    admin: AdminClient, partitions: Sequence[Partition], spec: OffsetSpec, level: IsolationLevel
) -> dict[Partition, int]:
    if not partitions:
        return {}
    specs = {TopicPartition(*partition): spec for partition in partitions}
    offsets = admin.list_offsets(specs, isolation_level=level, request_timeout=ANSWER_SECONDS)
    return {(found.topic, found.partition): answer.result(ANSWER_SECONDS).offset for found, answer in offsets.items()}


def _recorded(admin: AdminClient, settings: Mapping[str, Any], topic: str, bounds: Bounds) -> RecordedTimes:
    """
    Return the span of time for which a topic has all messages.

    It begins after the messages that the topic's retention has deleted, and ends at the first unfinished transaction. It is empty
    for a compacted topic, which keeps only the last message of a key.
    """
    if _is_compacted(admin, topic):
        return RecordedTimes(LATEST_TIME, LATEST_TIME)
    partitions = [partition for partition in bounds if partition[0] == topic]
    ends = _offsets(admin, partitions, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
    began, until, why = EPOCH, LATEST_TIME, ""
    for partition in partitions:
        low, last_stable = bounds[partition]
        end = ends[partition]
        if low > 0:
            began = max(began, _time_at(settings, partition, low, end))
        if last_stable < end and (unfinished_since := _time_at(settings, partition, last_stable, end)) < until:
            time_text = unfinished_since.isoformat(timespec="seconds")
            until, why = unfinished_since, AFTER_UNFINISHED.format(partition=partition[1], time=time_text)
    return RecordedTimes(began, until, why)


def _is_compacted(admin: AdminClient, topic: str) -> bool:
    """Return whether a topic keeps only the last record of a key. False if there is no such topic, or this user may not ask."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        config = admin.describe_configs([resource], request_timeout=ANSWER_SECONDS)[resource].result(ANSWER_SECONDS)
    except KafkaException:
        return False
    return "cleanup.policy" in config and "compact" in str(config["cleanup.policy"].value)


def _time_at(settings: Mapping[str, Any], partition: Partition, offset: int, end: int) -> datetime:
    """Return the time of the first record at or after an offset, committed or not; now, if there is none before `end`."""
    options = {**NO_GROUP, "isolation.level": "read_uncommitted", "auto.offset.reset": "earliest"}
    deadline = time.monotonic() + ANSWER_SECONDS
    # Each call needs a new consumer: after a second `assign`, `position` may still return the position of the first one.
    with closing(Consumer({**settings, **options})) as reader:
        reader.assign([TopicPartition(*partition, offset)])
        while time.monotonic() < deadline:
            record = reader.poll(POLL_SECONDS)
            error = record.error() if record is not None else None
            if record is not None and error is None:
                return EPOCH + timedelta(milliseconds=record.timestamp()[1])
            if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise KafkaException(error)  # other errors pass, or concern the group, which is not used
            if reader.position([TopicPartition(*partition)])[0].offset >= end:
                return datetime.now(UTC)
    raise TimeoutError(f"partition {partition[1]} of topic {partition[0]!r} has not answered for {ANSWER_SECONDS:g} s")


def _identified(records: DataFrame) -> DataFrame:
    """
    Add the columns that come from a record's headers and key.

    A record of another producer has an empty source, and its topic, partition and offset as its message id.
    """
    position = F.concat_ws("/", "topic", "partition", "offset")
    return records.withColumns(
        {
            "source": F.regexp_extract(F.coalesce(_header("ce_source"), F.lit("")), f"^{URN}(.*)$", 1),
            "lane": _header("ce_lane").try_cast("smallint"),
            "number": _header("ce_number").try_cast("bigint"),
            "message_id": F.coalesce(_header("outbox-id"), _header("ce_id"), position),
            "key": F.coalesce(F.col("key").cast("string"), _header("ce_subject"), F.lit("")),
        }
    )


def _header(name: str) -> Column:
    """Return the last header with this name as text; NULL if there is none."""
    matching = F.filter("headers", lambda header: header.key == name)
    return F.try_element_at(matching, F.lit(-1)).value.cast("string")


def _text(error: Exception) -> str:
    """Return an error of Kafka's client in one line."""
    cause = error.args[0] if error.args else error
    return str(cause.str() if isinstance(cause, KafkaError) else cause)
