"""
Models of the embedded broker's tables, which may be in a separate database. The broker writes the tables with SQL; the models are
for reading. Indexes are in the migration.

Each message is written at most twice: as a half message, then into its queue. A queue is a log: messages are appended at its end,
and retention deletes them from its beginning.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from outbox.embedded.half_state import HalfState


class EmbeddedTopic(models.Model):
    """A topic of the embedded broker. Its number of queues never changes, because keys would move between them."""

    id = models.IntegerField(primary_key=True)  # `ids.topic_number(name)`
    name = models.TextField(unique=True)
    type = models.TextField()
    queues = models.SmallIntegerField()

    class Meta:
        app_label = "outbox_embedded"
        db_table = "outbox_embedded_topic"

    def __str__(self) -> str:
        return self.name


class EmbeddedQueue(models.Model):
    """The last position taken in a queue. The lock of this row makes writers append one after the other."""

    pk = models.CompositePrimaryKey("topic_id", "queue")
    topic_id = models.IntegerField()
    queue = models.SmallIntegerField()
    last_pos = models.BigIntegerField()

    class Meta:
        app_label = "outbox_embedded"
        db_table = "outbox_embedded_queue"

    def __str__(self) -> str:
        return f"topic {self.topic_id} queue {self.queue}: {self.last_pos}"


class EmbeddedMessage(models.Model):
    """A visible message at its position in a queue. (message id, source) is unique."""

    pk = models.CompositePrimaryKey("topic_id", "queue", "pos")
    topic_id = models.IntegerField()
    queue = models.SmallIntegerField()
    pos = models.BigIntegerField()
    message_id = models.TextField()
    source = models.TextField()
    half_id = models.BigIntegerField(null=True)
    key = models.TextField()
    tag = models.TextField()
    headers = models.TextField()
    body = models.BinaryField()
    stored_at = models.DateTimeField()

    class Meta:
        app_label = "outbox_embedded"
        db_table = "outbox_embedded_message"

    def __str__(self) -> str:
        return self.message_id


class EmbeddedHalf(models.Model):
    """A half message, hidden from consumers."""

    id = models.BigAutoField(primary_key=True)
    topic_id = models.IntegerField()
    queue = models.SmallIntegerField()
    message_id = models.TextField()
    source = models.TextField()
    key = models.TextField()
    tag = models.TextField()
    headers = models.TextField()
    body = models.BinaryField()
    token = models.TextField()
    born_at = models.DateTimeField()
    ask_at = models.DateTimeField()
    asked = models.IntegerField(default=0)
    state = models.SmallIntegerField(choices=HalfState, default=HalfState.UNDECIDED)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_embedded"
        db_table = "outbox_embedded_half"
        verbose_name = _("half message")
        verbose_name_plural = _("half messages")
        permissions = [("ask_embeddedhalf", "Can check back about half messages")]

    def __str__(self) -> str:
        return f"half message {self.id}"


class EmbeddedOffset(models.Model):
    """The last position that a consumer group has read in a queue."""

    pk = models.CompositePrimaryKey("consumer_group", "topic_id", "queue")
    consumer_group = models.TextField()
    topic_id = models.IntegerField()
    queue = models.SmallIntegerField()
    pos = models.BigIntegerField()

    class Meta:
        app_label = "outbox_embedded"
        db_table = "outbox_embedded_offset"

    def __str__(self) -> str:
        return f"{self.consumer_group}: topic {self.topic_id} queue {self.queue} at {self.pos}"


class EmbeddedDelivery(models.Model):
    """
    A message that a group has read but not finished: it is being handled, or it is due.

    On a fifo topic, it may wait for an earlier one of its key. Its delivery count is 0 before its first delivery.
    """

    id = models.BigAutoField(primary_key=True)
    consumer_group = models.TextField()
    topic_id = models.IntegerField()
    queue = models.SmallIntegerField()
    pos = models.BigIntegerField()
    order_key = models.BigIntegerField(null=True)  # a hash of the key, on fifo topics only
    delivery_count = models.IntegerField()
    due_at = models.DateTimeField()

    class Meta:
        app_label = "outbox_embedded"
        db_table = "outbox_embedded_delivery"
        verbose_name_plural = "embedded deliveries"

    def __str__(self) -> str:
        return f"{self.consumer_group}: topic {self.topic_id} queue {self.queue} at {self.pos}"
