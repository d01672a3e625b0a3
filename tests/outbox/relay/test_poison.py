"""One message that the broker never answers: all others are sent."""

from collections.abc import Callable, Sequence

import pytest

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.models import Batch, MessageRow, State
from outbox.relay.breaker import BreakerState
from outbox.relay.rounds import Relay
from tests.clock import Clock
from tests.factories import TicketFactory
from tests.outbox.relay.conftest import Topics
from tests.outbox.relay.outages import open_broker, open_for

pytestmark = pytest.mark.django_db

ROUNDS = 60
SECONDS = 3  # between two rounds: the longest wait of a breaker

UNAVAILABLE = SendStatus.UNAVAILABLE


class Poisonous:
    """A broker's `send` that never answers a call with one of these messages in it."""

    def __init__(self, broker: MemoryBroker, ids: set[str], fail: Callable[[Sequence[Outgoing]], list[SendResult]]) -> None:
        self._send = broker.send
        self._ids = ids
        self._fail = fail
        self.sent: list[set[str]] = []

    def __call__(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        self.sent.append({message.message_id for message in messages})
        return self._fail(messages) if self.sent[-1] & self._ids else self._send(messages)


def no_answer(messages: Sequence[Outgoing]) -> list[SendResult]:
    return [SendResult(UNAVAILABLE, reason="no answer")] * len(messages)


def an_error(messages: Sequence[Outgoing]) -> list[SendResult]:
    raise RuntimeError("a bug in the broker")


@pytest.fixture
def poison(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Poisonous]:
    def poison(ids: set[str], fail: Callable[[Sequence[Outgoing]], list[SendResult]] = no_answer) -> Poisonous:
        send = Poisonous(broker, ids, fail)
        monkeypatch.setattr(broker, "send", send)
        return send

    return poison


def play(relay: Relay, clock: Clock) -> None:
    for _ in range(ROUNDS):
        relay.step()
        clock.now += SECONDS


def waiting() -> set[str]:
    """Return the ids of the messages that were not sent."""
    batches = Batch.objects.exclude(state=State.SENT)
    return {str(batch.message_ids[position - 1]) for batch in batches for position in _left(batch)}


def _left(batch: Batch) -> set[int]:
    return set(range(1, len(batch.message_ids) + 1)) - set(batch.split)


class TestMessageWithoutAnAnswer:
    @pytest.mark.parametrize("kind", ["normal", "fifo"])
    @pytest.mark.parametrize("fail", [no_answer, an_error])
    @pytest.mark.parametrize("place", [0, 60, 119])
    def test_holds_no_other_of_its_topic(self, relay, make_topic: Topics, poison, clock, kind, fail, place):
        topic = make_topic(kind)
        tickets = [TicketFactory(topic=topic, order_key=number) for number in range(120)]
        bad = str(tickets[place].message_id)
        poison({bad}, fail)

        play(relay, clock)

        assert waiting() == {bad}
        assert MessageRow.objects.count() == 120

    def test_holds_no_other_where_there_are_several(self, relay, make_topic: Topics, poison, clock):
        topics = [make_topic(), make_topic()]
        tickets = [TicketFactory(topic=topics[number % 2]) for number in range(60)]
        bad = {str(ticket.message_id) for ticket in tickets[10:15]}
        poison(bad)

        play(relay, clock)

        assert waiting() == bad

    def test_holds_no_other_behind_whole_batches_of_its_kind(self, make_relay, make_topic: Topics, poison, clock):
        topic = make_topic()
        tickets = TicketFactory.create_batch(40, topic=topic)
        bad = {str(ticket.message_id) for ticket in tickets[:20]}
        poison(bad)

        play(make_relay(batch_size=5), clock)

        assert waiting() == bad

    def test_holds_no_new_message(self, relay, make_topic: Topics, poison, clock):
        topic = make_topic()
        bad = str(TicketFactory(topic=topic).message_id)
        poison({bad})
        play(relay, clock)

        TicketFactory.create_batch(3, topic=topic)
        play(relay, clock)

        assert waiting() == {bad}

    def test_is_not_the_next_probe_while_another_waits(self, relay, make_topic: Topics, poison, clock):
        topics = [make_topic() for _ in range(3)]
        bad = {str(TicketFactory(topic=topic).message_id) for topic in topics for _ in range(3)}
        send = poison(bad)
        open_broker(relay.breakers)

        play(relay, clock)

        assert all(one != other for one, other in zip(send.sent, send.sent[1:], strict=False))
        assert all(len(probe) == 1 for probe in send.sent)
        assert {one for probe in send.sent for one in probe} == bad
        assert relay.breakers.state is not BreakerState.CLOSED

    def test_is_probed_again_where_nothing_else_waits(self, relay, make_topic: Topics, broker, clock):
        topic = make_topic()
        TicketFactory(topic=topic)
        open_for(relay.breakers, topic.name)
        broker.fail("send", UNAVAILABLE, times=3)

        play(relay, clock)

        assert waiting() == set()


class TestFailedTopicWithNothingLeft:
    def test_does_not_keep_the_broker_from_being_probed(self, relay, make_topic: Topics, clock):
        topic = make_topic()
        TicketFactory(topic=topic)
        open_for(relay.breakers, "empty", "empty-too", topic.name)

        play(relay, clock)

        assert waiting() == set()
        assert relay.breakers.state is BreakerState.CLOSED
