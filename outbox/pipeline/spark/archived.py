"""
Read database and lake together with Spark: each row once, also while days are being archived.

    database: days 3, 4      locked, so that the archiver deletes no day while they are read
    lake:     days 1, 2, 3   listed under that lock, so each day that is no longer in the database is here
    history:  days 1 and 2 of the lake, 3 of both with each row once, 4 of the database

The lake needs no snapshot, because its files never change.

Settings contain today's consumer groups, and do not say when each of them was added. So in archived days, a message
that a group has not handled is lost only if it was sent after the group handled its first message of the topic. Messages that a
group ignores are no exception, because they have inbox rows, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark import LakeError, records
from outbox.pipeline.spark.config import Archived, PipelineConfig, Source
from outbox.pipeline.spark.findings import NO_TOPIC
from outbox.pipeline.spark.history import FRAMES as OF_HISTORY
from outbox.pipeline.spark.history import LATEST_TIME, RecordedTimes, literally
from outbox.pipeline.spark.lake import (
    DUPLICATE,
    EPOCH,
    FAILED_DELIVERY,
    FRAMES,
    INBOX,
    MESSAGES,
    OPERATOR_ACT,
    RECORDED,
    Commit,
    Frame,
    Lake,
    Span,
    complete_since,
    require_own_lake,
)
from outbox.pipeline.spark.readers import read_files, read_rows, spark_schema, unreadable_file
from outbox.pipeline.spark.statements import exported_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The archiver commits a day to the lake before it deletes it from the database, and this lock prevents that deletion. So list the
# commits after locking: then each day that the database lacks is among them.
LOCK_DAYS = "LOCK TABLE outbox_message IN ACCESS SHARE MODE"


def read_lake(
    spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit] | None = None, unsettled: Iterable[str] = ()
) -> DataFrame:
    """
    Return the rows of a frame in all commits, each row once. Commits of older versions may lack the frame.

    Args:
        commits: the commits to read; None: all commits of the lake.
        unsettled: days that are not recorded as deleted from the database. Their inbox rows, and rows of other frames with a time
            column, may also be in the commit of a later day.

    Raises:
        LakeError: a committed file is missing or incomplete.
    """
    commits = lake.committed() if commits is None else commits
    for commit in commits:
        lake.require_files(commit, frame.name)
    commits_of_day = Counter(commit.day for commit in commits)
    repeated = {day for day, count in commits_of_day.items() if count > 1}
    if not frame.time:
        return _latest(spark, lake, frame, commits, repeated)
    rows = _read_frame(spark, lake, frame, commits)
    if not (shared := repeated | set(unsettled)):
        return rows
    is_old = F.col(frame.time) < F.lit(Span(date.fromisoformat(max(shared))).end).cast("timestamp")
    return rows.where(~is_old).unionAll(rows.where(is_old).dropDuplicates(list(frame.identity)))


def unsettled_days(commits: Iterable[Commit], deleted: Container[str]) -> set[str]:
    """Return the days in the lake that are not recorded as deleted from the database."""
    return {commit.day for commit in commits if commit.day not in deleted}


@contextmanager
def read_all(spark: SparkSession, source: Source, lake: Lake) -> Iterator[dict[str, DataFrame]]:
    """
    Return the rows of all frames in `lake.FRAMES`, from database and lake together, for use within the block.

    If a row is in both, the one in the database is returned. No day can be deleted from the database before the block ends.

    Raises:
        LakeError: a committed file is missing or incomplete; or, when the rows are read, it is damaged.
        HistoryError: the database cannot be reached.
    """
    with _naming_damaged_files(lake), exported_snapshot(source.url) as (connection, snapshot):
        connection.execute(LOCK_DAYS)
        commits = lake.committed()
        unsettled = unsettled_days(commits, records.deleted(connection))
        frames = {}
        for name, frame in FRAMES.items():
            database = read_rows(spark, source, frame, frame.query(None), snapshot)
            frames[name] = _with_lake_rows(database, read_lake(spark, lake, frame, commits, unsettled), frame, commits)
        yield frames


@contextmanager
def _naming_damaged_files(lake: Lake) -> Iterator[None]:
    """Turn an error of Spark about a damaged file of the lake into a LakeError that names the file."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        file = unreadable_file(error)
        if not file.startswith(str(lake.root.absolute())):
            raise
        raise LakeError(f"The file {file} is damaged. Restore it from a backup of the lake.") from error


def _latest(spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit], repeated: Container[str]) -> DataFrame:
    """Return each row once: if several commits contain it, from the one with the highest attempt."""
    parts = [_read_frame(spark, lake, frame, [commit for commit in commits if commit.day not in repeated])]
    repeated_parts = [
        _read_frame(spark, lake, frame, [commit]).withColumn("commit", F.lit(commit.attempt))
        for commit in commits
        if commit.day in repeated
    ]
    if repeated_parts:
        latest = Window.partitionBy(*frame.key).orderBy(F.desc("commit"))
        rows = reduce(DataFrame.unionAll, repeated_parts).withColumn("rank", F.row_number().over(latest))
        parts.append(rows.where("rank = 1").select(*spark_schema(frame).names))
    return reduce(DataFrame.unionAll, parts)


def _read_frame(spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit]) -> DataFrame:
    written_frames = [commit.frames[frame.name] for commit in commits if frame.name in commit.frames]
    paths = [str(lake.root / file) for written in written_frames for file in written.files]
    return read_files(spark, frame, paths) if paths else spark.createDataFrame([], spark_schema(frame))


def _with_lake_rows(database: DataFrame, lake: DataFrame, frame: Frame, commits: list[Commit]) -> DataFrame:
    """
    Add the rows that are only in the lake. Few rows in the database are old enough to be in both, so the anti-join is small.
    """
    if not commits:
        return database
    span = Span(date.fromisoformat(max(commit.day for commit in commits)))
    if frame.time:
        old = database.where(F.col(frame.time) < F.lit(span.end).cast("timestamp"))
    else:
        old = database.where(F.col("message_id") < span.end_id)
    return database.unionAll(lake.join(old.select(*frame.identity), list(frame.identity), "left_anti").select(*database.columns))


MESSAGE = ["topic", "message_id"]
POSITION = [*MESSAGE, "queue", "pos", "delivery_count"]


def drop_repeated_rows(rows: DataFrame) -> DataFrame:
    """
    Return one row for each position at the broker and delivery count.

    Takes and returns the columns of `lake.RECORDED`. A delivery is recorded again if its row was deleted from the table before an
    old message was redelivered, or before the broker's offset was set back. For a broker that does not report positions, all
    deliveries are kept.
    """
    has_position = F.col("pos").isNotNull()
    by_position = rows.where(has_position).dropDuplicates(POSITION)
    return by_position.unionAll(rows.where(~has_position).dropDuplicates(["id", "recorded_at"]))


def copies(rows: DataFrame) -> DataFrame:
    """
    Return one row for each copy of a message that the broker has stored.

    Each first delivery (delivery_count 1) is a copy. A later delivery may be the redelivery of a known copy. So if a message has
    n deliveries with the same count, and at most m deliveries with any one lower count, n - m of the n are further copies.

    Takes the result of `drop_repeated_rows`, and returns the same columns.
    """
    later = rows.where("delivery_count > 1")
    later_counts = (
        rows.join(later.select(*MESSAGE).distinct(), MESSAGE, "left_semi")
        .groupBy(*MESSAGE, "delivery_count")
        .agg(F.count("*").alias("n"))
    )
    earlier = Window.partitionBy(*MESSAGE).orderBy("delivery_count").rowsBetween(Window.unboundedPreceding, -1)
    explained = later_counts.select(*MESSAGE, "delivery_count", F.coalesce(F.max("n").over(earlier), F.lit(0)).alias("explained"))
    copy = F.row_number().over(Window.partitionBy(*MESSAGE, "delivery_count").orderBy("id", "recorded_at"))
    unexplained = later.withColumn("copy", copy).join(explained, [*MESSAGE, "delivery_count"]).where("copy > explained")
    return rows.where("delivery_count = 1").unionAll(unexplained.select(*rows.columns))


LANE = ["source", "topic", "lane"]


def owed_since(
    spark: SparkSession, config: PipelineConfig, folder: str, live_since: datetime
) -> Mapping[tuple[str, str], datetime]:
    """
    Return (group, topic) -> the time since which the group must have handled messages: its first inbox row, or `live_since` if
    that is earlier. Reads the frame `inbox` of a folder.
    """
    inbox = spark.read.parquet(literally(f"{folder}/inbox"))
    rows = inbox.groupBy("consumer_group", "topic").agg(F.unix_micros(F.min("at")).alias("at")).collect()
    first_handled = {(row.consumer_group, row.topic): EPOCH + timedelta(microseconds=row.at) for row in rows}
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    return {pair: min(live_since, first_handled.get(pair, live_since)) for pair in pairs}


def begin_marks(spark: SparkSession, folder: str, since: datetime, *, is_complete: bool) -> None:
    """
    Set the first number of each mark to the one after those that were claimed before `since`, as `statements.FIRST` does in SQL.

    Args:
        is_complete: whether all rows since the installation are there, so that a lane without claims before `since` begins with
            number 1. Otherwise, it begins with its lowest number that is left, or after its last number if none is.
    """
    places = spark.read.parquet(literally(f"{folder}/places")).where(F.col("number").isNotNull())
    before = F.max(F.when(F.col("claimed_at") < F.lit(since), F.col("number"))).alias("before")
    lanes = places.groupBy(*LANE).agg(before, F.min("number").alias("lowest")).collect()
    ends_before = {(row.source, row.topic, row.lane): (row.before, 0 if is_complete else row.lowest - 1) for row in lanes}
    marks = spark.read.parquet(literally(f"{folder}/marks")).collect()
    moved_marks = []
    for row in marks:
        lane = row.source, row.topic, row.lane
        before, fallback = ends_before.get(lane, (None, 0 if is_complete else row.last))
        moved_marks.append((*lane, 1 + (fallback if before is None else before), row.last))
    spark.createDataFrame(moved_marks, OF_HISTORY["marks"]).write.mode("overwrite").parquet(f"{folder}/marks")


MAX_BROADCAST_IDS = 500_000  # up to this number, the keys of a join are sent to each task, which is faster than a shuffle
AUDITED_FRAMES = (MESSAGES, INBOX, FAILED_DELIVERY, DUPLICATE, OPERATOR_ACT, RECORDED)

# frame of a history -> the columns by which a row of the lake is recognized in the database. Times are exact to the microsecond.
KEY_COLUMNS = {
    "messages": ["message_id"],
    "places": ["message_id"],
    "inbox": ["consumer_group", "message_id", "at"],
    "failed_deliveries": ["consumer_group", "message_id", "delivery_count", "outcome", "at"],
}


@dataclass(frozen=True)
class LakeSnapshot:
    """
    The commits of the lake, listed while no day could be deleted from the database.

    Args:
        unsettled: days that are not recorded as deleted from the database.
        is_complete: database and lake together have all rows since the installation.
        since: the time since which messages are audited; None: since the installation.
        recorded_since: the time since which the recorder's rows are complete; None: since the installation.
    """

    archived: Archived
    lake: Lake
    commits: list[Commit]
    unsettled: set[str]
    is_complete: bool
    since: datetime | None
    recorded_since: datetime | None

    @property
    def end(self) -> Span:
        """The last day in the lake."""
        return Span(date.fromisoformat(max(commit.day for commit in self.commits)))


def snapshot_lake(connection: Any, archived: Archived, since: datetime | None) -> LakeSnapshot:
    """
    Lock the days in the database until the connection's transaction ends, and list the commits of the lake.

    Args:
        since: do not audit messages from before this time; None: audit all that are complete.

    Raises:
        LakeError: the lake belongs to another database, it lacks a day or a file, or a manifest cannot be read.
    """
    connection.execute(LOCK_DAYS)
    lake = Lake(Path(archived.path))
    commits, deleted = lake.committed(), records.deleted(connection)
    require_own_lake(lake, commits, records.source(connection), records.committed(connection))
    for commit in commits:
        lake.require_files(commit, *(frame.name for frame in AUDITED_FRAMES))
    days = [*records.days(connection, date.max), *(date.fromisoformat(commit.day) for commit in commits)]

    if archived.live_since is None:  # nothing was ever pruned, so database and lake are complete since the installation
        return LakeSnapshot(archived, lake, commits, unsettled_days(commits, deleted), True, since, None)
    kept = timedelta(seconds=archived.kept_seconds)
    complete = partial(
        complete_since, commits, days, installed_at=archived.born, retention=kept, database_since=archived.live_since
    )
    complete_from, recorded_from = complete(), complete(frames=[RECORDED.name])
    begin = max((time for time in (complete_from, since) if time), default=None)
    return LakeSnapshot(archived, lake, commits, unsettled_days(commits, deleted), complete_from is None, begin, recorded_from)


def broker_spans(config: PipelineConfig, snapshot: LakeSnapshot, recorded: dict[str, RecordedTimes]) -> dict[str, RecordedTimes]:
    """
    Return topic -> the span of time for which database and lake have the messages at the broker.

    The recorder's rows are archived. The tables of the embedded broker are not, so its topics are known only for the time that
    the database alone covers.

    Args:
        recorded: the spans of recorded topics in the database.
    """
    live_since = snapshot.archived.live_since
    if live_since is None:
        return recorded
    not_archived = {topic: RecordedTimes(live_since, LATEST_TIME) for topic in config.seen_topics if topic not in config.recorded}
    since = snapshot.recorded_since
    return not_archived | {
        topic: replace(recorded_topic, began=max(recorded_topic.began, since)) if since else recorded_topic
        for topic, recorded_topic in recorded.items()
    }


def add_archived(
    spark: SparkSession, config: PipelineConfig, folder: str, snapshot: LakeSnapshot, log: Callable[[str], None]
) -> Mapping[tuple[str, str], datetime]:
    """
    Add the rows that are only in the lake to the frames of a history in a folder.

    Returns:
        (group, topic) -> the time since which the group must have handled messages; empty: since the installation.

    Raises:
        LakeError: a file of the lake cannot be read.
    """
    try:
        _add_rows(spark, config, folder, snapshot, log)
        if snapshot.since:
            begin_marks(spark, folder, snapshot.since, is_complete=snapshot.is_complete)
        live = snapshot.archived.live_since
        if live is None:
            return {}
        return owed_since(spark, config, folder, live)
    except LakeError:
        raise
    except Exception as error:  # errors of tasks are of PySpark, py4j or pyarrow
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
        in_database = spark.read.parquet(literally(f"{folder}/{RECORDED.name}"))
        recorded = in_database.unionAll(rows_of(RECORDED)).where(F.col("topic").isin(*config.recorded))
        columns = {"queue": F.hash("queue"), "pos": F.coalesce("pos", F.lit(0)), "at": F.coalesce("stored_at", "recorded_at")}
        _append(copies(drop_repeated_rows(recorded)).withColumns(columns), folder, "broker")
    if not snapshot.commits:
        return
    messages = rows_of(MESSAGES)
    discarded = _discarded(rows_of(OPERATOR_ACT), rows_of(INBOX))
    failed = _failed(rows_of(FAILED_DELIVERY)).unionAll(discarded).unionAll(_duplicates(rows_of(DUPLICATE)))
    archived = {
        "messages": _messages(messages),
        "places": _places(messages),
        "inbox": rows_of(INBOX).withColumnRenamed("handled_at", "at"),
        "failed_deliveries": failed,
    }
    for name, rows in archived.items():
        log(f"adding {name} of {len(snapshot.commits)} archived days")
        _append(_only_in_lake(spark, folder, name, rows, snapshot.end), folder, name)


def _append(rows: DataFrame, folder: str, name: str) -> None:
    typed = [F.col(column.name).cast(column.dataType) for column in OF_HISTORY[name]]
    rows.select(*typed).write.mode("append").parquet(f"{folder}/{name}")


def _only_in_lake(spark: SparkSession, folder: str, name: str, rows: DataFrame, end: Span) -> DataFrame:
    """Return the rows of the lake that the database does not have. Few rows in the database are old enough to be in both."""
    keys = KEY_COLUMNS[name]
    is_old = F.col("at") < F.lit(end.end).cast("timestamp") if "at" in keys else F.col("message_id") < end.end_id
    in_database = spark.read.parquet(literally(f"{folder}/{name}")).where(is_old).select(*keys).distinct()
    count = in_database.count()
    if not count:
        return rows
    return rows.join(F.broadcast(in_database) if count <= MAX_BROADCAST_IDS else in_database, keys, "left_anti")


def _messages(rows: DataFrame) -> DataFrame:
    """Return message rows without tombstones."""
    kind = F.get_json_object("headers", "$.ce-type").alias("type")
    columns = ("message_id", _topic(), "key", kind, "about", F.col("created_at").alias("at"))
    return rows.where("state <> 'tombstone'").select(*columns)


def _topic() -> Column:
    """Return the column `topic`, with a placeholder if the row of the topic was missing when the message was archived."""
    return F.when(F.col("topic") == "", F.lit(f"{NO_TOPIC}?")).otherwise(F.col("topic")).alias("topic")


def _places(rows: DataFrame) -> DataFrame:
    """Return rows of the frame `places`, as `statements.PLACES` does; a lost message has no place."""
    state = F.when(F.col("state") == "retrying", "released").otherwise(F.col("state")).alias("state")
    waiting_since = F.when(F.col("state") == "waiting", F.col("created_at"))
    at = F.coalesce("sent_at", "decided_at", "claimed_at", waiting_since).alias("at")
    place = ("source", _topic(), "lane", "number", "message_id", state, "claimed_at", at)
    return rows.where(~F.col("state").isin("tombstone", "lost")).select(*place)


def _failed(rows: DataFrame) -> DataFrame:
    return rows.withColumn("at", F.col("failed_at")).select(*OF_HISTORY["failed_deliveries"].names)


def _discarded(acts: DataFrame, inbox: DataFrame) -> DataFrame:
    """Return the messages that operators discarded, with the numbers of their inbox rows."""
    outcome, at = F.col("act").alias("outcome"), F.col("acted_at").alias("at")
    discarded = acts.where("act = 'discarded' AND consumer_group <> ''").select("consumer_group", "message_id", outcome, at)
    rows = inbox.where("delivery_count = 0").drop("handled_at", "idempotency_key")
    return rows.join(discarded, ["consumer_group", "message_id"]).select(*OF_HISTORY["failed_deliveries"].names)


def _duplicates(rows: DataFrame) -> DataFrame:
    nothing: dict[str, Column] = {name: F.lit(None) for name in ("lane", "number")}
    more = {"source": F.lit(""), "outcome": F.lit("duplicate"), "at": F.col("dropped_at"), **nothing}
    return rows.withColumns(more).select(*OF_HISTORY["failed_deliveries"].names)
