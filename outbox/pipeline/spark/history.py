"""
A history: what all stages had at one moment, as frames in Parquet. Every source provides exactly these, and every job reads them.

    folder/business/  messages/  places/  broker/  inbox/  failed_deliveries/  marks/     columns as in FRAMES
    folder/history.json: sources, time, what is known of brokers; it is written last

Times are UTC.
"""

from __future__ import annotations

import json
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


# The place of a message at a stage. Lane and number are NULL for messages without a number, which wait or were sent half first.
NUMBERED = {"source": StringType, "topic": StringType, "lane": ShortType, "number": LongType, "message_id": StringType}

# Rows that must have a message. subject: name of the entry in settings; about: `shop.order:4711`.
BUSINESS = _schema(subject=StringType, about=StringType, at=TimestampType)

# Message rows, as written by publish.
MESSAGES = _schema(message_id=StringType, topic=StringType, key=StringType, type=StringType, about=StringType, at=TimestampType)

# The place of each message: a position in a batch, a ticket, a delayed row. state: as in outbox_message_state;
# at: when it entered that state, as far as that is stored.
PLACES = _schema(**NUMBERED, state=StringType, claimed_at=TimestampType, at=TimestampType)

# Messages that a broker has stored and made visible.
BROKER = _schema(**NUMBERED, key=StringType, queue=IntegerType, pos=LongType, at=TimestampType)

# Messages that groups have handled.
INBOX = _schema(consumer_group=StringType, **NUMBERED, delivery_count=IntegerType, at=TimestampType)

# Messages that a group has not handled, by state (outcome): waiting at the broker, deferred, dead, discarded. And the log of
# deliveries that failed or were dropped: retry, dead letter, duplicate.
FAILED_DELIVERIES = _schema(
    consumer_group=StringType, **NUMBERED, delivery_count=IntegerType, outcome=StringType, at=TimestampType
)

# The numbers that each lane has assigned, first to last.
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


# Spark's schemes -> pyarrow's.
SCHEMES = {"file": "file", "hdfs": "hdfs", "viewfs": "viewfs", "gs": "gs", "s3": "s3", "s3a": "s3", "s3n": "s3"}
SAFE = "/%!$&'()*+,;=:@"


@contextmanager
def opened(file: str) -> Iterator[Any]:
    """Open a file. Raises OSError or pyarrow.ArrowException."""
    address = urlsplit(file)  # Spark does not escape non-ASCII characters
    known = address._replace(scheme=SCHEMES.get(address.scheme, address.scheme), path=quote(address.path, safe=SAFE))
    filesystem, path = FileSystem.from_uri(known.geturl())
    with filesystem.open_input_file(path) as stream:
        yield stream


def can_be_opened(files: Sequence[str]) -> bool:
    """Return whether pyarrow supports the file system and can read there."""
    try:
        with opened(files[0]):
            return True
    except (OSError, pa.ArrowException, IndexError):
        return False


METADATA = "history.json"
ALWAYS = datetime(9999, 1, 1, tzinfo=UTC)
MESSAGE_FRAMES = ("messages", "places", "broker", "inbox", "failed_deliveries")  # the frames with one message per row


@dataclass(frozen=True)
class Mark:
    """The numbers that a lane has assigned, first to last."""

    source: str
    topic: str
    lane: int
    first: int
    last: int


@dataclass(frozen=True)
class Recorded:
    """
    Between which times sent messages are in the history if the broker has them.

    Args:
        until: None: not certain yet.
        why: why later ones are not; empty: the recorder has not read them yet.
    """

    began: datetime
    until: datetime | None
    why: str = ""


@dataclass(frozen=True)
class History:
    """
    Args:
        frames: name -> frame, columns as in `schemas`.
        sources: the source ids of the databases; messages of others are not audited.
        as_of: when it was read, by the database's clock.
        brokers_as_of: when the brokers were read that have no snapshot in common with the database; None: there are none.
        recorded: topic -> which messages of a broker it has, where it has not all.
        files: name -> the Parquet files of a frame, if workers can open them without Spark.
        first_id: messages with lower ids are left out; empty: none.
        judged_since: from when on database and lake are complete; None: always, or there is no lake in it.
        owed: (group, topic) -> messages sent before this time were maybe not meant for the group.
        broken: rows that could not be read.
    """

    frames: Mapping[str, DataFrame]
    sources: frozenset[str]
    as_of: datetime
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    brokers_as_of: datetime | None = None
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    first_id: str = ""
    judged_since: datetime | None = None
    owed: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    broken: Sequence[Breach] = ()

    def __getattr__(self, name: str) -> DataFrame:
        """Return the frame with this name."""
        try:
            return self.frames[name]
        except KeyError:
            raise AttributeError(name) from None

    def marks_list(self) -> list[Mark]:
        """Return all marks. Raises HistoryError if a lane has two."""
        marks = [Mark(*row) for row in self.frames["marks"].select("source", "topic", "lane", "first", "last").collect()]
        lanes = {(mark.source, mark.topic, mark.lane) for mark in marks}
        if len(lanes) != len(marks):
            raise HistoryError("The history has two marks for one lane, so it mixes two histories. Read it again.")
        return marks

    def since(self, first_id: str) -> History:
        """Return the history without messages of lower ids. Marks are unchanged."""
        frames = dict(self.frames)
        for name in MESSAGE_FRAMES:
            frames[name] = frames[name].where(F.col("message_id") >= first_id)
        return replace(self, frames=frames, first_id=first_id)


def open_history(spark: SparkSession, folder: str) -> History:
    """
    Return a history that is stored as Parquet.

    Raises:
        HistoryError: a frame or a column is missing or has another type, which the text names; or the history is empty.
    """
    metadata = _read_metadata(spark, folder)
    frames = {}
    for name, schema in FRAMES.items():
        try:
            frame = spark.read.parquet(f"{folder}/{name}")
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
        topic: Recorded(_time(began), _time(until), why) for topic, (began, until, why) in metadata.get("recorded", {}).items()
    }
    files = {name: paths for name, frame in frames.items() if can_be_opened(paths := frame.inputFiles())}
    history = History(
        frames,
        frozenset(metadata["sources"]),
        _time(metadata["as_of"]),
        recorded,
        brokers_as_of=_time(metadata.get("brokers_as_of")),
        files=files,
        judged_since=_time(metadata.get("judged_since")),
        owed={(group, topic): _time(time) for group, topic, time in metadata.get("owed", [])},
        broken=[broken_row(*row) for row in metadata.get("broken", [])],
    )
    _require_rows(history, folder)
    return history


def _require_rows(history: History, folder: str) -> None:
    """Raise HistoryError if the history has no messages: an audit of it would prove nothing."""
    if not all(history.frames[name].isEmpty() for name in ("places", "broker", "inbox", "messages")):
        return
    if history.frames["marks"].isEmpty():
        raise HistoryError(f"The history in {folder} is empty: no lane, message, or inbox row. Nothing was proved.")
    if history.frames["marks"].where("first <= last").isEmpty():
        raise HistoryError(
            f"The history in {folder} has no message, batch or inbox row of the numbers that lanes have assigned. Either no "
            "message was published during the retention, or their rows are lost. Nothing was proved."
        )


def invalidate_history(spark: SparkSession, folder: str) -> None:
    """
    Remove the metadata of an older history from a folder, so that a partly overwritten one cannot be read.

    Raises:
        HistoryError: an executor wrote to another folder of this name, on its own machine.
    """
    _write_text(spark, folder, "")
    if not spark.read.text(f"{folder}/{METADATA}").inputFiles():
        raise HistoryError(
            f"The executors' files in {folder} are not in that folder here. Use --history with a folder that all machines share."
        )


def write_metadata(
    spark: SparkSession,
    folder: str,
    sources: Iterable[str],
    as_of: datetime,
    recorded: Mapping[str, Recorded] | None = None,
    *,
    brokers_as_of: datetime | None = None,
    judged_since: datetime | None = None,
    owed: Mapping[tuple[str, str], datetime] | None = None,
    broken: Iterable[Breach] = (),
) -> None:
    """Write the metadata of a history, after its frames. Without it the folder is not a history."""
    times = {
        topic: [_text(recorded_topic.began), _text(recorded_topic.until), recorded_topic.why]
        for topic, recorded_topic in (recorded or {}).items()
    }
    metadata = {
        "sources": sorted(sources),
        "as_of": _text(as_of),
        "brokers_as_of": _text(brokers_as_of),
        "recorded": times,
        "judged_since": _text(judged_since),
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
        lines = spark.read.text(f"{folder}/{METADATA}").collect()
        metadata: dict[str, Any] = json.loads("\n".join(row.value for row in lines))
    except (PySparkException, ValueError) as error:
        raise HistoryError(
            f"There is no history in {folder}: {METADATA} cannot be read. It is written last; the writer may have been stopped."
        ) from error
    return metadata
