"""The settings of a process in an outage. The environment says which: OUTAGE, a name of test_log.py, and BROKER_URL."""

import os
from datetime import timedelta

from project.settings import *  # noqa: F403
from project.settings import DATABASES, INSTALLED_APPS

OUTAGE = os.environ.get("OUTAGE", "")
URL = os.environ.get("BROKER_URL", "")
EMBEDDED = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
RABBITMQ = {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": {"NODES": [URL], "GROUPS": {"quiet": ["quiet"]}}}

INSTALLED_APPS = ["tests.journeys.quiet", *(app for app in INSTALLED_APPS if app not in ("project.shop", "project.demo"))]
ROOT_URLCONF = "outbox.api.urls"

OPTIONS = DATABASES["default"]["OPTIONS"]
if OUTAGE == "postgresql is away":
    DATABASES["default"] |= {"HOST": "127.0.0.1", "PORT": 1}
if OUTAGE == "postgresql is read-only":
    OPTIONS["options"] = "-c default_transaction_read_only=on"
if OUTAGE == "the role may only read":
    OPTIONS["assume_role"] = "outbox_quiet_reader"

CELERY_BROKER_URL = URL if OUTAGE == "redis is away" else "memory://"
OUTBOX = {
    "BROKERS": {
        "default": RABBITMQ if OUTAGE == "rabbitmq is away" else EMBEDDED,
        "celery": {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": "project.celery.app"}},
    },
    "TOPICS": {"quiet": {"TYPE": "normal"}},
    "CELERY_WAKEUP": OUTAGE == "redis is away",
    "CONSUMER": {"SETTLE": timedelta(seconds=2)},
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
