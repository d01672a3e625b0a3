"""An exception that is not the database's, at any place of a transaction: who hears of no error finds all of it committed."""

import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group

import outbox
from outbox import database
from tests.foreign_exceptions import Place, TimeIsOver, planted
from tests.outbox.publishing.rows import OrderMade, bodies
from tests.waiting import wait_until, wait_until_it_blocks

pytestmark = pytest.mark.django_db(transaction=True)


def write_and_publish(number: int) -> None:
    Group.objects.create(name=str(number))
    outbox.publish(OrderMade(order_id=number))


def in_a_block(number: int) -> None:
    with outbox.atomic():
        write_and_publish(number)


@outbox.transactional
def in_a_function(number: int) -> None:
    write_and_publish(number)


@outbox.transactional
async def in_a_coroutine(number: int) -> None:
    await Group.objects.acreate(name=str(number))
    await outbox.apublish(OrderMade(order_id=number))


WORK = {"block": in_a_block, "function": in_a_function, "coroutine": async_to_sync(in_a_coroutine)}


SLOW_COMMIT = """
CREATE FUNCTION wait_for_lock() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON auth_group
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait_for_lock()
"""


def committed() -> tuple[set[int], set[int]]:
    """Return which numbers have their row, and which their message."""
    return {int(group.name) for group in Group.objects.all()}, {body["order_id"] for body in bodies()}


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize(
    "work", [in_a_block, in_a_function, async_to_sync(in_a_coroutine)], ids=["block", "function", "coroutine"]
)
def test_at_every_call_leaves_nothing_out_that_was_answered(work: Callable[[int], None], place: Place):
    answered = set()
    tried = 0

    def attempt() -> None:
        nonlocal tried
        tried += 1
        try:
            work(tried)
        except Exception:
            return
        answered.add(tried)

    in_a_block(0)  # finds the topic
    with planted() as bomb:
        for nth in bomb.numbers(at_least=5):
            bomb.arm(nth, place)
            attempt()
            attempt()  # on the connection as it was left

    rows, messages = committed()
    assert answered <= rows
    assert rows == messages
    assert len(answered) >= tried // 2


@pytest.fixture
def slow_commit(transactional_db) -> Iterator[database.Connection]:
    """Make COMMIT wait for a lock that another connection holds."""
    with database.connect("default") as own:
        own.execute(SLOW_COMMIT)
        own.execute("SELECT pg_advisory_lock(4711)")
        yield own
        own.execute("DROP TRIGGER wait ON auth_group; DROP FUNCTION wait_for_lock()")


@pytest.fixture
def signalled() -> Iterator[int]:
    """A signal whose handler raises."""

    def handle(*_: object) -> None:
        raise TimeIsOver

    before = signal.signal(signal.SIGUSR1, handle)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_in_a_slow_commit_costs_nobody_else_anything(slow_commit: database.Connection, signalled: int):
    def interrupt(thread: int) -> None:
        wait_until_it_blocks(slow_commit)
        signal.pthread_kill(thread, signalled)

    interrupter = threading.Thread(target=interrupt, args=[threading.get_ident()])
    interrupter.start()
    with pytest.raises(Exception):  # noqa: B017, PT011  (Django raises another behind it)
        in_a_block(1)
    interrupter.join()
    slow_commit.execute("SELECT pg_advisory_unlock(4711)")

    in_a_block(2)

    assert 2 in committed()[0]
    assert wait_until(lambda: committed()[0] == committed()[1])
