"""
The embedded broker keeps messages in tables of PostgreSQL. It has its own connection; each statement is a transaction.

`log.py` has the invariant that everything else relies on: the positions of a queue become visible in order.
"""

from outbox.embedded.broker import EmbeddedBroker

__all__ = ["EmbeddedBroker"]
