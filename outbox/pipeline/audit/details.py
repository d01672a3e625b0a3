"""From numbers to messages: ids for what was found, and which numbers it is that repeat."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pyspark.sql import DataFrame

from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.findings import Finding, Kind, Stage
from outbox.pipeline.history import History
from outbox.pipeline.transforms.lookup import ids_of, repeated

Spot = tuple[str, str, int, int]

FRAME_OF = {Stage.OUTBOX: "places", Stage.BROKER: "broker", Stage.INBOX: "inbox"}
NAMELESS = (Kind.UNKNOWN_LANE, Kind.NO_NUMBER, Kind.CLOCK)


def with_repeats(config: PipelineConfig, history: History, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Put the numbers in the place of findings that name a bucket only; give all others as they are."""
    spots: dict[Stage, list[Finding]] = defaultdict(list)
    for one in findings:
        if one.kind is Kind.DUPLICATED and one.lane >= 0:
            spots[one.stage].append(one)
        else:
            yield one
    for stage, dirty in spots.items():
        yield from _repeats(config, history.frames[FRAME_OF[stage]], stage, dirty)


def _repeats(config: PipelineConfig, frame: DataFrame, stage: Stage, dirty: list[Finding]) -> list[Finding]:
    also = ["consumer_group"] if stage is Stage.INBOX else []
    spots = [(one.source, one.topic, one.lane, bucket) for one in dirty for bucket in range(one.first, one.last + 1)]
    found = []
    for row in repeated(frame, spots, also, ids=config.ids_per_finding).collect():
        is_one = row.messages <= 1
        found.append(
            Finding(
                Kind.DUPLICATED if is_one else Kind.RENUMBERED,
                stage,
                *(row.topic, row.source, row.lane),
                group=row.consumer_group if also else "",
                first=row.number,
                last=row.number,
                count=row.n - 1 if is_one else row.messages,
                ids=tuple(row.ids),
            )
        )
    return found


def with_ids(config: PipelineConfig, history: History, findings: list[Finding]) -> list[Finding]:
    """Fill in the message ids, as many of each finding as were asked for."""
    wanted: dict[str, dict[Spot, int]] = defaultdict(dict)
    for place, one in enumerate(findings):
        if one.lane < 0 or one.ids or one.kind in NAMELESS or (one.kind is Kind.LOST and one.stage is Stage.OUTBOX):
            continue
        for frame in _where_to_look(one):
            for number in range(one.first, min(one.last, one.first + config.ids_per_finding - 1) + 1):
                wanted[frame][one.source, one.topic, one.lane, number] = place
    ids: dict[Spot, str] = {}
    for frame, numbers in wanted.items():
        for row in ids_of(history.frames[frame], numbers).collect():
            ids[row.source, row.topic, row.lane, row.number] = row.message_id
    return [_with_ids(config, one, ids) for one in findings]


def _where_to_look(one: Finding) -> tuple[str, ...]:
    if one.kind is Kind.ORPHAN:
        return (FRAME_OF[one.stage],)
    return ("places", "broker") if one.kind is Kind.BEYOND_MARK or one.stage is Stage.INBOX else ("places",)


def _with_ids(config: PipelineConfig, one: Finding, ids: dict[Spot, str]) -> Finding:
    if one.lane < 0 or one.ids or one.kind in NAMELESS:
        return one
    span = range(one.first, min(one.last, one.first + config.ids_per_finding - 1) + 1)
    found = [ids[spot] for number in span if (spot := (one.source, one.topic, one.lane, number)) in ids]
    return replace(one, ids=tuple(found))
