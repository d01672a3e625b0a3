"""What the monitor saw, micro-batch by micro-batch. `outbox.pipeline.spark.monitor.write` writes all of it."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class MonitorJob(models.Model):
    """The last micro-batch that was applied. A job is a checkpoint of Spark's; another one begins anew."""

    job = models.TextField(primary_key=True)
    batch = models.BigIntegerField()
    applied_at = models.DateTimeField(db_default=Now())

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_monitor"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job}: {self.batch}"


class MonitorBucket(models.Model):
    """32,768 numbers of a lane in a role: which were seen, one bit each. `n`: in how many rows, `seen`: how many of them."""

    id = models.BigAutoField(primary_key=True)
    source = models.TextField()
    topic = models.TextField()
    lane = models.SmallIntegerField()
    bucket = models.BigIntegerField()
    role = models.TextField()  # sent, explained; of a group: handled, given up
    consumer_group = models.TextField()
    bits = models.BinaryField()
    n = models.BigIntegerField()
    seen = models.IntegerField()

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_monitor_bucket"
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["source", "topic", "lane", "bucket", "role", "consumer_group"], name="outbox_monitor_bucket_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.topic} lane {self.lane} bucket {self.bucket} {self.role} {self.consumer_group}"


class MonitorMissing(models.Model):
    """How many numbers of a bucket are missing to a group, or to the outbox; none where nothing is."""

    id = models.BigAutoField(primary_key=True)
    source = models.TextField()
    topic = models.TextField()
    lane = models.SmallIntegerField()
    bucket = models.BigIntegerField()
    consumer_group = models.TextField()
    count = models.IntegerField()
    first_number = models.BigIntegerField()

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_monitor_missing"
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["source", "topic", "lane", "bucket", "consumer_group"], name="outbox_monitor_missing_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.topic} lane {self.lane} bucket {self.bucket} {self.consumer_group}: {self.count}"


class MonitorLane(models.Model):
    """
    How the outbox, or a group, stands with a lane.

    Args:
        consumer_group: empty: the outbox itself.
        lane: -1: messages without a number.
        missing: below the highest number, and not there; NULL: not judged, for the group began behind what lay there before.
        duplicates: numbers seen again; of messages without a number, deliveries that the inbox dropped.
        first_missing_since: since when it is this number that is the first one missing. What is under way is missing for a
            moment.
        failed: tries.
    """

    id = models.BigAutoField(primary_key=True)
    source = models.TextField()
    topic = models.TextField()
    lane = models.SmallIntegerField()
    consumer_group = models.TextField()
    first_number = models.BigIntegerField(null=True)
    highest = models.BigIntegerField(null=True)
    seen = models.BigIntegerField(db_default=0)
    missing = models.BigIntegerField(null=True)
    duplicates = models.BigIntegerField(db_default=0)
    failed = models.BigIntegerField(db_default=0)
    first_missing = models.BigIntegerField(null=True)
    first_missing_since = models.DateTimeField(null=True)
    updated_at = models.DateTimeField(db_default=Now())

    class Meta:
        app_label = "outbox_pipeline"
        db_table = "outbox_monitor_lane"
        default_permissions = ("view",)
        verbose_name = "monitored lane"
        constraints = [
            models.UniqueConstraint(fields=["source", "topic", "lane", "consumer_group"], name="outbox_monitor_lane_once")
        ]

    def __str__(self) -> str:
        return f"{self.topic} lane {self.lane} {self.consumer_group}"
