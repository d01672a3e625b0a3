"""Tables of consumers: handled messages, failures, gaps."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class Inbox(models.Model):
    """
    A message that a group has handled; inserted in the handler's transaction.

    `dedupe_key` is the message id unless the handler names its own key. Lane and number are NULL where the message
    carried none. `delivery_count`: which delivery to the group was the one that was handled, from 1; 0: the group had no
    handler for the message.
    """

    pk = models.CompositePrimaryKey("consumer_group", "dedupe_key")
    consumer_group = models.TextField()
    dedupe_key = models.TextField()
    message_id = models.UUIDField()
    source = models.TextField(default="")
    topic = models.TextField()
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    delivery_count = models.IntegerField(db_default=1)
    handled_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_inbox"
        verbose_name = "inbox row"
        indexes = [
            models.Index(
                fields=["consumer_group", "topic", "source", "lane", "number"],
                name="outbox_inbox_number",
                condition=models.Q(number__isnull=False),
            ),
            models.Index(fields=["message_id"], name="outbox_inbox_message"),
            models.Index(fields=["handled_at"], name="outbox_inbox_handled"),
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.dedupe_key}"


class InboxRow(models.Model):
    """The inbox with one text as its key, for the admin, which does not support composite keys. A view; never look for an id."""

    id = models.TextField(primary_key=True)
    consumer_group = models.TextField()
    dedupe_key = models.TextField()
    message_id = models.UUIDField()
    topic = models.TextField()
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    delivery_count = models.IntegerField()
    handled_at = models.DateTimeField()

    class Meta:
        db_table = "outbox_inbox_row"
        managed = False
        default_permissions = ()  # whoever may view the inbox
        verbose_name = "inbox row"

    def __str__(self) -> str:
        return self.id


class FailedDelivery(models.Model):
    """
    A delivery whose handler failed.

    `delivery_count`: which delivery to the group it was, from 1. Source, lane and number are stored as in the inbox: a number
    that is being retried, or became a dead letter, arrived.
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
    fingerprint = models.TextField()  # equal for errors that look alike
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


class FailureCount(models.Model):
    """
    What is counted of a message that came to a group again, or failed. The row is deleted when the message is handled.

    `failures`: how often the handler raised. `crashes`: how often it was begun and did not end. `begun_at`, `begun_by`: the
    run that is under way, or never ended; of a first delivery that is not written down. `due_at`: the handler is not called
    again before. `given_up`: why the group gave it up. `has_letter`: the broker has stored its dead letter, so that another
    copy of the message is dropped. The row is deleted when the letter is replayed or discarded, too.
    """

    pk = models.CompositePrimaryKey("consumer_group", "message_id")
    consumer_group = models.TextField()
    message_id = models.UUIDField()
    topic = models.TextField()
    failures = models.IntegerField(db_default=0)
    crashes = models.IntegerField(db_default=0)
    begun_at = models.DateTimeField(null=True)
    begun_by = models.TextField(db_default="")
    due_at = models.DateTimeField(null=True)
    given_up = models.TextField(db_default="")
    has_letter = models.BooleanField(db_default=False)
    changed_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_failure_count"

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.message_id}"


class DeadLetter(FailedDelivery):
    """What the admin calls dead letters, and the permissions for them. They themselves lie with the brokers."""

    class Meta:
        proxy = True
        default_permissions = ("view",)
        permissions = [
            ("replay_deadletter", "Can replay dead letters"),
            ("discard_deadletter", "Can discard dead letters"),
        ]


class Duplicate(models.Model):
    """A delivery that the inbox dropped, because its group had handled the message before."""

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
    """Numbers of a lane that a group has not seen within the settle time. `closed_at`: when they came after all."""

    id = models.BigAutoField(primary_key=True)
    consumer_group = models.TextField()
    source = models.TextField()
    topic = models.TextField()
    lane = models.SmallIntegerField()
    first_number = models.BigIntegerField()
    last_number = models.BigIntegerField()
    found_at = models.DateTimeField(db_default=Now())
    closed_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "outbox_gap"
        constraints = [
            models.UniqueConstraint(fields=["consumer_group", "source", "topic", "lane", "first_number"], name="outbox_gap_once")
        ]

    def __str__(self) -> str:
        return f"{self.consumer_group}: {self.topic} lane {self.lane} {self.first_number}-{self.last_number}"
