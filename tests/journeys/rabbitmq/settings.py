"""The settings of a storm's processes."""

from outbox.schedule import beat_schedule
from tests.journeys.rabbitmq.given import given, names, outbox
from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.journeys.rabbitmq"]
OUTBOX = outbox(given["unique"], given["nodes"])
CELERY_BEAT_SCHEDULE = beat_schedule(consume=[names(given["unique"]).one])
