"""The settings of each release; its app `shop` is in a folder of its own."""

import os
from pathlib import Path

from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS

BASE_DIR = Path(os.environ["RELEASE_DIR"])
INSTALLED_APPS = [*INSTALLED_APPS, "shop"]
OUTBOX = {
    "BROKERS": {"default": {"BACKEND": "outbox.embedded.EmbeddedBroker"}},
    "TOPICS": {"orders": {"TYPE": "normal"}, "sales": {"TYPE": "normal"}},
    "CELERY_WAKEUP": False,
}
