"""The settings of a storm's processes."""

from datetime import timedelta

from outbox.schedule import beat_schedule
from tests.journeys.celery_storm.given import given
from tests.journeys.settings import *  # noqa: F403

TASKS = {"APP": "tests.journeys.celery_storm.app.app", "TIMEOUT": timedelta(seconds=3)}
OUTBOX = {
    "BROKERS": {"celery": {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": TASKS}},
    "RELAY": {"BATCH_SIZE": 50, "TASK_TIME": timedelta(seconds=5)},
    "CELERY_WAKEUP": True,
}
CELERY_BROKER_URL = given["read"]
CELERY_BROKER_READ_URL = given["read"]
CELERY_BROKER_WRITE_URL = given["write"]
CELERY_BROKER_HEARTBEAT = 4
# Redis gives the tasks of a dead worker to another one after this.
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 8} if given["read"].startswith("redis") else {}
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_BEAT_SCHEDULE = beat_schedule()
