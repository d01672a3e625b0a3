"""A history: all frames of `schemas`, as of one moment, in Parquet. Whatever the source, this is what the jobs read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.files import can_be_opened
from outbox.pipeline.spark.findings import Broken
from outbox.pipeline.spark.schemas import FRAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ABOUT = "history.json"
OF_MESSAGES = ("messages", "places", "broker", "inbox", "attempts")  # the frames whose rows are of a message


@dataclass(frozen=True)
class Mark:
    """A lane has given out the numbers first to last."""

    source: str
    topic: str
    lane: int
    first: int
    last: int


@dataclass(frozen=True)
class Recorded:
    """Of what was sent between these times, the recorder has written down all that the broker has. None: not sure yet."""

    began: datetime
    until: datetime | None


@dataclass(frozen=True)
class History:
    """
    Args:
        frames: name -> frame, columns as in `schemas`.
        sources: ids of the databases whose outbox this is; messages of others are not judged.
        as_of: when it was read, by the database's clock.
        recorded: topic -> how far the recorder had come by then.
        files: name -> the Parquet files of a frame, where workers can open them without Spark.
        first_id: what was published before it is left out; empty: nothing is.
        judged_since: from when on database and lake hold all that there was; None: always, or there is no lake in it.
        owed: (group, topic) -> what was sent before then is not known to have been meant for the group.
        broken: rows that could not be read as they stand in the database.
    """

    frames: Mapping[str, DataFrame]
    sources: frozenset[str]
    as_of: datetime
    recorded: Mapping[str, Recorded] = field(default_factory=dict)
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    first_id: str = ""
    judged_since: datetime | None = None
    owed: Mapping[tuple[str, str], datetime] = field(default_factory=dict)
    broken: Sequence[Broken] = ()

    def __getattr__(self, name: str) -> DataFrame:
        """Return a frame by its name."""
        try:
            return self.frames[name]
        except KeyError:
            raise AttributeError(name) from None

    def marks_list(self) -> list[Mark]:
        """Return all marks. Raises HistoryError where a lane has two."""
        found = [Mark(*row) for row in self.frames["marks"].select("source", "topic", "lane", "first", "last").collect()]
        lanes = {(mark.source, mark.topic, mark.lane) for mark in found}
        if len(lanes) != len(found):
            raise HistoryError("The history has two marks for one lane; it was put together of two. Read it again.")
        return found

    def since(self, first_id: str) -> History:
        """Leave out what was published before that id. Numbers stay: the marks say from which on they count."""
        frames = dict(self.frames)
        for name in OF_MESSAGES:
            frames[name] = frames[name].where(F.col("message_id") >= first_id)
        return replace(self, frames=frames, first_id=first_id)


def open_history(spark: SparkSession, folder: str) -> History:
    """
    Read a history in Parquet.

    Raises:
        HistoryError: a frame or a column is missing or of another type; the text names it. Or all of it is empty.
    """
    about = _read_about(spark, folder)
    frames = {}
    for name, schema in FRAMES.items():
        frame = _read_frame(spark, f"{folder}/{name}")
        found = {column.name: column.dataType for column in frame.schema}
        for column in schema:
            if column.name not in found:
                raise HistoryError(
                    f"The frame {name!r} in {folder} has no column {column.name!r}: it was written by another version. "
                    "Write the history again with this one."
                )
            if found[column.name] != column.dataType:
                raise HistoryError(
                    f"The column {column.name!r} of {name!r} in {folder} is {found[column.name].simpleString()}, not "
                    f"{column.dataType.simpleString()}. Write the history again with this version."
                )
        frames[name] = frame.select(*schema.names)
    recorded = {topic: Recorded(*map(_time, times)) for topic, times in about.get("recorded", {}).items()}
    files = {name: found for name, frame in frames.items() if can_be_opened(found := frame.inputFiles())}
    whose = frozenset(about["sources"]), datetime.fromisoformat(about["as_of"])
    owed = {(group, topic): datetime.fromisoformat(time) for group, topic, time in about.get("owed", [])}
    broken = [Broken(**{**one, "ids": tuple(one["ids"])}) for one in about.get("broken", [])]
    judged_since = _time(about.get("judged_since"))
    history = History(frames, *whose, recorded, files, judged_since=judged_since, owed=owed, broken=broken)
    _require_something(history, folder)
    return history


def _require_something(history: History, folder: str) -> None:
    """Raise HistoryError where nothing is left that could be judged: an answer would prove nothing."""
    if not all(history.frames[name].isEmpty() for name in ("places", "broker", "inbox", "messages")):
        return
    if history.frames["marks"].isEmpty():
        raise HistoryError(f"The history in {folder} is empty: no lane, message, or inbox row. Nothing was proved.")
    if history.frames["marks"].where("first <= last").isEmpty():
        raise HistoryError(
            f"Of the numbers that lanes have given out, the history in {folder} has no message, batch or inbox row. Either "
            "nothing was published for as long as messages are kept, or their rows are gone. Nothing was proved."
        )


def begin_history(spark: SparkSession, folder: str) -> None:
    """Take the end of an older history out of a folder: with frames of a newer one it would look whole."""
    _write_text(spark, folder, "")


def write_about(
    spark: SparkSession,
    folder: str,
    sources: Iterable[str],
    as_of: datetime,
    recorded: Mapping[str, Recorded] | None = None,
    *,
    judged_since: datetime | None = None,
    owed: Mapping[tuple[str, str], datetime] | None = None,
    broken: Iterable[Broken] = (),
) -> None:
    """Write beside the frames, last, whose they are and of when: without it there is no history."""
    times = {topic: [_text(one.began), _text(one.until)] for topic, one in (recorded or {}).items()}
    about = {
        "sources": sorted(sources),
        "as_of": _text(as_of),
        "recorded": times,
        "judged_since": _text(judged_since),
        "owed": [[*pair, _text(time)] for pair, time in (owed or {}).items()],
        "broken": [asdict(one) for one in broken],
    }
    _write_text(spark, folder, json.dumps(about))


def _write_text(spark: SparkSession, folder: str, text: str) -> None:
    spark.createDataFrame([(text,)], "value string").coalesce(1).write.mode("overwrite").text(f"{folder}/{ABOUT}")


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.astimezone(UTC).isoformat()


def _time(text: str | None) -> Any:
    return None if text is None else datetime.fromisoformat(text)


def _read_about(spark: SparkSession, folder: str) -> dict[str, Any]:
    try:
        lines = spark.read.text(f"{folder}/{ABOUT}").collect()
        found: dict[str, Any] = json.loads("\n".join(row.value for row in lines))
    except (PySparkException, ValueError) as error:
        raise HistoryError(
            f"There is no history in {folder}: {ABOUT} cannot be read. It is written last; was the writer stopped?"
        ) from error
    return found


def _read_frame(spark: SparkSession, path: str) -> DataFrame:
    try:
        return spark.read.parquet(path)
    except PySparkException as error:
        raise HistoryError(f"The frame {path} cannot be read: {str(error).splitlines()[0]}") from error
