"""
The testing kit for projects that use the outbox: `docs/how-to/test.md`.

The names are imported on first use, because `outbox.testing.postgres` and the pytest plugin are imported before Django.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.testing.kit import Outbox, OutboxTestMixin

__all__ = ["Outbox", "OutboxTestMixin"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'outbox.testing' has no attribute {name!r}")
    return getattr(import_module("outbox.testing.kit"), name)
