import io

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import transaction
from django.db.models.signals import post_migrate

import outbox
from outbox import conf, database
from outbox.consuming.register import groups
from outbox.consuming.worker import Worker
from outbox.database.identity import read_identity
from outbox.errors import OtherProject
from outbox.models import MessageRow, Topic
from outbox.monitoring.health import Health, health
from outbox.relay.hosts import open_runner, relay_targets
from outbox.topics import forget

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def other_project(settings):
    """Become a second project, with a topic of its own, on the database of the first."""
    settings.OUTBOX = {**settings.OUTBOX, "PROJECT": "blog", "TOPICS": {**settings.OUTBOX["TOPICS"], "posts": {}}}
    forget("default")


def owner():
    return read_identity(database.raw("default")).project


class TestProject:
    def test_is_the_package_of_the_wsgi_application(self, settings):
        settings.WSGI_APPLICATION = "shop.web.wsgi.application"

        assert conf.project() == "shop"

    def test_is_the_name_in_settings_where_there_is_one(self, settings):
        settings.WSGI_APPLICATION = "config.wsgi.application"
        settings.OUTBOX = {**settings.OUTBOX, "PROJECT": "shop"}

        assert conf.project() == "shop"


class TestOwner:
    def test_is_the_project_that_migrated(self):
        assert owner() == "project"

    def test_stays_when_another_project_migrates(self, other_project, caplog):
        post_migrate.send(sender=apps.get_app_config("outbox"), using="default", app_config=apps.get_app_config("outbox"))

        assert owner() == "project"
        assert not Topic.objects.filter(name="posts").exists()
        assert "belong to the project 'project', and this is 'blog'" in caplog.text

    def test_is_noted_at_the_next_migration_where_there_is_none(self):
        database.raw("default").execute("UPDATE outbox_source SET project = ''")

        call_command("migrate", stdout=io.StringIO())

        assert owner() == "project"


class TestOtherProject:
    def test_cannot_publish(self, other_project):
        with pytest.raises(OtherProject, match="belong to the project 'project', and this is 'blog'"), transaction.atomic():
            outbox.publish_raw("posts", b"{}")

        assert not MessageRow.objects.exists()

    def test_cannot_relay(self, other_project):
        with pytest.raises(OtherProject), open_runner(relay_targets()[0], note=""):
            pass

    def test_cannot_consume(self, other_project):
        worker = Worker(next(iter(groups().values())), "default")

        with pytest.raises(OtherProject):
            worker.step(conf.settings().consumer.wait)

    def test_is_named_by_the_check_with_the_two_remedies(self, other_project):
        (problem,) = [one for one in run_checks(databases=["default"]) if one.id == "outbox.database_unfit"]

        assert "belong to the project 'project', and this is 'blog'" in problem.msg
        assert 'OUTBOX["PROJECT"] = "project"' in problem.hint
        assert "UPDATE outbox_source SET project = 'blog'" in problem.hint

    def test_is_unfit_in_health(self, other_project):
        assert health()["default"] is Health.UNFIT

    def test_is_the_owner_once_the_tables_were_handed_over(self, other_project):
        database.raw("default").execute("UPDATE outbox_source SET project = 'blog'")
        try:
            with transaction.atomic():
                outbox.publish_raw("posts", b"{}")

            assert MessageRow.objects.count() == 1
        finally:
            database.raw("default").execute("UPDATE outbox_source SET project = 'project'")


class TestUnknownProject:
    def test_is_refused_nothing(self, settings):
        settings.WSGI_APPLICATION = None
        forget("default")

        with database.connect("default") as connection:
            database.ensure_fit("default", connection)
