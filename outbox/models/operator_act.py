"""What operators did about messages that were given up: the only table that names persons."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Act(models.TextChoices):
    """An operator's act on a dead message, or on a message that a group deferred, lost or ignored."""

    REPLAYED = "replayed"
    RETRIED_NOW = "retried now"
    HELD = "held"
    DELIVERED_AGAIN = "delivered again"
    DISCARDED = "discarded"


class OperatorAct(models.Model):
    """
    What an operator did about one message: who (`acted_by`), when, and the reason given.

    `consumer_group`: the group that deferred it, with its `delivery_count`; empty for a dead message, which has `batch_id` and
    `attempt` instead.
    """

    id = models.BigAutoField(primary_key=True)
    act = models.TextField(choices=Act)
    message_id = models.UUIDField(db_index=True)
    topic = models.TextField()
    consumer_group = models.TextField(db_default="")
    delivery_count = models.IntegerField(null=True)
    fingerprint = models.TextField(db_default="")  # of the error, as in the failed delivery
    batch_id = models.BigIntegerField(null=True)
    attempt = models.BigIntegerField(null=True)
    reason = models.TextField()
    acted_by = models.TextField()
    acted_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_operator_act"

    def __str__(self) -> str:
        return f"{self.message_id}: {self.act} by {self.acted_by}"
