"""Tables of the data pipeline: archived days, audits and their findings, recorded messages."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy


class ArchivedDay(models.Model):
    """A UTC day that is being archived, or was archived. The archive job writes it; see docs/how-to/archive.md."""

    class Step(models.TextChoices):
        PLANNED = "planned", _("planned")  # being written, not committed yet
        COMMITTED = "committed", pgettext_lazy("archived day", "committed")  # in the lake, and still in the database
        CHANGED = "changed", _("changed")  # its rows in the database differ from the lake, so it will be archived again
        DELETED = "deleted", _("deleted")  # only in the lake

    day = models.DateField(_("day"), primary_key=True)
    state = models.TextField(choices=Step)
    attempt = models.IntegerField(_("attempt"))  # from 1; the folder of an attempt in the lake is a1, a2, ...
    rows = models.BigIntegerField()  # number of messages
    digest = models.TextField()  # of the messages: the sum of the rows' hashes
    manifest = models.TextField(default="")  # a copy of the lake's manifest, JSON
    planned_at = models.DateTimeField(db_default=Now())
    committed_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_archived_day"
        verbose_name = _("archived day")
        verbose_name_plural = _("archived days")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.day}: {self.state}"


class AuditRun(models.Model):
    """
    One run of the audit: its scope, its code version, and its result.

    A run whose process was killed stays in state RUNNING; `outbox.pipeline.runs.state_of` returns whether it still runs.
    """

    class RunState(models.TextChoices):
        RUNNING = "running", _("running")
        DONE = "done", _("done")  # the audit finished; `found` is the number of findings
        FAILED = "failed", _("failed")  # `error` has the reason
        DIED = "died", pgettext_lazy("audit", "died")  # its process ended before the audit had finished
        SKIPPED = "skipped", _("skipped")  # another run was in progress

    id = models.BigAutoField(primary_key=True)
    state = models.TextField(choices=RunState, default=RunState.RUNNING)
    started_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    asked_by = models.TextField()  # `command` or `beat`
    host = models.TextField()
    pid = models.IntegerField()
    since = models.DateTimeField(null=True)  # NULL: the whole history was audited
    as_of = models.DateTimeField(null=True)  # when the database was read
    settle_seconds = models.FloatField()  # messages younger than this counted as in flight
    seconds = models.FloatField(null=True)  # duration, from the start of Spark's process to its end
    found = models.IntegerField(null=True)  # number of findings
    counts = models.JSONField(default=dict)  # topic -> name of the count -> number of messages
    code_version = models.TextField(default="")
    data_digest = models.TextField(default="")  # of all columns of the history except times
    verdict = models.TextField(default="")  # JSON, exactly as signed
    signature = models.TextField(default="")  # empty: there was no signing key
    exit_code = models.IntegerField(null=True)
    error = models.TextField(default="")

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_run"
        verbose_name = _("audit run")
        verbose_name_plural = _("audit runs")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return _("audit {}").format(self.id)


class AuditFinding(models.Model):
    """
    One finding of an audit. Kind and stage are values of the enums in `outbox.pipeline.spark.findings`.

    Lane and numbers are NULL for messages without a number. `count` is the number of all messages, while `message_ids` and
    `about` have at most `ids_per_finding` entries.
    """

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(AuditRun, models.CASCADE, related_name="findings")
    kind = models.TextField()
    stage = models.TextField()
    topic = models.TextField()
    source = models.TextField()
    lane = models.SmallIntegerField(null=True)
    consumer_group = models.TextField()
    subject = models.TextField()
    first_number = models.BigIntegerField(null=True)
    last_number = models.BigIntegerField(null=True)
    count = models.BigIntegerField(_("count"))
    message_ids = ArrayField(models.TextField())
    about = ArrayField(models.TextField())
    text = models.TextField()
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.TextField(default="")
    note = models.TextField(default="")
    resent_at = models.DateTimeField(null=True)
    resent_by = models.TextField(default="")
    resent_count = models.IntegerField(default=0)  # number of messages that were sent again

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_finding"
        verbose_name = _("audit finding")
        verbose_name_plural = _("audit findings")
        default_permissions = ("view",)
        permissions = [
            ("resend_auditfinding", "Can send lost messages again"),
            ("acknowledge_auditfinding", "Can acknowledge findings of audits"),
        ]

    def __str__(self) -> str:
        return self.text


class AuditLatency(models.Model):
    """
    A latency histogram of the messages that ended a hop in one minute, with the bins of `outbox.pipeline.spark.measures`.

    For days more than two days before the audit there is one histogram per day, and `minute` is the day's beginning.
    """

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(AuditRun, models.CASCADE, related_name="latencies")
    topic = models.TextField()
    hop = models.TextField()
    consumer_group = models.TextField()
    minute = models.DateTimeField()
    bins = ArrayField(models.IntegerField())
    counts = ArrayField(models.BigIntegerField())

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_latency"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.topic} {self.hop} {self.minute:%Y-%m-%d %H:%M}"


class AuditBacklog(models.Model):
    """
    The backlog of a group and topic at the time of the audit.

    `minutes` has the backlog after each minute of the last day, as `[seconds since 1970, backlog]`.
    """

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(AuditRun, models.CASCADE, related_name="backlogs")
    consumer_group = models.TextField()
    topic = models.TextField()
    backlog = models.BigIntegerField()
    growth = models.FloatField()  # messages per minute
    cause = models.TextField()
    onset_at = models.DateTimeField(null=True)
    most_repeated = models.JSONField(default=list)  # [message id, number of failures] of the messages that failed most often
    minutes = models.JSONField(default=list)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_backlog"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.consumer_group}, {self.topic}: {self.backlog}"


class RecordedMessage(models.Model):
    """
    A delivery to the recorder. A message that the broker has stored twice has two rows with `delivery_count` 1, at two positions.

    `queue` and `pos` are the message's position at the broker, in the broker's terms; they are empty and NULL if the broker does
    not report it. `delivery_count` is the number of the delivery to the recorder, from 1. While a row exists, the same delivery
    is not recorded again.
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
    The progress of the recorder in a topic.

    Of the messages that were sent between `began_at` and `read_until`, all that the broker has are recorded. `read_until` is NULL
    until that is certain for the first time.
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
