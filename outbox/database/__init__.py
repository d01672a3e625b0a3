"""
PostgreSQL apart from the models: connections, advisory locks, partitions of the message table, heartbeats.

The names of `connections.py` are imported on first use, because the pipeline's jobs import `locks` and run without Django.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.database.connections import (
        Connection,
        aware,
        bound_cursor,
        connect,
        connect_session,
        direct_alias,
        drop_if_lost,
        ensure_fit,
        explain_direct,
        explain_migrate,
        explain_missing,
        explain_pooler,
        has_outbox_tables,
        is_behind_transaction_pooler,
        is_outbox_database,
        is_refusal,
        kept_cursor,
        outbox_apps,
        outbox_databases,
        outside_transactions,
        own_apps,
        raw,
        refuses_all,
    )
    from outbox.database.own_connection import OwnConnection

__all__ = [
    "Connection",
    "OwnConnection",
    "aware",
    "bound_cursor",
    "connect",
    "connect_session",
    "direct_alias",
    "drop_if_lost",
    "ensure_fit",
    "explain_direct",
    "explain_migrate",
    "explain_missing",
    "explain_pooler",
    "has_outbox_tables",
    "is_behind_transaction_pooler",
    "is_outbox_database",
    "is_refusal",
    "kept_cursor",
    "outbox_apps",
    "outbox_databases",
    "outside_transactions",
    "own_apps",
    "raw",
    "refuses_all",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'outbox.database' has no attribute {name!r}")
    value = getattr(import_module("outbox.database.connections"), name)
    globals()[name] = value
    return value
