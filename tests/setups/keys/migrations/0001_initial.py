import django.db.models.deletion
from django.db import migrations, models

import tests.setups.keys.models


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("shop", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Gift",
            fields=[
                (
                    "order_ptr",
                    models.OneToOneField(
                        auto_created=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        parent_link=True,
                        primary_key=True,
                        serialize=False,
                        to="shop.order",
                    ),
                ),
                ("greeting", models.TextField(default="Hello")),
            ],
            bases=("shop.order",),
        ),
        migrations.CreateModel(
            name="Parcel",
            fields=[
                (
                    "id",
                    tests.setups.keys.models.UlidField(
                        default=tests.setups.keys.models.new_ulid, primary_key=True, serialize=False
                    ),
                ),
                ("order", models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="shop.order")),
            ],
        ),
    ]
