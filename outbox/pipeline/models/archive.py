"""Which days of messages are in the lake."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class ArchivedDay(models.Model):
    """A UTC day on its way to the lake, or there. Written by the archiving job; see docs/how-to/archive.md."""

    class Step(models.TextChoices):
        PLANNED = "planned"  # is being written; nothing of it counts yet
        COMMITTED = "committed"  # the lake has it for good, and the database still has it, too
        CHANGED = "changed"  # the database holds other rows of it than the lake: it is archived once more
        DELETED = "deleted"  # only the lake has it

    day = models.DateField(primary_key=True)
    state = models.TextField(choices=Step)
    attempt = models.IntegerField()  # which one it is, or was; its folder in the lake is called a1, a2, ...
    rows = models.BigIntegerField()  # messages
    digest = models.TextField()  # of the messages: sum of the rows' hashes
    manifest = models.TextField(default="")  # what the lake says, as JSON
    planned_at = models.DateTimeField(db_default=Now())
    committed_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_archived_day"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.day}: {self.state}"
