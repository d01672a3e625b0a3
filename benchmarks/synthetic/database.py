"""A synthetic history in the tables of an empty, migrated database: outbox, lanes, embedded broker, inbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks.synthetic.frames import make_frames
from benchmarks.synthetic.plan import FAULTS, SOURCE, Plan, draw
from benchmarks.synthetic.write import config_of, truth_of
from outbox.ids import topic_number
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.findings import FindingKind, Stage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Tables cannot tell these: there is no model of business rows, and the embedded broker drops what comes twice.
HERE = [fault for fault in FAULTS if fault not in ((FindingKind.LOST, Stage.BUSINESS), (FindingKind.DUPLICATED, Stage.BROKER))]

PER_BATCH = 500

EMPTY = ("outbox_message", "outbox_ticket", "outbox_batch", "outbox_lane", "outbox_inbox", "outbox_embedded_message")
HAS_ROWS = "SELECT EXISTS (SELECT FROM {table})"

# The database takes the name of the made-up one; nothing in it has used its own.
TAKE_NAME = "UPDATE outbox_source SET id = %s"
TOPIC = "INSERT INTO outbox_topic (id, name, type) VALUES (%s, %s, 'normal') ON CONFLICT DO NOTHING"
BROKER_TOPIC = "INSERT INTO outbox_embedded_topic (id, name, type, queues) VALUES (%s, %s, 'normal', 4) ON CONFLICT DO NOTHING"
LANE = "INSERT INTO outbox_lane (topic_id, lane, last_seq) SELECT id, %s, %s FROM outbox_topic WHERE name = %s"

# The broker goes on behind what was written.
LAST_POSITIONS = """
INSERT INTO outbox_embedded_queue (topic_id, queue, last_pos)
SELECT topic_id, queue, max(pos) FROM outbox_embedded_message GROUP BY topic_id, queue
ON CONFLICT (topic_id, queue) DO UPDATE SET last_pos = excluded.last_pos
"""

COPY = "COPY {table} ({columns}) FROM STDIN"
MESSAGE = ("id", "topic_id", "key", "headers", "about", "body", "created_at")
BATCH = ("topic_id", "lane", "first_seq", "message_ids", "state", "claimed_at", "sent_at")
STORED = ("topic_id", "queue", "pos", "message_id", "source", "key", "tag", "headers", "body", "stored_at")
INBOX = ("consumer_group", "idempotency_key", "message_id", "source", "topic", "lane", "number", "delivery_count", "handled_at")

SENT = 3  # outbox.models.State


def write_database(spark: SparkSession, plan: Plan, url: str) -> dict[str, Any]:
    """
    Fill the tables; give the truth, as `write_history` does.

    Raises:
        PipelineError: the database cannot be reached, has no tables of the outbox, or has rows in them.
    """
    truth = draw(plan, HERE)
    topics = [f"topic-{topic}" for topic in range(plan.topics)]
    frames = make_frames(spark, plan, truth)
    try:
        with psycopg.connect(url, autocommit=True, application_name="outbox synthetic") as connection:
            _require_empty(connection)
            ids = _make_topics(connection, topics)
            _copy(url, "outbox_message", MESSAGE, _messages(frames["messages"], ids))
            _copy_batches(url, frames["places"], ids)
            _copy(url, "outbox_embedded_message", STORED, _stored(frames["broker"], ids))
            _copy(url, "outbox_inbox", INBOX, _handled(frames["inbox"]))
            for _, topic, lane, _, last in frames["marks"].collect():
                connection.execute(LANE, [lane, last, topic])
            connection.execute(LAST_POSITIONS)
            connection.execute("ANALYZE")
    except psycopg.Error as error:
        raise PipelineError(f"The database cannot be filled: {str(error).strip()}") from error
    return truth_of(plan, truth, _config(plan, url), without_message=[])


def _config(plan: Plan, url: str) -> PipelineConfig:
    made = config_of(plan, url)
    source = Source(url, reader="python")
    return PipelineConfig(source, brokers=[source], groups=made.groups, seen_topics=made.seen_topics)


def _require_empty(connection: psycopg.Connection[Any]) -> None:
    for table in EMPTY:
        try:
            row = connection.execute(HAS_ROWS.format(table=table)).fetchone()
        except errors.UndefinedTable as error:
            raise PipelineError(f"There is no table {table}: run manage.py migrate on that database first.") from error
        if row != (False,):
            raise PipelineError(f"The table {table} has rows. Name a database that is migrated and empty: nothing was written.")


def _make_topics(connection: psycopg.Connection[Any], topics: list[str]) -> Column:
    """Return the ids of a column `topic`, in the outbox and at the broker."""
    connection.execute(TAKE_NAME, [SOURCE])
    ids = {topic: topic_number(topic) for topic in topics}
    for topic, number in ids.items():
        for statement in (TOPIC, BROKER_TOPIC):
            connection.execute(statement, [number, topic])
    return F.element_at(F.create_map(*(F.lit(value) for row in ids.items() for value in row)), F.col("topic"))


def _messages(frame: DataFrame, topic_id: Column) -> DataFrame:
    headers = F.to_json(F.struct(F.col("type").alias("ce-type")))
    return frame.select("message_id", topic_id, "key", headers, "about", F.lit("{}"), _text("at"))


def _stored(frame: DataFrame, topic_id: Column) -> DataFrame:
    number = F.struct(F.col("lane").cast("string").alias("ce-lane"), F.col("number").cast("string").alias("ce-number"))
    columns = ("queue", "pos", "message_id", "source", "key")
    return frame.select(topic_id, *columns, F.lit(""), F.to_json(number), F.lit("{}"), _text("at"))


def _handled(frame: DataFrame) -> DataFrame:
    """Set an idempotency key of its own for each row, or the inbox would reject a second copy."""
    columns = ("message_id", "source", "topic", "lane", "number", "delivery_count")
    return frame.select("consumer_group", F.expr("uuid()"), *columns, _text("at"))


def _text(name: str) -> Column:
    """Return a time as PostgreSQL reads it: a Python worker would convert it to its own time zone."""
    return F.concat(F.date_format(name, "yyyy-MM-dd HH:mm:ss.SSSSSS"), F.lit("+00"))


def _copy(url: str, table: str, columns: Iterable[str], frame: DataFrame) -> None:
    statement = COPY.format(table=table, columns=", ".join(columns))
    frame.foreachPartition(_copier(url, statement, lambda rows: rows))


def _copy_batches(url: str, places: DataFrame, topic_id: Column) -> None:
    one = F.struct("number", "message_id", _text("claimed_at").alias("claimed_at"), _text("at").alias("at"))
    batches = places.groupBy(topic_id.alias("topic_id"), "lane", F.expr(f"(number - 1) div {PER_BATCH}")).agg(
        F.sort_array(F.collect_list(one)).alias("messages")
    )
    statement = COPY.format(table="outbox_batch", columns=", ".join(BATCH))
    batches.foreachPartition(_copier(url, statement, _batches))


def _batches(rows: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Make batches of consecutive numbers; a missing number starts the next batch."""
    for row in rows:
        for _, run in groupby(enumerate(row.messages), key=lambda pair: pair[1].number - pair[0]):
            messages = [message for _, message in run]
            ids = "{" + ",".join(message.message_id for message in messages) + "}"
            last = messages[-1]
            yield row.topic_id, row.lane, messages[0].number, ids, SENT, last.claimed_at, last.at


def _copier(url: str, statement: str, rows_of: Any) -> Any:
    def copy(rows: Iterable[Any]) -> None:
        with (
            psycopg.connect(url, application_name="outbox synthetic") as connection,
            connection.cursor() as cursor,
            cursor.copy(statement.encode()) as target,
        ):
            for row in rows_of(rows):
                target.write_row(tuple(row))

    return copy
