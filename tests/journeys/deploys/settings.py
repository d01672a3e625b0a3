"""The settings of one release."""

from tests.journeys.deploys.given import given
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("project.")), "tests.journeys.deploys"]
ROOT_URLCONF = None
OUTBOX = given["outbox"]
