"""
Read the topics of Kafka by Spark's own source, as a reader of committed records.

    topic orders, partition 0, offset 7; headers ce_lane 1, ce_number 3, outbox-id 01a1…
        ->  broker: source, topic orders, lane 1, number 3, message_id 01a1…, key, queue 0, pos 7, at

The driver notes first, by Kafka's own client, where each partition begins and ends, and how far the groups have read. That is
before the databases' snapshots, so the outbox's has each message that Spark then reads, the inbox's what a group has finished.
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
NO_GROUP = {"group.id": "unused", "enable.auto.commit": False}
URN = "urn:uuid:"  # begins the header with the id of the outbox
OPEN = (
    "behind a transaction in partition {partition} that was begun at {time} and is still open, so readers of committed records "
    "wait for its end. kafka-transactions.sh find-hanging finds one that nobody will end"
)

Partition = tuple[str, int]  # topic and number
Bounds = Mapping[Partition, tuple[int, int]]


@dataclass(frozen=True)
class KafkaSnapshot:
    """
    What a cluster had at one moment.

    Args:
        bounds: partition -> the offset of its first record, and the one after its last committed record.
        recorded: topic -> between which times it has all that was sent to it.
        finished: group -> partition -> the offset up to which the group has finished it.
    """

    cluster: KafkaCluster
    bounds: Bounds
    recorded: Mapping[str, RecordedTimes]
    finished: Mapping[str, Mapping[Partition, int]]

    @classmethod
    def of(cls, cluster: KafkaCluster) -> KafkaSnapshot:
        """
        Note what a cluster has now.

        Raises:
            HistoryError: it does not answer, or this user may not read a topic or a group.
        """
        settings = {**cluster.client, "log_level": 0, "error_cb": lambda error: None}
        try:
            admin = AdminClient(settings)
            partitions = _partitions(admin, sorted(cluster.topics))
            finished = {
                group: _finished(settings, group, [place for place in partitions if place[0] in waiting])
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
            place = {"queue": F.col("partition"), "pos": F.col("offset"), "at": F.col("timestamp")}
            yield _identified(records).withColumns(place).select(*FRAMES["broker"].names)

    def waiting(self, spark: SparkSession) -> Iterator[DataFrame]:
        """Yield a part of the frame `failed_deliveries` for each group: the messages that Kafka still has for it."""
        for group, finished in self.finished.items():
            lows = {place: (max(offset, self.bounds[place][0]), self.bounds[place][1]) for place, offset in finished.items()}
            records = self._read(spark, lows)
            if records is None:
                continue
            more = {
                "consumer_group": F.lit(group),
                "delivery_count": F.lit(0),
                "outcome": F.lit("waiting"),
                "at": F.col("timestamp"),
            }
            yield _identified(records).withColumns(more).select(*FRAMES["failed_deliveries"].names)

    def _read(self, spark: SparkSession, bounds: Bounds) -> DataFrame | None:
        """Return the committed records of partitions between two offsets; None where there are none between."""
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
    """Return the partitions of those of some topics that exist."""
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


def _finished(settings: Mapping[str, Any], group: str, places: Sequence[Partition]) -> dict[Partition, int]:
    """Return the offsets up to which a group has finished partitions; 0 where it has committed none."""
    if not places:
        return {}
    found = {}
    with closing(Consumer({**settings, **NO_GROUP, "group.id": group})) as member:
        for place in member.committed([TopicPartition(*place) for place in places], timeout=ANSWER_SECONDS):
            if place.error is not None:
                raise KafkaException(place.error)
            found[place.topic, place.partition] = max(0, place.offset)
    return found


def _bounds(admin: AdminClient, places: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
    low = _offsets(admin, places, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)
    end = _offsets(admin, places, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
    return {place: (low[place], max(low[place], end[place])) for place in places}


def _offsets(admin: AdminClient, places: Sequence[Partition], which: OffsetSpec, level: IsolationLevel) -> dict[Partition, int]:
    if not places:
        return {}
    wanted = {TopicPartition(*place): which for place in places}
    offsets = admin.list_offsets(wanted, isolation_level=level, request_timeout=ANSWER_SECONDS)
    return {(place.topic, place.partition): answer.result(ANSWER_SECONDS).offset for place, answer in offsets.items()}


def _recorded(admin: AdminClient, settings: Mapping[str, Any], topic: str, bounds: Bounds) -> RecordedTimes:
    """Return between which times a topic has all messages: since its retention deleted some, and before an open transaction."""
    if _is_compacted(admin, topic):
        return RecordedTimes(LATEST_TIME, LATEST_TIME)
    places = [place for place in bounds if place[0] == topic]
    ends = _offsets(admin, places, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)
    began, until, why = EPOCH, LATEST_TIME, ""
    for place in places:
        low, committed = bounds[place]
        if low > 0:
            began = max(began, _time_at(settings, place, low, ends[place]))
        if committed < ends[place] and (begun := _time_at(settings, place, committed, ends[place])) < until:
            until, why = begun, OPEN.format(partition=place[1], time=begun.isoformat(timespec="seconds"))
    return RecordedTimes(began, until, why)


def _is_compacted(admin: AdminClient, topic: str) -> bool:
    """Return whether a topic keeps only the last record of a key. False where there is no topic, or this user may not ask."""
    resource = ConfigResource(ResourceType.TOPIC, topic)
    try:
        config = admin.describe_configs([resource], request_timeout=ANSWER_SECONDS)[resource].result(ANSWER_SECONDS)
    except KafkaException:
        return False
    return "cleanup.policy" in config and "compact" in str(config["cleanup.policy"].value)


def _time_at(settings: Mapping[str, Any], place: Partition, offset: int, end: int) -> datetime:
    """Return the time of the first record at an offset or after it, committed or not; now, where there is none up to the end."""
    mine = {**NO_GROUP, "isolation.level": "read_uncommitted", "auto.offset.reset": "earliest"}
    deadline = time.monotonic() + ANSWER_SECONDS
    # A new consumer for each: after a second `assign`, `position` may still be that of the first.
    with closing(Consumer({**settings, **mine})) as reader:
        reader.assign([TopicPartition(*place, offset)])
        while time.monotonic() < deadline:
            record = reader.poll(POLL_SECONDS)
            error = record.error() if record is not None else None
            if record is not None and error is None:
                return EPOCH + timedelta(milliseconds=record.timestamp()[1])
            if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise KafkaException(error)  # others pass, or concern the group, which is not used
            if reader.position([TopicPartition(*place)])[0].offset >= end:
                return datetime.now(UTC)
    raise TimeoutError(f"partition {place[1]} of topic {place[0]!r} has not answered for {ANSWER_SECONDS:g} s")


def _identified(records: DataFrame) -> DataFrame:
    """Add what headers and key say. A record of another producer has no source, and its place is its id."""
    place = F.concat_ws("/", "topic", "partition", "offset")
    return records.withColumns(
        {
            "source": F.regexp_extract(F.coalesce(_header("ce_source"), F.lit("")), f"^{URN}(.*)$", 1),
            "lane": _header("ce_lane").try_cast("smallint"),
            "number": _header("ce_number").try_cast("bigint"),
            "message_id": F.coalesce(_header("outbox-id"), _header("ce_id"), place),
            "key": F.coalesce(F.col("key").cast("string"), _header("ce_subject"), F.lit("")),
        }
    )


def _header(name: str) -> Column:
    """Return the last header with a name as text; NULL where there is none."""
    named = F.filter("headers", lambda header: header.key == name)
    return F.try_element_at(named, F.lit(-1)).value.cast("string")


def _text(error: Exception) -> str:
    """Return an error of Kafka's client in one line."""
    cause = error.args[0] if error.args else error
    return str(cause.str() if isinstance(cause, KafkaError) else cause)
