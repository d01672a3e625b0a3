"""What is kept beside the hot path: inbox, deferred messages, failures, acts, duplicates, gaps, check-backs, processes, dead messages."""

import django.contrib.postgres.fields
import django.db.models.functions.datetime
from django.db import migrations, models

from outbox.database.postgresql_only import PostgreSQLMigration

# The inbox with one text as its key, for the admin.
INBOX_ROW = """
CREATE VIEW outbox_inbox_row AS
SELECT consumer_group || ' ' || idempotency_key AS id, consumer_group, idempotency_key, message_id, topic, lane, number, delivery_count, handled_at
FROM outbox_inbox;
"""

# loaddata writes what dumpdata has read, the rows of views, too; these follow from those of the table.
INBOX_ROW_RULES = [
    "CREATE RULE outbox_inbox_row_insert AS ON INSERT TO outbox_inbox_row DO INSTEAD NOTHING",
    "CREATE RULE outbox_inbox_row_update AS ON UPDATE TO outbox_inbox_row DO INSTEAD NOTHING",
]


# Rows are updated often. Of one above 2 kB an update copies 65 bytes, since its body is stored apart.
DEFERRED_STORAGE = "ALTER TABLE outbox_deferred SET (autovacuum_vacuum_scale_factor = 0.02, toast_tuple_target = 128)"


class Migration(PostgreSQLMigration):
    dependencies = [("outbox", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="CheckBack",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("request_id", models.TextField(unique=True)),
                ("asked_by", models.TextField()),
                ("topic", models.TextField(verbose_name="topic")),
                ("message_id", models.TextField(db_index=True)),
                ("half_id", models.TextField()),
                ("token", models.TextField(default="")),
                ("asked", models.IntegerField(default=1)),
                ("answer", models.TextField()),
                ("sent_answer", models.TextField(default="")),
                ("reason", models.TextField()),
                ("about", models.TextField(default="none")),
                ("milliseconds", models.FloatField()),
                ("answered_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "verbose_name": "check-back",
                "verbose_name_plural": "check-backs",
                "db_table": "outbox_check_back",
            },
        ),
        migrations.CreateModel(
            name="DeadMessage",
            fields=[
                ("message_id", models.UUIDField(primary_key=True, serialize=False)),
                ("batch_id", models.BigIntegerField()),
                ("topic", models.TextField(verbose_name="topic")),
                ("key", models.TextField(default="")),
                ("headers", models.TextField(default="{}")),
                ("about", models.TextField(null=True)),
                ("body", models.BinaryField(null=True)),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("reason", models.TextField()),
                ("died_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "db_table": "outbox_dead",
                "verbose_name": "dead message",
                "verbose_name_plural": "dead messages",
                "permissions": [
                    ("replay_deadmessage", "Can replay dead messages"),
                    ("discard_deadmessage", "Can discard dead messages"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Duplicate",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField()),
                ("message_id", models.UUIDField(db_index=True)),
                ("topic", models.TextField()),
                ("delivery_count", models.IntegerField()),
                ("dropped_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "db_table": "outbox_duplicate",
            },
        ),
        migrations.CreateModel(
            name="FailedSend",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("batch_id", models.BigIntegerField(db_index=True)),
                ("attempt", models.BigIntegerField()),
                ("message_ids", django.contrib.postgres.fields.ArrayField(base_field=models.UUIDField(), size=None)),
                ("verdict", models.TextField()),
                ("reason", models.TextField()),
                ("failed_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "db_table": "outbox_failed_send",
            },
        ),
        migrations.CreateModel(
            name="FailedDelivery",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField()),
                ("message_id", models.UUIDField(db_index=True)),
                ("topic", models.TextField()),
                ("delivery_count", models.IntegerField()),
                ("source", models.TextField(default="")),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("outcome", models.TextField()),
                ("fingerprint", models.TextField()),
                ("error", models.TextField()),
                ("traceback", models.TextField(default="")),
                ("failed_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "verbose_name_plural": "failed deliveries",
                "db_table": "outbox_failed_delivery",
                "indexes": [
                    models.Index(
                        condition=models.Q(("number__isnull", False)),
                        fields=["consumer_group", "topic", "source", "lane", "number"],
                        name="outbox_failed_delivery_number",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OperatorAct",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "act",
                    models.TextField(
                        choices=[
                            ("replayed", "Replayed"),
                            ("retried now", "Retried Now"),
                            ("held", "Held"),
                            ("delivered again", "Delivered Again"),
                            ("discarded", "Discarded"),
                        ]
                    ),
                ),
                ("message_id", models.UUIDField(db_index=True)),
                ("topic", models.TextField()),
                ("consumer_group", models.TextField(db_default="")),
                ("delivery_count", models.IntegerField(null=True)),
                ("fingerprint", models.TextField(db_default="")),
                ("batch_id", models.BigIntegerField(null=True)),
                ("attempt", models.BigIntegerField(null=True)),
                ("reason", models.TextField()),
                ("acted_by", models.TextField()),
                ("acted_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), db_index=True)),
            ],
            options={
                "db_table": "outbox_operator_act",
            },
        ),
        migrations.CreateModel(
            name="Deferred",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField(verbose_name="consumer group")),
                ("message_id", models.UUIDField(db_index=True)),
                ("own_id", models.TextField()),
                ("idempotency_key", models.TextField()),
                ("topic", models.TextField(verbose_name="topic")),
                ("type", models.TextField(db_default="")),
                ("tag", models.TextField(db_default="")),
                ("key", models.TextField(db_default="")),
                ("headers", models.TextField()),
                ("body", models.BinaryField()),
                ("stored_at", models.DateTimeField(null=True)),
                ("source", models.TextField(db_default="")),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("delivery_count", models.IntegerField()),
                ("order_key", models.TextField(null=True)),
                ("failures", models.IntegerField(db_default=0)),
                ("crashes", models.IntegerField(db_default=0)),
                ("runs", models.IntegerField(db_default=0)),
                ("due_at", models.DateTimeField(null=True)),
                ("dead_at", models.DateTimeField(null=True)),
                ("no_code_since", models.DateTimeField(null=True)),
                ("reason", models.TextField()),
                ("error", models.TextField(db_default="")),
                ("fingerprint", models.TextField(db_default="")),
                ("deferred_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "verbose_name": "deferred message",
                "verbose_name_plural": "deferred messages",
                "db_table": "outbox_deferred",
                "default_permissions": ("view",),
                "permissions": [
                    ("replay_deferred", "Can replay, retry and hold deferred messages"),
                    ("discard_deferred", "Can discard deferred messages"),
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("dead_at", None)), fields=["consumer_group", "due_at"], name="outbox_deferred_due"
                    ),
                    models.Index(
                        condition=models.Q(("dead_at", None), ("order_key__isnull", False)),
                        fields=["order_key", "id"],
                        name="outbox_deferred_key",
                    ),
                    models.Index(
                        condition=models.Q(("dead_at__isnull", False)),
                        fields=["consumer_group", "dead_at"],
                        name="outbox_deferred_dead",
                    ),
                    models.Index(
                        condition=models.Q(("number__isnull", False)),
                        fields=["consumer_group", "topic", "source", "lane", "number"],
                        name="outbox_deferred_number",
                    ),
                ],
                "constraints": [models.UniqueConstraint(fields=("consumer_group", "message_id"), name="outbox_deferred_once")],
            },
        ),
        migrations.RunSQL(DEFERRED_STORAGE, migrations.RunSQL.noop),
        migrations.CreateModel(
            name="Overview",
            fields=[],
            options={
                "verbose_name": "overview",
                "verbose_name_plural": "overview",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("outbox.topic",),
        ),
        migrations.CreateModel(
            name="Gap",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField(verbose_name="consumer group")),
                ("source", models.TextField()),
                ("topic", models.TextField(verbose_name="topic")),
                ("lane", models.SmallIntegerField()),
                ("first_number", models.BigIntegerField()),
                ("last_number", models.BigIntegerField()),
                ("found_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("closed_at", models.DateTimeField(null=True)),
            ],
            options={
                "db_table": "outbox_gap",
                "verbose_name": "gap",
                "verbose_name_plural": "gaps",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("consumer_group", "source", "topic", "lane", "first_number"), name="outbox_gap_once"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Inbox",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "consumer_group", "idempotency_key", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("consumer_group", models.TextField()),
                ("idempotency_key", models.TextField()),
                ("message_id", models.UUIDField()),
                ("source", models.TextField(default="")),
                ("topic", models.TextField()),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("delivery_count", models.IntegerField(db_default=1)),
                ("handled_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "verbose_name": "inbox row",
                "verbose_name_plural": "inbox rows",
                "db_table": "outbox_inbox",
                "indexes": [
                    models.Index(
                        condition=models.Q(("number__isnull", False)),
                        fields=["consumer_group", "topic", "source", "lane", "number"],
                        name="outbox_inbox_number",
                    ),
                    models.Index(fields=["message_id"], name="outbox_inbox_message"),
                    models.Index(fields=["handled_at"], name="outbox_inbox_handled"),
                    models.Index(condition=models.Q(("delivery_count", 0)), fields=["handled_at"], name="outbox_inbox_ignored"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Process",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("kind", models.TextField()),
                ("host", models.TextField()),
                ("pid", models.IntegerField()),
                ("instance", models.TextField(db_default="")),
                ("broker", models.TextField(default="")),
                ("server", models.TextField(db_default="")),
                ("lane", models.SmallIntegerField(null=True)),
                ("consumer_group", models.TextField(default="")),
                ("breaker", models.TextField(default="closed")),
                ("note", models.TextField(default="")),
                (
                    "subscriptions",
                    django.contrib.postgres.fields.ArrayField(base_field=models.TextField(), db_default=[], size=None),
                ),
                ("refusals", models.JSONField(db_default={})),
                ("handling", models.JSONField(db_default={})),
                ("errors", models.JSONField(db_default={})),
                ("started_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("beat_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
            options={
                "verbose_name_plural": "processes",
                "db_table": "outbox_process",
                "constraints": [
                    models.UniqueConstraint(
                        fields=("kind", "host", "pid", "instance", "broker", "consumer_group"), name="outbox_process_once"
                    )
                ],
            },
        ),
        migrations.RunSQL([INBOX_ROW, *INBOX_ROW_RULES], "DROP VIEW outbox_inbox_row;"),
        migrations.CreateModel(
            name="InboxRow",
            fields=[
                ("id", models.TextField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField()),
                ("idempotency_key", models.TextField()),
                ("message_id", models.UUIDField()),
                ("topic", models.TextField()),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("delivery_count", models.IntegerField()),
                ("handled_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "inbox row",
                "verbose_name_plural": "inbox rows",
                "db_table": "outbox_inbox_row",
                "managed": False,
                "default_permissions": (),
            },
        ),
    ]
