"""The answers about half messages of half-first transactions."""

import threading
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from msgspec.structs import replace

from outbox.batches.half_first import READ_STEP
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Token
from outbox.models import Batch, MessageRow, State
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory, message_id, stored
from tests.outbox.check_backs.halves import ask, half_first, half_of, soon
from tests.waiting import wait_until_it_blocks

WRITE_HALF_FIRST = """
WITH m AS (INSERT INTO outbox_message (id, topic_id, body) VALUES (%(id)s, 1, ''))
INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state) VALUES (1, ARRAY[%(id)s]::uuid[], ARRAY[%(half)s], 2)
"""


class TestResolveOfAHalfFirst:
    """The second table in docs/state-machine.md: halves that their transaction sent before its work."""

    @pytest.fixture
    def batch(self) -> Batch:
        topic = TopicFactory(type="transaction")
        return BatchFactory(topic=topic, state=State.PREPARED, half_ids=["h"], lane=None, first_seq=None)

    def test_does_not_guess_what_an_unreadable_message_id_means(self, connection):
        assert ask(connection, half_first(message_id="4711")) == (UNKNOWN, True)

    def test_does_not_answer_for_the_message_of_another_database(self, connection):
        half = replace(half_first(), token=str(Token("urn:uuid:elsewhere", 0, 1, 1)))

        assert ask(connection, half) == (UNKNOWN, True)
        assert not MessageRow.objects.exists()

    def test_rolls_back_what_has_no_message_row_and_never_will(self, connection):
        half = half_first()

        assert ask(connection, half) == (ROLLBACK, False)
        tombstone = MessageRow.objects.get()
        assert (str(tombstone.id), tombstone.topic_id) == (half.message_id, 0)

    def test_rolls_back_what_has_a_tombstone(self, connection):
        half = half_first()
        ask(connection, half)

        assert ask(connection, half) == (ROLLBACK, False)
        assert MessageRow.objects.count() == 1

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_commits_the_half_that_its_transaction_was_committed_with(self, connection, batch, state):
        Batch.objects.update(state=state)

        assert ask(connection, half_first(batch)) == (COMMIT, False)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_waits_while_its_process_may_commit(self, connection, batch, state):
        Batch.objects.update(state=state, ends_until=soon())

        assert ask(connection, half_first(batch)) == (UNKNOWN, False)

    def test_rolls_back_at_once_what_its_process_does_not_commit(self, connection, batch):
        Batch.objects.update(ends_until=soon())

        assert ask(connection, half_first(batch, half_id="another")) == (ROLLBACK, False)

    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.DEAD, State.DISCARDED])
    def test_rolls_back_what_is_sent_again_or_given_up(self, connection, batch, state):
        Batch.objects.update(state=state)

        assert ask(connection, half_first(batch)) == (ROLLBACK, False)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_rolls_back_the_half_of_an_earlier_attempt(self, connection, batch, state):
        Batch.objects.update(state=state, attempt=2)

        assert ask(connection, half_first(batch)) == (ROLLBACK, False)

    def test_rolls_back_another_half_than_the_one_written_down(self, connection, batch):
        assert ask(connection, half_first(batch, half_id="another")) == (ROLLBACK, False)

    def test_does_not_know_a_message_without_a_batch(self, connection):
        message = MessageRowFactory()

        assert ask(connection, half_first(message_id=str(message.id))) == (UNKNOWN, True)

    def test_does_not_know_a_message_that_waits_in_a_batch_of_many(self, connection):
        batch = BatchFactory(size=2, state=State.PREPARED, half_ids=["h", "h"])

        assert ask(connection, half_first(message_id=str(max(batch.message_ids)))) == (UNKNOWN, True)

    def test_leaves_the_halves_of_relays_to_their_own_table(self, connection, batch):
        """Sent again after a discard, a message has a token that names its batch."""
        Batch.objects.update(attempt=2)

        assert ask(connection, half_of(stored(batch))) == (COMMIT, False)

    def test_does_not_know_while_the_transaction_is_open(self, own_connection, other_connection):
        half = half_first()
        own_connection.execute("SET lock_timeout = '100ms'")

        with other_connection.transaction():
            other_connection.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 1, '')", [half.message_id])

            assert ask(own_connection, half) == (UNKNOWN, False)

    @pytest.mark.parametrize("is_committed", [True, False])
    def test_waits_for_how_an_open_transaction_ends(self, own_connection, other_connection, is_committed):
        half = half_first()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(own_connection, half)))

        with other_connection.transaction(force_rollback=not is_committed):
            other_connection.execute(WRITE_HALF_FIRST, {"id": half.message_id, "half": half.half_id})
            asking.start()
            wait_until_it_blocks(other_connection)
        asking.join(10)

        assert answers == [(COMMIT if is_committed else ROLLBACK, False)]

    def test_does_not_know_where_no_partition_takes_the_row(self, connection, settings):
        settings.OUTBOX = {"RETENTION": timedelta(days=400)}
        connection.execute("ALTER TABLE outbox_message DETACH PARTITION outbox_message_default")
        last_year = message_id(datetime.now(UTC) - timedelta(days=365))

        with connection.transaction(force_rollback=True):
            connection.execute("SAVEPOINT before")
            answer = ask(connection, half_first(message_id=str(last_year)))
            connection.execute("ROLLBACK TO before")

        assert answer == (UNKNOWN, True)

    @pytest.mark.parametrize(
        "at",
        [
            datetime(1970, 1, 1, tzinfo=UTC),
            datetime.now(UTC) - timedelta(days=9),
            datetime.now(UTC) + timedelta(hours=2),
            datetime(9999, 12, 31, tzinfo=UTC),
        ],
    )
    def test_does_not_know_and_writes_nothing_of_a_time_of_which_nothing_is_kept(self, connection, at):
        assert ask(connection, half_first(message_id=str(message_id(at)))) == (UNKNOWN, True)
        assert not MessageRow.objects.exists()

    @pytest.mark.parametrize("number", [0, 2**128 - 1])
    def test_does_not_know_ids_that_hold_no_time(self, connection, number):
        assert ask(connection, half_first(message_id=str(UUID(int=number)))) == (UNKNOWN, True)
        assert not MessageRow.objects.exists()

    @pytest.mark.parametrize("at", [timedelta(minutes=59), timedelta(days=-7)])
    def test_rolls_back_what_never_came_of_a_time_that_is_kept(self, connection, at):
        assert ask(connection, half_first(message_id=str(message_id(datetime.now(UTC) + at)))) == (ROLLBACK, False)
        assert MessageRow.objects.count() == 1

    @pytest.mark.parametrize("at", [timedelta(hours=3), timedelta(days=-30)])
    def test_goes_by_the_row_whatever_the_time(self, connection, at):
        message = MessageRowFactory(id=message_id(datetime.now(UTC) + at))
        batch = BatchFactory(state=State.SENT, message_ids=[message.id], half_ids=["h"])

        assert ask(connection, half_first(batch)) == (COMMIT, False)
        assert ask(connection, half_first(batch, half_id="another")) == (ROLLBACK, False)

    def test_finds_the_batch_by_its_newest_id(self, own_connection):
        BatchFactory.create_batch(3, state=State.SENT, half_ids=["h"])
        batch = BatchFactory(state=State.PREPARED, half_ids=["h"])
        own_connection.execute("SET enable_seqscan = off")

        lines = own_connection.execute("EXPLAIN " + READ_STEP, {"id": batch.message_ids[0]}).fetchall()

        plan = "\n".join(line for (line,) in lines)
        assert "outbox_batch_newest_message" in plan
        assert "Seq Scan" not in plan
