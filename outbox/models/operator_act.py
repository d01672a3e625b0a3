"""What operators did about messages that were given up: the only table that names persons."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Act(models.TextChoices):
    """
    What an operator did about a dead message, or about the dead letter of a group.

    A broker may or may not have done what is only asked: its process died in between.
    """

    REPLAY_ASKED = "replay asked"
    REPLAYED = "replayed"
    DISCARD_ASKED = "discard asked"
    DISCARDED = "discarded"


class OperatorAct(models.Model):
    """
    What an operator did about one message: who (`acted_by`), when, and the reason given.

    `consumer_group`: whose dead letter it was, with its `delivery_count`; empty for a dead message, which has `batch_id` and
    `attempt` instead. Source, lane and number of a dead letter are stored as in the inbox: its number arrived.
    """

    id = models.BigAutoField(primary_key=True)
    act = models.TextField(choices=Act)
    message_id = models.UUIDField(db_index=True)
    topic = models.TextField()
    consumer_group = models.TextField(db_default="")
    delivery_count = models.IntegerField(null=True)
    source = models.TextField(db_default="")
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    fingerprint = models.TextField(db_default="")  # of the error, as in the failed delivery
    batch_id = models.BigIntegerField(null=True)
    attempt = models.BigIntegerField(null=True)
    reason = models.TextField()
    acted_by = models.TextField()
    acted_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_operator_act"
        indexes = [
            models.Index(
                fields=["consumer_group", "topic", "source", "lane", "number"],
                name="outbox_operator_act_number",
                condition=models.Q(number__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.message_id}: {self.act} by {self.acted_by}"
