"""The quick check: how far the messages of the last minutes or hours have come, and which live gaps are open. One statement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from psycopg.rows import class_row

from outbox import conf
from outbox.consuming.letter_acts import LetterAct
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import groups
from outbox.database import Connection

LOOKED_AT = 100_000  # messages, the newest
GIVEN_UP = [str(Outcome.DEAD_LETTER), str(LetterAct.DISCARD_ASKED), str(LetterAct.DISCARDED)]

# Messages by the time in their ids, each with the newest batch that holds it; then what became of them at the broker, and in each
# group that reads their topic. No batch, ticket or delayed row: nothing would send it. Which numbers a group misses, gaps say.
PROGRESS = """
WITH message AS MATERIALIZED (
    SELECT m.id, t.name AS topic, m.created_at FROM outbox_message m JOIN outbox_topic t ON t.id = m.topic_id
    WHERE m.id >= %(first_id)s AND m.topic_id <> 0 ORDER BY m.id DESC LIMIT %(limit)s
), oldest AS MATERIALIZED (SELECT id FROM message ORDER BY id LIMIT 1
), place AS (
    SELECT DISTINCT ON (u.id) u.id, b.state, b.sent_at
    FROM outbox_batch b CROSS JOIN LATERAL unnest(b.message_ids) WITH ORDINALITY u (id, position)
    WHERE outbox_newest(b.message_ids) >= (SELECT id FROM oldest) AND u.position::smallint <> ALL (b.split)
    ORDER BY u.id, b.id DESC
), published AS MATERIALIZED (
    SELECT m.id, m.topic, m.created_at, p.state, p.sent_at, p.id IS NULL
        AND NOT EXISTS (SELECT FROM outbox_ticket k WHERE k.message_id = m.id)
        AND NOT EXISTS (SELECT FROM outbox_delayed d WHERE d.message_id = m.id) AS is_stranded
    FROM message m LEFT JOIN place p ON p.id = m.id
), handled AS (
    SELECT consumer_group, message_id, min(handled_at) AS at FROM outbox_inbox
    WHERE message_id >= (SELECT id FROM oldest) GROUP BY 1, 2
), failed AS (
    SELECT DISTINCT ON (consumer_group, message_id) consumer_group, message_id, outcome FROM outbox_delivery
    WHERE message_id >= (SELECT id FROM oldest) ORDER BY consumer_group, message_id, id DESC
), came AS (
    SELECT topic, '' AS consumer_group, state = 3 AS is_done, state IN (4, 5) AS is_given_up, is_stranded, -- SENT; DEAD, SKIPPED
        extract(epoch FROM sent_at - created_at)::float8 AS seconds
    FROM published
    UNION ALL
    SELECT p.topic, g.name, h.at IS NOT NULL, h.at IS NULL AND f.outcome = ANY (%(given_up)s), false,
        extract(epoch FROM h.at - p.created_at)::float8
    FROM published p JOIN unnest(%(groups)s::text[], %(topics)s::text[]) g (name, topic) ON g.topic = p.topic
    LEFT JOIN handled h ON h.consumer_group = g.name AND h.message_id = p.id
    LEFT JOIN failed f ON f.consumer_group = g.name AND f.message_id = p.id
    WHERE p.state = 3 -- SENT
), gap AS (
    SELECT consumer_group, topic, sum(last_number - first_number + 1)::bigint AS numbers
    FROM outbox_gap WHERE closed_at IS NULL GROUP BY 1, 2
)
SELECT topic, consumer_group, count(*) AS messages, count(*) FILTER (WHERE is_done) AS done,
    count(*) FILTER (WHERE is_given_up) AS given_up, count(*) FILTER (WHERE is_stranded) + coalesce(max(g.numbers), 0) AS missing,
    percentile_disc('{0.5, 0.95, 0.99}'::float8[]) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE is_done) AS seconds
FROM came LEFT JOIN gap g USING (topic, consumer_group) GROUP BY 1, 2 ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """
    How far the messages of a topic have come: to the broker (`consumer_group` empty), or through a group.

    Args:
        messages: published; for a group, those of them that were sent.
        done: sent; for a group, handled.
        given_up: rejected or skipped; for a group, dead letters and what operators discarded.
        missing: messages that nothing would send; for a group, all numbers of its open gaps in the topic.
        seconds: p50, p95 and p99 from publish until that; None where nothing is done.
    """

    topic: str
    consumer_group: str
    messages: int
    done: int
    given_up: int
    missing: int
    seconds: list[float] | None

    @property
    def under_way(self) -> int:
        """Messages that are neither done nor given up."""
        return self.messages - self.done - self.given_up


def read_progress(connection: Connection, using: str, *, now: datetime, length: timedelta) -> list[Progress]:
    """
    Return how far the messages of the last while have come, by topic and group; the newest 100,000 at most.

    Args:
        using: the database's alias: groups that keep their inbox elsewhere are left out.
        length: cut to `OUTBOX["RETENTION"]`, behind which rows may have been pruned.
    """
    since = now - min(length, conf.settings().retention)
    reading = [(group.name, topic) for group in groups().values() if group.using == using for topic in group.topics]
    arguments = {
        "first_id": UUID(int=int(since.timestamp() * 1000) << 80),
        "limit": LOOKED_AT,
        "given_up": GIVEN_UP,
        "groups": [group for group, _ in reading],
        "topics": [topic for _, topic in reading],
    }
    return connection.cursor(row_factory=class_row(Progress)).execute(PROGRESS, arguments).fetchall()
