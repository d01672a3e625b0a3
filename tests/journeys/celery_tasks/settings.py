"""The shop's settings, with a broker for Celery's tasks."""

from datetime import timedelta

from project.settings import *  # noqa: F403
from project.settings import DATABASES, OUTBOX

DATABASES["default"]["CONN_MAX_AGE"] = 0
OUTBOX = {
    **OUTBOX,
    "BROKERS": {
        **OUTBOX["BROKERS"],
        "celery": {
            "BACKEND": "outbox.celery.CeleryBroker",
            "OPTIONS": {"APP": "tests.journeys.celery_tasks.app.app", "TIMEOUT": timedelta(seconds=3)},
        },
    },
    "CELERY_WAKEUP": False,  # the relay that the journey starts is the only one
}
