"""The brokers that the demo can use: their settings, and the number of messages that wait in them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from project.demo.kills import ROUNDS, Round
from project.demo.outage import BrokerKill
from project.demo.report import LEDGERS, Connection, Kills, number

# The number of messages that wait to be claimed, or are delayed.
UNSENT = "(SELECT count(*) FROM outbox_ticket) + (SELECT count(*) FROM outbox_delayed)"

# The number of unfinished messages with a broker outside the database, from the outbox's tables: unsent and unhandled ones, and
# the redeliveries that are still expected (and dropped by the inbox), one for each consumer that was killed before its ack.
UNHANDLED = f"""
{UNSENT}
    + (SELECT count(*) FROM outbox_batch WHERE state IN (0, 1))
    + (SELECT count(*) FROM message m JOIN reads r USING (topic) WHERE NOT EXISTS (
        SELECT FROM outbox_inbox i WHERE i.consumer_group = r.consumer_group AND i.message_id = m.id))
    + greatest(0, %d - (SELECT count(*) FROM outbox_duplicate WHERE delivery_count > 1))
"""  # noqa: S608

# Messages that the broker has confirmed, for each group that has not handled them.
HELD = f"""
{LEDGERS}
SELECT count(*) FROM outbox_batch b CROSS JOIN unnest(b.message_ids) WITH ORDINALITY u(id, position)
JOIN outbox_topic t ON t.id = b.topic_id JOIN reads r ON r.topic = t.name
WHERE b.state = 3 AND u.position::smallint <> ALL (b.split) AND r.consumer_group = ANY(%s)
AND NOT EXISTS (SELECT FROM outbox_inbox i WHERE i.consumer_group = r.consumer_group AND i.message_id = u.id)
"""  # noqa: S608

# The number of messages that wait in the outbox, and in the embedded broker: half messages, unread and unacknowledged messages.
WAITING = f"""
{LEDGERS}
SELECT {UNSENT}
    + (SELECT count(*) FROM outbox_batch WHERE state IN (0, 1, 2))
    + (SELECT count(*) FROM outbox_embedded_half WHERE state = 0)
    + (SELECT count(*) FROM reads JOIN outbox_embedded_topic t ON t.name = reads.topic
        JOIN outbox_embedded_message m ON m.topic_id = t.id
        LEFT JOIN outbox_embedded_offset o ON (o.consumer_group, o.topic_id, o.queue) = (reads.consumer_group, t.id, m.queue)
        WHERE m.pos > coalesce(o.pos, 0))
    + (SELECT count(*) FROM outbox_embedded_delivery)
"""  # noqa: S608

# A committed half message is no longer in the table of halves, but in that of messages.
SHOW = """
CREATE OR REPLACE TEMP VIEW demo_visible AS SELECT message_id, key FROM outbox_embedded_message;
CREATE OR REPLACE TEMP VIEW demo_half AS SELECT id FROM outbox_embedded_half
    UNION ALL SELECT half_id FROM outbox_embedded_message WHERE half_id IS NOT NULL
"""

# The same relations for a broker outside the database.
TABLES = """
DROP TABLE IF EXISTS demo_visible, demo_half;
CREATE TEMP TABLE demo_visible (message_id text, key text);
CREATE TEMP TABLE demo_half (id text)
"""


class DemoBroker(abc.ABC):
    """The broker of a demo."""

    doors: ClassVar[tuple[str, ...]]  # the ways of its check-backs, as in `asked_by`; empty if it has no half messages
    rounds: ClassVar[tuple[Round, ...]] = ROUNDS
    publishes_once: ClassVar[bool] = False  # whether a second copy of a message breaks the promise
    opening: str = ""  # the text for the user while it starts
    settle_seconds: ClassVar[float] = 40  # the timeout until all work is done
    commands: ClassVar[dict[str, str]] = {}  # additional processes that it needs: name -> management command

    @contextmanager
    def run(self, folder: Path) -> Iterator[None]:
        """
        Run the broker for the time of the block.

        Raises:
            DemoError: it did not start.
        """
        yield

    def environment(self) -> dict[str, str]:
        """Return environment variables for the settings of all processes."""
        return {}

    def plan_kill(self, connection: Connection) -> BrokerKill | None:
        """Return the planned kill of the broker itself; None if it is not killed."""
        return None

    @abc.abstractmethod
    def count_open(self, connection: Connection, kills: Kills) -> int:
        """Return the number of unfinished messages and deliveries."""

    @abc.abstractmethod
    def show(self, connection: Connection) -> None:
        """Create the temporary tables or views that the report reads: `demo_visible` and `demo_half`."""


class Embedded(DemoBroker):
    """The embedded broker, in the demo's database. It sends check-backs over HTTP."""

    doors = ("endpoint",)

    def count_open(self, connection: Connection, kills: Kills) -> int:
        return number(connection, WAITING)

    def show(self, connection: Connection) -> None:
        connection.execute(SHOW)


def count_unhandled(connection: Connection, kills: Kills) -> int:
    """Return the number of unfinished messages that the outbox's tables show, for a one-phase broker outside the database."""
    return number(connection, f"{LEDGERS} SELECT {UNHANDLED}" % kills.unacked)


def count_held(connection: Connection, groups: Sequence[str]) -> int:
    """Return the number of messages that a broker outside the database has confirmed and these groups have not handled."""
    return int((connection.execute(HELD, [list(groups)]).fetchone() or (0,))[0])


def write_copies(connection: Connection, copies: Iterable[tuple[str, str]], halves: Iterable[str] = ()) -> None:
    """
    Create the temporary tables that the report reads, for a broker outside the database.

    Args:
        copies: id and key of each copy of a message that consumers could see.
        halves: the ids of half messages.
    """
    connection.execute(TABLES)
    with connection.cursor() as cursor:
        with cursor.copy("COPY demo_visible FROM STDIN") as copy:
            for row in copies:
                copy.write_row(row)
        with cursor.copy("COPY demo_half FROM STDIN") as copy:
            for half in halves:
                copy.write_row((half,))
