"""The apps beside the outbox: each is added and removed with its migrations."""

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection

RELATIONS = r"SELECT relname FROM pg_class WHERE relname LIKE 'outbox\_%' AND relkind IN ('r', 'p', 'v', 'S', 'i')"


WITHOUT_MODEL = {"outbox_embedded": {"outbox_embedded_wakeup"}, "outbox_pipeline": set()}


def relations():
    with connection.cursor() as cursor:
        cursor.execute(RELATIONS)
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.django_db
@pytest.mark.parametrize("label", WITHOUT_MODEL)
class TestMigrations:
    def test_of_an_app_take_back_what_they_made_and_make_it_again(self, label):
        tables = {model._meta.db_table for model in apps.get_app_config(label).get_models()} | WITHOUT_MODEL[label]
        before = relations()

        call_command("migrate", label, "zero", verbosity=0)
        without = relations()
        call_command("migrate", label, verbosity=0)

        assert tables <= before
        assert {name for name in before - without if not name.startswith(tuple(tables))} <= {"outbox_embedded_half_id"}
        assert not tables & without
        assert relations() == before
