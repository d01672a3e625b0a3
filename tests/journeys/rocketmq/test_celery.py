"""The relay task in a prefork worker's children: children, and the whole worker, killed in the middle of a batch."""

import os
import signal
import time

from outbox.models import CheckBack, MessageState, Process
from tests.journeys.rocketmq.conftest import Journey
from tests.waiting import wait_until

HALF_SENT, DECIDED = "relay.after_half", "relay.after_decide"
OPTIONS = ["--queues", "outbox,shop", "--concurrency", "2", "--loglevel", "WARNING", "--beat"]
ALONE = ["--without-gossip", "--without-mingle", "--without-heartbeat"]


class Publisher:
    """Publishes while it waits."""

    def __init__(self, journey: Journey) -> None:
        self.journey = journey
        self.count = 0

    def publish_until_used(self, place: str) -> None:
        deadline = time.monotonic() + 120
        while not self.journey.is_used(place):
            assert time.monotonic() < deadline, f"nobody was killed {place}"
            self.publish(5)
            time.sleep(0.2)

    def publish(self, how_many: int) -> None:
        self.journey.publish(self.journey.work, *range(self.count, self.count + how_many))
        self.count += how_many


class TestPrefork:
    def test_loses_nothing_and_applies_nothing_twice(self, journey: Journey):
        publisher = Publisher(journey)
        worker = start(journey)
        journey.consume()

        for place in (HALF_SENT, DECIDED, HALF_SENT, DECIDED):
            journey.permit(place)
            publisher.publish_until_used(place)
        publisher.publish(50)
        os.killpg(worker.pid, signal.SIGKILL)
        publisher.publish(50)
        start(journey)

        wait_until(lambda: len(journey.effects(journey.work)) >= publisher.count, 120)
        assert sorted(number for _, number in journey.effects(journey.work)) == list(range(publisher.count))
        wait_until(lambda: not MessageState.objects.exclude(state="sent").exists(), 120)
        answers = CheckBack.objects.filter(asked_by="broker").values_list("answer", flat=True)
        wait_until(lambda: {"COMMIT", "ROLLBACK"} <= set(answers.all()), 120)
        assert set(Process.objects.filter(kind="relay").values_list("note", flat=True)) <= {"celery"}


def start(journey: Journey):
    """Start a worker with beat, whose children may be killed where it is permitted."""
    schedule = ["--schedule", str(journey.folder / "beat")]
    failpoints = f"{journey.kills(HALF_SENT)},{journey.kills(DECIDED)}"
    return journey.start("celery", "-A", "project", "worker", *OPTIONS, *schedule, *ALONE, failpoints=failpoints)
