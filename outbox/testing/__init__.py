"""
The testing kit for projects that use the outbox: `docs/how-to/test.md`.

The names are imported on first use, because `outbox.testing.postgres` and the pytest plugin are imported before Django.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.testing.kit import Outbox
    from outbox.testing.mixin import OutboxTestMixin

_MODULES = {
    "Outbox": "outbox.testing.kit",
    "OutboxTestMixin": "outbox.testing.mixin",
}

__all__ = ["Outbox", "OutboxTestMixin"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'outbox.testing' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
