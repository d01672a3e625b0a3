"""
A history: a copy of business rows, outbox, broker and inbox at one moment. A frame is a table of it, in Parquet.

    folder/business/  messages/  places/  broker/  inbox/  failed_deliveries/  marks/     columns as in FRAMES
    folder/history.json: sources, time, the spans of time for which brokers are known; it is written last

Whatever a history is copied from, it has these frames, and each job reads only them. The place of a message in the outbox, which
is in the frame `places`, is a position in a batch, a ticket or a delayed row. Times are UTC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
from pyarrow.fs import FileSystem
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, ShortType, StringType, StructField, StructType, TimestampType

from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.findings import Breach, broken_row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _schema(**columns: type) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in columns.items()])


# The columns that identify a message. Lane and number are NULL if it has no number, because it waits or was sent half first.
MESSAGE_COLUMNS = {"source": StringType, "topic": StringType, "lane": ShortType, "number": LongType, "message_id": StringType}

# Business rows that must have a message. subject: the name of the entry in settings; about: the row, as `shop.order:4711`.
BUSINESS = _schema(subject=StringType, about=StringType, at=TimestampType)

# Message rows, as `publish` has written them.
MESSAGES = _schema(message_id=StringType, topic=StringType, key=StringType, type=StringType, about=StringType, at=TimestampType)

# The place of each message in the outbox: a position in a batch, a ticket (no relay has claimed the message yet) or a delayed row
# (it is not due yet). state: as in the view outbox_message_state; at: when the message entered that state, if that is stored.
PLACES = _schema(**MESSAGE_COLUMNS, state=StringType, claimed_at=TimestampType, at=TimestampType)

# Messages that a broker has stored and made visible.
BROKER = _schema(**MESSAGE_COLUMNS, key=StringType, queue=IntegerType, pos=LongType, at=TimestampType)

# Messages that groups have handled.
INBOX = _schema(consumer_group=StringType, **MESSAGE_COLUMNS, delivery_count=IntegerType, at=TimestampType)

# Two kinds of rows. Messages that a group has not handled, with their state as outcome: waiting (at the broker), deferred, dead,
# discarded. And log entries about deliveries that failed or were dropped, with the outcome retry, dead letter or duplicate.
FAILED_DELIVERIES = _schema(
    consumer_group=StringType, **MESSAGE_COLUMNS, delivery_count=IntegerType, outcome=StringType, at=TimestampType
)

# The marks of lanes: the first and the last number that each lane has assigned.
MARKS = _schema(source=StringType, topic=StringType, lane=ShortType, first=LongType, last=LongType)

FRAMES: dict[str, StructType] = {
    "business": BUSINESS,
    "messages": MESSAGES,
    "places": PLACES,
    "broker": BROKER,
    "inbox": INBOX,
    "failed_deliveries": FAILED_DELIVERIES,
    "marks": MARKS,
}


# scheme of Spark -> scheme of pyarrow
SCHEMES = {"file": "file", "hdfs": "hdfs", "viewfs": "viewfs", "gs": "gs", "s3": "s3", "s3a": "s3", "s3n": "s3"}
SAFE = "/%!$&'()*+,;=:@"  # the characters of a path that are not escaped in a URL


@contextmanager
def open_file(file: str) -> Iterator[Any]:
    """Open a file of a history for reading, by its URL from Spark. Raises OSError or pyarrow.ArrowException."""
    address = urlsplit(file)  # Spark does not escape non-ASCII characters
    address = address._replace(scheme=SCHEMES.get(address.scheme, address.scheme), path=quote(address.path, safe=SAFE))
    filesystem, path = FileSystem.from_uri(address.geturl())
    with filesystem.open_input_file(path) as stream:
        yield stream


def literally(path: str) -> str:
    """Return a path to read for Spark, which would take some characters for a pattern. It takes a path to write as it is."""
    return re.sub(r"[]{}*?[\\]", r"\\\g<0>", path)


def can_open_without_spark(files: Sequence[str]) -> bool:
    """Return whether pyarrow can open the first of these files, so that workers can read them without Spark."""
    try:
        with open_file(files[0]):
            return True
    except (OSError, pa.ArrowException, IndexError):
        return False


METADATA = "history.json"
LATEST_TIME = datetime(9999, 1, 1, tzinfo=UTC)  # later than all times in a history
MESSAGE_FRAMES = ("messages", "places", "broker", "inbox", "failed_deliveries")  # the frames with one message per row


@dataclass(frozen=True)
class Mark:
    """The first and the last number that a lane has assigned."""

    source: str
    topic: str
    lane: int
    first: int
    last: int


@dataclass(frozen=True)
class RecordedTimes:
    """
    A span of time of a topic: each message that was sent in it, and that the broker has, is in the history.

    Args:
        began: the start of the span.
        until: the end of the span; None: it is not certain yet, so the span is empty.
        why: why later messages are not in the history; empty: because the recorder has not read them yet.
    """

    began: datetime
    until: datetime | None
    why: str = ""


@dataclass(frozen=True)
class History:
    """
    Args:
        frames: name -> frame, with the columns in `FRAMES`.
        sources: the source ids of the audited databases; messages of other databases are not audited.
        as_of: when the database was read, by its clock.
        recorded: topic -> the span of time for which the history has the broker's messages; missing: it has all of them.
        brokers_as_of: when Kafka was read, which has no snapshot in common with the database; None: it was not read.
        files: name of a frame -> its Parquet files, if workers can open them without Spark.
        first_id: messages with lower ids are left out; empty: none is.
        audited_since: in a history with archived days, the time since which it is audited; None: since the installation, or there
            are no archived days.
        owed: (group, topic) -> the group need not have handled messages that were sent before this time.
        broken: findings about rows that no release of the outbox writes.
    """

    frames: Mapping[str, DataFrame]
    sources: frozenset[str]
    as_of: datetime
    recorded: Mapping[str, RecordedTimes] = field(default_factory=dict)
    brokers_as_of: datetime | None = None
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    first_id: str = ""
    audited_since: datetime | None = None
    owed: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    broken: Sequence[Breach] = ()

    def __getattr__(self, name: str) -> DataFrame:
        """Return the frame with this name."""
        try:
            return self.frames[name]
        except KeyError:
            raise AttributeError(name) from None

    def read_marks(self) -> list[Mark]:
        """Return the marks of all lanes. Raises HistoryError if a lane has two."""
        marks = [Mark(*row) for row in self.frames["marks"].select("source", "topic", "lane", "first", "last").collect()]
        lanes = {(mark.source, mark.topic, mark.lane) for mark in marks}
        if len(lanes) != len(marks):
            raise HistoryError("The history has two marks for one lane, so it mixes two histories. Read it again.")
        return marks

    def since(self, first_id: str) -> History:
        """Return the history without messages with lower ids. Business rows and marks are unchanged."""
        frames = dict(self.frames)
        for name in MESSAGE_FRAMES:
            frames[name] = frames[name].where(F.col("message_id") >= first_id)
        return replace(self, frames=frames, first_id=first_id)


def open_history(spark: SparkSession, folder: str) -> History:
    """
    Return the history that is stored in a folder.

    Raises:
        HistoryError: a frame or a column is missing or has another type; or the history is empty. The text names it.
    """
    metadata = _read_metadata(spark, folder)
    frames = {}
    for name, schema in FRAMES.items():
        try:
            frame = spark.read.parquet(literally(f"{folder}/{name}"))
        except PySparkException as error:
            raise HistoryError(f"The frame {folder}/{name} cannot be read: {str(error).splitlines()[0]}") from error
        types = {column.name: column.dataType for column in frame.schema}
        for column in schema:
            if column.name not in types:
                raise HistoryError(
                    f"The frame {name!r} in {folder} has no column {column.name!r}: it was written by another version. "
                    "Write the history again with this one."
                )
            if types[column.name] != column.dataType:
                raise HistoryError(
                    f"The column {column.name!r} of {name!r} in {folder} is {types[column.name].simpleString()}, not "
                    f"{column.dataType.simpleString()}. Write the history again with this version."
                )
        frames[name] = frame.select(*schema.names)
    recorded = {
        topic: RecordedTimes(_time(began), _time(until), why)
        for topic, (began, until, why) in metadata.get("recorded", {}).items()
    }
    files = {name: paths for name, frame in frames.items() if can_open_without_spark(paths := frame.inputFiles())}
    history = History(
        frames,
        frozenset(metadata["sources"]),
        _time(metadata["as_of"]),
        recorded,
        brokers_as_of=_time(metadata.get("brokers_as_of")),
        files=files,
        audited_since=_time(metadata.get("judged_since")),
        owed={(group, topic): _time(time) for group, topic, time in metadata.get("owed", [])},
        broken=[broken_row(*row) for row in metadata.get("broken", [])],
    )
    _require_rows(history, folder)
    return history


def _require_rows(history: History, folder: str) -> None:
    """Raise HistoryError if the history has no messages, because an audit of it would prove nothing."""
    if not all(history.frames[name].isEmpty() for name in ("places", "broker", "inbox", "messages")):
        return
    if history.frames["marks"].isEmpty():
        raise HistoryError(f"The history in {folder} is empty: it has no lane, message or inbox row. Nothing was proved.")
    if history.frames["marks"].where("first <= last").isEmpty():
        raise HistoryError(
            f"The history in {folder} has no message, batch or inbox row of the numbers that lanes have assigned. Either no "
            "message was published during the retention, or their rows are lost. Nothing was proved."
        )


def invalidate_history(spark: SparkSession, folder: str) -> None:
    """
    Overwrite the metadata of an older history with an empty text, so that a history cannot be opened while it is overwritten.

    Raises:
        HistoryError: the folder is not shared: an executor wrote to a folder of this name on another machine.
    """
    _write_text(spark, folder, "")
    if not spark.read.text(literally(f"{folder}/{METADATA}")).inputFiles():
        raise HistoryError(
            f"The executors' files in {folder} are not in that folder here. Use --history with a folder that all machines share."
        )


def write_metadata(
    spark: SparkSession,
    folder: str,
    sources: Iterable[str],
    as_of: datetime,
    recorded: Mapping[str, RecordedTimes] | None = None,
    *,
    brokers_as_of: datetime | None = None,
    audited_since: datetime | None = None,
    owed: Mapping[tuple[str, str], datetime] | None = None,
    broken: Iterable[Breach] = (),
) -> None:
    """Write the metadata of a history. Call it after all frames are written: a folder without metadata is not a history."""
    times = {
        topic: [_text(recorded_topic.began), _text(recorded_topic.until), recorded_topic.why]
        for topic, recorded_topic in (recorded or {}).items()
    }
    metadata = {
        "sources": sorted(sources),
        "as_of": _text(as_of),
        "brokers_as_of": _text(brokers_as_of),
        "recorded": times,
        "judged_since": _text(audited_since),
        "owed": [[*pair, _text(time)] for pair, time in (owed or {}).items()],
        "broken": [[row.stage, row.topic, row.detail, row.count, row.ids] for row in broken],
    }
    _write_text(spark, folder, json.dumps(metadata))


def _write_text(spark: SparkSession, folder: str, text: str) -> None:
    spark.createDataFrame([(text,)], "value string").coalesce(1).write.mode("overwrite").text(f"{folder}/{METADATA}")


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat()


def _time(text: str | None) -> Any:
    return None if text is None else datetime.fromisoformat(text)


def _read_metadata(spark: SparkSession, folder: str) -> dict[str, Any]:
    try:
        lines = spark.read.text(literally(f"{folder}/{METADATA}")).collect()
        metadata: dict[str, Any] = json.loads("\n".join(row.value for row in lines))
    except (PySparkException, ValueError) as error:
        raise HistoryError(
            f"There is no history in {folder}: {METADATA} cannot be read. It is written last; the writer may have been stopped."
        ) from error
    return metadata
