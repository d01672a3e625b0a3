"""docs/reference/errors.md, from outbox/errors.py and outbox/pipeline/errors.py."""

from __future__ import annotations

import inspect
from types import ModuleType

from docs.generate.markdown import code, document, flat, of_app, table
from outbox import errors
from outbox.pipeline import errors as pipeline_errors

INTRODUCTION = """
All inherit `outbox.errors.OutboxError`; those about settings also Django's `ImproperlyConfigured`, those about a message also
`ValueError`. Like the results of Django's system checks, each has a `message`, which says what happened, to which row or topic,
and a `hint`, which says what to do and may be empty; `str(error)` is both. They can be pickled. They are in `outbox.errors`;
`OutboxError`, `NotInTransaction`, `HalfNotStored`, `Reject` and `RetryLater` in `outbox`, too. A broker library's own errors
never leave its adapter: a send returns a result for each message, other calls raise `BrokerUnavailable`.
"""


def page() -> str:
    """Make the page."""
    pipeline = ["## `outbox.pipeline`", of_app("outbox.pipeline"), _table(_of(pipeline_errors))]
    sources = "outbox/errors.py and outbox/pipeline/errors.py"
    return document("Errors", sources, INTRODUCTION.strip(), _table(_of(errors)), *pipeline)


def family() -> list[type[Exception]]:
    """Return the errors in the order of the files, OutboxError first."""
    return [*_of(errors), *_of(pipeline_errors)]


def _of(module: ModuleType) -> list[type[Exception]]:
    found = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, errors.OutboxError)]
    return [kind for kind in found if kind.__module__ == module.__name__]


def _table(kinds: list[type[Exception]]) -> str:
    rows = [
        [code(kind.__name__), flat(kind.__doc__), ", ".join(code(base.__name__) for base in kind.__bases__)] for kind in kinds
    ]
    return table(["error", "when", "is a"], rows)
