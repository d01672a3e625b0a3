"""The settings of a journey's processes."""

from tests.journeys.rocketmq.names import given, outbox
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("project.")), "tests.journeys.rocketmq"]
ROOT_URLCONF = None
OUTBOX = outbox(given["unique"], given["options"])
