"""
Idempotence the other way: a write that only happens while the row is in the state, or version, it was read in.

Where the inbox asks "did I handle this message?", a precondition asks "does the row still want it?". It needs no inbox
row, and it holds against writers that are no consumers: a form in the admin, another service.

    if not update_if(order, expect={"status": "new"}, status="paid"):
        return  # paid or cancelled meanwhile; nothing to do

    update_or_raise(order, expect={"version": order.version}, total=total, version=F("version") + 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Model, QuerySet

from outbox.errors import StaleRow


def update_if(target: Model | QuerySet[Any], *, expect: Mapping[str, Any], **changes: Any) -> bool:
    """
    Update a row, or the rows of a queryset, in one statement, where they are as expected.

    An instance gets the new values, too, if its row was updated. As with `QuerySet.update`, neither `save()` nor its
    signals run.

    Args:
        expect: lookups the rows must meet, such as `{"status": "new"}` or `{"version": 3}`.
        changes: field=value, or an expression such as `F("version") + 1`.

    Returns:
        Whether any row was updated. False: another was faster, and nothing was written.
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
        target.refresh_from_db(fields=computed)
    return True


def update_or_raise(target: Model | QuerySet[Any], *, expect: Mapping[str, Any], **changes: Any) -> None:
    """
    Update as `update_if` does; where no row is as expected, the caller's transaction cannot go on.

    Raises:
        StaleRow: no row was as expected; the text says how the row is now.
    """
    if update_if(target, expect=expect, **changes):
        return
    wanted = ", ".join(f"{name}={value!r}" for name, value in expect.items())
    if isinstance(target, QuerySet):
        raise StaleRow(f"No {target.model._meta.label_lower} with {wanted} is left among those asked for.")
    row = f"{target._meta.label_lower} {target.pk}"
    now = _row_of(target).values(*(name.partition("__")[0] for name in expect)).first()
    if now is None:
        raise StaleRow(f"{row} is gone; it was expected with {wanted}.")
    is_now = ", ".join(f"{name}={value!r}" for name, value in now.items())
    raise StaleRow(f"{row} is not {wanted} any more, but {is_now}. Read it again and decide anew.")


def _row_of(instance: Model) -> QuerySet[Any]:
    return type(instance)._base_manager.using(instance._state.db).filter(pk=instance.pk)
