"""Consumer groups that a database knows, whether or not this process has code for them."""

from __future__ import annotations

from outbox.consuming.register import groups
from outbox.consuming.subscriptions import matching_subscriptions
from outbox.database import Connection

# The names in the inbox, each found by the index of its primary key; and those of failure counts and of
# consumers of the last hour.
STORED = """
WITH RECURSIVE handled AS (
    (SELECT consumer_group AS name FROM outbox_inbox ORDER BY consumer_group LIMIT 1)
    UNION ALL
    SELECT (SELECT consumer_group FROM outbox_inbox WHERE consumer_group > handled.name ORDER BY consumer_group LIMIT 1)
    FROM handled WHERE handled.name IS NOT NULL
), known AS (
    SELECT name FROM handled WHERE name IS NOT NULL
    UNION SELECT consumer_group FROM outbox_failure_count
    UNION SELECT consumer_group FROM outbox_process WHERE kind = 'consumer'
)
SELECT name FROM known
"""

# Those of them whose consumers of the last hour subscribe to a message; of groups without such consumers, those that have
# received from its topic. Numbered rows are found by an index.
RECEIVES = f"""
{STORED} WHERE CASE WHEN EXISTS (SELECT FROM outbox_process WHERE kind = 'consumer' AND consumer_group = name)
    THEN EXISTS (
        SELECT FROM outbox_process WHERE kind = 'consumer' AND consumer_group = name AND subscriptions && %(matching)s::text[])
    ELSE EXISTS (
        SELECT FROM outbox_inbox WHERE consumer_group = name AND outbox_inbox.topic = %(topic)s AND number IS NOT NULL)
      OR EXISTS (SELECT FROM outbox_failure_count WHERE consumer_group = name AND outbox_failure_count.topic = %(topic)s) END
"""

FORGET = """
WITH gaps AS (DELETE FROM outbox_gap WHERE consumer_group = %(group)s AND topic = %(topic)s AND closed_at IS NULL)
DELETE FROM outbox_failure_count WHERE consumer_group = %(group)s AND topic = %(topic)s
"""


def without_code(connection: Connection) -> list[str]:
    """Return the groups in a database that this process has no handlers for."""
    return sorted(name for (name,) in connection.execute(STORED).fetchall() if name not in groups())


def without_code_for(connection: Connection, topic: str, type_name: str, tag: str) -> list[str]:
    """Return those of `without_code` that subscribe to a message, or have received from its topic."""
    values = {"topic": topic, "matching": matching_subscriptions(topic, type_name, tag)}
    return sorted(name for (name,) in connection.execute(RECEIVES, values).fetchall() if name not in groups())


def forget(connection: Connection, group: str, topic: str) -> None:
    """Delete the failures and open gaps of a group in a topic. Its inbox is kept, so that it handles nothing twice."""
    connection.execute(FORGET, {"group": group, "topic": topic})
