"""The settings of a project whose ORM returns times without a zone."""

from tests.outbox.management.settings import *  # noqa: F403

USE_TZ = False
TIME_ZONE = "America/New_York"
