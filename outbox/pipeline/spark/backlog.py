"""
The backlog of each group and topic by the minute, with its cause, and the messages that failed most often.

    minute   stored  handled  backlog
    10:01       100      100        0
    10:02       400      120      280    production faster
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark.cause import BacklogMinute, backlog_states, up_to
from outbox.pipeline.spark.columns import RowCounter, coded, constant, times_of
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MINUTE = 60_000_000

COLUMNS = {"broker": ("topic", "at"), "inbox": ("consumer_group", "topic", "at")}

# Messages stored (with an empty group) and handled. minute: since 1970.
HAPPENED = pa.schema(
    {"frame": pa.string(), "consumer_group": pa.string(), "topic": pa.string(), "minute": pa.int64(), "n": pa.int64()}
)


def happened(frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the counts per minute of a part of a frame."""
    counter = RowCounter(HAPPENED)
    for batch in batches:
        at, has_one = times_of(batch, "at")
        group = coded(batch, "consumer_group") if frame == "inbox" else constant("", len(batch))
        texts = [constant(frame, len(batch)), group, coded(batch, "topic")]
        counter.add([text.of(has_one) for text in texts], [at[has_one] // MINUTE])
    yield from counter.batches()


def tried(failed: DataFrame) -> DataFrame:
    """
    Return the counts of unsuccessful deliveries per minute: consumer_group, topic, minute, deliveries, consumed.

    A dead letter is finished, so it also counts as consumed.
    """
    is_tried = F.col("outcome").isin("retry", "dead letter", "duplicate") & F.col("at").isNotNull()
    minute = F.expr("unix_micros(at) div 60000000").alias("minute")
    return (
        failed.where(is_tried)
        .groupBy("consumer_group", "topic", minute)
        .agg(F.count("*").alias("deliveries"), F.count_if(F.col("outcome") == "dead letter").alias("consumed"))
    )


def most_repeated(failed: DataFrame, *, limit: int) -> DataFrame:
    """Return the messages with most failures, `limit` per group and topic: consumer_group, topic, message_id, failures."""
    keys = ["consumer_group", "topic"]
    rank = F.row_number().over(Window.partitionBy(*keys).orderBy(F.desc("failures"), "message_id"))
    return (
        failed.where(F.col("outcome").isin("retry", "dead letter"))
        .groupBy(*keys, "message_id")
        .agg(F.count("*").alias("failures"))
        .where(F.col("failures") > 1)
        .withColumn("rank", rank)
        .where(F.col("rank") <= limit)
        .select(*keys, "message_id", "failures")
    )


def backlog_report(spark: SparkSession, config: PipelineConfig, history: History, *, repeated: int = 10) -> list[dict[str, Any]]:
    """Return, for each group and topic, the backlog per minute, the current state, and the messages with most failures."""
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    if not pairs:
        return []
    minutes = _minutes(spark, history, pairs)
    again: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for row in most_repeated(history.failed_deliveries, limit=repeated).collect():
        again[row.consumer_group, row.topic].append([row.message_id, row.failures])
    last = int(history.as_of.timestamp()) // 60  # later times are reported as findings
    known = {pair: up_to(by_minute, last) for pair, by_minute in minutes.items()}
    return [_of_pair(*pair, known[pair], again[pair]) for pair in sorted(known) if known[pair]]


def _minutes(spark: SparkSession, history: History, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[BacklogMinute]]:
    """Return the counts per minute, by group and topic."""
    found: dict[tuple[str, str], dict[int, BacklogMinute]] = defaultdict(dict)

    def add(pair: tuple[str, str], minute: int, **more: int) -> None:
        now = found[pair].get(minute, BacklogMinute(minute))
        found[pair][minute] = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})

    counted = scan(spark, history, COLUMNS, happened, HAPPENED)
    for row in counted.groupBy(*HAPPENED.names[:-1]).agg(F.sum("n").alias("n")).collect():
        if row.frame == "inbox":
            add((row.consumer_group, row.topic), row.minute, deliveries=row.n, consumed=row.n)
            continue
        for pair in pairs:
            if pair[1] == row.topic:
                add(pair, row.minute, produced=row.n)
    for row in tried(history.failed_deliveries).collect():
        add((row.consumer_group, row.topic), row.minute, deliveries=row.deliveries, consumed=row.consumed)
    return {pair: list(minutes.values()) for pair, minutes in found.items()}


def _of_pair(group: str, topic: str, minutes: list[BacklogMinute], again: list[list[Any]]) -> dict[str, Any]:
    states = backlog_states(minutes)
    last = states[-1]
    return {
        "group": group,
        "topic": topic,
        "backlog": last.backlog,
        "growth": last.growth,
        "cause": last.cause,
        "onset": None if last.onset is None else datetime.fromtimestamp(last.onset * 60, UTC).isoformat(),
        "most_repeated": again,
        "minutes": [[state.minute * 60, state.backlog, state.growth, state.cause] for state in states],
    }
