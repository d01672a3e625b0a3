"""The relay: rounds, draining and stopping."""

from datetime import timedelta

import pytest
from django.utils import timezone

from outbox.brokers.base import SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.models import Batch, State, Ticket
from outbox.relay.breaker import BreakerState
from outbox.relay.claims import Claims
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, stored
from tests.outbox.relay.claiming import ids, shown
from tests.outbox.relay.outages import open_broker, open_for

pytestmark = pytest.mark.django_db


def claimed_sizes() -> list[int]:
    """Return the numbers of messages of the batches that were claimed, in order."""
    return [len(batch.message_ids) for batch in Batch.objects.filter(origin_id=None).order_by("id")]


class TestDrain:
    @pytest.mark.parametrize("kind", ["normal", "delay", "transaction"])
    def test_sends_what_waits_in_the_order_of_the_tickets(self, relay, broker, make_topic, kind):
        topic = make_topic(kind)
        tickets = TicketFactory.create_batch(3, topic=topic)

        drained = relay.drain()

        assert (drained.batches, drained.claimed, drained.sent, drained.unaccepted) == (1, 3, 3, 0)
        assert shown(broker, topic) == ids(tickets)
        assert Batch.objects.get().state == State.SENT
        assert not Ticket.objects.exists()

    def test_serves_new_messages_beside_a_backlog_of_old_batches(self, relay, broker, make_topic):
        topic = make_topic("normal")
        BatchFactory.create_batch(2, topic=topic, state=State.RELEASED, due_at=timezone.now())
        new = TicketFactory(topic=topic)

        relay.step()

        assert ids([new])[0] in shown(broker, topic)
        assert len(shown(broker, topic)) == 2

    def test_lets_a_batch_go_that_it_fails_over_and_serves_the_others(self, relay, broker, make_topic, caplog):
        broken, fine = make_topic("normal"), make_topic("normal")
        batch = BatchFactory(topic=broken, state=State.RELEASED, due_at=timezone.now(), order_keys=[])  # a key is missing
        new = TicketFactory(topic=fine)

        relay.step()

        assert shown(broker, fine) == ids([new])
        left = stored(batch)
        assert (left.state, left.failures) == (State.RELEASED, 1)
        assert "The relay failed: IndexError" in left.last_error
        assert left.last_error in caplog.text

    @pytest.mark.parametrize("verdict", [SendStatus.REFUSED, SendStatus.UNSURE])
    def test_goes_on_when_the_text_of_a_broker_cannot_be_stored_as_it_is(self, relay, broker, make_topic, verdict):
        topics = [make_topic("normal") for _ in range(2)]
        tickets = [TicketFactory(topic=topic) for topic in topics]
        broker.fail("send", verdict, where=lambda message: message.topic == topics[0].name, reason="a\0b \udcff")

        relay.step()

        assert shown(broker, topics[1]) == ids(tickets[1:])
        assert Batch.objects.get(topic_id=topics[0].id).last_error == "a\\x00b \\udcff"

    def test_sends_ordered_topics(self, relay, broker, make_topic):
        topic = make_topic("fifo")
        messages = [MessageRowFactory(topic=topic, key=key) for key in "aab"]
        tickets = [TicketFactory(topic=topic, message=message, order_key=ord(message.key)) for message in messages]

        relay.drain()

        assert set(shown(broker, topic)) == set(ids(tickets))
        assert [one for one in shown(broker, topic) if one != ids(tickets)[2]] == ids(tickets)[:2]

    def test_sends_by_half_messages_in_topics_of_type_transaction_only(self, relay, broker, make_topic):
        for kind in ("normal", "transaction"):
            TicketFactory(topic=make_topic(kind))

        relay.drain()

        assert len(broker.halves()) == 1

    def test_sends_whole_messages_to_a_broker_without_half_messages(self, make_relay, broker, make_topic):
        broker.lacks = (*broker.lacks, HalfMessages)
        topic = make_topic("transaction")
        broker.fail("send", SendStatus.ACCEPTED, times=None)  # the memory broker itself insists on half messages
        TicketFactory(topic=topic)

        make_relay().drain()

        assert broker.halves() == []
        assert Batch.objects.get().state == State.SENT

    @pytest.mark.parametrize("kind", ["normal", "transaction", "fifo"])
    def test_goes_on_until_nothing_waits_and_claims_more_after_full_rounds(self, make_relay, make_topic, kind):
        topic = make_topic(kind)
        for key in range(17):
            TicketFactory(topic=topic, order_key=key if kind == "fifo" else None)

        drained = make_relay(batch_size=2).drain()

        assert drained.sent == 17
        assert claimed_sizes() == [2, 4, 8, 3]

    @pytest.mark.parametrize("trouble", ["slow", "refused"])
    def test_claims_less_again_after_a_round_that_was_slow_or_did_not_send_all(
        self, make_relay, make_topic, broker, clock, monkeypatch, trouble
    ):
        TicketFactory.create_batch(12, topic=make_topic())
        relay, send = make_relay(batch_size=2), broker.send

        def send_slowly(messages):
            clock.now += 1 if len(messages) == 4 and trouble == "slow" else 0
            if len(messages) == 4 and trouble == "refused":
                broker.fail("send", SendStatus.REFUSED)
            return send(messages)

        monkeypatch.setattr(broker, "send", send_slowly)
        for _ in range(3):
            relay.step()

        assert claimed_sizes()[:3] == [2, 4, 2]

    def test_finishes_its_batch_when_told_to_stop(self, make_relay, make_topic, broker, monkeypatch):
        TicketFactory.create_batch(3, topic=make_topic())
        relay = make_relay(batch_size=2)
        send = broker.send

        def send_and_stop(messages):
            relay.stop()
            return send(messages)

        monkeypatch.setattr(broker, "send", send_and_stop)
        drained = relay.drain()

        assert (drained.batches, drained.sent) == (1, 2)
        assert Batch.objects.get().state == State.SENT

    def test_adds_up_what_it_did(self, relay, make_topic):
        for _ in range(2):
            TicketFactory(topic=make_topic())
            relay.drain()

        assert relay.total.sent == 2

    def test_takes_up_old_batches_before_new_ones(self, relay, broker, make_topic):
        topic = make_topic()
        new = TicketFactory(topic=topic)
        old = BatchFactory(topic=topic, state=State.RELEASED)

        relay.drain()

        assert shown(broker, topic) == [str(old.message_ids[0]), str(new.message_id)]

    def test_loads_large_bodies_in_slices(self, make_relay, broker, make_topic, monkeypatch, hold_budget):
        topic = make_topic()
        for _ in range(3):
            TicketFactory(topic=topic, message=MessageRowFactory(topic=topic, body=b"x" * 600))
        calls = []
        send = broker.send
        monkeypatch.setattr(broker, "send", lambda messages: calls.append(len(messages)) or send(messages))

        relay = make_relay()
        hold_budget(relay.breakers, 1200)
        relay.drain()

        assert calls == [2, 1]
        assert Batch.objects.get().state == State.SENT

    @pytest.mark.parametrize("kind", ["normal", "transaction"])
    def test_sends_nothing_of_a_batch_whose_row_is_gone(self, relay, broker, make_topic, monkeypatch, kind):
        """Its row is gone, as if another relay had claimed and pruned it."""
        topic = make_topic(kind)
        TicketFactory.create_batch(2, topic=topic)
        claim = Claims.claim

        def claim_and_lose(*args, **options):
            batches = claim(*args, **options)
            Batch.objects.filter(pk__in=[batch.id for batch in batches]).delete()
            return batches

        monkeypatch.setattr(Claims, "claim", claim_and_lose)
        done = relay.step()

        assert (done.sent, done.unaccepted, done.fences_lost) == (0, 0, 1)
        assert (shown(broker, topic), broker.halves()) == ([], [])

    def test_sends_a_batch_that_began_half_first_without_numbers(self, relay, broker, make_topic):
        topic = make_topic("transaction")
        BatchFactory(topic=topic, state=State.RELEASED, lane=None, first_seq=None)

        relay.drain()

        (message,) = broker.visible(topic.name)
        assert "ce-number" not in message.headers


class TestOutage:
    def test_burns_no_tries(self, relay, broker, make_topic, clock):
        TicketFactory.create_batch(2, topic=make_topic())
        broker.fail("send", SendStatus.UNAVAILABLE, times=None)

        for _ in range(5):
            relay.drain()
            clock.now += 60

        batch = Batch.objects.get()
        assert (batch.state, batch.failures) == (State.RELEASED, 0)

    def test_claims_nothing_of_a_topic_while_its_breaker_is_open(self, relay, broker, make_topic):
        topic = make_topic()
        BatchFactory(topic=topic, state=State.RELEASED)
        broker.fail("send", SendStatus.UNAVAILABLE, times=None)
        relay.drain()
        attempt = Batch.objects.get().attempt

        TicketFactory(topic=topic)
        drained = relay.drain()

        assert drained.batches == 0
        assert Batch.objects.get().attempt == attempt
        assert Ticket.objects.count() == 1

    def test_sends_one_message_as_a_probe(self, relay, broker, make_topic, clock, monkeypatch):
        topic = make_topic()
        TicketFactory.create_batch(3, topic=topic)
        open_for(relay.breakers, topic.name)
        clock.now += 60
        broker.fail("send", SendStatus.UNAVAILABLE, times=None)
        calls, send = [], broker.send
        monkeypatch.setattr(broker, "send", lambda messages: (calls.append(len(messages)), send(messages))[1])

        drained = relay.drain()

        assert (calls, drained.unaccepted) == ([1], 3)

    def test_gives_the_probe_back_where_its_topic_is_not_its_own(self, relay, clock):
        open_broker(relay.breakers)
        clock.now += 60
        TicketFactory(topic=TopicFactory(type="normal"))

        relay.step()

        batch = Batch.objects.get()
        assert (batch.state, batch.failures) == (State.RELEASED, 0)
        assert "do not assign topic" in batch.last_error
        assert relay.breakers.state is not BreakerState.CLOSED

    def test_probes_with_a_topic_that_had_not_failed(self, relay, broker, make_topic, clock):
        """A batch of a topic that is unavailable by itself would keep all others waiting."""
        away, well = make_topic(), make_topic()
        BatchFactory(topic=away, state=State.RELEASED)
        TicketFactory.create_batch(3, topic=well)
        open_for(relay.breakers, away.name, "away-2", "away-3")
        clock.now += 60
        broker.fail("send", SendStatus.UNAVAILABLE, times=None, where=lambda message: message.topic == away.name)

        drained = relay.drain()

        assert drained.sent == 3
        assert relay.breakers.state is BreakerState.CLOSED

    def test_of_one_topic_stops_no_other(self, relay, broker, make_topic, clock):
        away, *well = (make_topic() for _ in range(4))
        for topic in (away, *well):
            TicketFactory.create_batch(3, topic=topic)
        broker.fail("send", SendStatus.UNAVAILABLE, times=None, where=lambda message: message.topic == away.name)

        assert relay.drain().sent == 9

        for topic in (away, *well):
            TicketFactory(topic=topic)
        assert relay.drain().sent == 3
        assert relay.breakers.describe() == f"open for {away.name}"

        broker.heal()
        clock.now += 60
        assert relay.drain().sent == 4
        assert relay.breakers.describe() == "closed"

    def test_is_over_when_the_probe_is_answered(self, relay, broker, make_topic, clock):
        TicketFactory.create_batch(3, topic=make_topic())
        broker.fail("send", SendStatus.UNAVAILABLE, times=None)
        relay.drain()

        broker.heal()
        clock.now += 60
        drained = relay.drain()

        assert relay.breakers.state is BreakerState.CLOSED
        assert drained.sent == 3


class TestCommitOfOtherEnds:
    """Where a second COMMIT makes a second copy."""

    @pytest.fixture
    def broker(self, make_broker):
        return make_broker("stateless", window=timedelta(seconds=2))

    def test_is_sent_within_the_window(self, relay, broker, make_topic):
        topic = make_topic("transaction")
        TicketFactory(topic=topic)

        relay.drain()

        assert len(shown(broker, topic)) == 1

    def test_is_sent_however_long_the_half_messages_took(self, relay, broker, make_topic, clock, monkeypatch):
        """A check-back about them is UNKNOWN before the decision, and from there on to the window's end."""
        topic = make_topic("transaction")
        TicketFactory(topic=topic)
        send_halves = broker.send_halves

        def send_slowly(messages):
            clock.now += 10
            return send_halves(messages)

        monkeypatch.setattr(broker, "send_halves", send_slowly)
        relay.drain()

        assert len(shown(broker, topic)) == 1

    def test_is_not_sent_when_the_window_is_over(self, relay, broker, make_topic, clock, monkeypatch):
        """It is measured from before the decision."""
        topic = make_topic("transaction")
        TicketFactory(topic=topic)
        decide = relay.committer.decide

        def decide_slowly(committer, result):
            clock.now += 2
            return decide(result)

        monkeypatch.setattr(type(relay.committer), "decide", decide_slowly)
        relay.drain()

        assert shown(broker, topic) == []
        assert stored(Batch.objects.get()).state == State.PREPARED
        assert stored(Batch.objects.get()).open is None

    def test_is_not_sent_for_a_decision_found_written(self, relay, broker, make_topic, monkeypatch):
        """The process that wrote it may have committed."""
        topic = make_topic("transaction")
        TicketFactory(topic=topic)
        decide = relay.committer.decide
        monkeypatch.setattr(type(relay.committer), "decide", lambda self, result_of: decide(result_of) and decide(result_of))

        relay.drain()

        assert shown(broker, topic) == []
