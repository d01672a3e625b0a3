"""Settings of the explorer: the outbox and its embedded broker, on a database of its own."""

from datetime import timedelta
from typing import Any

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

del DATABASES["other"]
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.postgres", "outbox", "outbox.embedded"]
ROOT_URLCONF = None
SHARED = "explorer"  # the name of the memory brokers' store


def outbox(backend: str, **options: Any) -> dict[str, Any]:
    """Return OUTBOX for a broker. The times are those of the explorer's clock, which only its scheduler moves."""
    return {
        "PROJECT": "explorer",
        "BROKERS": {"default": {"BACKEND": backend, "OPTIONS": options}},
        "TOPICS": {"plain": {"TYPE": "normal"}, "keyed": {"TYPE": "fifo"}, "half": {"TYPE": "transaction"}},
        "RELAY": {"LEASE": timedelta(seconds=30), "SWEEP_AGE": timedelta(seconds=10), "BATCH_SIZE": 2},
        "CONSUMER": {"BATCH_SIZE": 2},
        "CELERY_WAKEUP": False,
    }


OUTBOX = outbox("outbox.embedded.EmbeddedBroker")
