"""The settings of a soak's processes."""

from tests.journeys.soak import days  # noqa: F401
from tests.journeys.soak.given import given, outbox
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith(("project.", "outbox.pipeline"))), "tests.journeys.soak"]
ROOT_URLCONF = None
DEBUG = False  # with it, Django keeps the statements of a connection
OUTBOX = outbox(given)
