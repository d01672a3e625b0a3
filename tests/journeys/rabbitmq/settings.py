"""The settings of a storm's processes."""

from outbox.schedule import beat_schedule
from tests.journeys.rabbitmq.given import given, names, outbox
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("project.")), "tests.journeys.rabbitmq"]
ROOT_URLCONF = None
OUTBOX = outbox(given["unique"], given["nodes"])
CELERY_BEAT_SCHEDULE = beat_schedule(consume=[names(given["unique"]).one])
