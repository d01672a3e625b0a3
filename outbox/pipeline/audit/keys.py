"""What is told by ids, not by numbers: business rows, and messages without a place."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.errors import HistoryError
from outbox.pipeline.findings import NO_MESSAGE, NO_ROW, ROW_GONE, SEVERAL_PLACES, STRANDED, Finding, Kind, Stage
from outbox.pipeline.history import History
from outbox.pipeline.transforms.identity import differences

SEPARATOR = "\n"  # in no name of a setting, and in no label of a model
BORDER = timedelta(hours=1)


def audit_business(config: PipelineConfig, history: History) -> list[Finding]:
    """Hold business rows to the messages about them: a row without a message, a message without its row."""
    if not config.business:
        return []
    if config.since and (without := [entry.name for entry in config.business if not entry.at]):
        raise HistoryError(
            f"Messages from before {config.since} are not in the history, and nothing says when the rows of "
            f'{", ".join(without)} were written. Name the column: OUTBOX["AUDIT"][...]["AT"].'
        )
    owed = history.business.select(_key(F.col("subject"), F.col("about")), "at")
    subject = _subject(config)
    told = history.messages.where(subject.isNotNull()).select(_key(subject, F.col("about")), "at")
    if config.since:
        owed = owed.where(F.col("at") >= F.lit(config.since))
    found = differences(owed.select("key"), told.select("key"))
    if found is None:
        return []
    if config.since:  # of a pair on the border, one may lie before it
        border = F.lit(config.since + BORDER)
        found = found.join(owed.unionAll(told).where(F.col("at") >= border).select("key").distinct(), "key")
    return _business_findings(config, found)


def _key(subject: Column, about: Column) -> Column:
    return F.concat(subject, F.lit(SEPARATOR), about).alias("key")


def _subject(config: PipelineConfig) -> Column:
    """Say which entry's message it is, by topic, type and what it is about; NULL: nobody's."""
    found = F.lit(None).cast("string")
    for entry in reversed(config.business):
        is_its = (F.col("topic") == entry.topic) & F.col("about").startswith(f"{entry.about}:")
        if entry.type:
            is_its = is_its & (F.col("type") == entry.type)
        found = F.when(is_its, entry.name).otherwise(found)
    return found


def _business_findings(config: PipelineConfig, found: DataFrame) -> list[Finding]:
    topics = {entry.name: entry.topic for entry in config.business}
    rows: dict[tuple[str, Kind, str], list[str]] = {}
    for row in found.collect():
        subject, about = row.key.split(SEPARATOR, 1)
        if row.left_n == 0:
            what = (subject, Kind.ORPHAN, NO_ROW)
        elif row.right_n == 0:
            what = (subject, Kind.LOST, NO_MESSAGE)
        else:
            what = (subject, Kind.DUPLICATED, f"{row.right_n} messages for {row.left_n} rows")
        rows.setdefault(what, []).append(about)
    return [
        Finding(
            *(kind, Stage.OUTBOX, topics[subject]),
            subject=subject,
            count=len(abouts),
            detail=detail,
            about=tuple(sorted(abouts)[: config.ids_per_finding]),
        )
        for (subject, kind, detail), abouts in sorted(rows.items())
    ]


def audit_places(config: PipelineConfig, history: History) -> list[Finding]:
    """Hold message rows to what says where they stand: nobody would send one that has no place."""
    found = differences(
        history.messages.select(F.col("message_id").alias("key")),
        history.places.select(F.col("message_id").alias("key")),
    )
    if found is None:
        return []
    wrong = F.broadcast(found.withColumnRenamed("key", "message_id"))
    named = history.messages.select("message_id", "topic").unionAll(history.places.select("message_id", "topic"))
    rows = (
        named.join(wrong, "message_id")
        .groupBy("message_id")
        .agg(F.min("topic").alias("topic"), F.first("left_n").alias("left_n"), F.first("right_n").alias("right_n"))
    )
    return by_topic(config, [(row.topic, *_place_of(row), "", row.message_id) for row in rows.collect()])


def _place_of(row: Any) -> tuple[Kind, Stage, str]:
    if row.right_n == 0:
        return Kind.LOST, Stage.OUTBOX, STRANDED
    if row.left_n == 0:
        return Kind.LOST, Stage.OUTBOX, ROW_GONE
    return Kind.DUPLICATED, Stage.OUTBOX, SEVERAL_PLACES


def by_topic(config: PipelineConfig, rows: list[tuple[str, Kind, Stage, str, str, str]]) -> list[Finding]:
    """Make one finding of messages that share all but the id: rows of topic, kind, stage, detail, group, message id."""
    found: dict[tuple[str, Kind, Stage, str, str], list[str]] = {}
    for topic, kind, stage, detail, group, message_id in rows:
        found.setdefault((topic, kind, stage, detail, group), []).append(message_id)
    return [
        Finding(
            *(kind, stage, topic),
            group=group,
            count=len(ids),
            detail=detail,
            ids=tuple(sorted(ids)[: config.ids_per_finding]),
        )
        for (topic, kind, stage, detail, group), ids in sorted(found.items())
    ]
