"""
Optimistic locking, another means to idempotence: a row is updated only if it still has the state or version that is expected.

The inbox asks "did the group handle this message before?", a precondition asks "is the row still as expected?". A precondition
needs no inbox row, and also protects against writers that are not consumers, such as a form in the admin or another service.

    if not update_if(order, expect={"status": "new"}, status="paid"):
        return  # paid or cancelled meanwhile; nothing to do

    update_or_raise(order, expect={"version": order.version}, total=total, version=F("version") + 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import router
from django.db.models import Model, QuerySet

from outbox.errors import StaleRow


def update_if(target: Model | QuerySet[Any], *, expect: Mapping[str, Any], **changes: Any) -> bool:
    """
    Update an instance's row, or the rows of a queryset, in one statement, if they meet a condition.

    If the row of an instance was updated, the instance also gets the new values. As with `QuerySet.update()`, neither `save()`
    nor signals run.

    Args:
        expect: lookups that rows must meet, such as `{"status": "new"}` or `{"version": 3}`.
        changes: field=value, or an expression such as `F("version") + 1`.

    Returns:
        Whether any row was updated. If not, no row met the condition, since another process changed or deleted the row before.
    """
    if not expect or not changes:
        raise TypeError("update_if() needs expect={…} and at least one field=value.")
    if isinstance(target, QuerySet):
        return target.filter(**expect).update(**changes) > 0
    if not _row_of(target).filter(**expect).update(**changes):
        return False
    computed = [name for name, value in changes.items() if hasattr(value, "resolve_expression")]
    for name in changes.keys() - computed:
        setattr(target, name, changes[name])
    if computed:
        target.refresh_from_db(using=_home_of(target), fields=computed)
    return True


def update_or_raise(target: Model | QuerySet[Any], *, expect: Mapping[str, Any], **changes: Any) -> None:
    """
    Update rows as `update_if()` does; raise an error if no row meets the condition.

    Raises:
        StaleRow: no row met the condition; for an instance, the text contains the current values of its row.
    """
    if update_if(target, expect=expect, **changes):
        return
    expected = ", ".join(f"{name}={value!r}" for name, value in expect.items())
    if isinstance(target, QuerySet):
        raise StaleRow(f"No {target.model._meta.label_lower} in the queryset has {expected} any more.")
    row = f"{target._meta.label_lower} {target.pk}"
    now = _row_of(target).values(*(name.partition("__")[0] for name in expect)).first()
    if now is None:
        raise StaleRow(f"{row} does not exist any more; expected was {expected}.")
    actual = ", ".join(f"{name}={value!r}" for name, value in now.items())
    raise StaleRow(f"{row} does not have {expected} any more, but {actual}.", hint="Read the row again, then decide.")


def _row_of(instance: Model) -> QuerySet[Any]:
    return instance._meta.base_manager.using(_home_of(instance)).filter(pk=instance.pk)


def _home_of(instance: Model) -> str:
    """Return the database to which an instance is written. It may have been read from a replica."""
    return router.db_for_write(instance._meta.model, instance=instance)
