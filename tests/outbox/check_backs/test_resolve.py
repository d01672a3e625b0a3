import shutil
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import connection as django_connection
from django.db import transaction
from msgspec.structs import replace

from outbox.check_backs.register import check_back
from outbox.check_backs.resolve import resolve
from outbox.check_backs.sources import About
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Token
from outbox.models import Batch, State
from outbox.testing.postgres import Postgres
from tests.factories import BatchFactory, MessageRowFactory, stored
from tests.outbox.check_backs.halves import ask, half_of, soon, source_of
from tests.waiting import wait_until_it_blocks


def lease_over() -> datetime:
    return datetime.now(UTC) - timedelta(seconds=1)


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

    @pytest.mark.parametrize("state", [State.RELEASED, State.DEAD, State.DISCARDED])
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
