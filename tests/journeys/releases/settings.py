"""The settings of each release; its app `shop` is in a folder of its own."""

import os
from pathlib import Path

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

BASE_DIR = Path(os.environ["RELEASE_DIR"])
del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("project.")), "shop"]
ROOT_URLCONF = None
OUTBOX = {
    "BROKERS": {"default": {"BACKEND": "outbox.embedded.EmbeddedBroker"}},
    "TOPICS": {"orders": {"TYPE": "normal"}, "sales": {"TYPE": "normal"}},
    "CELERY_WAKEUP": False,
}
