"""
Prune the inbox. A row is kept as long as its broker may deliver the message again, however old it is.

A dead letter counts, too: it can be replayed. When a consumer dies between its database commit and the acknowledgement, the
message is delivered again, perhaps weeks later, when its group is started again. Without the inbox row, the message would be
applied twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import NamedTuple

from outbox import conf
from outbox.brokers.base import Broker
from outbox.database import Connection
from outbox.errors import OutboxError
from outbox.logs import get_logger, log_fields

logger = get_logger(__name__)

SLICE = 10_000  # rows in one question to the brokers

# A slice of rows past their retention, oldest first, after the last row of the slice before.
# A message whose dead letter was replayed since then may be in its queue again, as long as a new one.
READ_OLD = """
SELECT handled_at, consumer_group, dedupe_key, message_id::text, topic FROM outbox_inbox inbox
WHERE handled_at < %(before)s AND handled_at >= %(after_at)s
    AND (handled_at, consumer_group, dedupe_key) > (%(after_at)s, %(after_group)s, %(after_key)s)
    AND topic <> ALL(%(unavailable)s) AND NOT EXISTS (
        SELECT FROM outbox_delivery act
        WHERE act.message_id = inbox.message_id AND act.consumer_group = inbox.consumer_group AND act.failed_at >= %(before)s
            AND act.outcome IN ('replay asked', 'replayed'))
ORDER BY handled_at, consumer_group, dedupe_key LIMIT %(limit)s
"""

DELETE = """
DELETE FROM outbox_inbox inbox USING unnest(%s::text[], %s::text[]) AS old (consumer_group, dedupe_key)
WHERE inbox.consumer_group = old.consumer_group AND inbox.dedupe_key = old.dedupe_key AND inbox.handled_at < %s
"""

READ_BROKERS = "SELECT name, broker FROM outbox_topic WHERE id <> 0"

BEGINNING = datetime(1, 1, 1, tzinfo=UTC)


class _Row(NamedTuple):
    handled_at: datetime
    consumer_group: str
    dedupe_key: str
    message_id: str
    topic: str


def prune_inbox(connection: Connection, *, before: datetime) -> int:
    """
    Delete inbox rows whose messages are not delivered again; return how many.

    Where a broker cannot be reached, the rows of its topics are kept until the next prune.

    Args:
        connection: in autocommit.
        before: rows of messages handled later are kept.
    """
    deleted = 0
    last = _Row(BEGINNING, "", "", "", "")
    with ExitStack() as stack:
        brokers = _Brokers(_broker_of(connection), stack)
        while True:
            rows = _read(connection, before, last, brokers.unavailable)
            finished = brokers.without_redeliveries(rows)
            keys = [row.consumer_group for row in finished], [row.dedupe_key for row in finished]
            deleted += connection.execute(DELETE, [*keys, before]).rowcount if finished else 0
            if len(rows) < SLICE:
                return deleted
            last = rows[-1]


def _broker_of(connection: Connection) -> dict[str, str]:
    """Return each topic's broker from settings; for topics that settings no longer have, from the database."""
    settings = conf.settings()
    known: dict[str, str] = {name: broker for name, broker in connection.execute(READ_BROKERS) if broker in settings.brokers}
    return known | {name: topic.broker for name, topic in settings.topics.items()}


def _read(connection: Connection, before: datetime, last: _Row, unavailable: set[str]) -> list[_Row]:
    values = {"before": before, "after_at": last.handled_at, "after_group": last.consumer_group, "after_key": last.dedupe_key}
    found = connection.execute(READ_OLD, {**values, "unavailable": sorted(unavailable), "limit": SLICE}).fetchall()
    return [_Row(*row) for row in found]


class _Brokers:
    """
    The brokers that are asked for redeliveries; each client is made when it is first needed.

    Args:
        broker_of: topic -> alias of its broker.
        stack: closes the clients.
    """

    def __init__(self, broker_of: dict[str, str], stack: ExitStack) -> None:
        self.unavailable: set[str] = set()  # topics whose broker could not be asked
        self._broker_of = broker_of
        self._stack = stack
        self._made: dict[str, Broker] = {}

    def without_redeliveries(self, rows: Iterable[_Row]) -> list[_Row]:
        """Return the rows without those whose messages may be delivered again, or whose broker cannot be asked."""
        asked: dict[tuple[str, str], set[str]] = {}
        for row in rows:
            alias = self._broker_of.get(row.topic)
            if alias is not None:  # None: no broker has the topic any more
                asked.setdefault((alias, row.consumer_group), set()).add(row.message_id)
        expected = {(group, one) for (alias, group), ids in asked.items() for one in self._ask(alias, group, ids)}
        return [row for row in rows if row.topic not in self.unavailable and (row.consumer_group, row.message_id) not in expected]

    def _ask(self, alias: str, group: str, ids: set[str]) -> set[str]:
        try:
            if conf.broker_class(alias).may_deliver_again is Broker.may_deliver_again:
                return set()  # this broker cannot tell, so no client is made
            if alias not in self._made:
                self._made[alias] = self._stack.enter_context(closing(conf.make_broker(alias)))
            return self._made[alias].may_deliver_again(group, ids)
        except OutboxError as error:
            self.unavailable |= {topic for topic, broker in self._broker_of.items() if broker == alias}
            logger.warning(
                "Inbox rows of topics on broker %r are not pruned now: %s", alias, error, extra=log_fields(broker=alias)
            )
            return set()
