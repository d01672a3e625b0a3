"""
The stored message, and the ticket, which says that the message waits to be claimed by a relay.

The migration creates the tables with SQL, and publishing writes them with SQL; the models are for reading. A message row never
changes.
"""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


class Topic(models.Model):
    """A topic of `OUTBOX["TOPICS"]`, with its pause. The id is a hash of the name; tombstones have the topic id 0."""

    id = models.IntegerField(primary_key=True)  # `ids.topic_number` of the name
    name = models.TextField(_("name"), unique=True)
    broker = models.TextField(_("broker"), default="default")
    type = models.TextField(_("type"))
    ordered = models.BooleanField(default=False)
    paused = models.BooleanField(default=False)
    paused_at = models.DateTimeField(null=True)
    paused_by = models.TextField(db_default="")
    pause_reason = models.TextField(db_default="")

    class Meta:
        db_table = "outbox_topic"
        verbose_name = _("topic")
        verbose_name_plural = _("topics")
        permissions = [("pause_topic", "Can pause and resume topics")]

    def __str__(self) -> str:
        return self.name


class Overview(Topic):
    """Makes the overview one of the admin's pages. Users who may view topics may view the overview."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = verbose_name_plural = _("overview")


class MessageRow(models.Model):
    """One published message. The caller's transaction writes it once; it is dropped with its daily partition."""

    id = models.UUIDField(primary_key=True)  # uuid7: the first 48 bits are the time in milliseconds
    topic_id = models.IntegerField()
    key = models.TextField(default="")
    headers = models.TextField(default="{}")  # JSON object of texts: tag, trace, ce-*
    about = models.TextField(null=True)  # noqa: DJ001  (rows with NULL are not in the index)
    body = models.BinaryField()
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_message"
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        permissions = [("view_body", "Can view masked fields and bodies of messages")]

    def __str__(self) -> str:
        return str(self.id)


class Ticket(models.Model):
    """A message that waits to be claimed; the claim deletes the row. Only Django treats `pos` as a primary key."""

    pos = models.BigAutoField(primary_key=True)
    message_id = models.UUIDField()
    topic_id = models.IntegerField()
    order_key = models.BigIntegerField(null=True)  # a hash of topic and key, on topics of type fifo

    class Meta:
        db_table = "outbox_ticket"

    def __str__(self) -> str:
        return f"{self.pos}: {self.message_id}"


class Delayed(models.Model):
    """A message with a delay. When it is due, a relay replaces the row by a ticket."""

    message_id = models.UUIDField(primary_key=True)
    due_at = models.DateTimeField()
    topic_id = models.IntegerField()
    order_key = models.BigIntegerField(null=True)

    class Meta:
        db_table = "outbox_delayed"
        verbose_name_plural = "delayed"

    def __str__(self) -> str:
        return f"{self.message_id} at {self.due_at}"


class IdempotencyKey(models.Model):
    """An idempotency key that has not expired. A second publish with this key gets the receipt of the first message."""

    pk = models.CompositePrimaryKey("topic_id", "idempotency_key")
    topic_id = models.IntegerField()
    idempotency_key = models.TextField()
    message_id = models.UUIDField()
    expires_at = models.DateTimeField()

    class Meta:
        db_table = "outbox_idempotency_key"

    def __str__(self) -> str:
        return self.idempotency_key


class MessageState(models.Model):
    """
    The state of each message: a view that joins the message with its ticket, its delayed row and its batch.

    Filter by id, key or about, since a query by state alone reads every message.
    """

    class MessageStatus(models.TextChoices):
        WAITING = "waiting", _("waiting")  # has a ticket
        DELAYED = "delayed", _("delayed")  # waits until `due_at`
        CLAIMED = "claimed", _("claimed")  # a relay is sending it
        PREPARED = "prepared", _("prepared")  # decided, and the half message is being committed
        SENT = "sent", _("sent")
        RELEASED = "released", _("released")  # released without being sent, claimed again at `due_at`
        RETRYING = "retrying", _("retrying")  # failed, claimed again at `due_at`
        DEAD = "dead", _("dead")
        DISCARDED = "discarded", _("discarded")  # dead, and an operator discarded it
        LOST = "lost", _("lost")  # no relay can send it: a row was deleted by hand, or the database was restored only in part

    id = models.UUIDField(primary_key=True)
    topic_id = models.IntegerField()
    topic = models.TextField()
    key = models.TextField()
    about = models.TextField(null=True)  # noqa: DJ001
    created_at = models.DateTimeField()
    state = models.TextField(choices=MessageStatus)
    batch_id = models.BigIntegerField(null=True)
    position = models.IntegerField(null=True)
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    attempt = models.BigIntegerField(null=True)
    failures = models.IntegerField(null=True)
    due_at = models.DateTimeField(null=True)
    claimed_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    last_error = models.TextField(null=True)  # noqa: DJ001

    class Meta:
        db_table = "outbox_message_state"
        managed = False

    def __str__(self) -> str:
        return f"{self.id}: {self.state}"
