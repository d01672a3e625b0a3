"""What brokers were seen to have, for the audit: the recorder's rows, and how far it has come."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("outbox", "0007_archive"),
    ]

    operations = [
        migrations.CreateModel(
            name="RecordedTopic",
            fields=[
                ("topic", models.TextField(primary_key=True, serialize=False)),
                ("broker", models.TextField()),
                ("consumer_group", models.TextField()),
                ("began_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("read_until", models.DateTimeField(null=True)),
            ],
            options={
                "db_table": "outbox_recorded_topic",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="RecordedMessage",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("topic", models.TextField()),
                ("message_id", models.UUIDField()),
                ("source", models.TextField(default="")),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("key", models.TextField(default="")),
                ("tag", models.TextField(default="")),
                ("queue", models.TextField(default="")),
                ("pos", models.BigIntegerField(null=True)),
                ("nth", models.IntegerField(default=1)),
                ("stored_at", models.DateTimeField(null=True)),
                ("recorded_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "db_table": "outbox_recorded",
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(fields=("message_id", "topic", "queue", "pos", "nth"), name="outbox_recorded_once")
                ],
            },
        ),
    ]
