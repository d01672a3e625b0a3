"""The settings of a storm's processes."""

from tests.journeys.kafka.given import given, outbox
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [app for app in INSTALLED_APPS if not app.startswith("project.")]
ROOT_URLCONF = None
OUTBOX = outbox(given["servers"], given["ordered"], given["plain"], given["control"])
