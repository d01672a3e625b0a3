"""The states of a half message, in a separate module because the broker is imported before Django's apps are ready."""

from __future__ import annotations

from django.db.models import IntegerChoices
from django.utils.translation import gettext_lazy as _


class HalfState(IntegerChoices):
    """The state of a half message. After a COMMIT, its row is usually deleted, since the message is in the queue then."""

    UNDECIDED = 0, _("undecided")
    PARKED = 1, _("parked")  # its check-backs reached their limit; an operator has to act, and it can still be ended
    COMMITTED = 2, _("committed")  # another half message had made its message visible; the row is kept to remember the end
    ROLLED_BACK = 3, _("rolled back")
