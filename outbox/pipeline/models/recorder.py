"""What a broker was seen to have: the recorder's rows, which the audit reads as the broker's side."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class RecordedMessage(models.Model):
    """
    A delivery to the recorder. A message that the broker has stored twice has two rows with `nth` 1, in two places.

    `queue` and `pos`: where it lay, in the broker's words; NULL and empty where the broker does not say. `nth`: which
    delivery to the recorder it was, from 1. A place is written down once, however often it is read, while its row is here.
    """

    id = models.BigAutoField(primary_key=True)
    topic = models.TextField()
    message_id = models.UUIDField()
    source = models.TextField(default="")
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    key = models.TextField(default="")
    tag = models.TextField(default="")
    queue = models.TextField(default="")
    pos = models.BigIntegerField(null=True)
    nth = models.IntegerField(default=1)
    stored_at = models.DateTimeField(null=True)  # by the broker's clock
    recorded_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_recorded"
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["message_id", "topic", "queue", "pos", "nth"], name="outbox_recorded_once")
        ]

    def __str__(self) -> str:
        return f"{self.topic}: {self.message_id}"


class RecordedTopic(models.Model):
    """
    How far the recorder has come in a topic: of what was sent between these two times it has written down all that the
    broker has. `read_until` is NULL until that is sure for the first time.
    """

    topic = models.TextField(primary_key=True)
    broker = models.TextField()
    consumer_group = models.TextField()
    began_at = models.DateTimeField(db_default=Now())
    read_until = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_recorded_topic"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.topic} until {self.read_until}"
