from datetime import timedelta

from django.conf import settings
from django.core.checks import Warning as Caution
from django.db import router
from django.http import HttpResponse

from outbox.extensions import Extension, Page, RetentionHold
from outbox.findings import Finding
from tests.third_app.models import Copy


def check_place(**kwargs):
    return [] if hasattr(settings, "COPIES") else [Caution("Set COPIES.", id="third_app.W001")]


def check_copies(databases=None, **kwargs):
    return [Caution(f"Database {alias!r} was asked.", id="third_app.W002") for alias in databases or ()]


class ThirdAppExtension(Extension):
    tables = {"third_app_copy": "copied_at < %(before)s"}
    retention_hold = RetentionHold("not copied yet", lambda: timedelta(days=7), grace=timedelta(days=2))
    checks = (check_place,)
    database_checks = (check_copies,)
    pages = (Page(95, "Copies", Copy, "third_app_copy_changelist"),)

    def find_attention(self, connection, alias):
        if not router.allow_migrate_model(alias, Copy):
            return
        if connection.execute("SELECT EXISTS (SELECT FROM third_app_copy)").fetchone() == (False,):
            yield Finding("third_app.no_copies", f"database {alias!r}", "No message was copied.", "Start the copier.")

    def has_archive(self):
        return True

    def archived_message(self, model_admin, request, message_id):
        return HttpResponse(f"A copy of {message_id}.")
