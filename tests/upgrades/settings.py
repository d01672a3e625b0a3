"""
The shop's settings, the same for each release.

OUTBOX_FOLDER: where its package `outbox` has to be. MISBEHAVES: no process takes the work of another
for an hour. MOODS: the type of a topic.
"""

import os
from datetime import timedelta
from pathlib import Path

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

import outbox

FOLDER = os.environ.get("OUTBOX_FOLDER")
if FOLDER and not Path(outbox.__file__).is_relative_to(FOLDER):
    raise ImproperlyConfigured(f"The package outbox is {outbox.__file__}, and not the one in {FOLDER}.")

DATABASE = dj_database_url.config()
DATABASE["HOST"] = DATABASE.setdefault("OPTIONS", {}).pop("host", DATABASE["HOST"])
DATABASES = {"default": DATABASE}
SECRET_KEY = "for-a-shop-of-tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SILENCED_SYSTEM_CHECKS = ["outbox.W049"]
INSTALLED_APPS = ["django.contrib.postgres", "outbox", "outbox.embedded", "outbox.pipeline", "tests.upgrades"]

PATIENCE = timedelta(hours=1) if "MISBEHAVES" in os.environ else timedelta(seconds=3)
OUTBOX = {
    "PROJECT": "upgrades",
    "BROKERS": {
        "default": {"BACKEND": "outbox.embedded.EmbeddedBroker", "OPTIONS": {"CHECK_AFTER": PATIENCE}},
        "ledger": {"BACKEND": "outbox.brokers.memory.MemoryBroker", "OPTIONS": {"NAME": "ledger", "TRANSACTIONS": True}},
    },
    "TOPICS": {
        "orders": {"TYPE": "transaction"},
        "notes": {"TYPE": "normal"},
        "steps": {"TYPE": "fifo"},
        "alarms": {"TYPE": "normal"},
        "held": {"TYPE": "normal"},
        "moods": {"TYPE": os.environ.get("MOODS", "normal")},
        "entries": {"TYPE": "normal", "BROKER": "ledger"},
        "accounts": {"TYPE": "fifo", "BROKER": "ledger"},
    },
    "RELAY": {"LEASE": max(PATIENCE, timedelta(seconds=30)), "SWEEP_AGE": PATIENCE},
    "CONSUMER": {"INVISIBLE": PATIENCE},
    "CELERY_WAKEUP": False,
}
