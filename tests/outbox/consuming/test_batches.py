"""Handlers that take many messages at once."""

from datetime import timedelta
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from outbox import Reject, RetryPolicy, consumer
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import ConfigurationError
from outbox.models import Duplicate, Inbox
from outbox.testing.factories import DeferredFactory
from project.shop.models import CartEntry
from tests.outbox.consuming.deliveries import applied, end_delays, numbered, outgoing
from tests.outbox.consuming.messages import Ignored, Placed

pytestmark = pytest.mark.django_db

NO_WAIT = timedelta(0)


class Handler:
    """Writes all it takes in one statement; an invoice "bad" fails, an invoice "rejected" is rejected."""

    def __init__(self, **options) -> None:
        self.calls: list[list[str]] = []
        consumer(Placed, group="many", **{"batch_size": 10} | options)(self.handle)

    def handle(self, messages, contexts) -> None:
        self.calls.append([message.invoice for message in messages])
        assert [context.group for context in contexts] == ["many"] * len(messages)
        CartEntry.objects.bulk_create([CartEntry(invoice=message.invoice, change=1) for message in messages])
        invoices = {message.invoice for message in messages}
        if "bad" in invoices:
            raise ValueError("one is bad")
        if "rejected" in invoices and len(messages) == 1:
            raise Reject("of no use")


def step() -> Worker:
    worker = Worker(group("many"), "default")
    worker.step(NO_WAIT)
    worker.close()
    return worker


class TestBatch:
    def test_is_one_call_one_transaction_and_one_claim(self, broker):
        handler = Handler()
        broker.send([outgoing(Placed(f"A{number}")) for number in range(10)])

        with CaptureQueriesContext(connection) as queries:
            worker = step()

        assert handler.calls == [[f"A{number}" for number in range(10)]]
        assert worker.counts.handled == Inbox.objects.count() == 10
        assert sum("INSERT INTO outbox_inbox" in query["sql"] for query in queries) == 1
        assert broker.backlog("many").waiting == {"orders": 0}

    def test_is_no_larger_than_the_handler_wants(self, broker):
        handler = Handler(batch_size=4)
        broker.send([outgoing(Placed(f"A{number}")) for number in range(10)])

        step()

        assert [len(call) for call in handler.calls] == [4, 4, 2]

    def test_that_fails_is_handled_one_by_one(self, broker):
        handler = Handler(retry=RetryPolicy(limit=0))
        broker.send([outgoing(Placed(invoice)) for invoice in ("A1", "bad", "A2")])

        worker = step()

        assert handler.calls == [["A1", "bad", "A2"], ["A1"], ["bad"], ["A2"]]
        assert (worker.counts.handled, worker.counts.dead_letters) == (2, 1)
        assert applied() == ["A1", "A2"]

    def test_drops_what_the_group_has_handled(self, broker):
        handler = Handler()
        known = outgoing(Placed("A1"))
        broker.send([known])
        step()
        broker.send([known, outgoing(Placed("A2"))])

        worker = step()

        assert handler.calls == [["A1"], ["A2"]]
        assert (worker.counts.handled, worker.counts.duplicates) == (1, 1)
        assert Duplicate.objects.count() == 1

    @pytest.mark.parametrize(
        ("options", "handled"),
        [({}, ["A1", "A1", "A2"]), ({"idempotency_key": lambda message: message.invoice}, ["A1", "A2"])],
        ids=["message", "own key"],
    )
    def test_drops_a_copy_within_it(self, broker, options, handled):
        handler = Handler(**options)
        twin = outgoing(Placed("A1"))
        broker.send([twin, twin, outgoing(Placed("A1")), outgoing(Placed("A2"))])

        worker = step()

        assert handler.calls == [handled]
        assert (worker.counts.handled, worker.counts.duplicates) == (len(handled), 4 - len(handled))

    def test_drops_a_copy_of_what_was_discarded_or_deferred(self, broker):
        handler = Handler(idempotency_key=lambda message: message.invoice)
        copies = [outgoing(Placed(invoice), headers=numbered(number)) for number, invoice in enumerate(["A1", "A2"], 1)]
        discarded, waiting = ({"message_id": UUID(copy.message_id), "topic": "orders"} for copy in copies)
        Inbox.objects.create(consumer_group="many", idempotency_key=copies[0].message_id, delivery_count=0, **discarded)
        DeferredFactory(consumer_group="many", **waiting)
        broker.send([*copies, outgoing(Placed("A3")), outgoing(Placed("A4"))])

        worker = step()

        assert handler.calls == [["A3", "A4"]]
        assert (worker.counts.handled, worker.counts.duplicates) == (2, 2)

    def test_leaves_what_comes_again_alone(self, broker, clock):
        handler = Handler(retry=RetryPolicy(limit=1, delays=[timedelta(seconds=1)], jitter=0))
        broker.send([outgoing(Placed("bad"))])
        step()
        clock.forward(timedelta(seconds=2))
        end_delays()
        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])

        step()

        assert handler.calls == [["bad"], ["bad"], ["A1", "A2"]]

    def test_stands_beside_a_handler_of_one(self, broker):
        handler = Handler()
        seen = []
        consumer(Ignored, group="many")(lambda message, context: seen.append(message))
        broker.send([outgoing(Placed("A1")), outgoing(Ignored()), outgoing(Placed("A2"))])

        step()

        assert handler.calls == [["A1", "A2"]]
        assert len(seen) == 1

    def test_may_be_a_coroutine_function(self, broker):
        @consumer(Placed, group="many", batch_size=5)
        async def handle(messages, contexts):
            await CartEntry.objects.abulk_create([CartEntry(invoice=message.invoice, change=1) for message in messages])

        broker.send([outgoing(Placed("A1")), outgoing(Placed("A2"))])

        step()

        assert applied() == ["A1", "A2"]

    @pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 501}])
    def test_refuses_what_contradicts_it(self, options):
        with pytest.raises(ConfigurationError, match="batch_size"):
            Handler(**options)

    def test_refuses_an_ordered_topic(self, fifo):
        Handler()

        with pytest.raises(ConfigurationError, match="Remove batch_size"):
            group("many").topics_of("default")
