"""The settings of the storm's consumers; two releases of their code differ in the types that they handle."""

from tests.journeys.consumers.given import given, outbox
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("project.")), "tests.journeys.consumers"]
ROOT_URLCONF = None
OUTBOX = outbox(given)
