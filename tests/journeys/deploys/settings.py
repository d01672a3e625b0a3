"""The settings of one release."""

from tests.journeys.deploys.given import given
from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.journeys.deploys"]
OUTBOX = given["outbox"]
