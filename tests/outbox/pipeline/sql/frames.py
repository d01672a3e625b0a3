"""The frames of `outbox.pipeline.spark.history` as temporary tables, in a transaction that is rolled back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from outbox import database
from outbox.database import Connection
from outbox.pipeline.spark.config import PipelineConfig

FRAMES = """
CREATE TEMP TABLE quick_business (subject text, about text, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_messages (message_id text, topic text, key text, type text, about text, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_places (source text, topic text, lane smallint, number bigint, message_id text, state text,
    claimed_at timestamptz, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_broker (source text, topic text, lane smallint, number bigint, message_id text, key text,
    queue int, pos bigint, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_inbox (consumer_group text, source text, topic text, lane smallint, number bigint, message_id text,
    delivery_count int, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_failed_deliveries (consumer_group text, source text, topic text, lane smallint, number bigint,
    message_id text, delivery_count int, outcome text, at timestamptz) ON COMMIT DROP;
CREATE TEMP TABLE quick_marks (source text, topic text, lane smallint, first bigint, last bigint) ON COMMIT DROP;
CREATE TEMP TABLE quick_groups (name text, topic text, is_from_start boolean) ON COMMIT DROP;
CREATE TEMP TABLE quick_entries (nth int, name text, topic text, type text, about text) ON COMMIT DROP;
"""

GROUP = "INSERT INTO quick_groups VALUES (%s, %s, %s)"
ENTRY = "INSERT INTO quick_entries VALUES (%s, %s, %s, %s, %s)"


@dataclass
class Check:
    """The transaction that has the frames."""

    connection: Connection

    def run(self, statement: str, arguments: Any = None) -> psycopg.Cursor[tuple[Any, ...]]:
        return self.connection.execute(statement, arguments)

    def describe(self, config: PipelineConfig) -> None:
        """Write down who owes what."""
        for group in config.groups:
            for topic in group.topics:
                self.run(GROUP, [group.name, topic, group.is_from_start])
        for nth, entry in enumerate(config.business):
            self.run(ENTRY, [nth, entry.name, entry.topic, entry.type, entry.about])


@contextmanager
def opened(using: str) -> Iterator[Check]:
    """Return a check with empty frames; at the end all of it is gone."""
    with (
        database.connect(using, application_name="outbox tests") as connection,
        connection.transaction(force_rollback=True),
    ):
        check = Check(connection)
        check.run(FRAMES)
        yield check
