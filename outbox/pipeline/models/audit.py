"""What audits found: runs, findings, and how latency and backlog were then."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Now


class AuditRun(models.Model):
    """
    One audit: over what, by which code, and what came of it.

    A run that says RUNNING and whose process is gone is dead; `outbox.pipeline.audit_runs.store` tells the two apart.
    """

    class State(models.TextChoices):
        RUNNING = "running"
        DONE = "done"  # there is an answer; whether it is a good one, `found` says
        FAILED = "failed"  # there is none, and `error` says why
        DIED = "died"  # its process was gone before it had one
        SKIPPED = "skipped"  # another one ran at that time

    id = models.BigAutoField(primary_key=True)
    state = models.TextField(choices=State, default=State.RUNNING)
    started_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    asked_by = models.TextField()  # command, beat
    host = models.TextField()
    pid = models.IntegerField()
    since = models.DateTimeField(null=True)  # NULL: the whole history
    as_of = models.DateTimeField(null=True)
    settle_seconds = models.FloatField()
    seconds = models.FloatField(null=True)  # of judging, reading left out
    found = models.IntegerField(null=True)  # how many findings
    counts = models.JSONField(default=dict)  # topic -> what -> how many messages
    code_version = models.TextField(default="")
    data_digest = models.TextField(default="")
    verdict = models.TextField(default="")  # JSON, as it was signed
    signature = models.TextField(default="")  # empty: there was no key
    exit_code = models.IntegerField(null=True)
    error = models.TextField(default="")

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_run"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"audit {self.id}"


class AuditFinding(models.Model):
    """
    One thing that an audit found wrong; kind and stage are words of `outbox.pipeline.spark.findings`.

    Lane and numbers are NULL where its messages carry none. `message_ids` and `about` hold at most so many as the audit
    was asked to name, `count` says how many there are.
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
    count = models.BigIntegerField()
    message_ids = ArrayField(models.TextField())
    about = ArrayField(models.TextField())
    text = models.TextField()
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.TextField(default="")
    note = models.TextField(default="")
    sent_again_at = models.DateTimeField(null=True)
    sent_again_by = models.TextField(default="")
    sent_again = models.IntegerField(default=0)  # how many messages

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_finding"
        default_permissions = ("view",)
        permissions = [
            ("retry_auditfinding", "Can have lost messages sent again"),
            ("acknowledge_auditfinding", "Can acknowledge findings of audits"),
        ]

    def __str__(self) -> str:
        return self.text


class AuditLatency(models.Model):
    """How long messages took that ended a hop in a minute: counts of the bins of `outbox.pipeline.spark.bins`, which add up."""

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
    """How a group stood with a topic when the audit was made; `minutes`: of the last day, `[seconds since 1970, backlog]`."""

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(AuditRun, models.CASCADE, related_name="backlogs")
    consumer_group = models.TextField()
    topic = models.TextField()
    backlog = models.BigIntegerField()
    growth = models.FloatField()  # messages a minute
    cause = models.TextField()
    onset_at = models.DateTimeField(null=True)
    most_repeated = models.JSONField(default=list)  # [message id, tries]
    minutes = models.JSONField(default=list)

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_audit_backlog"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.consumer_group}, {self.topic}: {self.backlog}"
