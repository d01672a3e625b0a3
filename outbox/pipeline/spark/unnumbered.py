"""Checks of messages without a number: half first, or still waiting. They are few, and joined by id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F

from outbox.pipeline.spark.columns import Bools, coded, micros_of
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NOT_SENT, Breach, FindingKind, Stage
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.keys import by_topic
from outbox.pipeline.spark.roles import COLUMNS as OF_ROLES
from outbox.pipeline.spark.roles import DEAD, DISCARDED, NEVER, WAITING, Roles, Seen, micros, roles_of
from outbox.pipeline.spark.scan import may_have_null, scan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OBSERVED = pa.schema({"message_id": pa.string(), "topic": pa.string(), "seen": pa.string()})
NOT_READ = "not recorded yet"
SENT_AS = {
    int(Seen.SENT): "sent",
    int(Seen.SENT_YOUNG): "sent young",
    int(Seen.UNSEEN): "unseen",
    int(Seen.UNREAD): "unread",
}


def audit_unnumbered(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Compare the stages, message by message."""
    columns = {
        name: tuple(dict.fromkeys(("source", "topic", "number", "message_id", *wanted))) for name, wanted in OF_ROLES.items()
    }
    if not may_have_null(history, columns, "number"):
        return []
    observations = Observations(
        roles_of(config, history), history.sources, micros(history.as_of) - int(config.settle_seconds * 1e6)
    )
    wrong = (
        scan(spark, history, columns, observations.of_part, OBSERVED, where_null="number")
        .groupBy("message_id", "topic")
        .agg(F.collect_set("seen").alias("seen"))
        .select("message_id", "topic", F.explode(F.array_compact(F.array(*_rules(config)))).alias("wrong"))
        .select("topic", "wrong.kind", "wrong.stage", "wrong.detail", "wrong.group", "message_id")
    )
    rows = [
        (row.topic, FindingKind(row.kind), Stage(row.stage), row.detail, row.group, row.message_id) for row in wrong.collect()
    ]
    return by_topic(config, rows)


@dataclass(frozen=True)
class Observations:
    """Turns rows of messages without a number into observations: message_id, topic, seen."""

    roles: Roles
    sources: frozenset[str]
    cutoff_micros: int

    def of_part(self, frame: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the observations of a part of a frame."""
        for batch in batches:
            is_ours = coded(batch, "source").is_(*self.sources)
            mine = batch.filter(pc.and_(batch.column("number").is_null(), pa.array(is_ours)))
            for seen in self.seen(frame, mine) if len(mine) else ():
                has_seen = [message is not None for message in seen]
                columns = [mine.column("message_id"), mine.column("topic").cast(pa.string()), pa.array(seen, pa.string())]
                yield pa.RecordBatch.from_arrays([column.filter(pa.array(has_seen)) for column in columns], schema=OBSERVED)

    def seen(self, frame: str, batch: pa.RecordBatch) -> Iterator[list[str | None]]:
        """Yield columns with an observation for each row of a frame, or None."""
        is_old = micros_of(batch, "at") <= self.cutoff_micros  # a missing time counts as old here
        match frame:
            case "places":
                roles, state = self.roles.of_sent(batch), coded(batch, "state")
                under_way = np.where(is_old, "late", "open")
                sent = np.array([SENT_AS[role] for role in roles])
                yield np.where(state.is_("sent"), sent, np.where(state.is_("dead", "discarded"), "gone", under_way)).tolist()
                for index, is_not_owed in self.roles.not_owed(batch):
                    yield self._not_for(index, is_not_owed)
            case "broker":
                is_shown = micros_of(batch, "at", missing=NEVER) <= self.cutoff_micros
                yield np.where(is_shown, "stored", "stored young").tolist()
            case "inbox":
                yield [f"in {group}" for group in batch.column("consumer_group").to_pylist()]
            case "failed_deliveries":
                outcome, group = batch.column("outcome").to_pylist(), batch.column("consumer_group").to_pylist()
                yield [_known(*row) for row in zip(outcome, group, strict=True)]

    def _not_for(self, group: int, those: Bools) -> list[str | None]:
        return [f"not for {self.roles.groups[group].name}" if flag else None for flag in those]


def _known(outcome: str | None, group: str) -> str | None:
    if outcome in WAITING:
        return f"waits in {group}"
    return f"dead in {group}" if outcome in (DEAD, DISCARDED) else None


def _rules(config: PipelineConfig) -> list[Column]:
    """Return a column for each rule: a struct if a message breaks it, else NULL. Needs the columns topic and seen."""

    def is_(*names: str) -> Column:
        return reduce(Column.__or__, [F.array_contains("seen", name) for name in names])

    placed = is_(*SENT_AS.values(), "gone", "late", "open")
    stored = is_("stored", "stored young")
    is_seen = F.col("topic").isin(*config.seen_topics) if config.seen_topics else F.lit(False)
    arrived = F.exists("seen", lambda one: one.startswith("in "))
    rules = [
        _rule(is_("late") & ~stored, FindingKind.LATE, Stage.OUTBOX, NOT_SENT),
        _rule(is_seen & is_("sent") & ~stored, FindingKind.LOST, Stage.BROKER),
        _rule(is_seen & is_("unread") & ~stored, FindingKind.LATE, Stage.BROKER, NOT_READ),
        _rule(stored & ~placed, FindingKind.ORPHAN, Stage.BROKER),
        _rule(arrived & ~stored & ~placed, FindingKind.ORPHAN, Stage.INBOX),
    ]
    due = F.when(is_seen, is_("stored") | (is_("unseen") & ~is_("stored young"))).otherwise(is_("sent"))
    for group in config.groups:
        if group.topics:
            name = group.name
            owed = due & F.col("topic").isin(*group.topics) & ~is_(f"in {name}", f"dead in {name}", f"not for {name}")
            waits = is_(f"waits in {name}")
            rules.append(_rule(owed & ~waits, FindingKind.LOST, Stage.INBOX, group=name))
            rules.append(_rule(owed & waits, FindingKind.LATE, Stage.INBOX, group=name))
    return rules


def _rule(is_broken: Column, kind: FindingKind, stage: Stage, detail: str = "", group: str = "") -> Column:
    parts = {"kind": kind.value, "stage": stage.value, "detail": detail, "group": group}
    return F.when(is_broken, F.struct(*(F.lit(value).alias(name) for name, value in parts.items())))
