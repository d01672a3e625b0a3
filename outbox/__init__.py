"""
A transactional outbox for Django: database changes and published messages are committed together, or not at all.

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
    from outbox.consuming.register import RetryPolicy, consumer
    from outbox.errors import Reject, RetryLater
    from outbox.message import Message, Receipt
    from outbox.publishing.decorator import transactional
    from outbox.publishing.functions import Envelope, apublish, publish, publish_many, publish_raw
    from outbox.publishing.transactions import atomic

_MODULES = {
    "Message": "outbox.message",
    "Receipt": "outbox.message",
    "Reject": "outbox.errors",
    "RetryLater": "outbox.errors",
    "Envelope": "outbox.publishing.functions",
    "publish": "outbox.publishing.functions",
    "apublish": "outbox.publishing.functions",
    "publish_many": "outbox.publishing.functions",
    "publish_raw": "outbox.publishing.functions",
    "atomic": "outbox.publishing.transactions",
    "transactional": "outbox.publishing.decorator",
    "consumer": "outbox.consuming.register",
    "Context": "outbox.consuming.delivery_info",
    "RetryPolicy": "outbox.consuming.register",
    "update_if": "outbox.consuming.precondition",
    "update_or_raise": "outbox.consuming.precondition",
    "RedisIdempotencyKey": "outbox.consuming.idempotency_key",
    "check_back": "outbox.check_backs.register",
}

_MOVED_TO_ERRORS = (
    "BrokenTransaction",
    "HalfNotStored",
    "NotAwaited",
    "NotInTransaction",
    "NotOutermost",
    "OutboxError",
    "TimeLimitExceeded",
)
_MOVED = {
    "Retry": "outbox.RetryPolicy",
    **{name: f"outbox.check_backs.{name}" for name in ("COMMIT", "ROLLBACK", "UNKNOWN", "Resolution")},
    **{name: f"outbox.errors.{name}" for name in _MOVED_TO_ERRORS},
}

__all__ = [
    "Context",
    "Envelope",
    "Message",
    "Receipt",
    "RedisIdempotencyKey",
    "Reject",
    "RetryLater",
    "RetryPolicy",
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
    if name in _MOVED:
        raise ImportError(f"outbox.{name} has been called {_MOVED[name]} since 0.2.0.")
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module 'outbox' has no attribute {name!r}") from None
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
