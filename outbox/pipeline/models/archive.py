"""The state of archived days."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class ArchivedDay(models.Model):
    """A UTC day that is being archived, or has been. Written by the archive job; see docs/how-to/archive.md."""

    class Step(models.TextChoices):
        PLANNED = "planned"  # being written, not committed yet
        COMMITTED = "committed"  # in the lake, and still in the database
        CHANGED = "changed"  # its rows in the database differ from the lake; to be archived again
        DELETED = "deleted"  # only in the lake

    day = models.DateField(primary_key=True)
    state = models.TextField(choices=Step)
    attempt = models.IntegerField()  # counts from 1; its folder in the lake is a1, a2, ...
    rows = models.BigIntegerField()  # number of messages
    digest = models.TextField()  # of the messages: sum of the rows' hashes
    manifest = models.TextField(default="")  # a copy of the lake's manifest, JSON
    planned_at = models.DateTimeField(db_default=Now())
    committed_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_archived_day"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.day}: {self.state}"
