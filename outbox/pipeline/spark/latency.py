"""
Measure how long messages take for each hop, and the backlog of each consumer group and topic per minute.

    published 10:00:00.0 -- claim 0.2 s --> claimed -- send 0.1 s --> sent
    published 10:00:00.0 -- store 0.4 s --> stored at the broker
    published 10:00:00.0 -- handle 1.5 s --> handled by a group

    topic   hop     consumer_group  minute  bin      n
    orders  handle  cart            10:01   164      7     seven messages took 1.36 to 1.48 s
    orders  handle  cart            10:01   ARRIVED  9     nine messages were handled, two of them with an id without a time

    minute   stored  handled  backlog  cause
    10:01       100      100        0  none
    10:02       400      120      280  production faster

A history is a copy of the tables and topics at one moment (`history.py`). One pass reads three of its frames: `places` (positions
of messages in the outbox), `broker` and `inbox`. No hop needs a join, because the message id contains the time of publishing.
`measures.py` defines the bins, and finds the causes of backlogs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark.cells import micros
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import STAGE_OF, Breach, FindingKind, clock_has_jumped
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.measures import (
    ARRIVED,
    BACKWARDS,
    BINS_PER_DOUBLING,
    INSTANT,
    SHARES,
    BacklogMinute,
    backlog_states,
    minutes_up_to,
    percentile,
)
from outbox.pipeline.spark.scan import Bools, Coded, Ints, RowCounter, coded, constant, published_micros, scan, times_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE, DAY = 60_000_000, 86_400_000_000

# Hops that ended at most this long before the history was read are counted per minute, and earlier ones per day.
DETAILED_FOR = timedelta(days=2)

# frame -> the columns to read
COLUMNS = {
    "places": ("topic", "state", "message_id", "claimed_at", "at"),
    "broker": ("topic", "message_id", "at"),
    "inbox": ("consumer_group", "topic", "message_id", "at"),
}

# minute: minutes since 1970; n: the number of messages.
HISTOGRAM = pa.schema(
    {
        "topic": pa.string(),
        "hop": pa.string(),
        "consumer_group": pa.string(),
        "minute": pa.int64(),
        "bin": pa.int32(),
        "n": pa.int64(),
    }
)

Times = tuple[Ints, Bools]  # for each row, microseconds since 1970, and whether it has a time
Hop = tuple[str, Times, Times, Any]  # name, start, end, and for each row (or for all) whether its message has made the hop


def histograms(
    tolerance_micros: int, detailed_since_micros: int, frame: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """
    Yield rows of HISTOGRAM for some rows of a frame: how many of them fall into each bin.

    The hops are `claim` (from publish to claim), `send` (from claim to sent), `store` (from publish to stored at the broker) and
    `handle` (from publish to handled, for each group).

    Args:
        tolerance_micros: a length; negative latencies of at most this size count as 0, because clocks differ.
        detailed_since_micros: a time, in microseconds since 1970; hops that ended before it are counted per day.
        frame: the name of the frame, `places`, `broker` or `inbox`.
    """
    counter = RowCounter(HISTOGRAM)
    for batch in batches:
        topic = coded(batch, "topic")
        group = coded(batch, "consumer_group") if frame == "inbox" else constant("", len(batch))
        for name, (start, has_start), (end, has_end), has_hop in HOPS[frame](batch):
            texts: list[Coded] = [topic, constant(name, len(batch)), group]
            period = np.where(end >= detailed_since_micros, end // MINUTE, end // DAY * (DAY // MINUTE))
            latency = end - start
            doublings = np.floor(np.log2(np.maximum(latency, 1)) * BINS_PER_DOUBLING).astype(np.int64)
            bins = np.select([latency < -tolerance_micros, latency <= 1], [BACKWARDS, INSTANT], doublings + 1)
            _count(counter, texts, [period, bins], has_start & has_end & has_hop)
            if frame != "places":
                _count(counter, texts, [end // MINUTE, np.full(len(batch), ARRIVED)], has_end)
    yield from counter.batches()


def _count(counter: RowCounter, texts: Sequence[Coded], numbers: Sequence[Ints], rows: Bools) -> None:
    counter.add([text.of(rows) for text in texts], [number[rows] for number in numbers])


def _of_places(batch: pa.RecordBatch) -> Iterator[Hop]:
    is_sent, claimed = coded(batch, "state").is_("sent"), times_of(batch, "claimed_at")
    yield "claim", published_micros(batch), claimed, is_sent
    yield "send", claimed, times_of(batch, "at"), is_sent


HOPS: dict[str, Callable[[pa.RecordBatch], Iterable[Hop]]] = {
    "places": _of_places,
    "broker": lambda batch: [("store", published_micros(batch), times_of(batch, "at"), True)],
    "inbox": lambda batch: [("handle", published_micros(batch), times_of(batch, "at"), True)],
}


def count_times(spark: SparkSession, config: PipelineConfig, history: History) -> pa.Table:
    """Return rows of HISTOGRAM: the bins of all hops and, in the bin ARRIVED, all stored and handled messages."""
    tolerance_micros = int(config.clock_tolerance_seconds * 1_000_000)
    count = partial(histograms, tolerance_micros, micros(history.as_of - DETAILED_FOR))
    rows = scan(spark, history, COLUMNS, count, HISTOGRAM)
    return rows.groupBy(*HISTOGRAM.names[:-1]).agg(F.sum("n").alias("n")).toArrow()


def _sums_by(bin_counts: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield each combination of values in some columns, with the sum of n."""
    sums = bin_counts.group_by(list(names)).aggregate([("n", "sum")])
    return zip(*(sums[name].to_pylist() for name in (*names, "n_sum")), strict=True)


def latency_report(config: PipelineConfig, bin_counts: pa.Table) -> dict[str, Any]:
    """
    Return the histograms as rows of topic, hop, group, seconds since 1970, bin and n; the percentiles of each topic, hop and
    group; and the findings, which are of kind `clock` and count the messages with a negative latency beyond the tolerance.
    """
    bin_counts = bin_counts.filter(pc.not_equal(bin_counts["bin"], ARRIVED))
    histograms: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for topic, hop, group, bin_number, n in _sums_by(bin_counts, "topic", "hop", "consumer_group", "bin"):
        histograms[topic, hop, group][bin_number] = n
    seconds = pc.multiply(bin_counts["minute"], 60)
    columns = (bin_counts["topic"], bin_counts["hop"], bin_counts["consumer_group"], seconds, bin_counts["bin"], bin_counts["n"])
    return {
        "histograms": list(zip(*(column.to_pylist() for column in columns), strict=True)),
        "percentiles": [
            {"topic": topic, "hop": hop, "group": group, "count": sum(bins.values())}
            | {f"p{share * 100:g}": percentile(bins, share) for share in SHARES}
            for (topic, hop, group), bins in sorted(histograms.items())
        ],
        "findings": [
            Breach(
                *(FindingKind.CLOCK, STAGE_OF[hop], topic),
                group=group,
                count=bins[BACKWARDS],
                detail=clock_has_jumped(config.clock_tolerance_seconds),
            ).as_dict()
            for (topic, hop, group), bins in sorted(histograms.items())
            if bins.get(BACKWARDS)
        ],
    }


def unhandled_deliveries(failed: DataFrame) -> DataFrame:
    """
    Return the number of deliveries per minute that did not handle their message: consumer_group, topic, minute, deliveries,
    consumed. Each is a failure that is retried, a dead letter, or a dropped duplicate. `consumed` counts only the dead letters,
    which are finished; a duplicate was already counted when the group handled the message.
    """
    is_delivery = F.col("outcome").isin("retry", "dead letter", "duplicate") & F.col("at").isNotNull()
    minute = F.expr("unix_micros(at) div 60000000").alias("minute")
    return (
        failed.where(is_delivery)
        .groupBy("consumer_group", "topic", minute)
        .agg(F.count("*").alias("deliveries"), F.count_if(F.col("outcome") == "dead letter").alias("consumed"))
    )


def most_repeated(failed: DataFrame, *, limit: int) -> DataFrame:
    """Return the messages with the most failures (at least 2), `limit` per group and topic, with the number of failures."""
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


def backlog_report(config: PipelineConfig, history: History, bin_counts: pa.Table, *, repeated: int = 10) -> list[dict[str, Any]]:
    """Return for each group and topic its backlog per minute, its current backlog, and the messages with the most failures."""
    if not any(group.topics for group in config.groups):
        return []
    failing: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for row in most_repeated(history.failed_deliveries, limit=repeated).collect():
        failing[row.consumer_group, row.topic].append([row.message_id, row.failures])
    last = int(history.as_of.timestamp()) // 60  # later times come from wrong clocks, which findings report
    minutes_by_pair = {pair: minutes_up_to(minutes, last) for pair, minutes in _minutes(config, history, bin_counts).items()}
    return [_backlog_of(*pair, minutes_by_pair[pair], failing[pair]) for pair in sorted(minutes_by_pair) if minutes_by_pair[pair]]


def _minutes(config: PipelineConfig, history: History, bin_counts: pa.Table) -> Mapping[tuple[str, str], list[BacklogMinute]]:
    """Return (group, topic) -> the counts of its minutes. Each group must consume what its topics store."""
    sums: dict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
    counted = bin_counts.filter(pc.equal(bin_counts["bin"], ARRIVED))
    for topic, hop, group, minute, n in _sums_by(counted, "topic", "hop", "consumer_group", "minute"):
        if hop == "handle":
            sums[group, topic, minute].update(deliveries=n, consumed=n)
            continue
        for subscriber in config.groups:
            if topic in subscriber.topics:
                sums[subscriber.name, topic, minute].update(produced=n)
    for row in unhandled_deliveries(history.failed_deliveries).collect():
        sums[row.consumer_group, row.topic, row.minute].update(deliveries=row.deliveries, consumed=row.consumed)
    minutes: dict[tuple[str, str], list[BacklogMinute]] = defaultdict(list)
    for (group, topic, minute), counts in sums.items():
        minutes[group, topic].append(BacklogMinute(minute, **counts))
    return minutes


def _backlog_of(group: str, topic: str, minutes: list[BacklogMinute], failing: list[list[Any]]) -> dict[str, Any]:
    states = backlog_states(minutes)
    last = states[-1]
    return {
        "group": group,
        "topic": topic,
        "backlog": last.backlog,
        "growth": last.growth,
        "cause": last.cause,
        "onset": None if last.onset is None else datetime.fromtimestamp(last.onset * 60, UTC).isoformat(),
        "most_repeated": failing,
        "minutes": [[state.minute * 60, state.backlog, state.growth, state.cause] for state in states],
    }
