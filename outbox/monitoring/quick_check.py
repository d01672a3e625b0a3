"""The quick check: the progress of the messages of the last hours or of a day, and open gaps, in one statement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from outbox import conf
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import groups
from outbox.database import Connection
from outbox.ids import first_id_at
from outbox.models import Act, State
from outbox.monitoring.find import LAST_ID

MESSAGE_LIMIT = 100_000  # the newest messages
GIVEN_UP = [str(Outcome.DEAD_LETTER), str(Act.DISCARD_ASKED), str(Act.DISCARDED)]

# Messages by the time in their ids, each with the newest batch that holds it; then their progress to the broker, and in each
# group that reads their topic. A message without batch, ticket or delayed row would never be sent. Numbers that a group misses
# come from gaps.
PROGRESS = f"""
WITH message AS MATERIALIZED (
    SELECT m.id, topic.name AS topic, m.created_at FROM outbox_message m JOIN outbox_topic topic ON topic.id = m.topic_id
    WHERE m.id >= %(first)s AND m.id < %(end)s AND m.topic_id <> 0 ORDER BY m.id DESC LIMIT %(limit)s
), oldest AS MATERIALIZED (SELECT id FROM message ORDER BY id LIMIT 1
), batched AS (
    SELECT DISTINCT ON (member.id) member.id, batch.state, batch.sent_at
    FROM outbox_batch batch CROSS JOIN LATERAL unnest(batch.message_ids) WITH ORDINALITY member (id, position)
    WHERE outbox_newest(batch.message_ids) >= (SELECT id FROM oldest) AND member.position::smallint <> ALL (batch.split)
    ORDER BY member.id, batch.id DESC
), published AS MATERIALIZED (
    SELECT message.id, message.topic, message.created_at, batched.state, batched.sent_at, batched.id IS NULL
        AND NOT EXISTS (SELECT FROM outbox_ticket ticket WHERE ticket.message_id = message.id)
        AND NOT EXISTS (SELECT FROM outbox_delayed delayed WHERE delayed.message_id = message.id) AS is_stranded
    FROM message LEFT JOIN batched ON batched.id = message.id
), handled AS (
    SELECT consumer_group, message_id, min(handled_at) AS at FROM outbox_inbox
    WHERE message_id >= (SELECT id FROM oldest) GROUP BY 1, 2
), failed AS (
    SELECT DISTINCT ON (consumer_group, message_id) consumer_group, message_id, outcome FROM (
        SELECT consumer_group, message_id, outcome, failed_at AS at FROM outbox_failed_delivery
        WHERE message_id >= (SELECT id FROM oldest)
        UNION ALL
        SELECT consumer_group, message_id, act, acted_at FROM outbox_operator_act
        WHERE message_id >= (SELECT id FROM oldest) AND consumer_group <> ''
    ) last ORDER BY consumer_group, message_id, at DESC
), progress AS (
    SELECT topic, '' AS consumer_group, state = {State.SENT} AS is_done,
        state IN ({State.DEAD}, {State.DISCARDED}) AS is_given_up, is_stranded,
        extract(epoch FROM sent_at - created_at)::float8 AS seconds
    FROM published
    UNION ALL
    SELECT published.topic, reader.name, handled.at IS NOT NULL,
        handled.at IS NULL AND failed.outcome = ANY (%(given_up)s), false,
        extract(epoch FROM handled.at - published.created_at)::float8
    FROM published JOIN unnest(%(groups)s::text[], %(topics)s::text[]) reader (name, topic) ON reader.topic = published.topic
    LEFT JOIN handled ON handled.consumer_group = reader.name AND handled.message_id = published.id
    LEFT JOIN failed ON failed.consumer_group = reader.name AND failed.message_id = published.id
    WHERE published.state = {State.SENT}
), gap AS (
    SELECT consumer_group, topic, sum(last_number - first_number + 1)::bigint AS numbers
    FROM outbox_gap WHERE closed_at IS NULL GROUP BY 1, 2
)
SELECT topic, consumer_group, count(*) AS messages, count(*) FILTER (WHERE is_done) AS done,
    count(*) FILTER (WHERE is_given_up) AS given_up,
    count(*) FILTER (WHERE is_stranded) + coalesce(max(gap.numbers), 0) AS missing,
    percentile_disc('{{0.5, 0.95, 0.99}}'::float8[]) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE is_done) AS seconds
FROM progress LEFT JOIN gap USING (topic, consumer_group) GROUP BY 1, 2 ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """
    The progress of a topic's messages: to the broker (`consumer_group` is ""), or in a consumer group.

    Args:
        messages: number of messages published; for a group, of those that were sent.
        done: sent; for a group, handled.
        given_up: rejected or discarded; for a group, dead letters, discarded ones included.
        missing: messages that would never be sent; for a group, all numbers of its open gaps in the topic.
        seconds: p50, p95 and p99 of the time from publishing until done; None if none is done.
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


def read_progress(
    connection: Connection, using: str, *, now: datetime, begin: datetime, end: datetime | None = None
) -> list[Progress]:
    """
    Return the progress of the messages published in a time, by topic and group; of the newest 100,000 at most.

    Args:
        using: the database's alias; groups whose inbox is in another database are left out.
        begin: at most `OUTBOX["RETENTION"]` ago, since older rows may have been pruned; a longer time is cut.
        end: None: up to the newest message, whatever the clocks of publishers say.
    """
    begin = max(begin, now - conf.settings().retention)
    reading = [(group.name, topic) for group in groups().values() if group.using == using for topic in group.topics]
    arguments = {
        "first": first_id_at(begin),
        "end": LAST_ID if end is None else first_id_at(end),
        "limit": MESSAGE_LIMIT,
        "given_up": GIVEN_UP,
        "groups": [group for group, _ in reading],
        "topics": [topic for _, topic in reading],
    }
    return connection.cursor(row_factory=class_row(Progress)).execute(PROGRESS, arguments).fetchall()
