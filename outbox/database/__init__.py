"""
What is ours in PostgreSQL beside the tables: connections, advisory locks, days of messages, heartbeats.
"""

from outbox.database.connections import (
    Connection,
    connect,
    drop_if_lost,
    is_behind_transaction_pooler,
    is_outbox_database,
    outbox_databases,
    outside_transactions,
    raw,
)

__all__ = [
    "Connection",
    "connect",
    "drop_if_lost",
    "is_behind_transaction_pooler",
    "is_outbox_database",
    "outbox_databases",
    "outside_transactions",
    "raw",
]
