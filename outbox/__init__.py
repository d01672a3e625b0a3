"""
Django-integrated transactional outbox: change the database and publish a message as one act.

The public names are imported on first use, so that `import outbox` needs neither Django's models nor a broker's client.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.check_back.register import check_back
    from outbox.consumer.context import Context
    from outbox.consumer.register import Retry, consumer
    from outbox.errors import HalfNotStored, NotInTransaction, OutboxError, Reject, RetryLater
    from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Message, Receipt, Resolution
    from outbox.publish import apublish, publish, publish_many, publish_raw, transaction, transactional

_HOMES = {
    "Message": "outbox.message",
    "Receipt": "outbox.message",
    "Resolution": "outbox.message",
    "COMMIT": "outbox.message",
    "ROLLBACK": "outbox.message",
    "UNKNOWN": "outbox.message",
    "OutboxError": "outbox.errors",
    "HalfNotStored": "outbox.errors",
    "NotInTransaction": "outbox.errors",
    "Reject": "outbox.errors",
    "RetryLater": "outbox.errors",
    "publish": "outbox.publish",
    "apublish": "outbox.publish",
    "publish_many": "outbox.publish",
    "publish_raw": "outbox.publish",
    "transaction": "outbox.publish",
    "transactional": "outbox.publish",
    "consumer": "outbox.consumer.register",
    "Context": "outbox.consumer.context",
    "Retry": "outbox.consumer.register",
    "check_back": "outbox.check_back.register",
}

__all__ = [
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "Context",
    "HalfNotStored",
    "Message",
    "NotInTransaction",
    "OutboxError",
    "Receipt",
    "Reject",
    "Resolution",
    "Retry",
    "RetryLater",
    "apublish",
    "check_back",
    "consumer",
    "publish",
    "publish_many",
    "publish_raw",
    "transaction",
    "transactional",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'outbox' has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(ModuleType):
    """
    Keeps `publish`, `consumer` and `check_back` the functions they are.

    Each lives in a module of the same name, and importing that would set the module in the function's place.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
