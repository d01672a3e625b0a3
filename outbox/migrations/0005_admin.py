"""What the admin needs: who paused a topic and why, the inbox with one key, parked halves by an index, permissions."""

from django.db import migrations, models

INBOX_ROW = """
CREATE VIEW outbox_inbox_row AS
SELECT consumer_group || ' ' || dedupe_key AS id, consumer_group, dedupe_key, message_id, topic, lane, number, nth, handled_at
FROM outbox_inbox;
"""

# Halves are neither inserted nor committed as parked: it costs the broker's hot path nothing.
PARKED = "CREATE INDEX outbox_embedded_half_parked ON outbox_embedded_half (id) WHERE state = 1;"


class Migration(migrations.Migration):
    dependencies = [("outbox", "0004_embedded")]

    operations = [
        migrations.AddField("topic", "paused_at", models.DateTimeField(null=True)),
        migrations.AddField("topic", "paused_by", models.TextField(db_default="")),
        migrations.AddField("topic", "pause_reason", models.TextField(db_default="")),
        migrations.RunSQL(INBOX_ROW, "DROP VIEW outbox_inbox_row;"),
        migrations.RunSQL(PARKED, "DROP INDEX outbox_embedded_half_parked;"),
        migrations.CreateModel(
            name="InboxRow",
            fields=[
                ("id", models.TextField(primary_key=True, serialize=False)),
                ("consumer_group", models.TextField()),
                ("dedupe_key", models.TextField()),
                ("message_id", models.UUIDField()),
                ("topic", models.TextField()),
                ("lane", models.SmallIntegerField(null=True)),
                ("number", models.BigIntegerField(null=True)),
                ("nth", models.IntegerField()),
                ("handled_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "inbox row",
                "db_table": "outbox_inbox_row",
                "managed": False,
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[],
            options={
                "permissions": [
                    ("retry_deadletter", "Can have dead letters delivered again"),
                    ("discard_deadletter", "Can discard dead letters"),
                ],
                "default_permissions": ("view",),
                "proxy": True,
                "indexes": [],
                "constraints": [],
            },
            bases=("outbox.faileddelivery",),
        ),
        migrations.AlterModelOptions(
            name="topic",
            options={"permissions": [("pause_topic", "Can pause and resume topics")]},
        ),
        migrations.AlterModelOptions(
            name="checkback",
            options={"verbose_name": "check-back"},
        ),
        migrations.AlterModelOptions(
            name="messagerow",
            options={
                "permissions": [("view_body", "Can view masked fields and bodies of messages")],
                "verbose_name": "message",
            },
        ),
        migrations.AlterModelOptions(
            name="deadmessage",
            options={
                "permissions": [
                    ("retry_deadmessage", "Can have dead messages sent again"),
                    ("discard_deadmessage", "Can let dead messages rest"),
                ]
            },
        ),
        migrations.AlterModelOptions(
            name="embeddedhalf",
            options={
                "permissions": [("ask_embeddedhalf", "Can have half messages asked about")],
                "verbose_name": "half message",
            },
        ),
    ]
