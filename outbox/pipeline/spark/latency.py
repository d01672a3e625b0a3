"""
How long messages take for each hop, and the backlog of each group and topic by the minute, with its cause.

    published 10:00:00.000 (its id) -- claim 0.2 s --> claimed -- send 0.1 s --> sent
                                    -- store 0.4 s --> stored    -- handle 1.5 s --> handled     (all but send since the publish)

    minute   stored  handled  backlog
    10:01       100      100        0
    10:02       400      120      280    production faster

The time of publishing is in the message id, so no hop needs a join. Histograms can be added; `bins` defines their bins.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark.bins import BACKWARDS, BINS_PER_DOUBLING, INSTANT, SHARES, add, percentile
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import STAGE_OF, Breach, FindingKind, clock_has_jumped
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import Bools, Coded, Ints, RowCounter, coded, constant, published_micros, scan, times_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


CURRENT = 10  # minutes
BASELINE = 15  # minutes
GROWING = 0.05  # a backlog grows if it gains more than this share of the produced messages
REPEATED = 0.2  # the share of retries among deliveries from which on retries are the cause
FASTER = 1.3  # times the baseline
SLOWER = 0.7  # times the baseline
LONGEST = 14 * 24 * 60  # minutes; limits the result if a time is damaged


class BacklogCause(enum.StrEnum):
    NONE = "none"
    RETRIES = "repeated retries"
    PRODUCTION_FASTER = "production faster"
    CONSUMPTION_SLOWER = "consumption slower"
    STEADY_OVERLOAD = "steady overload"


@dataclass(frozen=True)
class BacklogMinute:
    """The counts of a minute (since 1970): messages stored, deliveries, messages finished."""

    minute: int
    produced: int = 0
    deliveries: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class BacklogState:
    """
    The backlog of a group and topic at the end of a minute.

    Args:
        growth: messages per minute, over the last ten.
        onset: the minute in which the episode began; None if the backlog does not grow.
    """

    minute: int
    backlog: int
    growth: float
    cause: BacklogCause
    onset: int | None = None


def up_to(minutes: Sequence[BacklogMinute], last: int) -> list[BacklogMinute]:
    """Return the minutes up to the last one. Those older than `LONGEST` are merged into one initial backlog."""
    first = last - LONGEST
    old = [minute for minute in minutes if minute.minute < first]
    within = [minute for minute in minutes if first <= minute.minute <= last]
    if not old:
        return within
    waiting = sum(minute.produced - minute.consumed for minute in old)
    return [BacklogMinute(first - 1, produced=max(0, waiting), consumed=max(0, -waiting)), *within]


def backlog_states(minutes: Sequence[BacklogMinute]) -> list[BacklogState]:
    """Return the backlog after each minute, from the first to the last, including minutes without messages."""
    if not minutes:
        return []
    by_minute = {minute.minute: minute for minute in minutes}
    first, last = min(by_minute), max(by_minute)
    span = [by_minute.get(minute, BacklogMinute(minute)) for minute in range(first, last + 1)]
    states: list[BacklogState] = []
    backlog = 0
    for place, one in enumerate(span):
        backlog += one.produced - one.consumed
        now, before = _sums(span[max(0, place - CURRENT + 1) : place + 1]), _sums(_baseline(span, place))
        cause = _cause(now, before)
        onset = None
        if cause is not BacklogCause.NONE:
            episode = states[-1] if states and states[-1].cause is not BacklogCause.NONE else None
            onset = episode.onset if episode else _onset(span, place)
            # The cause of an episode may not be visible in its first minutes.
            if episode and episode.cause is not BacklogCause.STEADY_OVERLOAD:
                cause = episode.cause
        length = min(CURRENT, place + 1)
        states.append(BacklogState(one.minute, backlog, (now["produced"] - now["consumed"]) / length, cause, onset))
    return states


def _baseline(span: Sequence[BacklogMinute], place: int) -> Sequence[BacklogMinute]:
    end = max(0, place - CURRENT + 1)
    return span[max(0, end - BASELINE) : end]


def _sums(minutes: Sequence[BacklogMinute]) -> Mapping[str, float]:
    sums: dict[str, float] = {
        name: sum(getattr(minute, name) for minute in minutes) for name in ("produced", "deliveries", "consumed")
    }
    return {**sums, "minutes": len(minutes)}


def _cause(now: Mapping[str, float], before: Mapping[str, float]) -> BacklogCause:
    """Apply the rules in order: retries first, since they also slow consumption."""
    if now["produced"] - now["consumed"] <= GROWING * now["produced"]:
        return BacklogCause.NONE
    if now["deliveries"] and (now["deliveries"] - now["consumed"]) / now["deliveries"] >= REPEATED:
        return BacklogCause.RETRIES
    if before["minutes"] == 0:
        return BacklogCause.STEADY_OVERLOAD
    if _rate(now, "produced") >= FASTER * _rate(before, "produced"):
        return BacklogCause.PRODUCTION_FASTER
    if _rate(now, "consumed") <= SLOWER * _rate(before, "consumed"):
        return BacklogCause.CONSUMPTION_SLOWER
    return BacklogCause.STEADY_OVERLOAD


def _rate(sums: Mapping[str, float], name: str) -> float:
    return sums[name] / max(1, sums["minutes"])


def _onset(span: Sequence[BacklogMinute], place: int) -> int:
    """Return the first of the preceding minutes, within the window, since when the backlog has been growing."""
    start = place
    while start > max(0, place - CURRENT + 1) and span[start - 1].produced - span[start - 1].consumed > (
        GROWING * span[start - 1].produced
    ):
        start -= 1
    return span[start].minute


MINUTE = 60_000_000

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


@dataclass(frozen=True)
class Hop:
    """The times of a hop in some rows. is_one: which rows are about it."""

    name: str
    start: Times
    end: Times
    is_one: Bools | bool = True
    group: Coded | None = None


@dataclass(frozen=True)
class Latency:
    """Calculates latencies. tolerance_micros: negative latencies up to this count as 0, because clocks differ."""

    tolerance_micros: int = 0

    def histograms(self, frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """
        Yield the histograms of a part of a frame. Hops: `claim` (publish to claim), `send` (claim to sent), `store` (publish to
        stored), `handle` (publish to handled, by group).
        """
        counter = RowCounter(HISTOGRAM)
        for batch in batches:
            topic = coded(batch, "topic")
            for hop in HOPS[frame](batch):
                (start, has_start), (end, has_end) = hop.start, hop.end
                counts = has_start & has_end & hop.is_one
                texts = [topic, constant(hop.name, len(batch)), hop.group or constant("", len(batch))]
                numbers = [end // MINUTE, self._bins(end - start)]
                counter.add([text.of(counts) for text in texts], [number[counts] for number in numbers])
        yield from counter.batches()

    def _bins(self, micros: Ints) -> Ints:
        doublings = np.floor(np.log2(np.maximum(micros, 1)) * BINS_PER_DOUBLING).astype(np.int64)
        return np.select([micros < -self.tolerance_micros, micros <= 1], [BACKWARDS, INSTANT], doublings + 1)


def _of_places(batch: pa.RecordBatch) -> Iterator[Hop]:
    is_sent = coded(batch, "state").is_("sent")
    claimed = times_of(batch, "claimed_at")
    yield Hop("claim", published_micros(batch), claimed, is_sent)
    yield Hop("send", claimed, times_of(batch, "at"), is_sent)


def _of_broker(batch: pa.RecordBatch) -> Iterator[Hop]:
    yield Hop("store", published_micros(batch), times_of(batch, "at"))


def _of_inbox(batch: pa.RecordBatch) -> Iterator[Hop]:
    yield Hop("handle", published_micros(batch), times_of(batch, "at"), group=coded(batch, "consumer_group"))


HOPS = {"places": _of_places, "broker": _of_broker, "inbox": _of_inbox}


def latency_report(spark: SparkSession, config: PipelineConfig, history: History) -> dict[str, Any]:
    """
    Return histograms (rows of topic, hop, group, minute, bin, n), percentiles of each topic and hop, and findings.

    A finding of kind `clock` counts the messages with a negative latency beyond the tolerance.
    """
    count = Latency(int(config.clock_tolerance_seconds * 1_000_000)).histograms
    histograms = scan(spark, history, COLUMNS, count, HISTOGRAM)
    rows = histograms.groupBy(*HISTOGRAM.names[:-1]).agg(F.sum("n").alias("n")).collect()
    whole: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for row in rows:
        key = row.topic, row.hop, row.consumer_group
        whole[key] = add(whole[key], {row.bin: row.n})
    return {
        "histograms": [[row.topic, row.hop, row.consumer_group, row.minute * 60, row.bin, row.n] for row in rows],
        "percentiles": [
            {
                "topic": topic,
                "hop": hop,
                "group": group,
                "count": sum(bins.values()),
                **{f"p{share * 100:g}": percentile(bins, share) for share in SHARES},
            }
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


TIMES = {"broker": ("topic", "at"), "inbox": ("consumer_group", "topic", "at")}

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

    counted = scan(spark, history, TIMES, happened, HAPPENED)
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
