"""Transactions that are certainly committed when they return, on connections in any state."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, connection, transaction

from outbox import database
from outbox.database.guarded import atomic, guarded_transaction
from outbox.errors import BrokenTransaction
from tests.foreign_exceptions import Bomb, Place, TimeIsOver, planted

COUNT = "SELECT count(*) FROM auth_group"


@pytest.fixture
def bomb(transactional_db):
    with planted() as bomb:
        yield bomb


@pytest.fixture
def stored(transactional_db) -> Iterator[Callable[[], int]]:
    """Return the number of groups, read over another connection."""
    with database.connect("default") as own:
        yield lambda: own.execute(COUNT).fetchone()[0]


def break_it(bomb: Bomb, nth: int) -> None:
    """Write in an atomic() block in which the nth call raises an error: BEGIN, INSERT, COMMIT, autocommit."""
    connection.ensure_connection()
    bomb.arm(nth, Place.BEFORE)
    with pytest.raises(Exception), transaction.atomic():  # noqa: B017, PT011
        Group.objects.create(name="lost")
    assert bomb.has_gone_off
    bomb.disarm()


def write(and_then: Callable[[], object]) -> None:
    with atomic("default"):
        Group.objects.create(name="a")
        and_then()


def ignore_an_error_of(statement: str) -> None:
    with suppress(DatabaseError), connection.cursor() as cursor:
        cursor.execute(statement)


def ignore(error: type[BaseException], work: Callable[[], object]) -> None:
    with suppress(error):
        work()


def fail_without_a_savepoint() -> None:
    with transaction.atomic(savepoint=False):
        raise ZeroDivisionError


# What fails where a group "a" is there, and marks the transaction for rollback.
SWALLOWED: dict[str, Callable[[], object]] = {
    "create": lambda: Group.objects.create(name="a"),
    "save": lambda: Group(name="a").save(),
    "bulk_create": lambda: Group.objects.bulk_create([Group(name="b"), Group(name="a")]),
    "update": lambda: Group.objects.update(name=None),
    "block without a savepoint": fail_without_a_savepoint,
}


class TestAtomic:
    def test_commits_at_its_end(self, stored):
        with atomic("default"):
            Group.objects.create(name="a")

        assert stored() == 1

    def test_is_a_savepoint_in_another(self, stored):
        with transaction.atomic():
            with suppress(ZeroDivisionError), atomic("default"):
                Group.objects.create(name="a")
                raise ZeroDivisionError
            Group.objects.create(name="b")

        assert Group.objects.get().name == "b"

    def test_rolls_back_without_an_error_where_it_is_told_to(self, stored):
        with atomic("default"):
            Group.objects.create(name="a")
            transaction.set_rollback(True)

        assert stored() == 0

    def test_raises_where_it_caught_an_error_that_it_did_not_survive(self, stored):
        with pytest.raises(BrokenTransaction, match="error was caught"):
            write(lambda: ignore_an_error_of("SELECT 1 / 0"))

        assert stored() == 0

    @pytest.mark.parametrize("swallowed", SWALLOWED.values(), ids=SWALLOWED)
    def test_raises_where_it_caught_an_error_for_which_django_rolls_back(self, stored, swallowed):
        def swallow():
            with suppress(DatabaseError, ZeroDivisionError):
                swallowed()

        with pytest.raises(BrokenTransaction, match="error was caught"):
            write(swallow)

        assert stored() == 0

    @pytest.mark.parametrize("swallowed", SWALLOWED.values(), ids=SWALLOWED)
    def test_raises_as_a_savepoint_too_and_leaves_the_block_around_it_alone(self, stored, swallowed):
        def swallow():
            with suppress(DatabaseError, ZeroDivisionError):
                swallowed()

        with transaction.atomic():
            Group.objects.create(name="before")
            with pytest.raises((BrokenTransaction, DatabaseError)):
                write(swallow)
            Group.objects.create(name="after")

        assert stored() == 2

    def test_names_the_error_that_it_caught(self, stored):
        def swallow():
            with suppress(IntegrityError):
                Group.objects.create(name="a")

        with pytest.raises(BrokenTransaction) as caught:
            write(swallow)

        assert isinstance(caught.value.__cause__, IntegrityError)

    def test_commits_where_the_error_was_caught_around_a_block_of_its_own(self, stored):
        def swallow():
            with suppress(IntegrityError), transaction.atomic():
                Group.objects.create(name="a")

        write(swallow)

        assert stored() == 1

    def test_rolls_back_without_an_error_where_it_is_told_to_after_one(self, stored):
        def swallow():
            with suppress(IntegrityError):
                Group.objects.create(name="a")
            transaction.set_rollback(True)

        write(swallow)

        assert stored() == 0

    def test_forgets_what_an_earlier_one_was_told(self, stored):
        with atomic("default"):
            transaction.set_rollback(True)

        with pytest.raises(BrokenTransaction):
            write(lambda: ignore(IntegrityError, lambda: Group.objects.create(name="a")))

    def test_raises_where_its_connection_was_closed_in_the_middle(self, stored):
        with pytest.raises(BrokenTransaction):
            write(connection.close)
        with atomic("default"):
            Group.objects.create(name="b")

        assert stored() == 1

    def test_is_a_savepoint_in_a_tests_own_transaction(self, db):
        with atomic("default", durable=True):
            Group.objects.create(name="a")

        assert connection.in_atomic_block
        assert Group.objects.count() == 1

    def test_runs_the_hooks_of_its_commit(self, stored):
        seen = []
        with atomic("default"):
            Group.objects.create(name="a")
            transaction.on_commit(lambda: seen.append(stored()))

        assert seen == [1]

    def test_may_be_opened_by_a_hook_of_another(self, stored):
        seen = []

        def write_more():
            with atomic("default"):
                Group.objects.create()

        with transaction.atomic():
            transaction.on_commit(write_more)
            transaction.on_commit(lambda: seen.append(stored()))
        with atomic("default"):
            transaction.on_commit(lambda: seen.append(stored()))

        assert seen == [1, 1]

    def test_lets_an_error_of_a_hook_through(self, stored):
        with pytest.raises(ZeroDivisionError):
            write(lambda: transaction.on_commit(lambda: 1 / 0))

        assert stored() == 1


class TestAConnectionThatWasLeftBroken:
    @pytest.mark.parametrize("nth", [3, 4], ids=["in its COMMIT", "before autocommit"])
    def test_is_refused_once_where_it_may_be_somebodys_by_hand(self, bomb, nth, stored):
        break_it(bomb, nth)

        with pytest.raises(BrokenTransaction, match="Autocommit of database 'default' was off"), atomic("default"):
            Group.objects.create(name="b")
        before = stored()
        with atomic("default"):
            Group.objects.create(name="c")

        assert stored() == before + 1
        assert connection.get_autocommit()

    @pytest.mark.parametrize("nth", [3, 4], ids=["in its COMMIT", "before autocommit"])
    def test_is_opened_anew_for_who_has_it_alone(self, bomb, nth, stored):
        break_it(bomb, nth)
        before = stored()

        with guarded_transaction("default"):
            Group.objects.create(name="c")

        assert stored() == before + 1

    def test_is_opened_anew_where_django_knows_nothing_of_it(self, bomb, stored):
        connection.ensure_connection()
        bomb.arm(1, Place.BEHIND)
        with pytest.raises(TimeIsOver):
            connection.set_autocommit(False)  # of psycopg's it is off
        bomb.disarm()

        with atomic("default"):
            Group.objects.create(name="c")

        assert stored() == 1
        assert connection.connection.autocommit

    def test_takes_its_hooks_along(self, bomb, stored):
        ran = []
        connection.ensure_connection()
        bomb.arm(3, Place.BEHIND)
        with suppress(TimeIsOver), transaction.atomic():
            Group.objects.create(name="a")
            transaction.on_commit(lambda: ran.append("of the broken one"))
        bomb.disarm()

        with atomic("default"):
            transaction.on_commit(lambda: ran.append("of this one"))

        assert ran == ["of this one"]

    def test_is_not_one_that_a_transaction_by_hand_was_begun_on(self, stored):
        """It is rolled back, and its owner gets an error."""
        transaction.set_autocommit(False)
        Group.objects.create(name="a")

        with pytest.raises(BrokenTransaction, match="outside of atomic"), atomic("default"):
            Group.objects.create(name="b")

        assert stored() == 0

    def test_leaves_a_database_alone_whose_transactions_are_all_by_hand(self, stored, monkeypatch):
        connection.close()
        with monkeypatch.context() as patch:  # undone before the database is emptied, which would not be committed
            patch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
            with atomic("default"):
                Group.objects.create(name="a")
            before = stored()
            transaction.commit()
            connection.close()

        assert (before, stored()) == (0, 1)
