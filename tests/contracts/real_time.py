"""What harnesses of real servers share: their time cannot be moved, so the contract's minutes are seconds."""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from outbox.brokers.base import Outgoing
from outbox.message import TopicType
from tests.contracts.harness import Harness

SCALE = 1 / 20  # a minute of the contract takes 3 s


class RealTimeHarness(Harness):
    """A server that goes by its own clock."""

    def clock(self) -> datetime:
        return datetime.now(UTC)

    def is_now(self, time: datetime | None) -> bool:
        return time is not None and abs(datetime.now(UTC) - time) < timedelta(seconds=30)


def sooner(message: Outgoing) -> Outgoing:
    """Return a message whose delay is as much shorter."""
    if message.deliver_at is None or not message.topic.startswith(TopicType.DELAY):
        return message
    now = datetime.now(UTC)
    return replace(message, deliver_at=now + (message.deliver_at - now) * SCALE)
