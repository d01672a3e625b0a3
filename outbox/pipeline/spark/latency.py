"""
How long messages take for each hop, and the backlog of each group and topic by the minute, with its cause, from one pass.

    published 10:00:00.000 (its id) -- claim 0.2 s --> claimed -- send 0.1 s --> sent
                                    -- store 0.4 s --> stored    -- handle 1.5 s --> handled     (all but send since the publish)

    topic   hop     consumer_group  minute  bin      n
    orders  handle  cart            10:01   163      7     seven messages took 1.4 to 1.5 s; before RECENT, minutes are days
    orders  handle  cart            10:01   COUNTED  9     nine were handled, among them two without a time in their ids

    minute   stored  handled  backlog
    10:01       100      100        0
    10:02       400      120      280    production faster

The time of publishing is in the message id, so no hop needs a join. `measures` defines the bins, and has the causes of backlogs.
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
    BACKWARDS,
    BINS_PER_DOUBLING,
    COUNTED,
    INSTANT,
    SHARES,
    BacklogMinute,
    backlog_states,
    percentile,
    up_to,
)
from outbox.pipeline.spark.scan import Bools, Coded, Ints, RowCounter, coded, constant, published_micros, scan, times_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE, DAY = 60_000_000, 86_400_000_000
RECENT = timedelta(days=2)  # before the time of the history; earlier histograms are of whole days

COLUMNS = {
    "places": ("topic", "state", "message_id", "claimed_at", "at"),
    "broker": ("topic", "message_id", "at"),
    "inbox": ("consumer_group", "topic", "message_id", "at"),
}

# minute: since 1970.
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

Times = tuple[Ints, Bools]  # microseconds since 1970, and which rows have one
Hop = tuple[str, Times, Times, Any]  # name, start, end, and which rows are about it


def histograms(
    tolerance_micros: int, recent_micros: int, frame: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """
    Yield the histograms of a part of a frame. Hops: `claim` (publish to claim), `send` (claim to sent), `store` (publish to
    stored), `handle` (publish to handled, by group).

    Args:
        tolerance_micros: negative latencies up to this count as 0, because clocks differ.
        recent_micros: what ended earlier is counted by the day.
    """
    counter = RowCounter(HISTOGRAM)
    for batch in batches:
        topic = coded(batch, "topic")
        group = coded(batch, "consumer_group") if frame == "inbox" else constant("", len(batch))
        for name, (start, has_start), (end, has_end), is_one in HOPS[frame](batch):
            texts: list[Coded] = [topic, constant(name, len(batch)), group]
            period = np.where(end >= recent_micros, end // MINUTE, end // DAY * (DAY // MINUTE))
            latency = end - start
            doublings = np.floor(np.log2(np.maximum(latency, 1)) * BINS_PER_DOUBLING).astype(np.int64)
            bins = np.select([latency < -tolerance_micros, latency <= 1], [BACKWARDS, INSTANT], doublings + 1)
            _count(counter, texts, [period, bins], has_start & has_end & is_one)
            if frame != "places":
                _count(counter, texts, [end // MINUTE, np.full(len(batch), COUNTED)], has_end)
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
    """Return the histograms of all hops and the counts of stored and handled messages, with the columns of HISTOGRAM."""
    tolerance_micros = int(config.clock_tolerance_seconds * 1_000_000)
    count = partial(histograms, tolerance_micros, micros(history.as_of - RECENT))
    rows = scan(spark, history, COLUMNS, count, HISTOGRAM)
    return rows.groupBy(*HISTOGRAM.names[:-1]).agg(F.sum("n").alias("n")).toArrow()


def _summed(times: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns, and the sum of n."""
    sums = times.group_by(list(names)).aggregate([("n", "sum")])
    return zip(*(sums[name].to_pylist() for name in (*names, "n_sum")), strict=True)


def latency_report(config: PipelineConfig, times: pa.Table) -> dict[str, Any]:
    """
    Return histograms (rows of topic, hop, group, seconds since 1970, bin, n), percentiles of each topic and hop, and findings.

    A finding of kind `clock` counts the messages with a negative latency beyond the tolerance.
    """
    times = times.filter(pc.not_equal(times["bin"], COUNTED))
    whole: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for topic, hop, group, place, n in _summed(times, "topic", "hop", "consumer_group", "bin"):
        whole[topic, hop, group][place] = n
    seconds = pc.multiply(times["minute"], 60)
    columns = (times["topic"], times["hop"], times["consumer_group"], seconds, times["bin"], times["n"])
    return {
        "histograms": list(zip(*(column.to_pylist() for column in columns), strict=True)),
        "percentiles": [
            {"topic": topic, "hop": hop, "group": group, "count": sum(bins.values())}
            | {f"p{share * 100:g}": percentile(bins, share) for share in SHARES}
            for (topic, hop, group), bins in sorted(whole.items())
        ],
        "findings": [
            Breach(
                *(FindingKind.CLOCK, STAGE_OF[hop], topic),
                group=group,
                count=bins[BACKWARDS],
                detail=clock_has_jumped(config.clock_tolerance_seconds),
            ).as_dict()
            for (topic, hop, group), bins in sorted(whole.items())
            if bins.get(BACKWARDS)
        ],
    }


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


def backlog_report(config: PipelineConfig, history: History, times: pa.Table, *, repeated: int = 10) -> list[dict[str, Any]]:
    """Return, for each group and topic, the backlog per minute, the current state, and the messages with most failures."""
    if not any(group.topics for group in config.groups):
        return []
    again: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for row in most_repeated(history.failed_deliveries, limit=repeated).collect():
        again[row.consumer_group, row.topic].append([row.message_id, row.failures])
    last = int(history.as_of.timestamp()) // 60  # later times are reported as findings
    known = {pair: up_to(minutes, last) for pair, minutes in _minutes(config, history, times).items()}
    return [_of_pair(*pair, known[pair], again[pair]) for pair in sorted(known) if known[pair]]


def _minutes(config: PipelineConfig, history: History, times: pa.Table) -> Mapping[tuple[str, str], list[BacklogMinute]]:
    """Return the counts per minute, by group and topic."""
    sums: dict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
    counted = times.filter(pc.equal(times["bin"], COUNTED))
    for topic, hop, group, minute, n in _summed(counted, "topic", "hop", "consumer_group", "minute"):
        if hop == "handle":
            sums[group, topic, minute].update(deliveries=n, consumed=n)
            continue
        for reader in config.groups:
            if topic in reader.topics:
                sums[reader.name, topic, minute].update(produced=n)
    for row in tried(history.failed_deliveries).collect():
        sums[row.consumer_group, row.topic, row.minute].update(deliveries=row.deliveries, consumed=row.consumed)
    minutes: dict[tuple[str, str], list[BacklogMinute]] = defaultdict(list)
    for (group, topic, minute), counts in sums.items():
        minutes[group, topic].append(BacklogMinute(minute, **counts))
    return minutes


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
