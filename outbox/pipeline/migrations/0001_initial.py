"""Tables of audits and their findings, of archived days, and of recorded messages."""

import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

from outbox.database.postgresql_only import PostgreSQLMigration


class Migration(PostgreSQLMigration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="ArchivedDay",
            fields=[
                ("day", models.DateField(primary_key=True, serialize=False, verbose_name="day")),
                (
                    "state",
                    models.TextField(
                        choices=[
                            ("planned", "planned"),
                            ("committed", "committed"),
                            ("changed", "changed"),
                            ("deleted", "deleted"),
                        ]
                    ),
                ),
                ("attempt", models.IntegerField(verbose_name="attempt")),
                ("rows", models.BigIntegerField()),
                ("digest", models.TextField()),
                ("manifest", models.TextField(default="")),
                ("planned_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("committed_at", models.DateTimeField(null=True)),
                ("deleted_at", models.DateTimeField(null=True)),
            ],
            options={
                "verbose_name": "archived day",
                "verbose_name_plural": "archived days",
                "db_table": "outbox_archived_day",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="AuditRun",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "state",
                    models.TextField(
                        choices=[
                            ("running", "running"),
                            ("done", "done"),
                            ("failed", "failed"),
                            ("died", "died"),
                            ("skipped", "skipped"),
                        ],
                        default="running",
                    ),
                ),
                ("started_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("ended_at", models.DateTimeField(null=True)),
                ("asked_by", models.TextField()),
                ("host", models.TextField()),
                ("pid", models.IntegerField()),
                ("since", models.DateTimeField(null=True)),
                ("as_of", models.DateTimeField(null=True)),
                ("settle_seconds", models.FloatField()),
                ("seconds", models.FloatField(null=True)),
                ("found", models.IntegerField(null=True)),
                ("counts", models.JSONField(default=dict)),
                ("code_version", models.TextField(default="")),
                ("data_digest", models.TextField(default="")),
                ("verdict", models.TextField(default="")),
                ("signature", models.TextField(default="")),
                ("exit_code", models.IntegerField(null=True)),
                ("error", models.TextField(default="")),
            ],
            options={
                "verbose_name": "audit run",
                "verbose_name_plural": "audit runs",
                "db_table": "outbox_audit_run",
                "default_permissions": ("view",),
            },
        ),
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
            name="AuditLatency",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("topic", models.TextField()),
                ("hop", models.TextField()),
                ("consumer_group", models.TextField()),
                ("minute", models.DateTimeField()),
                ("bins", django.contrib.postgres.fields.ArrayField(base_field=models.IntegerField(), size=None)),
                ("counts", django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="latencies", to="outbox_pipeline.auditrun"
                    ),
                ),
            ],
            options={
                "db_table": "outbox_audit_latency",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="AuditFinding",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("kind", models.TextField()),
                ("stage", models.TextField()),
                ("topic", models.TextField()),
                ("source", models.TextField()),
                ("lane", models.SmallIntegerField(null=True)),
                ("consumer_group", models.TextField()),
                ("subject", models.TextField()),
                ("first_number", models.BigIntegerField(null=True)),
                ("last_number", models.BigIntegerField(null=True)),
                ("count", models.BigIntegerField(verbose_name="count")),
                ("message_ids", django.contrib.postgres.fields.ArrayField(base_field=models.TextField(), size=None)),
                ("about", django.contrib.postgres.fields.ArrayField(base_field=models.TextField(), size=None)),
                ("text", models.TextField()),
                ("acknowledged_at", models.DateTimeField(null=True)),
                ("acknowledged_by", models.TextField(default="")),
                ("note", models.TextField(default="")),
                ("resent_at", models.DateTimeField(null=True)),
                ("resent_by", models.TextField(default="")),
                ("resent_count", models.IntegerField(default=0)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="findings", to="outbox_pipeline.auditrun"
                    ),
                ),
            ],
            options={
                "verbose_name": "audit finding",
                "verbose_name_plural": "audit findings",
                "db_table": "outbox_audit_finding",
                "permissions": [
                    ("resend_auditfinding", "Can send lost messages again"),
                    ("acknowledge_auditfinding", "Can acknowledge findings of audits"),
                ],
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="AuditBacklog",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField()),
                ("topic", models.TextField()),
                ("backlog", models.BigIntegerField()),
                ("growth", models.FloatField()),
                ("cause", models.TextField()),
                ("onset_at", models.DateTimeField(null=True)),
                ("most_repeated", models.JSONField(default=list)),
                ("minutes", models.JSONField(default=list)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="backlogs", to="outbox_pipeline.auditrun"
                    ),
                ),
            ],
            options={
                "db_table": "outbox_audit_backlog",
                "default_permissions": (),
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
                ("delivery_count", models.IntegerField(default=1)),
                ("stored_at", models.DateTimeField(null=True)),
                ("recorded_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "db_table": "outbox_recorded",
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("message_id", "topic", "queue", "pos", "delivery_count"), name="outbox_recorded_once"
                    )
                ],
            },
        ),
    ]
