from django.db import router

from outbox.findings import Finding, Needs, rule
from tests.third_app.models import Copy


@rule("third_app.no_copies", needs=Needs.DATABASE)
def find_copies(status, connection):
    if not router.allow_migrate_model(status.database, Copy):
        return
    if connection.execute("SELECT EXISTS (SELECT FROM third_app_copy)").fetchone() == (False,):
        yield Finding("third_app.no_copies", f"database {status.database!r}", "No message was copied.", "Start the copier.")
