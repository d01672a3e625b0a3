"""
Django-integrated transactional outbox: change the database and publish a message as one act.

The public names are imported on first use, so that `import outbox` needs neither Django's models nor a broker's client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.check_backs.register import check_back
    from outbox.consuming.delivery_info import Context
    from outbox.consuming.idempotency_key import RedisIdempotencyKey
    from outbox.consuming.precondition import update_if, update_or_raise
    from outbox.consuming.register import Retry, consumer
    from outbox.errors import (
        BrokenTransaction,
        HalfNotStored,
        NotAwaited,
        NotInTransaction,
        NotOutermost,
        OutboxError,
        Reject,
        RetryLater,
        TimeLimitExceeded,
    )
    from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Message, Receipt, Resolution
    from outbox.publishing.decorator import transactional
    from outbox.publishing.functions import Envelope, apublish, publish, publish_many, publish_raw
    from outbox.publishing.transactions import atomic

_HOMES = {
    "Message": "outbox.message",
    "Receipt": "outbox.message",
    "Resolution": "outbox.message",
    "COMMIT": "outbox.message",
    "ROLLBACK": "outbox.message",
    "UNKNOWN": "outbox.message",
    "OutboxError": "outbox.errors",
    "BrokenTransaction": "outbox.errors",
    "HalfNotStored": "outbox.errors",
    "NotAwaited": "outbox.errors",
    "NotInTransaction": "outbox.errors",
    "NotOutermost": "outbox.errors",
    "Reject": "outbox.errors",
    "RetryLater": "outbox.errors",
    "TimeLimitExceeded": "outbox.errors",
    "Envelope": "outbox.publishing.functions",
    "publish": "outbox.publishing.functions",
    "apublish": "outbox.publishing.functions",
    "publish_many": "outbox.publishing.functions",
    "publish_raw": "outbox.publishing.functions",
    "atomic": "outbox.publishing.transactions",
    "transactional": "outbox.publishing.decorator",
    "consumer": "outbox.consuming.register",
    "Context": "outbox.consuming.delivery_info",
    "Retry": "outbox.consuming.register",
    "update_if": "outbox.consuming.precondition",
    "update_or_raise": "outbox.consuming.precondition",
    "RedisIdempotencyKey": "outbox.consuming.idempotency_key",
    "check_back": "outbox.check_backs.register",
}

__all__ = [
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "BrokenTransaction",
    "Context",
    "Envelope",
    "HalfNotStored",
    "Message",
    "NotAwaited",
    "NotInTransaction",
    "NotOutermost",
    "OutboxError",
    "Receipt",
    "RedisIdempotencyKey",
    "Reject",
    "Resolution",
    "Retry",
    "RetryLater",
    "TimeLimitExceeded",
    "apublish",
    "atomic",
    "check_back",
    "consumer",
    "publish",
    "publish_many",
    "publish_raw",
    "transactional",
    "update_if",
    "update_or_raise",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'outbox' has no attribute {name!r}") from None
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
