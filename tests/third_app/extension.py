from datetime import timedelta

from django.http import HttpResponse

from outbox.extensions import Extension, Page, RetentionHold
from tests.third_app.models import Copy


class ThirdAppExtension(Extension):
    tables = {"third_app_copy": "copied_at < %(before)s"}
    retention_hold = RetentionHold("not copied yet", lambda: timedelta(days=7), grace=timedelta(days=2))
    pages = (Page(95, "Copies", Copy, "third_app_copy_changelist"),)

    def has_archive(self):
        return True

    def archived_message(self, model_admin, request, message_id):
        return HttpResponse(f"A copy of {message_id}.")
