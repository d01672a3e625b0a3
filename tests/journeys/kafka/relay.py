"""A relay of the storm; of a control, without the rule that it leaves out. `python -m tests.journeys.kafka.relay`."""

import django

django.setup()

from django.core.management import call_command  # noqa: E402

from outbox.brokers.kafka import lanes  # noqa: E402
from outbox.relay import transactions  # noqa: E402
from tests.journeys.kafka.given import MARKER_NOT_ASKED, NOBODY_FENCED, given  # noqa: E402

if given["control"] == MARKER_NOT_ASKED:
    read = transactions.TransactionalSender._decode_marker

    def read_nothing(self, text, lane):
        marker = read(self, text, lane)
        return marker and transactions.Marker((), marker.database, marker.timeline)

    transactions.TransactionalSender._decode_marker = read_nothing

if given["control"] == NOBODY_FENCED:
    open_lane = lanes.KafkaLanes.open

    def open_own(self, source, lane):
        return self.look_at(source, lane) if self._lanes else open_lane(self, source, lane)

    lanes.KafkaLanes.open = open_own

call_command("outbox_relay")
