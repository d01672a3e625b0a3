"""
The embedded broker: tables in PostgreSQL, written over a connection of its own, each statement a transaction.

`log.py` holds the one invariant everything else leans on: a queue's positions become visible in their order.
"""

from outbox.embedded.broker import EmbeddedBroker

__all__ = ["EmbeddedBroker"]
