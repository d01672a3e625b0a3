"""The frames of a synthetic history, each computed from the message's number alone, without a shuffle."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks.synthetic.plan import GROUP, SOURCE, Plan, Truth
from outbox.pipeline.spark.findings import FindingKind, Stage
from outbox.pipeline.spark.history import FRAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = datetime(2026, 1, 1, tzinfo=UTC)
AFTER = timedelta(hours=1)  # so long after the last one the history is read: nothing is under way

# Where a message is missing that was lost at a stage: there, and at all later ones.
MISSING_AT = {
    "messages": (Stage.OUTBOX,),
    "places": (Stage.OUTBOX,),
    "broker": (Stage.OUTBOX, Stage.BROKER),
    "inbox": (Stage.OUTBOX, Stage.BROKER),
}


def as_of(plan: Plan) -> datetime:
    """Return the moment at which the history is read."""
    return START + timedelta(microseconds=plan.messages * plan.each_micros) + AFTER


def make_frames(spark: SparkSession, plan: Plan, truth: Truth) -> dict[str, DataFrame]:
    """Return all frames by name, faults included."""
    rows = _messages(spark, plan)
    orphans = truth.of(FindingKind.ORPHAN, Stage.BROKER)
    inbox_orphans = [n for group in truth.faults.get((FindingKind.ORPHAN, Stage.INBOX), {}).values() for n in group]

    def at(name: str) -> DataFrame:
        missing = [n for stage in MISSING_AT[name] for n in truth.of(FindingKind.LOST, stage)]
        missing += orphans + inbox_orphans if name in ("messages", "places") else []
        missing += inbox_orphans if name == "broker" else []
        return _without(rows, missing)

    broker = _again(at("broker"), rows, truth.of(FindingKind.DUPLICATED, Stage.BROKER))
    frames = {
        "business": _business(rows, truth),
        "messages": at("messages").withColumn("at", _time("micros")),
        "places": at("places").withColumn("claimed_at", _time(_later(2_000, 1))).withColumn("at", _time(_later(5_000, 2))),
        "broker": broker.withColumn("at", _time(_later(7_000, 2))),
        "inbox": _inbox(at("inbox"), rows, plan, truth),
        "failed_deliveries": spark.createDataFrame([], FRAMES["failed_deliveries"]),
        "marks": spark.createDataFrame(_marks(plan), FRAMES["marks"]),
    }
    return {name: frame.select(*(F.col(c.name).cast(c.dataType) for c in FRAMES[name])) for name, frame in frames.items()}


def _messages(spark: SparkSession, plan: Plan) -> DataFrame:
    n = F.col("n")
    micros = F.lit(int(START.timestamp() * 1_000_000)) + n * plan.each_micros
    # As uuid7 has it: 48 bits of milliseconds, then bits that nobody can guess; here the message's number, scattered.
    time = F.lower(F.lpad(F.hex(F.expr(f"({int(START.timestamp() * 1000)} + n * {plan.each_micros} div 1000)")), 12, "0"))
    rest = F.lower(F.lpad(F.hex(F.xxhash64("n", F.lit(plan.seed))), 16, "0"))
    return spark.range(plan.messages).withColumnRenamed("id", "n").select(
        "n",
        micros.alias("micros"),
        F.lit(SOURCE).alias("source"),
        F.concat(F.lit("topic-"), (n % plan.topics).cast("string")).alias("topic"),
        F.expr(f"n div {plan.topics} % {plan.lanes}").alias("lane"),
        F.expr(f"n div {plan.streams} + 1").alias("number"),
        F.concat(
            time.substr(1, 8), F.lit("-"), time.substr(9, 4), F.lit("-7"), rest.substr(1, 3), F.lit("-8"), rest.substr(4, 3),
            F.lit("-"), rest.substr(7, 10), F.lit("00"),
        ).alias("message_id"),
        F.lit("sent").alias("state"),
        F.concat(F.lit("key-"), (n % 1000).cast("string")).alias("key"),
        F.lit("OrderPlaced").alias("type"),
        F.concat(F.lit("shop.order:"), n.cast("string")).alias("about"),
        (n % 4).alias("queue"),
        F.expr("n div 4").alias("pos"),
        F.lit(1).alias("delivery_count"),
    )  # fmt: skip


def _business(rows: DataFrame, truth: Truth) -> DataFrame:
    """Return the orders, including some whose message was never published."""
    extra = _only(rows, truth.of(FindingKind.LOST, Stage.BUSINESS)).withColumn("about", F.concat("about", F.lit("-unsaid")))
    return rows.unionAll(extra).withColumn("subject", F.col("topic")).withColumn("at", _time("micros"))


def _inbox(rows: DataFrame, everything: DataFrame, plan: Plan, truth: Truth) -> DataFrame:
    """Return the inbox rows of all groups, in one pass if nothing is missing."""
    lost, twice, orphans = (
        truth.faults.get((kind, Stage.INBOX), {}) for kind in (FindingKind.LOST, FindingKind.DUPLICATED, FindingKind.ORPHAN)
    )
    groups = [GROUP(group) for group in range(plan.groups)]
    found = rows.withColumn("consumer_group", F.explode(F.array(*map(F.lit, groups))))
    found = _without_of_groups(found, {group: [*lost.get(group, []), *_others(orphans, group)] for group in groups})
    for group, messages in twice.items():
        found = _again(found, everything.withColumn("consumer_group", F.lit(group)), messages)
    return found.withColumn("at", _time(_later(20_000, 30)))


def _others(orphans: dict[str, list[int]], group: str) -> list[int]:
    return [n for other, messages in orphans.items() if other != group for n in messages]


def _without_of_groups(frame: DataFrame, missing: dict[str, list[int]]) -> DataFrame:
    rows = [(n, group) for group, messages in missing.items() for n in messages]
    if not rows:
        return frame
    gone = F.broadcast(frame.sparkSession.createDataFrame(rows, "n bigint, consumer_group string"))
    return frame.join(gone, ["n", "consumer_group"], "left_anti")


def _numbers(frame: DataFrame, messages: Iterable[int]) -> DataFrame:
    return F.broadcast(frame.sparkSession.createDataFrame([(n,) for n in messages], "n bigint"))


def _without(frame: DataFrame, messages: list[int]) -> DataFrame:
    return frame.join(_numbers(frame, messages), "n", "left_anti") if messages else frame


def _only(frame: DataFrame, messages: list[int]) -> DataFrame:
    return frame.join(_numbers(frame, messages), "n", "left_semi")


def _again(frame: DataFrame, everything: DataFrame, messages: list[int]) -> DataFrame:
    return frame.unionByName(_only(everything, messages)) if messages else frame


def _later(least: int, scale: int) -> Column:
    """Return a moment some milliseconds after the publish; few wait long."""
    chance = F.pmod(F.xxhash64("n", F.lit(scale)), F.lit(10_000)) / 10_000
    return (F.col("micros") + least - F.log(1 - chance) * 1_000 * scale).cast("bigint")


def _time(micros: str | Column) -> Column:
    return F.timestamp_micros(micros)


def _marks(plan: Plan) -> list[tuple[str, str, int, int, int]]:
    return [
        (SOURCE, f"topic-{topic}", lane, 1, plan.last(topic, lane))
        for topic in range(plan.topics)
        for lane in range(plan.lanes)
        if plan.last(topic, lane) > 0
    ]
