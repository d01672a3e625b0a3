import pytest

from outbox import database
from outbox.batches.operators import REPLAY_BATCHES, REPLAY_MESSAGE, replay_all, replay_messages
from outbox.database import partitions
from outbox.ids import day_of
from outbox.message import TopicSpec, TopicType
from outbox.models import Batch, DeadMessage, MessageRow, MessageState, State, Topic
from tests.factories import BatchFactory, TopicFactory, message_id

pytestmark = pytest.mark.django_db


@pytest.fixture
def connection(db):
    return database.raw("default")


class Overtaken:
    """A connection on which another process writes between the read of dead batches and their update."""

    def __init__(self, connection, write):
        self.connection = connection
        self.write = write

    def execute(self, statement, *args):
        if statement is REPLAY_BATCHES or statement is REPLAY_MESSAGE:
            self.write()
            self.write = lambda: None
        return self.connection.execute(statement, *args)


def dead(size=1, **fields):
    return BatchFactory(size=size, state=State.DEAD, failures=4, last_error="refused", attempt=3, **fields)


def states(batch):
    return [MessageState.objects.get(id=message_id).state for message_id in batch.message_ids]


class TestSettleMessages:
    def test_releases_a_dead_batch_of_one_from_its_first_try_on(self, connection):
        batch = dead()

        result = replay_messages(connection, batch.message_ids, by="ada")

        batch.refresh_from_db()
        assert (result.messages, result.refused) == (1, {})
        assert (batch.state, batch.failures, batch.attempt) == (State.RELEASED, 0, 3)
        assert batch.due_at is not None

    def test_takes_one_message_out_of_a_dead_batch(self, connection):
        batch = dead(size=3, first_seq=7)

        replay_messages(connection, [batch.message_ids[1]], by="ada")

        assert states(batch) == ["dead", "released", "dead"]
        left = Batch.objects.exclude(id=batch.id).get()
        assert (left.first_seq, left.lane, left.message_ids, left.attempt) == (8, 1, [batch.message_ids[1]], 3)

    def test_leaves_nothing_dead_when_each_message_was_taken(self, connection):
        batch = dead(size=3)

        result = replay_messages(connection, batch.message_ids, by="ada")

        assert result.messages == 3
        assert not Batch.objects.filter(state=State.DEAD).exists()
        assert states(batch) == ["released"] * 3

    def test_frees_the_key_of_the_message_it_takes(self, connection):
        topic = TopicFactory(type="fifo")
        batch = dead(size=3, topic=topic, order_keys=[11, 22, 33])

        replay_messages(connection, [batch.message_ids[1]], by="ada")

        batch.refresh_from_db()
        assert batch.order_keys == [11, None, 33]
        assert Batch.objects.exclude(id=batch.id).get().order_keys == [22]

    @pytest.mark.parametrize("origin", [None, 7])
    def test_keeps_the_place_of_the_message_in_the_order_of_its_key(self, connection, origin):
        batch = dead(size=2, topic=TopicFactory(type="fifo"), order_keys=[11, 22], origin_id=origin)

        replay_messages(connection, [batch.message_ids[1]], by="ada")

        assert Batch.objects.exclude(id=batch.id).get().origin_id == (origin or batch.id)

    def test_gives_no_order_keys_to_a_batch_without_order(self, make_relay, connection):
        batch = dead(size=3, topic=TopicFactory(type="transaction"))

        replay_messages(connection, batch.message_ids[:2], by="ada")

        batch.refresh_from_db()
        assert batch.order_keys is None
        relay = make_relay(lane=1)
        name = Topic.objects.get(id=batch.topic_id).name
        relay.broker.topics[name] = TopicSpec(name, TopicType.TRANSACTION)
        assert relay.drain().batches == 2  # with keys, each relay would fail on it again and again

    def test_has_an_ordered_message_sent_again(self, make_relay, connection):
        batch = dead(size=2, topic=TopicFactory(type="fifo"), order_keys=[11, 22])
        replay_messages(connection, [batch.message_ids[1]], by="ada")

        claimed = make_relay(lane=1).claims.reclaim()

        assert claimed is not None
        assert claimed.message_ids == [str(batch.message_ids[1])]

    def test_lets_a_message_rest(self, connection):
        batch = dead(size=2)

        replay_messages(connection, [batch.message_ids[0]], discard=True, by="ada")

        assert states(batch) == ["discarded", "dead"]

    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.PREPARED, State.SENT, State.DISCARDED])
    def test_refuses_a_message_that_is_not_dead(self, state, connection):
        batch = BatchFactory(state=state)

        result = replay_messages(connection, batch.message_ids, by="ada")

        assert result.refused == {str(batch.message_ids[0]): "It is not dead."}
        batch.refresh_from_db()
        assert batch.state == state

    def test_refuses_a_message_that_left_its_dead_batch(self, connection):
        batch = dead(size=2, split=[1])
        BatchFactory(message_ids=[batch.message_ids[0]], state=State.SENT)

        assert str(batch.message_ids[0]) in replay_messages(connection, [batch.message_ids[0]], by="ada").refused

    def test_refuses_what_could_not_be_sent(self, connection):
        batch = dead(message_ids=[message_id()])

        result = replay_messages(connection, batch.message_ids, by="ada")

        assert result.refused[str(batch.message_ids[0])].startswith("Its message row is gone")

    def test_lets_rest_what_could_not_be_sent(self, connection):
        batch = dead(message_ids=[message_id()])

        assert replay_messages(connection, batch.message_ids, discard=True, by="ada").messages == 1

    @pytest.mark.parametrize(
        ("size", "change"),
        [(1, {"state": State.SENT}), (2, {"state": State.DISCARDED}), (3, {"split": [1]}), (2, {"split": [2]})],
        ids=["sent again", "discarded", "the same message taken", "the others taken"],
    )
    def test_changes_nothing_when_another_process_was_first(self, size, change, connection):
        batch = dead(size=size)
        overtaken = Overtaken(connection, lambda: Batch.objects.filter(id=batch.id).update(**change))

        result = replay_messages(overtaken, [batch.message_ids[0]], by="ada")

        assert result.refused == {str(batch.message_ids[0]): "Another process changed this message first. Reload and try again."}
        assert Batch.objects.get().state == change.get("state", State.DEAD)

    def test_takes_no_message_that_another_process_took_out_of_the_batch_meanwhile(self, connection):
        batch = dead(size=3)
        overtaken = Overtaken(connection, lambda: Batch.objects.filter(id=batch.id).update(split=[2]))

        result = replay_messages(overtaken, batch.message_ids, by="ada")

        assert result.messages == 2
        assert result.refused == {str(batch.message_ids[1]): "Another process changed this message first. Reload and try again."}

    def test_asks_the_database_the_same_few_times_for_many_messages(self, connection):
        many = [message_id for _ in range(20) for message_id in dead().message_ids]
        statements = []

        class Counting:
            def execute(self, statement, *args):
                statements.append(statement)
                return connection.execute(statement, *args)

        result = replay_messages(Counting(), many, by="ada")

        assert result.messages == 20
        assert len(statements) == 4

    def test_restores_a_message_row_from_its_copy(self, connection):
        topic = TopicFactory()
        gone = message_id()
        dead(topic=topic, message_ids=[gone])
        DeadMessage.objects.create(
            message_id=gone, batch_id=1, topic=topic.name, key="k", headers='{"a": "b"}', about="x:1", body=b"body", reason="r"
        )

        replay_messages(connection, [gone], by="ada")

        row = MessageRow.objects.get(id=gone)
        assert (row.topic_id, row.key, row.headers, row.about, bytes(row.body)) == (topic.id, "k", '{"a": "b"}', "x:1", b"body")
        assert day_of(gone) in partitions.days(connection)


class TestSettleAll:
    def test_releases_every_dead_batch(self, connection):
        batches = [dead(size=2), dead()]

        result = replay_all(connection, by="ada")

        assert result.messages == 3
        assert not Batch.objects.filter(state=State.DEAD).exists()
        assert [states(batch) for batch in batches] == [["released"] * 2, ["released"]]

    def test_counts_and_releases_only_what_is_left_of_a_batch(self, connection):
        batch = dead(size=3, split=[2])
        sent = BatchFactory(message_ids=[batch.message_ids[1]], state=State.SENT)

        assert replay_all(connection, by="ada").messages == 2

        assert states(batch) == ["released", "sent", "released"]
        sent.refresh_from_db()
        assert sent.state == State.SENT

    def test_refuses_what_has_neither_row_nor_copy(self, connection):
        batches = [dead(size=2), dead(), dead()]
        gone = [str(batches[0].message_ids[1]), str(batches[2].message_ids[0])]
        MessageRow.objects.filter(id__in=gone).delete()

        result = replay_all(connection, by="ada")

        assert (result.messages, sorted(result.refused)) == (2, sorted(gone))
        assert MessageState.objects.get(id=batches[0].message_ids[0]).state == "released"
        assert sorted(Batch.objects.filter(state=State.DEAD).values_list("id", flat=True)) == [batches[0].id, batches[2].id]

    def test_keeps_to_a_topic(self, connection):
        mine, other = TopicFactory(), TopicFactory()
        dead(topic=mine)
        kept = dead(topic=other)

        assert replay_all(connection, topic=mine.name, by="ada").messages == 1

        assert list(Batch.objects.filter(state=State.DEAD)) == [kept]

    def test_goes_through_all_slices(self, connection, monkeypatch):
        monkeypatch.setattr("outbox.batches.operators.BATCHES_AT_ONCE", 2)
        for _ in range(5):
            dead()

        assert replay_all(connection, by="ada").messages == 5

    def test_leaves_batches_alone_that_die_meanwhile(self, connection):
        dead()
        since = []

        result = replay_all(Overtaken(connection, lambda: since.append(dead())), by="ada")

        assert result.messages == 1
        assert list(Batch.objects.filter(state=State.DEAD)) == since

    def test_leaves_living_batches_alone(self, connection):
        batch = BatchFactory(state=State.CLAIMED)

        replay_all(connection, by="ada")

        batch.refresh_from_db()
        assert batch.state == State.CLAIMED
