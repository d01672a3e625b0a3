"""What SQL finds in the frames: findings, latency and backlog."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import STAGE_OF, Breach, FindingKind, clock_has_jumped
from outbox.pipeline.spark.measures import BACKWARDS, BacklogMinute, BacklogState, backlog_states, minutes_up_to
from tests.outbox.pipeline.sql import standing
from tests.outbox.pipeline.sql.frames import Check
from tests.outbox.pipeline.sql.ids import judge_ids
from tests.outbox.pipeline.sql.lanes import judge_lanes

BORDER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Backlog:
    """How a group stands with a topic, minute by minute."""

    group: str
    topic: str
    minutes: list[BacklogState]
    again: list[list[Any]]


@dataclass(frozen=True)
class Answer:
    """What was found. `histograms`: rows of topic, hop, group, minute, bin, n."""

    findings: list[Breach]
    histograms: list[standing.Histogram]
    backlogs: list[Backlog]


def judge(check: Check, config: PipelineConfig, *, as_of: datetime, since: datetime | None, sources: list[str]) -> Answer:
    """Judge the frames as they are filled."""
    cutoff = as_of - timedelta(seconds=config.settle_seconds)
    first_id = "" if since is None else str(UUID(int=int(since.timestamp() * 1000) << 80))
    histograms = standing.read_histograms(check, tolerance_seconds=config.clock_tolerance_seconds)
    findings = [
        *judge_lanes(check, config, cutoff=cutoff, sources=sources),
        *judge_ids(check, config, cutoff=cutoff, sources=sources, since=since, border=BORDER, first_id=first_id),
        *_jumps(histograms, config),
    ]
    again = standing.read_most_repeated(check)
    backlogs = [
        Backlog(group, topic, backlog_states(_to_the_end(minutes, as_of)), again.get((group, topic), []))
        for (group, topic), found in sorted(standing.read_minutes(check).items())
        if (minutes := minutes_up_to(found, int(as_of.timestamp()) // 60))
    ]
    return Answer(sorted(findings), histograms, backlogs)


def _to_the_end(minutes: list[BacklogMinute], as_of: datetime) -> list[BacklogMinute]:
    """Add the last whole minute: a group that nothing happens to stands still."""
    last = int(as_of.timestamp()) // 60 - 1
    return [*minutes, BacklogMinute(last)] if minutes[-1].minute < last else minutes


def _jumps(histograms: list[standing.Histogram], config: PipelineConfig) -> list[Breach]:
    backwards: Counter[tuple[str, str, str]] = Counter()
    for topic, hop, group, _, place, count in histograms:
        if place == BACKWARDS:
            backwards[topic, hop, group] += count
    return [
        Breach(
            *(FindingKind.CLOCK, STAGE_OF[hop], topic),
            group=group,
            count=count,
            detail=clock_has_jumped(config.clock_tolerance_seconds),
        )
        for (topic, hop, group), count in backwards.items()
    ]
