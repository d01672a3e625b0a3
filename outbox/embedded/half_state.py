"""The states of a half message. Apart from the models, because the broker is imported before Django's apps are ready."""

from __future__ import annotations

from django.db.models import IntegerChoices


class HalfState(IntegerChoices):
    """The state of a half message. A committed one is deleted: its message is in the queue then."""

    UNDECIDED = 0
    PARKED = 1  # check-backs reached their limit; it can still be ended, and needs an operator
    COMMITTED = 2  # its message was visible already by another half message; kept to remember the end
    ROLLED_BACK = 3
