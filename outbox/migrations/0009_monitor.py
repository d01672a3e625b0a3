"""What the monitor saw: sets of numbers, what is missing, and how each lane stands."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("outbox", "0008_recorder"),
    ]

    operations = [
        migrations.CreateModel(
            name="MonitorJob",
            fields=[
                ("job", models.TextField(primary_key=True, serialize=False)),
                ("batch", models.BigIntegerField()),
                ("applied_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "outbox_monitor",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="MonitorBucket",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("source", models.TextField()),
                ("topic", models.TextField()),
                ("lane", models.SmallIntegerField()),
                ("bucket", models.BigIntegerField()),
                ("role", models.TextField()),
                ("consumer_group", models.TextField()),
                ("bits", models.BinaryField()),
                ("n", models.BigIntegerField()),
                ("seen", models.IntegerField()),
            ],
            options={
                "db_table": "outbox_monitor_bucket",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("source", "topic", "lane", "bucket", "role", "consumer_group"), name="outbox_monitor_bucket_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="MonitorLane",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("source", models.TextField()),
                ("topic", models.TextField()),
                ("lane", models.SmallIntegerField()),
                ("consumer_group", models.TextField()),
                ("first_number", models.BigIntegerField(null=True)),
                ("highest", models.BigIntegerField(null=True)),
                ("seen", models.BigIntegerField(db_default=0)),
                ("missing", models.BigIntegerField(null=True)),
                ("duplicates", models.BigIntegerField(db_default=0)),
                ("failed", models.BigIntegerField(db_default=0)),
                ("first_missing", models.BigIntegerField(null=True)),
                ("first_missing_since", models.DateTimeField(null=True)),
                ("updated_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "verbose_name": "monitored lane",
                "db_table": "outbox_monitor_lane",
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(fields=("source", "topic", "lane", "consumer_group"), name="outbox_monitor_lane_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="MonitorMissing",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("source", models.TextField()),
                ("topic", models.TextField()),
                ("lane", models.SmallIntegerField()),
                ("bucket", models.BigIntegerField()),
                ("consumer_group", models.TextField()),
                ("count", models.IntegerField()),
                ("first_number", models.BigIntegerField()),
            ],
            options={
                "db_table": "outbox_monitor_missing",
                "default_permissions": (),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("source", "topic", "lane", "bucket", "consumer_group"), name="outbox_monitor_missing_once"
                    )
                ],
            },
        ),
    ]
