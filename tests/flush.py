"""
Empties the tables that a test has filled, where the test commits: Django empties all there are, and takes 100 ms for it.

Django's way writes content types and permissions anew, too; here they stay.
"""

from datetime import UTC, datetime

from django.db import connections, transaction
from django.test import TransactionTestCase

from outbox import database
from outbox.database import is_outbox_database
from outbox.database.partitions import create_partitions, days
from outbox.topics import write_topics

KEPT = {"django_content_type", "auth_permission"}

# A table without a model: a relay that was killed on call leaves its row there.
WITHOUT_A_MODEL = {"outbox_wakeup"}

# Up to so many rows are deleted. TRUNCATE makes a new file for the table, for each of its indexes and each of its days.
FEW = 1000

COUNT = "SELECT '{0}', count(*) FROM (SELECT FROM {0} LIMIT 1001) AS few HAVING count(*) > 0"


def flush(case: TransactionTestCase) -> None:
    """Stand in for TransactionTestCase._fixture_teardown."""
    for alias in case._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
        _empty(alias)
        if is_outbox_database(alias):
            write_topics(alias)
            if datetime.now(UTC).date() not in days(database.raw(alias)):
                create_partitions(alias)


def _empty(alias: str) -> None:
    connection = connections[alias]
    tables = set(connection.introspection.django_table_names(include_views=False)) - KEPT
    if is_outbox_database(alias):
        tables |= WITHOUT_A_MODEL
    names = sorted(connection.ops.quote_name(table) for table in tables)
    # In one transaction, so that foreign keys, which are deferred, do not ask for an order.
    with transaction.atomic(alias), connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(COUNT.format(name) for name in names))
        filled = dict(cursor.fetchall())
        if many := [name for name, rows in filled.items() if rows > FEW]:
            cursor.execute(f"TRUNCATE {', '.join(many)} CASCADE")
        for name in filled:
            cursor.execute(f"DELETE FROM {name}")
