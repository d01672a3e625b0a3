"""
Add archived rows to a history.

No day can leave the database while it is read; so everything that it no longer has is committed in the lake. The lake is read
afterwards, without a snapshot, because its committed files never change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.archive import records
from outbox.pipeline.spark.config import Archived, PipelineConfig
from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.history import ALWAYS, Recorded
from outbox.pipeline.spark.lake.commit import Commit
from outbox.pipeline.spark.lake.completeness import complete_since, require_own_lake
from outbox.pipeline.spark.lake.frames import DUPLICATE, FAILED_DELIVERY, INBOX, MESSAGES, OPERATOR_ACT, RECORDED, Frame, Span
from outbox.pipeline.spark.lake.manifest import Lake
from outbox.pipeline.spark.lake.read import HOLD_DAYS, read_lake, unsettled_days
from outbox.pipeline.spark.schemas import FRAMES
from outbox.pipeline.spark.sources.broken_rows import NO_TOPIC
from outbox.pipeline.spark.sources.copies import copies, once
from outbox.pipeline.spark.sources.owed import begin_marks, owed_from

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEW = 500_000  # the maximum number of ids to broadcast to tasks
NEEDED = (MESSAGES, INBOX, FAILED_DELIVERY, DUPLICATE, OPERATOR_ACT, RECORDED)

# The columns that identify rows that the database still has. Times are exact to the microsecond.
KEYS = {
    "messages": ["message_id"],
    "places": ["message_id"],
    "inbox": ["consumer_group", "message_id", "at"],
    "failed_deliveries": ["consumer_group", "message_id", "delivery_count", "outcome", "at"],
}


@dataclass(frozen=True)
class LakeSnapshot:
    """
    The commits of the lake while no day could leave the database.

    Args:
        unsettled: days that the database may still have.
        is_whole: database and lake are complete from the beginning.
        since: from when on they are audited; None: from the beginning.
        recorded_since: from when on the recorder's rows are complete; None: always.
    """

    archived: Archived
    lake: Lake
    commits: list[Commit]
    unsettled: set[str]
    is_whole: bool
    since: datetime | None
    recorded_since: datetime | None

    @property
    def end(self) -> Span:
        """The last day in the lake."""
        return Span(date.fromisoformat(max(commit.day for commit in self.commits)))


def snapshot_lake(connection: Any, archived: Archived, since: datetime | None) -> LakeSnapshot:
    """
    Lock the days in the database until this transaction ends, and list the commits of the lake.

    Args:
        since: do not audit earlier messages.

    Raises:
        LakeError: the lake belongs to another database, it lacks a day or a file, or a manifest cannot be read.
    """
    connection.execute(HOLD_DAYS)
    lake = Lake(Path(archived.path))
    commits, deleted = lake.committed(), records.deleted(connection)
    require_own_lake(lake, commits, records.source(connection), records.committed(connection))
    for commit in commits:
        lake.require_files(commit, *(frame.name for frame in NEEDED))
    days = [*records.days(connection, date.max), *(date.fromisoformat(commit.day) for commit in commits)]

    if archived.live_since is None:  # nothing was ever pruned
        return LakeSnapshot(archived, lake, commits, unsettled_days(commits, deleted), True, since, None)
    kept = timedelta(seconds=archived.kept_seconds)
    complete = partial(complete_since, commits, days, born=archived.born, kept=kept, without=archived.live_since)
    whole, recorded = complete(), complete(frames=[RECORDED.name])
    begin = max((time for time in (whole, since) if time), default=None)
    return LakeSnapshot(archived, lake, commits, unsettled_days(commits, deleted), whole is None, begin, recorded)


def known_at_the_broker(config: PipelineConfig, snapshot: LakeSnapshot, recorded: dict[str, Recorded]) -> dict[str, Recorded]:
    """Return from when on it is known what brokers have: their own tables are not archived, the recorder's are."""
    live = snapshot.archived.live_since
    if live is None:
        return recorded
    own = {topic: Recorded(live, ALWAYS) for topic in config.seen_topics if topic not in config.recorded}
    since = snapshot.recorded_since
    return own | {topic: replace(one, began=max(one.began, since)) if since else one for topic, one in recorded.items()}


def add_archived(
    spark: SparkSession, config: PipelineConfig, folder: str, snapshot: LakeSnapshot, log: Callable[[str], None]
) -> Mapping[tuple[str, str], datetime]:
    """
    Add the rows that are only in the lake to the frames in a folder.

    Returns:
        (group, topic) -> from when on the group must have handled sent messages; empty: from the beginning.

    Raises:
        LakeError: a file of the lake cannot be read.
    """
    try:
        _add_rows(spark, config, folder, snapshot, log)
        if snapshot.since:
            begin_marks(spark, folder, snapshot.since, is_whole=snapshot.is_whole)
        live = snapshot.archived.live_since
        if live is None:
            return {}
        return owed_from(spark, config, folder, live)
    except LakeError:
        raise
    except Exception as error:  # tasks raise errors of PySpark, py4j or pyarrow
        lines = [type(error).__name__, *str(error).strip().splitlines()]
        reason = next((line for line in lines if "reading file" in line or line.startswith(": ")), lines[-1])
        raise LakeError(f"The lake in {snapshot.lake.root} cannot be read: {reason.strip(': ')}") from error


def _add_rows(
    spark: SparkSession, config: PipelineConfig, folder: str, snapshot: LakeSnapshot, log: Callable[[str], None]
) -> None:
    def rows_of(frame: Frame) -> DataFrame:
        return read_lake(spark, snapshot.lake, frame, snapshot.commits, snapshot.unsettled)

    if config.recorded:
        log("adding recorded messages")
        there = spark.read.parquet(f"{folder}/{RECORDED.name}")
        seen = there.unionAll(rows_of(RECORDED)).where(F.col("topic").isin(*config.recorded))
        _append(_broker(once(seen)), folder, "broker")
    if not snapshot.commits:
        return
    messages = rows_of(MESSAGES)
    discarded = _discarded(rows_of(OPERATOR_ACT), rows_of(INBOX))
    failed = _failed(rows_of(FAILED_DELIVERY)).unionAll(discarded).unionAll(_duplicates(rows_of(DUPLICATE)))
    found = {
        "messages": _messages(messages),
        "places": _places(messages),
        "inbox": _inbox(rows_of(INBOX)),
        "failed_deliveries": failed,
    }
    for name, rows in found.items():
        log(f"adding {name} of {len(snapshot.commits)} archived days")
        _append(_but_those_there(spark, folder, name, rows, snapshot.end), folder, name)


def _append(rows: DataFrame, folder: str, name: str) -> None:
    extra = [column for column in rows.columns if column not in FRAMES[name].names]
    typed = [F.col(column.name).cast(column.dataType) for column in FRAMES[name]]
    rows.select(*typed, *extra).write.mode("append").parquet(f"{folder}/{name}")


def _but_those_there(spark: SparkSession, folder: str, name: str, rows: DataFrame, end: Span) -> DataFrame:
    """Leave out rows that the database has. Few of them are old enough to be in the lake."""
    keys = KEYS[name]
    is_old = F.col("at") < F.lit(end.end).cast("timestamp") if "at" in keys else F.col("message_id") < end.end_id
    there = spark.read.parquet(f"{folder}/{name}").where(is_old).select(*keys).distinct()
    many = there.count()
    if not many:
        return rows
    return rows.join(F.broadcast(there) if many <= FEW else there, keys, "left_anti")


def _messages(rows: DataFrame) -> DataFrame:
    """Return message rows without tombstones."""
    kind = F.get_json_object("headers", "$.ce-type").alias("type")
    columns = ("message_id", _topic(), "key", kind, "about", F.col("created_at").alias("at"))
    return rows.where("state <> 'tombstone'").select(*columns)


def _topic() -> Column:
    """Return the topic, or a placeholder if the message had none when it was archived."""
    return F.when(F.col("topic") == "", F.lit(f"{NO_TOPIC}?")).otherwise(F.col("topic")).alias("topic")


def _places(rows: DataFrame) -> DataFrame:
    """Return the places of messages, as `statements.PLACES` does; a lost message has none."""
    state = F.when(F.col("state") == "retrying", "released").otherwise(F.col("state")).alias("state")
    waited = F.when(F.col("state") == "waiting", F.col("created_at"))
    at = F.coalesce("sent_at", "decided_at", "claimed_at", waited).alias("at")
    place = ("source", _topic(), "lane", "number", "message_id", state, "claimed_at", at)
    return rows.where(~F.col("state").isin("tombstone", "lost")).select(*place)


def _inbox(rows: DataFrame) -> DataFrame:
    return rows.withColumn("at", F.col("handled_at")).select(*FRAMES["inbox"].names)


def _failed(rows: DataFrame) -> DataFrame:
    return rows.withColumn("at", F.col("failed_at")).select(*FRAMES["failed_deliveries"].names)


def _discarded(acts: DataFrame, inbox: DataFrame) -> DataFrame:
    """Return the messages that operators discarded, with the numbers of their inbox rows."""
    outcome, at = F.col("act").alias("outcome"), F.col("acted_at").alias("at")
    discarded = acts.where("act = 'discarded' AND consumer_group <> ''").select("consumer_group", "message_id", outcome, at)
    rows = inbox.where("delivery_count = 0").drop("handled_at", "idempotency_key")
    return rows.join(discarded, ["consumer_group", "message_id"]).select(*FRAMES["failed_deliveries"].names)


def _duplicates(rows: DataFrame) -> DataFrame:
    nothing: dict[str, Column] = {name: F.lit(None) for name in ("lane", "number")}
    more = {"source": F.lit(""), "outcome": F.lit("duplicate"), "at": F.col("dropped_at"), **nothing}
    return rows.withColumns(more).select(*FRAMES["failed_deliveries"].names)


def _broker(rows: DataFrame) -> DataFrame:
    place = {"queue": F.hash("queue"), "pos": F.coalesce("pos", F.lit(0)), "at": F.coalesce("stored_at", "recorded_at")}
    return copies(rows).withColumns(place).select(*FRAMES["broker"].names)
