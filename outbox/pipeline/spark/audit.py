"""
Audit one history: compare business rows, outbox, broker and inbox, and report the differences as findings.

    tables, Kafka, lake -> history -> lanes, keys, unnumbered, order, topics -> findings, counts
                                   -> latency, backlog, digest               -> report

    key "k", numbers in the order of the queue: 1 3 2 4      ->  2 is out of order, after 3
    message without a number, observed: sent, not stored     ->  lost at the broker

Messages with numbers are compared in `lanes.py`. Messages without a number were sent half first, or still wait to be claimed.
They are few, so they are compared by their ids, in a shuffle.

`history.py` explains what a history is, and `findings.py` lists the kinds of findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.cells import COLUMNS as ROLE_COLUMNS
from outbox.pipeline.spark.cells import DEAD, DISCARDED, FAR_FUTURE, MAX_GROUPS, WAITING, Role, RoleRules, micros, role_rules
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NO_TOPIC, NOT_SENT, REPORT_ORDER, Breach, FindingKind, Report, Stage, unknown_topic
from outbox.pipeline.spark.history import History, open_history
from outbox.pipeline.spark.keys import audit_keys, by_topic, digest
from outbox.pipeline.spark.lake import first_id_at
from outbox.pipeline.spark.lanes import audit_lanes, with_messages
from outbox.pipeline.spark.latency import backlog_report, count_times, latency_report
from outbox.pipeline.spark.scan import coded, may_have_null, micros_of, scan
from outbox.pipeline.spark.session import Steps, code_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def out_of_order(frame: DataFrame, keys: list[str], *orders: list[str]) -> DataFrame:
    """
    Return the rows that come after a higher number with the same keys, in each of the given orders.

    Takes a frame with the column `number` and those in `keys` and `orders`. Returns its columns, and `overtaken_by`, the higher
    number in the first order. The windows are partitioned by key. A key is a customer or an order, so the partitions are small.
    """
    highest_before = {
        f"before_{nth}": F.max("number").over(Window.partitionBy(*keys).orderBy(*by).rowsBetween(Window.unboundedPreceding, -1))
        for nth, by in enumerate(orders)
    }
    return (
        frame.where(F.col("number").isNotNull())
        .withColumns(highest_before)
        .where(reduce(Column.__and__, [F.col(name) > F.col("number") for name in highest_before]))
        .select(*frame.columns, F.col("before_0").alias("overtaken_by"))
    )


def with_generation(frame: DataFrame, keys: list[str], *, tolerance_seconds: float) -> DataFrame:
    """
    Add the column `generation`: how often the positions of a key have started anew before the row.

    If a topic or broker is created again, positions start at 0. If a topic gets more queues, a key may move to another queue. So
    positions of a key define an order only as long as they increase with time, within the tolerance of clocks.
    """
    in_time = Window.partitionBy(*keys).orderBy(F.col("at").asc_nulls_first(), "queue", "pos")
    at, earlier = F.unix_micros("at"), F.unix_micros(F.lag("at").over(in_time))
    is_elsewhere = (F.col("queue") != F.lag("queue").over(in_time)) | (F.col("pos") < F.lag("pos").over(in_time))
    starts_anew = is_elsewhere & (at > earlier + int(tolerance_seconds * 1_000_000))
    return (
        frame.where(F.col("number").isNotNull())
        .withColumn("starts_anew", F.coalesce(starts_anew, F.lit(False)).cast("int"))
        .withColumn("generation", F.sum("starts_anew").over(in_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)))
        .drop("starts_anew")
    )


KEY_OF_A_LANE = ["topic", "source", "lane", "key"]  # numbers of different lanes cannot be compared


def audit_order(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return findings about messages of ordered topics that came after a message of their key with a higher number."""
    if not config.ordered_topics:
        return []
    is_ordered = F.col("topic").isin(*config.ordered_topics)
    tolerance = config.clock_tolerance_seconds
    stored = with_generation(history.broker.where(is_ordered), KEY_OF_A_LANE, tolerance_seconds=tolerance)
    stored_late = out_of_order(stored, KEY_OF_A_LANE, ["queue", "pos"], ["generation", "queue", "pos"])
    keys = history.messages.where(is_ordered).select("message_id", "key")
    handled = history.inbox.where(is_ordered).join(keys, "message_id")
    handled_late = out_of_order(handled, ["consumer_group", *KEY_OF_A_LANE], ["at", "number"])
    return [
        *_findings(Stage.BROKER, stored_late.withColumn("consumer_group", F.lit("")).collect()),
        *_findings(Stage.INBOX, handled_late.collect()),
    ]


def _findings(stage: Stage, rows: Iterable[Any]) -> list[Breach]:
    return [
        Breach(
            *(FindingKind.OUT_OF_ORDER, stage, row.topic, row.source, row.lane),
            group=row.consumer_group,
            first=row.number,
            last=row.number,
            count=1,
            detail=f"after {row.overtaken_by} of key {row.key!r}",
            ids=(row.message_id,),
        )
        for row in rows
    ]


OBSERVATION = pa.schema({"message_id": pa.string(), "topic": pa.string(), "seen": pa.string()})
NOT_READ = "not recorded yet"
OBSERVATION_OF_ROLE = {
    int(Role.SENT): "sent",
    int(Role.SENT_YOUNG): "sent young",
    int(Role.UNSEEN): "unseen",
    int(Role.UNREAD): "unread",
}


def audit_unnumbered(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return findings about messages without a number, from a comparison of the stages message by message."""
    columns = {
        name: tuple(dict.fromkeys(("source", "topic", "number", "message_id", *wanted))) for name, wanted in ROLE_COLUMNS.items()
    }
    if not may_have_null(history, columns, "number"):
        return []
    cutoff_micros = micros(history.as_of) - int(config.settle_seconds * 1e6)
    observe = partial(observations, role_rules(config, history), history.sources, cutoff_micros)
    wrong = (
        scan(spark, history, columns, observe, OBSERVATION, where_null="number")
        .groupBy("message_id", "topic")
        .agg(F.collect_set("seen").alias("seen"))
        .select("message_id", "topic", F.explode(F.array_compact(F.array(*_unnumbered_rules(config)))).alias("wrong"))
        .select("topic", "wrong.kind", "wrong.stage", "wrong.detail", "wrong.group", "message_id")
    )
    rows = [
        (row.topic, FindingKind(row.kind), Stage(row.stage), row.detail, row.group, row.message_id) for row in wrong.collect()
    ]
    return by_topic(config, rows)


def observations(
    roles: RoleRules, sources: frozenset[str], cutoff_micros: int, frame: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """
    Yield what some rows of a frame say about messages without a number: message_id, topic, seen.

    `seen` says what the row proves about its message, such as "sent" or "stored".

    Args:
        sources: the source ids of the audited databases; messages of other databases are left out.
        cutoff_micros: messages with a later time are young, so their absence at a later stage is no finding yet.
        frame: the name of the frame.
    """
    for batch in batches:
        is_ours = coded(batch, "source").is_(*sources)
        ours = batch.filter(pc.and_(batch.column("number").is_null(), pa.array(is_ours)))
        for seen in observed(roles, cutoff_micros, frame, ours) if len(ours) else ():
            has_seen = [value is not None for value in seen]
            columns = [ours.column("message_id"), ours.column("topic").cast(pa.string()), pa.array(seen, pa.string())]
            yield pa.RecordBatch.from_arrays([column.filter(pa.array(has_seen)) for column in columns], schema=OBSERVATION)


def observed(roles: RoleRules, cutoff_micros: int, frame: str, batch: pa.RecordBatch) -> Iterator[list[str | None]]:
    """Yield lists with an observation, or None, for each row of a frame."""
    is_old = micros_of(batch, "at") <= cutoff_micros  # a missing time counts as old
    match frame:
        case "places":
            state, under_way = coded(batch, "state"), np.where(is_old, "late", "open")
            if_sent = np.array([OBSERVATION_OF_ROLE[role] for role in roles.of_sent(batch)])
            yield np.where(state.is_("sent"), if_sent, np.where(state.is_("dead", "discarded"), "gone", under_way)).tolist()
            for index, is_not_owed in roles.not_owed(batch):
                yield [f"not for {roles.groups[index].name}" if flag else None for flag in is_not_owed]
        case "broker":
            is_shown = micros_of(batch, "at", missing=FAR_FUTURE) <= cutoff_micros
            yield np.where(is_shown, "stored", "stored young").tolist()
        case "inbox":
            yield [f"in {group}" for group in batch.column("consumer_group").to_pylist()]
        case "failed_deliveries":
            outcome, group = batch.column("outcome").to_pylist(), batch.column("consumer_group").to_pylist()
            yield [_delivery_state(*row) for row in zip(outcome, group, strict=True)]


def _delivery_state(outcome: str | None, group: str) -> str | None:
    if outcome in WAITING:
        return f"waits in {group}"
    return f"dead in {group}" if outcome in (DEAD, DISCARDED) else None


def _unnumbered_rules(config: PipelineConfig) -> list[Column]:
    """Return a column for each rule: a struct if a message breaks it, otherwise NULL. Needs the columns topic and seen."""

    def has(*names: str) -> Column:
        return reduce(Column.__or__, [F.array_contains("seen", name) for name in names])

    placed = has(*OBSERVATION_OF_ROLE.values(), "gone", "late", "open")
    stored = has("stored", "stored young")
    is_broker_known = F.col("topic").isin(*config.seen_topics) if config.seen_topics else F.lit(False)
    arrived = F.exists("seen", lambda value: value.startswith("in "))
    rules = [
        _rule(has("late") & ~stored, FindingKind.LATE, Stage.OUTBOX, NOT_SENT),
        _rule(is_broker_known & has("sent") & ~stored, FindingKind.LOST, Stage.BROKER),
        _rule(is_broker_known & has("unread") & ~stored, FindingKind.LATE, Stage.BROKER, NOT_READ),
        _rule(stored & ~placed, FindingKind.ORPHAN, Stage.BROKER),
        _rule(arrived & ~stored & ~placed, FindingKind.ORPHAN, Stage.INBOX),
    ]
    due = F.when(is_broker_known, has("stored") | (has("unseen") & ~has("stored young"))).otherwise(has("sent"))
    for group in config.groups:
        if group.topics:
            name = group.name
            owed = due & F.col("topic").isin(*group.topics) & ~has(f"in {name}", f"dead in {name}", f"not for {name}")
            waits = has(f"waits in {name}")
            rules.append(_rule(owed & ~waits, FindingKind.LOST, Stage.INBOX, group=name))
            rules.append(_rule(owed & waits, FindingKind.LATE, Stage.INBOX, group=name))
    return rules


def _rule(is_broken: Column, kind: FindingKind, stage: Stage, detail: str = "", group: str = "") -> Column:
    parts = {"kind": kind.value, "stage": stage.value, "detail": detail, "group": group}
    return F.when(is_broken, F.struct(*(F.lit(value).alias(name) for name, value in parts.items())))


def audit_topics(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return findings about topics to which messages, batches or tickets refer, and whose row is missing."""
    is_missing = F.col("topic").startswith(NO_TOPIC)
    messages, places = (frame.where(is_missing).select("topic", "message_id") for frame in (history.messages, history.places))
    ids = F.slice(F.sort_array(F.collect_set("message_id")), 1, config.ids_per_finding)
    rows = messages.unionAll(places).groupBy("topic").agg(F.count_distinct("message_id").alias("n"), ids.alias("ids"))
    return [unknown_topic(row.topic, row.n, row.ids) for row in rows.collect()]


def audit(spark: SparkSession, config: PipelineConfig, history: History, steps: Steps | None = None) -> Report:
    """
    Compare business rows, outbox, broker and inbox. Return findings and counts.

    Raises:
        HistoryError: the history does not suffice for an audit.
    """
    if len(config.groups) > MAX_GROUPS:
        raise HistoryError(f"There are {len(config.groups)} consumer groups; an audit supports at most {MAX_GROUPS}.")
    steps = steps or Steps()
    recent = history.since(first_id_at(config.since)) if config.since else history

    def audit_numbers() -> Report:
        report = audit_lanes(spark, config, history)
        steps.log("messages of findings")
        report.findings = with_messages(spark, config, history, report.findings)
        return report

    def audit_ids() -> list[Breach]:
        return [breach for check in ID_AUDITS for breach in check(spark, config, recent)]

    # Two threads, so that the cores work on one while the driver plans the other, waits for its last task, or reads its results.
    with steps("comparing the stages"), ThreadPoolExecutor(2) as pool:
        numbers, ids = pool.submit(audit_numbers), pool.submit(audit_ids)
    report = numbers.result()
    report.findings = sorted([*report.findings, *ids.result(), *history.broken], key=REPORT_ORDER)
    return report


# The first one is the shortest. If it ran last, a core would be idle at the end.
ID_AUDITS: tuple[Callable[[SparkSession, PipelineConfig, History], list[Breach]], ...] = (
    audit_unnumbered,
    audit_keys,
    audit_order,
    audit_topics,
)


def make_report(spark: SparkSession, config: PipelineConfig, folder: str, steps: Steps) -> dict[str, object]:
    """
    Copy the databases' history to a folder, or use the history in files that the configuration names, and audit it.

    Raises:
        PipelineError: the history cannot be read, or does not suffice for an audit.
    """
    if config.outbox.is_postgres:
        from outbox.pipeline.spark.postgres import copy_history  # psycopg is not needed for a history in files

        with steps("copying the history"):
            copy_history(spark, config, folder, steps.log)
    else:
        folder = config.outbox.url
    with steps("opening the history"):
        history = open_history(spark, folder)
    config = replace(config, since=history.audited_since or config.since)
    recent = history  # if there is an archive, without its days, whose latency and backlog earlier runs have reported
    if config.archived and config.archived.live_since:
        recent = history.since(first_id_at(config.archived.live_since))
    report = audit(spark, config, history, steps)
    with steps("latency and backlog"):
        bin_counts = count_times(spark, config, recent)
        latency, backlog = latency_report(config, bin_counts), backlog_report(config, recent, bin_counts)
    with steps("digest"):
        history_digest = digest(spark, history)
    return {
        "as_of": history.as_of.isoformat(),
        "since": config.since.isoformat() if config.since else None,
        "findings": [finding.as_dict() for finding in report.findings] + latency.pop("findings"),
        "counts": report.counts,
        "foreign": report.foreign,
        "latency": latency,
        "backlog": backlog,
        "sources": sorted(history.sources),
        "digest": history_digest,
        "code_version": code_version(),
    }
