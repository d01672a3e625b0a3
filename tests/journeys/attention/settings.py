"""Settings of the processes that are killed, frozen and stopped."""

from tests.outbox.consuming.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.journeys.attention"]
