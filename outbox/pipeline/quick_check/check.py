"""The whole quick check of one window of one database."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg

from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.quick_check import standing, window
from outbox.pipeline.quick_check.frames import Check, opened
from outbox.pipeline.quick_check.ids import judge_ids
from outbox.pipeline.quick_check.lanes import judge_lanes
from outbox.pipeline.spark.bins import BACKWARDS, add
from outbox.pipeline.spark.cause import BacklogState, Minute, standings, until
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import STAGE_OF, Finding, Kind, clock_has_jumped
from outbox.pipeline.spark.sources.sane import CAREFUL, PLAIN, Sql

SOURCES = "SELECT id FROM outbox_source"

LOOKED_AT = 100_000  # rows of one kind
SECONDS = 15.0
SETTLE = timedelta(minutes=1)
LONGEST_BORDER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Backlog:
    """How a group stands with a topic, counted from the window's beginning on: minute by minute, and at its end."""

    group: str
    topic: str
    minutes: list[BacklogState]
    again: list[list[Any]]


@dataclass(frozen=True)
class Answer:
    """
    What a quick check found.

    Args:
        histograms: rows of topic, hop, group, minute, bin, n.
        rows: what was looked at -> how many rows.
        notes: what was not looked at, and why.
    """

    since: datetime
    as_of: datetime
    findings: list[Finding]
    histograms: list[standing.Histogram]
    backlogs: list[Backlog]
    rows: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def quick_check(
    using: str, *, length: timedelta, settle: timedelta = SETTLE, limit: int = LOOKED_AT, seconds: float = SECONDS
) -> Answer:
    """
    Look at what was published in the last minutes or hours, as the audit would.

    Args:
        length: of the window.
        settle: what is younger is under way.
        limit: no more rows of one kind are looked at.
        seconds: no longer than that; twice, where rows cannot be read as they are.

    Raises:
        WindowTooLarge: the window holds more.
        ConfigurationError: an entry of `OUTBOX["PIPELINE"]["AUDIT"]` names what is not there.
    """
    began = time.monotonic()
    config = pipeline_config(using, settle=settle)
    try:
        answer = _check(using, config, length, PLAIN, limit=limit, seconds=seconds)
    except (psycopg.DataError, psycopg.NotSupportedError):  # a row cannot be read as it is
        answer = _check(using, config, length, CAREFUL, limit=limit, seconds=seconds)
    return replace(answer, seconds=time.monotonic() - began)


def _check(using: str, config: PipelineConfig, length: timedelta, sql: Sql, *, limit: int, seconds: float) -> Answer:
    with opened(using, limit=limit, seconds=seconds) as (check, now):
        since = max([now - length, *([config.since] if config.since else [])])
        looked = window.fill(check, config, since=since, sql=sql)
        if config.recorded:
            looked.notes.append(
                f"What brokers have of {', '.join(config.recorded)} is recorded, and judged by outbox_audit alone."
            )
        seen = [topic for topic in config.seen_topics if "broker" in looked.rows and topic not in config.recorded]
        answer = judge(check, replace(config, seen_topics=seen), as_of=now, since=since, border=min(LONGEST_BORDER, length / 4))
    return replace(answer, findings=sorted([*answer.findings, *looked.broken]), rows=looked.rows, notes=looked.notes)


def judge(
    check: Check,
    config: PipelineConfig,
    *,
    as_of: datetime,
    since: datetime | None,
    border: timedelta,
    sources: list[str] | None = None,
) -> Answer:
    """Judge the frames as they are filled. Raises WindowTooLarge."""
    ours = sources or [row[0] for row in check.run(SOURCES).fetchall()]
    cutoff = as_of - timedelta(seconds=config.settle_seconds)
    first_id = "" if since is None else str(UUID(int=int(since.timestamp() * 1000) << 80))
    histograms = standing.read_histograms(check, tolerance_seconds=config.clock_tolerance_seconds)
    findings = [
        *judge_lanes(check, config, cutoff=cutoff, sources=ours),
        *judge_ids(check, config, cutoff=cutoff, sources=ours, since=since, border=border, first_id=first_id),
        *_jumps(histograms, config),
    ]
    again = standing.read_most_repeated(check)
    backlogs = [
        Backlog(group, topic, standings(_to_the_end(minutes, as_of)), again.get((group, topic), []))
        for (group, topic), found in sorted(standing.read_minutes(check).items())
        if (minutes := until(found, int(as_of.timestamp()) // 60))
    ]
    return Answer(since or as_of, as_of, sorted(findings), histograms, backlogs)


def _to_the_end(minutes: list[Minute], as_of: datetime) -> list[Minute]:
    """Add the last whole minute: a group that nothing happens to stands still."""
    last = int(as_of.timestamp()) // 60 - 1
    return [*minutes, Minute(last)] if minutes[-1].minute < last else minutes


def _jumps(histograms: list[standing.Histogram], config: PipelineConfig) -> list[Finding]:
    whole: dict[tuple[str, str, str], dict[int, int]] = {}
    for topic, hop, group, _, place, count in histograms:
        whole[topic, hop, group] = add(whole.get((topic, hop, group), {}), {place: count})
    return [
        Finding(
            *(Kind.CLOCK, STAGE_OF[hop], topic),
            group=group,
            count=bins[BACKWARDS],
            detail=clock_has_jumped(config.clock_tolerance_seconds),
        )
        for (topic, hop, group), bins in whole.items()
        if BACKWARDS in bins
    ]
