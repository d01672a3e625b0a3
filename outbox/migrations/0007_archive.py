"""Which days of messages are in the lake."""

import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("outbox", "0006_audit")]

    operations = [
        migrations.CreateModel(
            name="ArchivedDay",
            fields=[
                ("day", models.DateField(primary_key=True, serialize=False)),
                (
                    "state",
                    models.TextField(
                        choices=[
                            ("planned", "Planned"),
                            ("committed", "Committed"),
                            ("changed", "Changed"),
                            ("deleted", "Deleted"),
                        ]
                    ),
                ),
                ("attempt", models.IntegerField()),
                ("rows", models.BigIntegerField()),
                ("digest", models.TextField()),
                ("manifest", models.TextField(default="")),
                ("planned_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ("committed_at", models.DateTimeField(null=True)),
                ("deleted_at", models.DateTimeField(null=True)),
            ],
            options={"db_table": "outbox_archived_day", "default_permissions": ("view",)},
        ),
    ]
