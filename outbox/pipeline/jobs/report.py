"""Latency and backlog of a history, as JSON knows them."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from outbox.pipeline.bins import BACKWARDS, SHARES, add, percentile
from outbox.pipeline.cause import Minute, standings
from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.findings import STAGE_OF, Finding, Kind, clock_has_jumped
from outbox.pipeline.history import History
from outbox.pipeline.transforms import backlog, latency

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def latency_report(config: PipelineConfig, history: History) -> dict[str, Any]:
    """
    Give histograms (rows of topic, hop, group, minute, bin, n), percentiles of each topic and hop, and findings.

    A finding of kind `clock` says how many messages arrived before they were sent, by more than the clocks' tolerance.
    """
    frame = latency.histograms(history.places, history.broker, history.inbox, config.clock_tolerance_seconds)
    rows = frame.withColumn("minute", frame.minute.cast("bigint")).collect()
    whole: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for row in rows:
        key = row.topic, row.hop, row.consumer_group
        whole[key] = add(whole[key], {row.bin: row.n})
    return {
        "histograms": [[row.topic, row.hop, row.consumer_group, row.minute, row.bin, row.n] for row in rows],
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
            Finding(
                *(Kind.CLOCK, STAGE_OF[hop], topic),
                group=group,
                count=bins[BACKWARDS],
                detail=clock_has_jumped(config.clock_tolerance_seconds),
            ).as_dict()
            for (topic, hop, group), bins in sorted(whole.items())
            if bins.get(BACKWARDS)
        ],
    }


def backlog_report(spark: SparkSession, config: PipelineConfig, history: History, *, repeated: int = 10) -> list[dict[str, Any]]:
    """Give, for each group and topic: rows by the minute, the last standing, and the messages tried most often."""
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    if not pairs:
        return []
    readers = spark.createDataFrame(pairs, "consumer_group string, topic string")
    rows: dict[tuple[str, str], list[Minute]] = defaultdict(list)
    for row in backlog.minutes(history.broker, history.inbox, history.attempts, readers).collect():
        rows[row.consumer_group, row.topic].append(Minute(row.minute, row.produced, row.attempts, row.consumed))
    again: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for row in backlog.most_repeated(history.attempts, limit=repeated).collect():
        again[row.consumer_group, row.topic].append([row.message_id, row.tries])
    return [_of_pair(group, topic, rows[group, topic], again[group, topic]) for group, topic in sorted(rows)]


def _of_pair(group: str, topic: str, minutes: list[Minute], again: list[list[Any]]) -> dict[str, Any]:
    found = standings(minutes)
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
