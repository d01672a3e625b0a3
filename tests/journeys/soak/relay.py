"""A relay whose maintenance does not wait for an hour. `python -m tests.journeys.soak.relay`."""

import django

django.setup()

from django.core.management import call_command  # noqa: E402

from outbox.management.commands import outbox_relay  # noqa: E402
from tests.journeys.soak.given import MAINTENANCE_INTERVAL  # noqa: E402

outbox_relay.MAINTENANCE_INTERVAL = MAINTENANCE_INTERVAL
call_command("outbox_relay")
