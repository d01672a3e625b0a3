"""The settings of a journey's processes."""

from tests.journeys.rocketmq.names import given, outbox
from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.journeys.rocketmq"]
OUTBOX = outbox(given["unique"], given["options"])
