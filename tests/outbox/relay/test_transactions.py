"""A relay whose broker sends in transactions: what a lost answer, a dead relay and a lost marker leave to be settled."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db.models import F
from django.utils import timezone

from outbox import database
from outbox.batches.operators import resend
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.database.identity import read_identity
from outbox.database.locks import Lock
from outbox.errors import BrokerMisconfigured
from outbox.failpoints import FailpointReached
from outbox.models import Batch, MessageRow, State
from outbox.relay.rounds import Relay
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, stored
from tests.outbox.relay.claiming import ids, shown

pytestmark = pytest.mark.django_db

LANE, OTHER = 1, 2
LONG = timedelta(hours=1)


@pytest.fixture
def name() -> Iterator[str]:
    name = str(uuid4())
    yield name
    forget(name)


@pytest.fixture
def connect_broker(make_broker, name: str) -> Callable[[], MemoryBroker]:
    """Return another client of the same broker, as another process has it."""
    return lambda: make_broker(NAME=name, TRANSACTIONS=True)


@pytest.fixture
def broker(connect_broker) -> MemoryBroker:
    return connect_broker()


@pytest.fixture
def relay_beside(connect_broker, make_relay) -> Callable[..., Relay]:
    """Return a relay of another process."""

    def make(lane: int = LANE, **options: Any) -> Relay:
        return Relay(database.raw("default"), connect_broker(), lane, random=lambda: 0.5, **options)

    return make


@pytest.fixture
def topic(relay: Relay, make_topic: Callable[..., Any]) -> Any:
    """A topic of a relay that has opened its lane."""
    topic = make_topic("normal")
    relay.step()
    return topic


@pytest.fixture
def tickets(topic: Any) -> list[Any]:
    """Two messages that wait."""
    return TicketFactory.create_batch(2, topic=topic)


def marker_of(broker: MemoryBroker, lane: int = 1) -> str | None:
    source = read_identity(database.raw("default")).source
    return broker._store.markers[source, lane]


def lose_marker(broker: MemoryBroker, lane: int = 1) -> None:
    source = read_identity(database.raw("default")).source
    broker._store.markers.pop((source, lane), None)


def end_leases() -> None:
    Batch.objects.update(lease_until=F("lease_until") - LONG)


def die(relay: Relay, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Let a relay die at a failpoint, in the middle of a step."""
    monkeypatch.setenv("OUTBOX_FAILPOINTS", f"{place}=raise")
    with pytest.raises(FailpointReached):
        relay.step()
    monkeypatch.delenv("OUTBOX_FAILPOINTS")


class TestRound:
    def test_sends_all_topics_in_one_transaction(self, relay, broker, make_topic):
        normal, ordered, other = make_topic("normal"), make_topic("fifo"), make_topic("normal")
        tickets = [TicketFactory(topic=normal), TicketFactory(topic=other)]
        messages = [MessageRowFactory(topic=ordered, key=key) for key in "aab"]
        in_order = [TicketFactory(topic=ordered, message=message, order_key=ord(message.key)) for message in messages]

        done = relay.step()

        assert (done.batches, done.claimed, done.sent, done.unaccepted) == (3, 5, 5, 0)
        assert shown(broker, normal) + shown(broker, other) == ids(tickets)
        assert shown(broker, ordered) == ids(in_order)
        assert set(Batch.objects.values_list("state", "tx_lane", "tx_attempt")) == {(State.SENT, 1, 1)}
        assert all(f"[{batch.id},1]" in (marker_of(broker) or "") for batch in Batch.objects.all())

    def test_claims_few_new_messages_alike(self, relay, broker, topic):
        ticket = TicketFactory(topic=topic)

        relay.step(frozenset([topic.id]))

        assert shown(broker, topic) == ids([ticket])
        assert Batch.objects.get().tx_lane == 1

    def test_leaves_out_topics_that_are_away(self, relay, broker, make_topic, monkeypatch):
        away, whole = make_topic("normal"), make_topic("normal")
        tickets = [TicketFactory(topic=topic) for topic in (away, whole)]
        monkeypatch.setattr(
            broker, "find_unavailable", lambda topics: {away.name: "Its server is down."} if away.name in topics else {}
        )

        relay.step()

        assert shown(broker, whole) == ids(tickets[1:])
        held = Batch.objects.exclude(state=State.SENT).get()
        assert (held.topic_id, held.state, held.failures, held.last_error) == (away.id, State.RELEASED, 0, "Its server is down.")
        assert relay.breakers.failed_topics == [away.name]

    def test_takes_as_many_bytes_as_its_budget(self, relay, broker, make_topic, monkeypatch, hold_budget):
        topics = [make_topic("normal"), make_topic("fifo", ordered=True)]
        for topic in topics:
            for key in "aba":
                message = MessageRowFactory(topic=topic, key=key, body=b"0123456789")
                TicketFactory(topic=topic, message=message, order_key=ord(key) if topic.ordered else None)
        sizes: list[int] = []
        send = broker.send_transaction

        def note(lane, messages, marker):
            sizes.append(len(messages))
            return send(lane, messages, marker)

        monkeypatch.setattr(broker, "send_transaction", note)
        hold_budget(relay.breakers, 20)

        relay.drain()

        ordered = list(MessageRow.objects.filter(topic_id=topics[1].id).order_by("id").values_list("id", flat=True))
        assert [len(shown(broker, topic)) for topic in topics] == [3, 3]
        assert shown(broker, topics[1]) == [str(one) for one in ordered]
        assert max(sizes) == 2
        assert set(Batch.objects.values_list("state", "failures", "lease_until")) == {(State.SENT, 0, None)}

    def test_splits_a_rejected_message_off_and_sends_the_others_after(self, relay, broker, make_topic):
        topic, other = make_topic("normal"), make_topic("normal")
        bad, good = MessageRowFactory(topic=topic, body=b""), MessageRowFactory(topic=topic)
        tickets = [TicketFactory(topic=topic, message=bad), TicketFactory(topic=topic, message=good), TicketFactory(topic=other)]

        relay.step()
        before = shown(broker, topic) + shown(broker, other)
        relay.drain()

        assert before == []
        assert shown(broker, topic) + shown(broker, other) == ids(tickets[1:])
        dead = Batch.objects.get(state=State.DEAD)
        assert ([str(one) for one in dead.message_ids], dead.tx_lane) == (ids(tickets[:1]), None)
        assert set(Batch.objects.exclude(pk=dead.pk).values_list("state", "failures")) == {(State.SENT, 0)}

    def test_holds_only_the_key_of_a_rejected_message(self, relay, broker, make_topic):
        topic = make_topic("fifo", ordered=True)
        messages = [MessageRowFactory(topic=topic, key=key, body=b"" if n == 4 else b"{}") for n, key in enumerate("abcabcabc")]
        tickets = [TicketFactory(topic=topic, message=message, order_key=ord(message.key)) for message in messages]

        relay.drain()

        assert shown(broker, topic) == ids(tickets[:4] + tickets[5:7] + tickets[8:])
        waiting = Batch.objects.exclude(state=State.SENT).order_by("first_seq")
        assert [(batch.state, batch.order_keys) for batch in waiting] == [(State.DEAD, [ord("b")]), (State.RELEASED, [ord("b")])]

    def test_splits_off_a_message_whose_row_is_gone(self, relay, broker, make_topic):
        topic = make_topic("normal")
        tickets = TicketFactory.create_batch(2, topic=topic)
        with database.raw("default").cursor() as cursor:
            cursor.execute("DELETE FROM outbox_message WHERE id = %s", [tickets[0].message_id])

        relay.drain()

        assert shown(broker, topic) == ids(tickets[1:])
        assert Batch.objects.filter(state=State.DEAD).count() == 1

    def test_returns_its_batches_when_the_broker_is_away(self, relay, broker, make_topic):
        topic = make_topic("normal")
        ticket = TicketFactory(topic=topic)
        relay.step()
        late = TicketFactory(topic=topic)
        broker.fail("send_transaction", "unavailable", reason="no leader")

        relay.step()

        batch = Batch.objects.get(message_ids=[late.message_id])
        assert (batch.state, batch.tx_lane, batch.failures, batch.last_error) == (State.RELEASED, None, 0, "no leader")
        relay.drain()
        assert shown(broker, topic) == ids([ticket, late])


class TestLostAnswer:
    @pytest.mark.parametrize("is_committed", [True, False])
    def test_is_settled_by_the_marker(self, relay, broker, topic, tickets, is_committed):
        broker.fail("send_transaction", "unsure", stored=is_committed)

        relay.step()
        in_doubt = Batch.objects.get()
        relay.drain()

        assert (in_doubt.state, in_doubt.tx_lane, in_doubt.tx_attempt) == (State.CLAIMED, 1, 1)
        assert shown(broker, topic) == ids(tickets)
        batch = stored(in_doubt)
        assert (batch.state, batch.attempt, batch.failures) == (State.SENT, 1 if is_committed else 2, 0)

    def test_is_not_sent_before_the_lane_was_fenced(self, relay, broker, topic, tickets):
        broker.fail("send_transaction", "unsure", late=True)

        relay.step()
        relay.step()
        broker.deliver_late()  # it was on its way all the time
        relay.drain()

        assert shown(broker, topic) == ids(tickets)


class TestError:
    def test_before_the_mark_is_settled_before_the_next_transaction(self, relay, broker, topic, tickets, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr("outbox.relay.transactions.mark_committed", lambda *args: 1 / 0)
            relay.step()
        batch = Batch.objects.get()
        Batch.objects.update(due_at=F("due_at") + LONG)  # as after several failures
        later = TicketFactory(topic=topic)

        relay.drain()

        assert shown(broker, topic) == ids([*tickets, later])
        assert (batch.state, stored(batch).state) == (State.RELEASED, State.SENT)


# Where a relay may die, and what of its transaction is visible then.
DEATHS = {
    "relay.after_claim": 0,
    "relay.before_transaction": 0,
    "relay.after_transaction": 2,
    "relay.after_mark": 2,
}


class TestDeath:
    @pytest.mark.parametrize("lane", [LANE, OTHER], ids=["same-lane", "other-lane"])
    @pytest.mark.parametrize("place", DEATHS)
    def test_leaves_one_copy(self, relay, relay_beside, broker, topic, tickets, monkeypatch, place, lane):
        die(relay, monkeypatch, place)
        visible = len(shown(broker, topic))
        end_leases()

        second = relay_beside(lane=lane)
        ends = any(not second.step().batches for _ in range(10))  # `drain` would never end if a batch was claimed again and again

        assert ends
        assert visible == DEATHS[place]
        assert shown(broker, topic) == ids(tickets)
        assert Batch.objects.get().state == State.SENT

    @pytest.mark.parametrize("place", ["relay.after_claim", "relay.before_fence", "relay.after_fence", "relay.after_adopt"])
    @pytest.mark.parametrize("is_committed", [True, False])
    def test_of_one_that_resolves_leaves_one_copy(
        self, relay, relay_beside, broker, topic, tickets, monkeypatch, place, is_committed
    ):
        die(relay, monkeypatch, "relay.after_transaction" if is_committed else "relay.before_transaction")
        end_leases()
        second = relay_beside(lane=OTHER)
        if place == "relay.after_adopt" and is_committed:
            second.drain()  # it has nothing to adopt
        else:
            die(second, monkeypatch, place)
            end_leases()

        relay_beside(lane=3).drain()

        assert shown(broker, topic) == ids(tickets)
        assert Batch.objects.get().state == State.SENT

    @pytest.mark.parametrize("place", ["relay.after_open", "relay.after_settle"])
    def test_while_it_settles_leaves_one_copy(self, relay, relay_beside, broker, topic, tickets, monkeypatch, place):
        die(relay, monkeypatch, "relay.after_transaction")
        die(relay_beside(), monkeypatch, place)

        relay_beside().drain()

        assert shown(broker, topic) == ids(tickets)

    def test_of_its_lane_only_in_the_database_leaves_one_copy(self, relay, relay_beside, broker, topic, tickets, monkeypatch):
        """The relay lives on while another has its lane: its commit comes too late, or its mark does."""
        send = broker.send_transaction

        def send_late(*args):
            end_leases()
            relay_beside().drain()
            return send(*args)

        monkeypatch.setattr(broker, "send_transaction", send_late)

        relay.step()
        relay.drain()

        assert shown(broker, topic) == ids(tickets)

    def test_after_the_claim_of_its_lane_is_seen_in_the_marker(self, relay, relay_beside, broker, topic, tickets, monkeypatch):
        """A relay that claims a batch of another lane reads the marker afterwards: the batch may have been sent just before."""
        die(relay, monkeypatch, "relay.before_transaction")
        end_leases()
        other = relay_beside(lane=OTHER)

        claim = other._claim

        def send_first(new):
            monkeypatch.setattr(other, "_claim", claim)
            die(relay_beside(), monkeypatch, "relay.after_transaction")
            end_leases()
            return claim(new)

        monkeypatch.setattr(other, "_claim", send_first)

        other.drain()

        assert shown(broker, topic) == ids(tickets)
        assert Batch.objects.get().state == State.SENT

    def test_of_its_lane_after_the_claim_leaves_one_copy(self, relay, relay_beside, broker, topic, tickets, monkeypatch):
        """What was claimed before a lane was opened is not sent in it: another holder may have sent it in between."""

        claim = relay._claim

        def take_over(new):
            found = claim(new)
            monkeypatch.setattr(relay, "_claim", claim)
            end_leases()
            relay_beside().drain()
            return found

        monkeypatch.setattr(relay, "_claim", take_over)

        relay.step()
        relay.drain()

        assert shown(broker, topic) == ids(tickets)

    @pytest.mark.parametrize("lane", [LANE, OTHER], ids=["same-lane", "other-lane"])
    def test_after_a_resend_is_not_settled_by_the_marker_of_the_first_time(
        self, relay, relay_beside, broker, topic, monkeypatch, lane
    ):
        ticket = TicketFactory(topic=topic)
        relay.drain()
        resend(database.raw("default"), [ticket.message_id], lost_before=timezone.now() + LONG)
        die(relay, monkeypatch, "relay.before_transaction")
        end_leases()

        relay_beside(lane=lane).drain()

        assert shown(broker, topic) == ids([ticket, ticket])

    def test_that_was_only_assumed_cannot_commit_after_another_lane_took_over(self, relay, relay_beside, broker, topic, tickets):
        broker.fail("send_transaction", "unsure", late=True)
        relay.step()
        end_leases()

        relay_beside(lane=OTHER).drain()
        broker.deliver_late()

        assert shown(broker, topic) == ids(tickets)

    def test_of_the_one_before_is_not_resolved_by_a_relay_that_lost_the_batch(
        self, relay, relay_beside, broker, topic, tickets, monkeypatch
    ):
        die(relay, monkeypatch, "relay.before_transaction")
        end_leases()
        late = relay_beside(lane=OTHER)
        fence = late.broker.open_lane

        def fence_slowly(source, lane):
            marker = fence(source, lane)
            if lane == OTHER:
                return marker
            end_leases()
            die(relay_beside(lane=3), monkeypatch, "relay.after_transaction")  # it had fenced lane 1, too
            return marker

        monkeypatch.setattr(late.broker, "open_lane", fence_slowly)

        late.step()
        end_leases()
        relay_beside(lane=3).drain()

        assert shown(broker, topic) == ids(tickets)


class TestLostMarker:
    def test_leaves_what_is_in_doubt_to_an_operator(self, relay, relay_beside, broker, topic, tickets, monkeypatch, caplog):
        die(relay, monkeypatch, "relay.after_transaction")
        lose_marker(broker)
        later = TicketFactory(topic=topic)

        relay_beside().drain()

        dead = Batch.objects.get(state=State.DEAD)
        assert (dead.tx_lane, dead.tx_attempt) == (None, None)
        assert "The marker of lane 1 is gone from broker 'default'" in dead.last_error
        assert "Replay sends it, perhaps a second time" in caplog.text
        assert shown(broker, topic)[2:] == ids([later])

    def test_of_another_lane_leaves_its_batch_to_an_operator(self, relay, relay_beside, broker, topic, tickets, monkeypatch):
        die(relay, monkeypatch, "relay.after_transaction")
        lose_marker(broker)
        end_leases()

        relay_beside(lane=OTHER).drain()

        assert Batch.objects.get().state == State.DEAD
        assert len(shown(broker, topic)) == 2


class TestMarker:
    def test_that_another_database_has_written_is_refused(self, relay, relay_beside, broker, make_topic):
        source = read_identity(database.raw("default")).source
        broker.open_lane(source, 1)
        broker.send_transaction(1, [], '{"sent":[[5,1]],"database":"77/16384","timeline":1}')
        ticket = TicketFactory(topic=make_topic("normal"))

        with pytest.raises(BrokerMisconfigured, match=r"Another database \(server/id 77/16384\) .* give it another source id"):
            relay.step()

        assert stored(ticket)
        relay_beside(takes_over=True).drain()
        assert Batch.objects.get().state == State.SENT

    def test_of_each_lane_is_taken_over_at_once(self, relay_beside, broker, connect, caplog):
        source = read_identity(database.raw("default")).source
        for lane in (1, 2, 3):
            broker.open_lane(source, lane)
            broker.send_transaction(lane, [], '{"database":"77/16384","timeline":1}')
        connect().execute("SELECT pg_advisory_lock(%s, 3)", [Lock.LANE])  # as another relay does

        relay_beside(takes_over=True).step()

        for lane in (1, 2):
            relay_beside(lane=lane).step()
        assert "Lanes [3] were not taken over, since other relays hold them" in caplog.text
        with pytest.raises(BrokerMisconfigured, match="run outbox_relay --take-over once, which takes over all lanes"):
            relay_beside(lane=3).step()

    def test_that_is_not_ours_is_refused(self, relay, broker):
        broker.open_lane(read_identity(database.raw("default")).source, 1)
        broker.send_transaction(1, [], "hello")

        with pytest.raises(BrokerMisconfigured, match="cannot be read"):
            relay.step()

    def test_of_a_database_that_was_restored_is_reset_with_an_alert(self, relay, relay_beside, broker, make_topic, caplog):
        topic = make_topic("normal")
        TicketFactory(topic=topic)
        relay.drain()
        batch = Batch.objects.get()
        Batch.objects.all().delete()
        with database.raw("default").cursor() as cursor:
            cursor.execute("SELECT setval(pg_get_serial_sequence('outbox_batch', 'id'), %s, false)", [batch.id])

        relay_beside().step()

        assert "failed over or was restored" in caplog.text
        assert '"sent"' not in (marker_of(broker) or "")

    def test_keeps_its_names_while_all_of_them_are_recorded(self, relay, relay_beside, broker, make_topic):
        TicketFactory(topic=make_topic("normal"))
        relay.drain()
        before = marker_of(broker)

        relay_beside().step()

        assert before == marker_of(broker)


class TestTable:
    def test_has_no_dead_batch_in_a_transaction(self, db):
        with pytest.raises(Exception, match="outbox_batch_dead_is_in_no_transaction"):
            BatchFactory(dead=True, tx_lane=1, tx_attempt=1)

    def test_forgets_the_transaction_when_a_relay_without_transactions_claims(self, make_broker, clock, make_topic):
        topic = make_topic("normal")
        batch = BatchFactory(topic=topic, released=True, tx_lane=1, tx_attempt=1)

        Relay(database.raw("default"), make_broker(), LANE, clock=clock).drain()

        assert (stored(batch).state, stored(batch).tx_lane) == (State.SENT, None)
