"""
The embedded broker keeps messages in tables of PostgreSQL. It has its own connection; each statement is a transaction.

All modules rely on the invariant in `log.py`: the positions of a queue become visible in order.
"""

from outbox.embedded.broker import EmbeddedBroker

__all__ = ["EmbeddedBroker"]
