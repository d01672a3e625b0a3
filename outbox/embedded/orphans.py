"""
Deliveries without a message, because rows of the message table were deleted, or the table was restored from an older backup.

Such a delivery can never be handled. It would block its key and stay in the backlog forever, so it is deleted and reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime

from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.topics import StoredTopic
from outbox.logs import get_logger

logger = get_logger(__name__)

# Deletes the given deliveries, and all others of the group that are due and have no message, since many are often lost together.
DROP = f"""
DELETE FROM outbox_embedded_delivery WHERE id IN (
    SELECT d.id FROM outbox_embedded_delivery d
    WHERE d.consumer_group = %(group)s AND d.topic_id = ANY(%(topic_ids)s)
      AND (d.id = ANY(%(ids)s) OR d.due_at <= {NOW})
      AND NOT EXISTS (
          SELECT FROM outbox_embedded_message m WHERE m.topic_id = d.topic_id AND m.queue = d.queue AND m.pos = d.pos)
    FOR UPDATE OF d SKIP LOCKED
)
RETURNING topic_id, queue, pos
"""


def drop(connection: Connection, group: str, topics: Iterable[StoredTopic], ids: Sequence[int], *, now: datetime | None) -> None:
    """
    Delete a group's deliveries without a message, and log an error for each queue that has lost messages.

    Args:
        ids: deliveries that the caller holds, and that have no message.
    """
    names = {topic.id: topic.name for topic in topics}
    parameters = {"group": group, "topic_ids": list(names), "ids": ids, "now": now}
    lost = defaultdict(list)
    for topic_id, queue, pos in connection.execute(DROP, parameters):
        lost[topic_id, queue].append(pos)
    for (topic_id, queue), positions in sorted(lost.items()):
        logger.error(
            "Group %r will not handle %d messages of topic %r: their rows are missing in outbox_embedded_message (queue %d, "
            "positions %d to %d). Their deliveries are deleted. Find out who deleted the rows, or which backup was restored; "
            "outbox_audit names the messages that the group misses.",
            group,
            len(positions),
            names[topic_id],
            queue,
            min(positions),
            max(positions),
        )
