"""Tables of consumers: handled messages, deferred messages, failed deliveries, duplicates and gaps."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


class Inbox(models.Model):
    """
    A message that a group has handled; the row is inserted in the handler's transaction.

    `idempotency_key` is the message id, unless the handler names another key. Lane and number are NULL if the message had none.
    `delivery_count` counts the deliveries to the group up to the one that was handled, from 1. It is 0 if the
    message was not handled, because the group had no handler for it or an operator discarded it.
    """

    pk = models.CompositePrimaryKey("consumer_group", "idempotency_key")
    consumer_group = models.TextField()
    idempotency_key = models.TextField()
    message_id = models.UUIDField()
    source = models.TextField(default="")
    topic = models.TextField()
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    delivery_count = models.IntegerField(db_default=1)
    handled_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_inbox"
        verbose_name = _("inbox row")
        verbose_name_plural = _("inbox rows")
        indexes = [
            models.Index(
                fields=["consumer_group", "topic", "source", "lane", "number"],
                name="outbox_inbox_number",
                condition=models.Q(number__isnull=False),
            ),
            models.Index(fields=["message_id"], name="outbox_inbox_message"),
            models.Index(fields=["handled_at"], name="outbox_inbox_handled"),
            models.Index(fields=["handled_at"], name="outbox_inbox_ignored", condition=models.Q(delivery_count=0)),
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.idempotency_key}"


class InboxRow(models.Model):
    """
    A view of the inbox with a text as its primary key, for the admin, which does not support composite keys.

    Do not filter by `id`, which has no index.
    """

    id = models.TextField(primary_key=True)
    consumer_group = models.TextField(_("consumer group"))
    idempotency_key = models.TextField()
    message_id = models.UUIDField()
    topic = models.TextField(_("topic"))
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    delivery_count = models.IntegerField()
    handled_at = models.DateTimeField()

    class Meta:
        db_table = "outbox_inbox_row"
        managed = False
        default_permissions = ()  # users who may view the inbox may view these rows
        verbose_name = _("inbox row")
        verbose_name_plural = _("inbox rows")

    def __str__(self) -> str:
        return self.id


class FailedDelivery(models.Model):
    """
    A delivery whose handler failed: a log for operators. No decision depends on it.

    `delivery_count` counts the deliveries to the group up to this one, from 1. Source, lane and number are as in the inbox.
    """

    id = models.BigAutoField(primary_key=True)
    consumer_group = models.TextField()
    message_id = models.UUIDField(db_index=True)
    topic = models.TextField()
    delivery_count = models.IntegerField()
    source = models.TextField(default="")
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    outcome = models.TextField()  # retry, dead letter
    fingerprint = models.TextField()  # equal for similar errors
    error = models.TextField()
    traceback = models.TextField(default="")
    failed_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_failed_delivery"
        verbose_name_plural = "failed deliveries"
        indexes = [
            models.Index(
                fields=["consumer_group", "topic", "source", "lane", "number"],
                name="outbox_failed_delivery_number",
                condition=models.Q(number__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.message_id} delivery {self.delivery_count}"


class Deferred(models.Model):
    """
    A message that a group has received and not handled yet: it waits to be run again, or is a dead letter.

    The message was acknowledged at the broker. A row is deleted only if the inbox has its message, in the same transaction or
    before; docs/explanation/deliveries.md has the statements. `own_id` is the id under which the message was sent, which need
    not be a UUID; `message_id` is a UUID made of `own_id` and the source.

    `order_key`: group, topic and key, on topics of type fifo.
    `failures`: how often the handler raised an error.
    `crashes`: the number of runs that were begun and of which no end is known.
    `runs`: how often a run was begun or the message was replayed; the number identifies a run.
    `due_at`: when it is run. NULL: it waits for an earlier deferred message of its key. The year 9999: an operator holds it.
    `dead_at`: when it became a dead letter, which is not run again automatically.
    `no_code_since`: since when it has been due while no live process had a handler for it.
    `delivery_count`: the broker's count of deliveries when it was deferred.
    """

    id = models.BigAutoField(primary_key=True)  # the order of arrival
    consumer_group = models.TextField(_("consumer group"))
    message_id = models.UUIDField(db_index=True)
    own_id = models.TextField()
    idempotency_key = models.TextField()
    topic = models.TextField(_("topic"))
    type = models.TextField(db_default="")
    tag = models.TextField(db_default="")
    key = models.TextField(db_default="")
    headers = models.TextField()
    body = models.BinaryField()
    stored_at = models.DateTimeField(null=True)
    source = models.TextField(db_default="")
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    delivery_count = models.IntegerField()
    order_key = models.TextField(null=True)  # noqa: DJ001  (rows with NULL are not in the index)
    failures = models.IntegerField(db_default=0)
    crashes = models.IntegerField(db_default=0)
    runs = models.IntegerField(db_default=0)
    due_at = models.DateTimeField(null=True)
    dead_at = models.DateTimeField(null=True)
    no_code_since = models.DateTimeField(null=True)
    reason = models.TextField()  # see `consuming.deferred.Reason`
    error = models.TextField(db_default="")
    fingerprint = models.TextField(db_default="")  # equal for similar errors
    deferred_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_deferred"
        verbose_name = _("deferred message")
        verbose_name_plural = _("deferred messages")
        default_permissions = ("view",)
        permissions = [
            ("replay_deferred", "Can replay, retry and hold deferred messages"),
            ("discard_deferred", "Can discard deferred messages"),
        ]
        constraints = [models.UniqueConstraint(fields=["consumer_group", "message_id"], name="outbox_deferred_once")]
        indexes = [
            models.Index(fields=["consumer_group", "due_at"], name="outbox_deferred_due", condition=models.Q(dead_at=None)),
            models.Index(
                fields=["order_key", "id"],
                name="outbox_deferred_key",
                condition=models.Q(dead_at=None, order_key__isnull=False),
            ),
            models.Index(
                fields=["consumer_group", "dead_at"], name="outbox_deferred_dead", condition=models.Q(dead_at__isnull=False)
            ),
            models.Index(
                fields=["consumer_group", "topic", "source", "lane", "number"],
                name="outbox_deferred_number",
                condition=models.Q(number__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.own_id}"


class Duplicate(models.Model):
    """A delivery that was dropped, because the inbox shows that its group has handled the message before."""

    id = models.BigAutoField(primary_key=True)
    consumer_group = models.TextField()
    message_id = models.UUIDField(db_index=True)
    topic = models.TextField()
    delivery_count = models.IntegerField()
    dropped_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_duplicate"

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.message_id}"


class Gap(models.Model):
    """Numbers of a lane that a group has not received within the settle time. `closed_at`: when they arrived later."""

    id = models.BigAutoField(primary_key=True)
    consumer_group = models.TextField(_("consumer group"))
    source = models.TextField()
    topic = models.TextField(_("topic"))
    lane = models.SmallIntegerField()
    first_number = models.BigIntegerField()
    last_number = models.BigIntegerField()
    found_at = models.DateTimeField(db_default=Now())
    closed_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "outbox_gap"
        verbose_name = _("gap")
        verbose_name_plural = _("gaps")
        constraints = [
            models.UniqueConstraint(fields=["consumer_group", "source", "topic", "lane", "first_number"], name="outbox_gap_once")
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.topic} lane {self.lane} {self.first_number}-{self.last_number}"
