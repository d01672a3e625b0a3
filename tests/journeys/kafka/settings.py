"""The settings of a storm's processes."""

from tests.journeys.kafka.given import given, outbox
from tests.journeys.settings import *  # noqa: F403

OUTBOX = outbox(given["servers"], given["ordered"], given["plain"], given["control"])
