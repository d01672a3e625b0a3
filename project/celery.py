"""The shop's Celery app: `celery -A project worker --beat -Q outbox,shop`."""

import os

from celery import Celery
from kombu.transport import TRANSPORT_ALIASES

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

TRANSPORT_ALIASES["files"] = "project.celery_files:Transport"

app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
