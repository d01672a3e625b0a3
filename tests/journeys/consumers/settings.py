"""The settings of the storm's consumers; two releases of their code differ in the types that they handle."""

from tests.journeys.consumers.given import given, outbox
from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.journeys.consumers"]
OUTBOX = outbox(given)
