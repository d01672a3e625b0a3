"""Settings of the processes of a situation."""

from datetime import timedelta

from outbox.schedule import beat_schedule
from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS, VAR_DIR
from tests.journeys.attention.given import given

INSTALLED_APPS = [*(app for app in INSTALLED_APPS if app not in ("project.shop", "project.demo")), "tests.journeys.attention"]
ROOT_URLCONF = None

EMBEDDED = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
RABBITMQ = {
    "BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker",
    "OPTIONS": {
        "NODES": given.get("nodes", []),
        "USER": given.get("user", "guest"),
        "PASSWORD": given.get("password", "guest"),
        "VIRTUAL_HOST": given.get("virtual_host", "/"),
        "HEARTBEAT": timedelta(seconds=4),
        "MAX_LENGTH": given.get("max_length"),
    },
}
TASKS = {
    "BACKEND": "outbox.celery.CeleryBroker",
    "OPTIONS": {"APP": "tests.journeys.attention.app.app", "TIMEOUT": timedelta(seconds=3)},
}
OUTBOX = {
    "BROKERS": {
        "default": RABBITMQ if given["broker"] == "rabbitmq" else EMBEDDED,
        **({"celery": TASKS} if given["celery"] and not given["wakeup"] else {}),
    },
    "TOPICS": {topic: {"TYPE": "normal"} for topic in given["topics"]},
    "CONSUMER": {"INVISIBLE": timedelta(seconds=5), "SETTLE": timedelta(seconds=2)},
    "CELERY_WAKEUP": given["wakeup"],
}
CELERY_BROKER_URL = given["celery"] or "memory://"
CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 3, "socket_connect_timeout": 3} if "redis" in CELERY_BROKER_URL else {}
CELERY_BEAT_SCHEDULE = beat_schedule(consume=given["consumes"])
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "beat")
