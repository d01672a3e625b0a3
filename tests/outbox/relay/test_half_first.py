"""PREPARED batches of half-first transactions whose process died between the database commit and the broker's commit."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.brokers.base import Ended, EndSemantics, HalfStatus, Outgoing, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.message import COMMIT, ROLLBACK, Header, Token
from outbox.models import Batch, DeadMessage, MessageState, State
from tests.factories import BatchFactory, MessageRowFactory, stored
from tests.outbox.relay.committing import half_of

pytestmark = pytest.mark.django_db

WINDOW = timedelta(seconds=2)


@pytest.fixture
def leave(make_topic, broker: MemoryBroker) -> Callable[..., Batch]:
    """Store a half message and its batch, as of a process that died after its database commit that long ago."""

    def leave(ago: timedelta = timedelta(hours=1)) -> Batch:
        topic = make_topic("transaction")
        message = MessageRowFactory(topic=topic)
        half_id = broker.new_half_id(str(message.id))
        (source,) = database.raw("default").execute("SELECT id FROM outbox_source").fetchone()
        sealed = {"headers": {Header.SOURCE: source}, "token": f"{source}:0:1:1"}
        broker.send_halves([Outgoing(str(message.id), topic.name, message.body, half_id=half_id, **sealed)])
        return BatchFactory(
            topic=topic,
            message_ids=[message.id],
            state=State.PREPARED,
            half_ids=[half_id],
            decided_at=datetime.now(UTC) - ago,
            ends_until=datetime.now(UTC) - ago + WINDOW,
            lane=None,
            first_seq=None,
        )

    return leave


class TestTheSweep:
    def test_commits_it_where_a_second_end_does_no_harm(self, relay, broker, leave):
        batch = leave()

        relay.sweep()

        assert [half.ended for half in broker.halves()] == [Ended.COMMITTED]
        assert (stored(batch).state, stored(batch).attempt) == (State.SENT, 1)

    def test_sends_it_again_where_the_broker_rolled_it_back(self, relay, broker, leave):
        batch = leave()
        broker.end([half_of(broker, batch)], ROLLBACK)

        relay.sweep()
        released = stored(batch).state
        relay.drain()

        assert released == State.RELEASED
        [message] = broker.visible(half_of(broker, batch).topic)
        assert (message.message_id, message.body) == (str(batch.message_ids[0]), b'{"order_id": 1}')
        assert Header.NUMBER not in message.headers
        token = Token.parse(message.token)
        assert (token.batch, token.attempt, token.is_half_first) == (batch.id, 2, False)
        assert (stored(batch).state, stored(batch).lane) == (State.SENT, None)

    def test_sends_it_again_where_the_broker_discarded_it(self, relay, broker, leave):
        batch = leave()
        broker.discard_halves()

        relay.sweep()
        relay.drain()

        assert broker.copies(str(batch.message_ids[0])) == 1

    def test_leaves_one_alone_that_was_committed_a_moment_ago(self, make_relay, broker, leave):
        leave(ago=timedelta(0))

        make_relay(sweep_age=timedelta(seconds=10)).sweep()

        assert [half.ended for half in broker.halves()] == [None]


class TestTheSweepOfStatelessEnds:
    @pytest.fixture
    def broker(self, make_broker) -> MemoryBroker:
        return make_broker(EndSemantics.STATELESS, window=WINDOW)

    def test_leaves_it_to_its_process_while_that_may_commit(self, relay, broker, leave):
        batch = leave(ago=timedelta(0))

        relay.sweep()

        assert [half.ended for half in broker.halves()] == [None]
        assert stored(batch).state == State.PREPARED

    def test_commits_it_where_it_is_hidden_still(self, relay, broker, leave):
        batch = leave()

        relay.sweep()

        assert [half.ended for half in broker.halves()] == [Ended.COMMITTED]
        assert (stored(batch).state, stored(batch).attempt) == (State.SENT, 1)

    def test_finds_it_sent(self, relay, broker, leave):
        batch = leave()
        broker.end([half_of(broker, batch)], COMMIT)  # the check-back did

        relay.sweep()
        relay.drain()

        assert stored(batch).state == State.SENT
        assert broker.copies(str(batch.message_ids[0])) == 1

    def test_sends_it_again_where_it_is_gone(self, relay, broker, leave):
        batch = leave()
        broker.fail("look_up_halves", HalfStatus.GONE)

        relay.sweep()
        relay.drain()

        assert broker.copies(str(batch.message_ids[0])) == 1
        assert (stored(batch).state, stored(batch).attempt) == (State.SENT, 2)


class TestAMessageThatIsSentAgain:
    def test_is_kept_with_its_reason_when_the_broker_refuses_it(self, relay, broker, leave):
        batch = leave()
        broker.discard_halves()
        relay.sweep()
        broker.fail("send_halves", SendStatus.REFUSED, reason="too odd")

        relay.drain()

        assert stored(batch).state == State.DEAD
        dead = DeadMessage.objects.get()
        assert (dead.message_id, dead.lane, dead.number, dead.reason) == (batch.message_ids[0], None, None, "too odd")
        assert MessageState.objects.get().state == "dead"
