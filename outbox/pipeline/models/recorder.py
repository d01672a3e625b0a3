"""The recorder's rows, from which the audit knows what a broker has stored."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class RecordedMessage(models.Model):
    """
    A delivery to the recorder. A message that the broker has stored twice has two rows with `delivery_count` 1, at two places.

    `queue` and `pos`: its place, in the broker's terms; empty and NULL if the broker does not report it. `delivery_count`:
    the number of the delivery to the recorder, from 1. A place is recorded once as long as its row exists.
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
    delivery_count = models.IntegerField(default=1)
    stored_at = models.DateTimeField(null=True)  # by the broker's clock
    recorded_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_recorded"
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["message_id", "topic", "queue", "pos", "delivery_count"], name="outbox_recorded_once")
        ]

    def __str__(self) -> str:
        return f"{self.topic}: {self.message_id}"


class RecordedTopic(models.Model):
    """
    The progress of the recorder in a topic: of the messages sent between these two times, all that the broker has are recorded.
    `read_until` is NULL until that is certain for the first time.
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
