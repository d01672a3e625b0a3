"""
The batch, which is a group of messages of one topic that a relay claims and sends together; and other tables that relays write.

docs/state-machine.md has a drawing of the states and transitions. A transition is an UPDATE of one row whose WHERE names state
and attempt.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from outbox.conf.apps import require_outbox

require_outbox()  # here, because without the app in INSTALLED_APPS, the models below would raise a less clear error


class State(models.IntegerChoices):
    """The state of a batch."""

    RELEASED = 0
    CLAIMED = 1
    PREPARED = 2
    SENT = 3
    DEAD = 4
    DISCARDED = 5


UNFINISHED = f"({State.RELEASED}, {State.CLAIMED}, {State.PREPARED})"
"""The states of an unfinished batch, as SQL literals. With parameters, PostgreSQL could not use the partial index on states."""


class Lane(models.Model):
    """The last number that a lane has given to a message of a topic. Only one relay holds a lane, with an advisory lock."""

    pk = models.CompositePrimaryKey("topic_id", "lane")
    topic_id = models.IntegerField()
    lane = models.SmallIntegerField()
    last_seq = models.BigIntegerField()

    class Meta:
        db_table = "outbox_lane"

    def __str__(self) -> str:
        return f"topic {self.topic_id} lane {self.lane}: {self.last_seq}"


class Batch(models.Model):
    """One batch. The message at position p (from 1) has number `first_seq + p - 1`."""

    id = models.BigAutoField(primary_key=True)
    topic_id = models.IntegerField()
    lane = models.SmallIntegerField(null=True)
    first_seq = models.BigIntegerField(null=True)
    message_ids = ArrayField(models.UUIDField())
    order_keys = ArrayField(models.BigIntegerField(), null=True)
    origin_id = models.BigIntegerField(null=True)  # the batch in which the messages were claimed; NULL: this batch
    half_ids = ArrayField(models.TextField(null=True), null=True)
    half_places = ArrayField(models.TextField(null=True), null=True)  # where the broker stores the half messages, in its format
    split = ArrayField(models.SmallIntegerField(), default=list)  # positions that were moved to other batches
    open = ArrayField(models.SmallIntegerField(), null=True)  # decided positions whose commit was not answered; NULL: all
    state = models.SmallIntegerField(choices=State, default=State.CLAIMED)
    attempt = models.BigIntegerField(default=1)  # the fence
    failures = models.IntegerField(default=0)
    owner = models.IntegerField(null=True)  # the lane whose relay claimed the batch
    lease_until = models.DateTimeField(null=True)
    due_at = models.DateTimeField(null=True)
    decided_at = models.DateTimeField(null=True)
    # Until this time, the process that decided the batch may end (commit or roll back) its half messages. NULL: at any time.
    ends_until = models.DateTimeField(null=True)
    claimed_at = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    last_error = models.TextField(null=True)  # noqa: DJ001
    # The lane and attempt of the broker's transaction that may contain the batch's messages. NULL: no transaction contains them.
    tx_lane = models.SmallIntegerField(null=True)
    tx_attempt = models.BigIntegerField(null=True)

    class Meta:
        db_table = "outbox_batch"
        verbose_name_plural = "batches"

    def __str__(self) -> str:
        return f"{self.id} {State(self.state).label}"


class FailedSend(models.Model):
    """A failed send: the messages of a batch that were not sent, and the broker's reason."""

    id = models.BigAutoField(primary_key=True)
    batch_id = models.BigIntegerField(db_index=True)
    attempt = models.BigIntegerField()
    message_ids = ArrayField(models.UUIDField())
    verdict = models.TextField()
    reason = models.TextField()
    failed_at = models.DateTimeField(db_default=Now(), db_index=True)

    class Meta:
        db_table = "outbox_failed_send"

    def __str__(self) -> str:
        return f"batch {self.batch_id} attempt {self.attempt}: {self.verdict}"


class DeadMessage(models.Model):
    """A copy of a dead message. The message is not lost when the daily partition with its message row is dropped."""

    message_id = models.UUIDField(primary_key=True)
    batch_id = models.BigIntegerField()
    topic = models.TextField(_("topic"))
    key = models.TextField(default="")
    headers = models.TextField(default="{}")
    about = models.TextField(null=True)  # noqa: DJ001
    body = models.BinaryField(null=True)  # NULL: the message row was gone when the message died
    lane = models.SmallIntegerField(null=True)
    number = models.BigIntegerField(null=True)
    reason = models.TextField()
    died_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_dead"
        verbose_name = _("dead message")
        verbose_name_plural = _("dead messages")
        permissions = [
            ("replay_deadmessage", "Can replay dead messages"),
            ("discard_deadmessage", "Can discard dead messages"),
        ]

    def __str__(self) -> str:
        return str(self.message_id)


class Process(models.Model):
    """The last heartbeat of a process, as a relay, consumer or checker."""

    id = models.BigAutoField(primary_key=True)
    kind = models.TextField()  # relay, consumer, checker
    host = models.TextField()
    pid = models.IntegerField()
    instance = models.TextField(db_default="")  # unique to the process, even if another one has the same host and pid
    broker = models.TextField(default="")
    server = models.TextField(db_default="")  # names the broker's server, according to the settings of the process
    lane = models.SmallIntegerField(null=True)
    consumer_group = models.TextField(default="")
    breaker = models.TextField(default="closed")  # closed, open, half-open, or the topics for which it is open
    note = models.TextField(default="")
    subscriptions = ArrayField(
        models.TextField(), db_default=[]
    )  # of a consumer: the topics, types and tags that its code handles
    refusals = models.JSONField(db_default={})  # of a consumer: the topics that it cannot receive from, with the reasons
    handling = models.JSONField(db_default={})  # of a consumer: the handler that has been running for the longest time
    errors = models.JSONField(db_default={})  # errors of loops whose last step failed, by the name of the loop
    started_at = models.DateTimeField(db_default=Now())
    beat_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "outbox_process"
        verbose_name_plural = "processes"
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "host", "pid", "instance", "broker", "consumer_group"], name="outbox_process_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.host}:{self.pid}"
