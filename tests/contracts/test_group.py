"""A consumer group on each broker: what it cannot handle is a row of its database, and the broker is done with it."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import msgspec
import pytest

from outbox import Reject, RetryPolicy, conf, consumer
from outbox.consuming import register
from outbox.consuming import worker as worker_module
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.message import Header, TopicType
from outbox.models import Deferred, Inbox
from tests.contracts.acts import Acts
from tests.contracts.harness import Harness
from tests.waiting import wait_until

INVISIBLE = timedelta(seconds=60)
A_MOMENT = timedelta(seconds=0.2)


class Shop:
    """A group with a handler, and its workers."""

    def __init__(self, harness: Harness, acts: Acts) -> None:
        self.harness, self.acts = harness, acts
        self.applied: list[str] = []
        self.contexts = []
        self.failing: dict[str, Exception] = {}  # text -> what the handler raises
        self.workers: list[Worker] = []
        self.stops = False  # whether the handler stops its worker
        for kind in (TopicType.NORMAL, TopicType.FIFO):
            consumer(topic=harness.topic(kind), group="group", retry=RetryPolicy(delays=[timedelta(hours=1)]))(self.handle)

    def handle(self, message, context) -> None:
        self.contexts.append(context)
        if message["text"] in self.failing:
            raise self.failing[message["text"]]
        self.applied.append(message["text"])
        if self.stops:
            self.workers[-1].stop()

    def send(self, *texts: str, kind: TopicType = TopicType.NORMAL, keyed: bool = False) -> None:
        """Send messages; with `keyed`, the first letter of a text is the key."""
        headers = {Header.CONTENT_TYPE: "application/json"}
        bodies = [(text, msgspec.json.encode({"text": text})) for text in texts]
        self.acts.send(
            *(
                self.acts.message(kind, body=body, key=text.partition("-")[0] if keyed else "", headers=headers)
                for text, body in bodies
            )
        )

    def worker(self) -> Worker:
        self.workers.append(Worker(group("group"), "default"))
        return self.workers[-1]

    def work_until(self, is_done: Callable[[], bool], worker: Worker | None = None) -> Worker:
        """Have a worker work until something is so."""
        worker = worker or self.worker()
        wait_until(lambda: worker.step(A_MOMENT) < 0 or is_done(), 60)
        return worker

    def restart(self) -> None:
        """End the workers, and let the broker's time for what they held pass."""
        for worker in self.workers:
            worker.close()
        self.harness.pass_time(INVISIBLE * 2)

    def waits(self, kind: TopicType = TopicType.NORMAL) -> int:
        return self.acts.waiting(kind, count=0)


@pytest.fixture
def shop(harness: Harness, acts: Acts, settings, monkeypatch) -> Iterator[Shop]:
    kind = harness.broker_class
    topics = {spec.name: {"TYPE": str(spec.type)} for spec in harness.topics.values()}
    settings.OUTBOX = {
        **settings.OUTBOX,
        "BROKERS": {"default": {"BACKEND": f"{kind.__module__}.{kind.__qualname__}"}},
        "TOPICS": topics,
        "CONSUMER": {"INVISIBLE": INVISIBLE},
    }
    monkeypatch.setattr(register, "registered", {})
    monkeypatch.setattr(conf, "make_broker", lambda alias: harness.open())
    monkeypatch.setattr(conf, "broker_class", lambda alias: kind)
    monkeypatch.setattr(worker_module, "POLL_SECONDS", 0.0)
    shop = Shop(harness, acts)
    with closing(shop.worker()) as first:  # the group is known before messages are sent
        first.step(A_MOMENT)
    yield shop
    for worker in shop.workers:
        worker.close()


class TestMessageThatFails:
    def test_is_acknowledged_and_comes_no_more(self, shop: Shop):
        shop.failing["bad"] = ValueError("no")
        shop.send("bad", "good")

        shop.work_until(lambda: shop.applied == ["good"] and Deferred.objects.exists())
        shop.restart()
        worker = shop.worker()
        for _ in range(3):
            worker.step(A_MOMENT)

        assert shop.waits() == 0
        assert Deferred.objects.get().failures == 1
        assert len(shop.contexts) == 2

    def test_is_a_dead_letter_in_the_groups_own_database(self, shop: Shop):
        shop.failing["bad"] = Reject("of no use")
        shop.send("bad")

        shop.work_until(Deferred.objects.filter(dead_at__isnull=False).exists)

        assert Deferred.objects.get().error == "of no use"
        assert shop.waits() == 0

    @pytest.mark.needs("supports_order")
    def test_holds_its_key_and_no_other(self, shop: Shop):
        shop.failing["bad-0"] = ValueError("no")
        texts = [f"{key}-{number}" for number in range(4) for key in ("bad", *"abcdefghijklmnopqrst")]
        shop.send(*texts, kind=TopicType.FIFO, keyed=True)

        shop.work_until(lambda: len(shop.applied) == 80 and Deferred.objects.count() == 4)

        assert shop.waits(TopicType.FIFO) == 0
        for key in "abcdefghijklmnopqrst":
            assert [text for text in shop.applied if text.startswith(f"{key}-")] == [f"{key}-{number}" for number in range(4)]
        shop.failing.clear()
        Deferred.objects.filter(due_at__isnull=False).update(due_at="2020-01-01T00:00:00Z")
        shop.work_until(lambda: len(shop.applied) == 84)
        assert [text for text in shop.applied if text.startswith("bad")] == [f"bad-{number}" for number in range(4)]


class TestMessageThatComesAgain:
    def test_is_dropped_where_its_acknowledgement_was_lost(self, shop: Shop, harness: Harness, monkeypatch):
        shop.send("good")
        with monkeypatch.context() as patch:
            patch.setattr(harness.broker_class, "ack", lambda broker, deliveries: [False] * len(deliveries))
            shop.work_until(lambda: shop.applied == ["good"])
            shop.restart()

        worker = shop.worker()
        shop.work_until(lambda: worker.counts.duplicates == 1, worker)

        assert shop.applied == ["good"]
        assert not Deferred.objects.exists()
        assert shop.waits() == 0

    def test_is_run_in_doubt_where_its_process_was_killed(self, shop: Shop, monkeypatch):
        shop.send("good")
        killed = shop.worker()
        with monkeypatch.context() as patch:
            patch.setattr(killed, "_handle", lambda deliveries: 1 / 0)
            patch.setattr(killed, "_settle_rest", lambda broker, *, is_outage: received.append(is_outage))
            received: list[bool] = []
            wait_until(lambda: _dies(killed) and bool(received), 60)
        shop.restart()

        shop.work_until(lambda: shop.applied == ["good"])

        [context] = shop.contexts
        assert context.delivery_count > 1
        assert Inbox.objects.count() == 1
        assert shop.waits() == 0

    def test_is_deferred_where_its_worker_was_stopped(self, shop: Shop):
        shop.stops = True
        shop.send(*(f"text {number}" for number in range(4)))

        worker = shop.work_until(lambda: len(shop.applied) == 1)
        worker.close()

        left = Deferred.objects.count()
        assert {row.reason for row in Deferred.objects.all()} <= {"stop"}
        assert shop.acts.waiting(count=3 - left) == 3 - left


def _dies(worker: Worker) -> bool:
    try:
        worker.step(A_MOMENT)
    except ZeroDivisionError:
        return True
    return False
