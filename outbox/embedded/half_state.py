"""The states of a half message. Apart from the models, because the broker is imported before Django's apps are ready."""

from __future__ import annotations

from django.db.models import IntegerChoices
from django.utils.translation import gettext_lazy as _


class HalfState(IntegerChoices):
    """The state of a half message. A committed one is deleted: its message is in the queue then."""

    UNDECIDED = 0, _("undecided")
    PARKED = 1, _("parked")  # check-backs reached their limit; it can still be ended, and needs an operator
    COMMITTED = 2, _("committed")  # its message was visible already by another half message; kept to remember the end
    ROLLED_BACK = 3, _("rolled back")
