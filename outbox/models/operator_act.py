"""The actions of operators on dead messages, and on messages that consumer groups have deferred, lost or ignored."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Act(models.TextChoices):
    """An operator's action on a dead message, or on a message that a group has deferred, lost or ignored."""

    REPLAYED = "replayed"
    RETRIED_NOW = "retried now"
    HELD = "held"
    DELIVERED_AGAIN = "delivered again"
    DISCARDED = "discarded"


class OperatorAct(models.Model):
    """
    An operator's action on one message, with the operator's name (`acted_by`), the time and the reason.

    `consumer_group` is the group that has deferred, lost or ignored the message. For a dead message it is empty, and `batch_id`
    and `attempt` are set.
    """

    id = models.BigAutoField(primary_key=True)
    act = models.TextField(choices=Act)
    message_id = models.UUIDField(db_index=True)
    topic = models.TextField()
    consumer_group = models.TextField(db_default="")
    delivery_count = models.IntegerField(null=True)
    fingerprint = models.TextField(db_default="")  # the fingerprint of the error, as in the failed delivery
    batch_id = models.BigIntegerField(null=True)
    attempt = models.BigIntegerField(null=True)
    reason = models.TextField()
    acted_by = models.TextField()
    acted_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_operator_act"

    def __str__(self) -> str:
        return f"{self.message_id}: {self.act} by {self.acted_by}"
