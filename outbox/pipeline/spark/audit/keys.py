"""Checks by id instead of number: business rows and their messages, message rows and their places."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from outbox.pipeline.spark.audit.recorded import micros
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.findings import (
    NO_MESSAGE,
    NO_ROW,
    ROW_GONE,
    SEVERAL_PLACES,
    STRANDED,
    Breach,
    FindingKind,
    Stage,
)
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.scan import scan
from outbox.pipeline.spark.transforms.identity import DIGEST, candidates
from outbox.pipeline.spark.transforms.keys import ABOUT, CANDIDATE, PLACE, Keys

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BORDER = timedelta(hours=1)


def audit_keys(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """
    Compare business rows with the messages about them, and message rows with their places: no relay would send a message without
    a place.

    Raises:
        HistoryError: it is not known which business rows belong to the history.
    """
    if config.since and (without := [entry.name for entry in config.business if not entry.at]):
        raise HistoryError(
            f"Messages from before {config.since} are not in the history, and it is not known when the rows of "
            f'{", ".join(without)} were written. Set OUTBOX["PIPELINE"]["AUDIT"][...]["AT"] to a field with that time.'
        )
    pairs = (ABOUT, PLACE) if config.business else (PLACE,)
    keys = Keys(config.business, micros(config.since) if config.since else None, secrets.randbits(64), pairs)
    sums = [F.sum(name).alias(name) for name in ("n", "high", "low", "check")]
    digests = scan(spark, history, keys.columns(), keys.digest, DIGEST).groupBy("pair", "bucket").agg(*sums)
    wanted = candidates(digests.where("n <> 0 OR high <> 0 OR low <> 0 OR check <> 0").collect())
    if not wanted:
        return []
    keys = replace(keys, pairs=tuple(wanted))
    sums = [F.sum(name).alias(name) for name in ("left", "right")]
    rows = (
        scan(spark, history, keys.columns(), partial(keys.candidates, wanted), CANDIDATE)
        .groupBy("pair", "subject", "key")
        .agg(*sums, F.min("topic").alias("topic"), F.max("at").alias("at"))
        .where(F.col("left") != F.col("right"))
        .collect()
    )
    # Near the start of the history, one of a pair may be outside of it.
    border = micros(config.since + BORDER) if config.since else 0
    return [
        *_business_findings(config, (row for row in rows if row.pair == ABOUT and row.at >= border)),
        *by_topic(config, [(row.topic, *_place_of(row), "", row.key) for row in rows if row.pair == PLACE]),
    ]


def _business_findings(config: PipelineConfig, found: Iterable[Any]) -> list[Breach]:
    topics = {entry.name: entry.topic for entry in config.business}
    rows: dict[tuple[str, FindingKind, str], list[str]] = {}
    for row in found:
        if row.left == 0:
            what = (row.subject, FindingKind.ORPHAN, NO_ROW)
        elif row.right == 0:
            what = (row.subject, FindingKind.LOST, NO_MESSAGE)
        else:
            what = (row.subject, FindingKind.DUPLICATED, f"{row.right} messages for {row.left} rows")
        rows.setdefault(what, []).append(row.key)
    return [
        Breach(
            *(kind, Stage.OUTBOX, topics[subject]),
            subject=subject,
            count=len(abouts),
            detail=detail,
            about=tuple(sorted(abouts)[: config.ids_per_finding]),
        )
        for (subject, kind, detail), abouts in sorted(rows.items())
    ]


def _place_of(row: Any) -> tuple[FindingKind, Stage, str]:
    if row.right == 0:
        return FindingKind.LOST, Stage.OUTBOX, STRANDED
    if row.left == 0:
        return FindingKind.LOST, Stage.OUTBOX, ROW_GONE
    return FindingKind.DUPLICATED, Stage.OUTBOX, SEVERAL_PLACES


def by_topic(config: PipelineConfig, rows: list[tuple[str, FindingKind, Stage, str, str, str]]) -> list[Breach]:
    """Group rows of (topic, kind, stage, detail, group, message id) into findings that have all but the id in common."""
    found: dict[tuple[str, FindingKind, Stage, str, str], list[str]] = {}
    for topic, kind, stage, detail, group, message_id in rows:
        found.setdefault((topic, kind, stage, detail, group), []).append(message_id)
    return [
        Breach(
            *(kind, stage, topic),
            group=group,
            count=len(ids),
            detail=detail,
            ids=tuple(sorted(ids)[: config.ids_per_finding]),
        )
        for (topic, kind, stage, detail, group), ids in sorted(found.items())
    ]
