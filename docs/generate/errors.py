"""docs/reference/errors.md, from outbox/errors.py."""

from __future__ import annotations

import inspect

from docs.generate.markdown import code, document, flat, table
from outbox import errors

INTRODUCTION = """
All inherit `outbox.OutboxError`; those about settings also Django's `ImproperlyConfigured`, those about a message also
`ValueError`. Each text says what happened, to which row or topic, and what to do. They stand in `outbox.errors`; `OutboxError`,
`NotInTransaction`, `HalfNotStored`, `Reject` and `RetryLater` in `outbox`, too. A broker library's own errors never leave its
adapter: sends answer with a verdict, other calls raise `BrokerUnavailable`.
"""


def page() -> str:
    """Make the page."""
    rows = [
        [code(kind.__name__), flat(kind.__doc__), ", ".join(code(base.__name__) for base in kind.__bases__)] for kind in family()
    ]
    return document("Errors", "outbox/errors.py", INTRODUCTION.strip(), table(["error", "when", "is a"], rows))


def family() -> list[type[Exception]]:
    """Give the errors in the order of the file."""
    return [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.OutboxError)]
