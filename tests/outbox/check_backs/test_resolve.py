import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import connection as django_connection
from django.db import transaction

from outbox import database
from outbox.batches.half_first import READ_STEP
from outbox.check_backs.about import About
from outbox.check_backs.register import check_back
from outbox.check_backs.resolve import resolve
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Token
from outbox.models import Batch, MessageRow, State
from outbox.testing.postgres import Postgres
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory, message_id, stored
from tests.outbox.check_backs.halves import half_of, source_of
from tests.waiting import wait_until_it_blocks


def lease_over() -> datetime:
    return datetime.now(UTC) - timedelta(seconds=1)


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=30)


def ask(connection: database.Connection, half: Half):
    """Return (resolution, whether an alert was sent)."""
    answer = resolve(connection, half)
    return answer.resolution, answer.is_alert


class TestResolve:
    """The rows of the table in docs/state-machine.md."""

    @pytest.mark.parametrize("token", ["17", "a:b:c:d", ":17:1:1", "urn:uuid:1:17:1:x"])
    def test_does_not_guess_what_an_unreadable_token_means(self, connection, token):
        half = Half("orders", str(uuid4()), "h", token, born_at=datetime.now(UTC))

        assert ask(connection, half) == (UNKNOWN, True)

    def test_does_not_answer_for_the_batch_of_another_database(self, connection):
        batch = BatchFactory(state=State.PREPARED, half_ids=["h"])
        half = replace(half_of(batch), token=str(Token("urn:uuid:elsewhere", batch.id, 1, 1)))

        assert ask(connection, half) == (UNKNOWN, True)

    @pytest.mark.parametrize("age", [None, timedelta(0), timedelta(days=1000)])
    def test_does_not_guess_why_a_batch_is_missing(self, connection, age):
        """Nothing is pruned whose end is not confirmed."""
        half = half_without_batch(born_at=None if age is None else datetime.now(UTC) - age)

        assert ask(connection, half) == (UNKNOWN, True)

    def test_does_not_answer_for_an_attempt_the_batch_has_not_had(self, connection):
        batch = BatchFactory(state=State.RELEASED, attempt=2)

        assert ask(connection, half_of(batch, attempt=3)) == (UNKNOWN, True)

    @pytest.mark.parametrize("position", [1, 3, 0, -1])
    def test_does_not_answer_for_a_message_the_position_does_not_hold(self, connection, position):
        batch = BatchFactory(state=State.RELEASED, size=2)
        second = half_of(batch, position=2)
        half = replace(second, token=str(Token(source_of(), batch.id, 1, position)))

        assert ask(connection, half) == (UNKNOWN, True)

    @pytest.mark.parametrize("state", [State.CLAIMED, State.PREPARED, State.SENT])
    def test_rolls_back_a_half_of_an_earlier_attempt(self, connection, state):
        batch = BatchFactory(state=state, attempt=3, half_ids=["h"])

        assert ask(connection, half_of(batch, attempt=2)) == (ROLLBACK, False)

    @pytest.mark.parametrize("state", [State.RELEASED, State.DEAD, State.SKIPPED])
    def test_rolls_back_what_was_given_back_or_given_up(self, connection, state):
        batch = BatchFactory(state=state, half_ids=["h"])

        assert ask(connection, half_of(batch)) == (ROLLBACK, False)

    def test_waits_for_a_relay_whose_lease_is_alive(self, connection):
        batch = BatchFactory(state=State.CLAIMED)

        assert ask(connection, half_of(batch)) == (UNKNOWN, False)
        assert stored(batch).state == State.CLAIMED

    def test_takes_a_batch_back_whose_lease_is_over(self, connection):
        batch = BatchFactory(state=State.CLAIMED, attempt=4, lease_until=lease_over())

        assert ask(connection, half_of(batch)) == (ROLLBACK, False)
        released = stored(batch)
        assert (released.state, released.attempt, released.lease_until) == (State.RELEASED, 4, None)
        assert released.due_at is not None

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_rolls_back_a_position_that_was_split_off(self, connection, state):
        batch = BatchFactory(state=state, size=2, half_ids=["h1", "h2"], split=[2])

        assert ask(connection, half_of(batch, position=2)) == (ROLLBACK, False)
        assert ask(connection, half_of(batch, position=1)) == (COMMIT, False)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    @pytest.mark.parametrize("half_ids", [["h"], None, [None]])
    def test_rolls_back_another_half_than_the_one_decided(self, connection, state, half_ids):
        batch = BatchFactory(state=state, half_ids=half_ids)

        assert ask(connection, half_of(batch, half_id="another")) == (ROLLBACK, False)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_commits_the_half_that_was_decided(self, connection, state):
        batch = BatchFactory(state=state, size=2, half_ids=["h1", "h2"])

        assert ask(connection, half_of(batch, position=1)) == (COMMIT, False)
        assert ask(connection, half_of(batch, position=2)) == (COMMIT, False)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_waits_while_its_decider_may_commit(self, connection, state):
        batch = BatchFactory(state=state, half_ids=["h"], ends_until=soon())

        answer = resolve(connection, half_of(batch))

        assert (answer.resolution, answer.is_alert) == (UNKNOWN, False)
        assert "may be in progress" in answer.reason

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT])
    def test_commits_when_its_deciders_time_is_over(self, connection, state):
        batch = BatchFactory(state=state, half_ids=["h"], ends_until=lease_over())

        assert ask(connection, half_of(batch)) == (COMMIT, False)

    @pytest.mark.parametrize("changes", [{"split": [1]}, {"half_ids": ["another"]}, {"state": State.RELEASED}, {"attempt": 2}])
    def test_rolls_back_at_once_what_its_decider_does_not_commit(self, connection, changes):
        batch = BatchFactory(state=State.PREPARED, half_ids=["h"], ends_until=soon())
        half = half_of(batch)
        Batch.objects.update(**changes)

        assert ask(connection, half) == (ROLLBACK, False)

    def test_names_the_batch_in_its_reason(self, connection):
        batch = BatchFactory(state=State.SENT, half_ids=["h"])

        answer = resolve(connection, half_of(batch))

        assert f"Batch {batch.id} " in answer.reason


class TestTheFence:
    """Another commits between the check-back's read and its fence; each step leaves but one of the fence's guards."""

    @pytest.mark.parametrize(
        ("step", "answer", "state"),
        [
            ("state = 2, half_ids = '{h}'", COMMIT, State.PREPARED),
            ("attempt = 2", ROLLBACK, State.CLAIMED),
            ("lease_until = clock_timestamp() + interval '1 minute'", UNKNOWN, State.CLAIMED),
        ],
        ids=["decided", "claimed again", "lease made longer"],
    )
    def test_reads_again_when_another_was_first(self, own_connection, other_connection, step, answer, state):
        batch = BatchFactory(state=State.CLAIMED, lease_until=lease_over())
        half = half_of(batch, half_id="h")
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(own_connection, half)))

        with other_connection.transaction():
            other_connection.execute(f"UPDATE outbox_batch SET {step} WHERE id = %s", [batch.id])
            asking.start()
            wait_until_it_blocks(other_connection)
        asking.join(10)

        assert answers == [(answer, False)]
        assert stored(batch).state == state


@pytest.mark.usefixtures("resolvers")
class TestResolveOfAHalfWithoutToken:
    HALF = Half("orders", "of another producer", "h", key="4711", born_at=datetime.now(UTC))

    @pytest.mark.parametrize("resolution", [COMMIT, ROLLBACK, UNKNOWN])
    def test_asks_the_function_of_its_topic(self, connection, resolution):
        asked = []

        @check_back("orders")
        def did_it_commit(half):
            asked.append(half)
            return resolution

        assert ask(connection, self.HALF) == (resolution, False)
        assert asked == [self.HALF]

    def test_sends_an_alert_where_the_topic_has_none(self, connection):
        @check_back("invoices")
        def did_it_commit(half):
            return COMMIT

        assert ask(connection, self.HALF) == (UNKNOWN, True)

    def test_takes_an_exception_for_unknown(self, connection):
        @check_back("orders")
        def did_it_commit(half):
            raise LookupError("no such order")

        assert ask(connection, self.HALF) == (UNKNOWN, False)

    @pytest.mark.parametrize("value", ["COMMIT", True, None])
    def test_takes_nothing_but_a_resolution(self, connection, value):
        @check_back("orders")
        def did_it_commit(half):
            return value

        assert ask(connection, self.HALF) == (UNKNOWN, True)

    def test_is_unknown_where_it_left_a_transaction_open(self, own_connection):
        @check_back("orders")
        def did_it_commit(half):
            transaction.set_autocommit(False)
            Group.objects.create(name="never to be committed")
            return ROLLBACK

        assert ask(own_connection, self.HALF) == (UNKNOWN, True)
        assert django_connection.get_autocommit()

    def test_sees_what_is_true_now(self, own_connection):
        transaction.set_autocommit(False)  # left so, in a transaction that began long ago
        with django_connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not Group.objects.exists()
        own_connection.execute("INSERT INTO auth_group (name) VALUES ('made since')")

        @check_back("orders")
        def did_it_commit(half):
            return COMMIT if Group.objects.exists() else ROLLBACK

        assert ask(own_connection, self.HALF) == (COMMIT, False)

    def test_does_not_ask_it_for_a_half_with_a_token(self, connection):
        @check_back("orders")
        def did_it_commit(half):
            return COMMIT

        assert ask(connection, replace(self.HALF, token="unreadable")) == (UNKNOWN, True)


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

    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.DEAD, State.SKIPPED])
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


class TestResolveBesideThePrimary:
    def test_does_not_answer_from_a_read_only_session(self, own_connection):
        half = half_of(BatchFactory(state=State.SENT, half_ids=["h"]))
        own_connection.execute("SET default_transaction_read_only = on")

        assert ask(own_connection, half) == (UNKNOWN, True)

    def test_does_not_answer_from_a_standby(self, standby_url):
        half = Half("orders", str(uuid4()), "h", "the source:17:1:1", born_at=datetime.now(UTC) - timedelta(days=14))

        with psycopg.connect(standby_url, autocommit=True) as connection:
            answer = resolve(connection, half)

        assert (answer.resolution, answer.is_alert) == (UNKNOWN, True)
        assert "in recovery" in answer.reason

    @pytest.fixture
    def standby_url(self) -> Iterator[str]:
        """A server in recovery that knows its source and holds no batch."""
        home = Path(tempfile.mkdtemp(prefix="standby-"))
        home.chmod(0o755)  # the server does not run as root
        with Postgres(home) as server, psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE outbox_source AS SELECT 'the source'::text AS id")
        (home / "data" / "standby.signal").touch()
        with Postgres(home) as server:
            yield server.url
        shutil.rmtree(home)


class TestResolveAbout:
    @pytest.mark.parametrize(("is_there", "about"), [(True, About.EXISTS), (False, About.MISSING)])
    def test_says_whether_the_business_row_is_there_and_decides_nothing_by_it(self, connection, is_there, about):
        key = Group.objects.create(name="a business row").pk if is_there else 4711
        message = MessageRowFactory(about=f"auth.group:{key}")
        batch = BatchFactory(state=State.SENT, message_ids=[message.id], half_ids=["h"])

        answer = resolve(connection, half_of(batch))

        assert (answer.resolution, answer.about) == (COMMIT, about)


def half_without_batch(born_at: datetime | None) -> Half:
    return Half("orders", str(uuid4()), "h", str(Token(source_of(), 4711, 1, 1)), born_at=born_at)


WRITE_HALF_FIRST = """
WITH m AS (INSERT INTO outbox_message (id, topic_id, body) VALUES (%(id)s, 1, ''))
INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state) VALUES (1, ARRAY[%(id)s]::uuid[], ARRAY[%(half)s], 2)
"""


def half_first(batch: Batch | None = None, **fields: Any) -> Half:
    """Make the half message that the transaction of a batch sent, or that of one which wrote nothing."""
    default = {
        "message_id": str(batch.message_ids[0] if batch else message_id()),
        "half_id": batch.half_ids[0] if batch else "h",
        "token": str(Token(source_of(), 0, 1, 1)),
    }
    return Half(**{"topic": "orders", "born_at": datetime.now(UTC), **default, **fields})
