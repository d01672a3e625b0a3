"""The latency and backlog reports of a history, for JSON."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from outbox.pipeline.spark.bins import BACKWARDS, SHARES, add, percentile
from outbox.pipeline.spark.cause import BacklogMinute, backlog_states, up_to
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import STAGE_OF, Breach, FindingKind, clock_has_jumped
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import scan
from outbox.pipeline.spark.transforms import backlog, latency

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def latency_report(spark: SparkSession, config: PipelineConfig, history: History) -> dict[str, Any]:
    """
    Return histograms (rows of topic, hop, group, minute, bin, n), percentiles of each topic and hop, and findings.

    A finding of kind `clock` counts the messages with a negative latency beyond the tolerance.
    """
    count = latency.Latency(int(config.clock_tolerance_seconds * 1_000_000)).histograms
    found = scan(spark, history, latency.COLUMNS, count, latency.HISTOGRAM)
    rows = found.groupBy(*latency.HISTOGRAM.names[:-1]).agg(F.sum("n").alias("n")).collect()
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


def backlog_report(spark: SparkSession, config: PipelineConfig, history: History, *, repeated: int = 10) -> list[dict[str, Any]]:
    """Return, for each group and topic, the backlog per minute, the current state, and the messages with most failures."""
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    if not pairs:
        return []
    minutes = _minutes(spark, history, pairs)
    again: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for row in backlog.most_repeated(history.failed_deliveries, limit=repeated).collect():
        again[row.consumer_group, row.topic].append([row.message_id, row.failures])
    last = int(history.as_of.timestamp()) // 60  # later times are reported as findings
    known = {pair: up_to(found, last) for pair, found in minutes.items()}
    return [_of_pair(*pair, known[pair], again[pair]) for pair in sorted(known) if known[pair]]


def _minutes(spark: SparkSession, history: History, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[BacklogMinute]]:
    """Return the counts per minute, by group and topic."""
    found: dict[tuple[str, str], dict[int, BacklogMinute]] = defaultdict(dict)

    def add(pair: tuple[str, str], minute: int, **more: int) -> None:
        now = found[pair].get(minute, BacklogMinute(minute))
        found[pair][minute] = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})

    counted = scan(spark, history, backlog.COLUMNS, backlog.happened, backlog.HAPPENED)
    for row in counted.groupBy(*backlog.HAPPENED.names[:-1]).agg(F.sum("n").alias("n")).collect():
        if row.frame == "inbox":
            add((row.consumer_group, row.topic), row.minute, deliveries=row.n, consumed=row.n)
            continue
        for pair in pairs:
            if pair[1] == row.topic:
                add(pair, row.minute, produced=row.n)
    for row in backlog.tried(history.failed_deliveries).collect():
        add((row.consumer_group, row.topic), row.minute, deliveries=row.deliveries, consumed=row.consumed)
    return {pair: list(minutes.values()) for pair, minutes in found.items()}


def _of_pair(group: str, topic: str, minutes: list[BacklogMinute], again: list[list[Any]]) -> dict[str, Any]:
    found = backlog_states(minutes)
    last = found[-1]
    return {
        "group": group,
        "topic": topic,
        "backlog": last.backlog,
        "growth": last.growth,
        "cause": last.cause,
        "onset": None if last.onset is None else datetime.fromtimestamp(last.onset * 60, UTC).isoformat(),
        "most_repeated": again,
        "minutes": [[one.minute * 60, one.backlog, one.growth, one.cause] for one in found],
    }
