"""Half first on a real RocketMQ: the stories of the embedded broker. The server asks by itself, from the sixth second on."""

import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connections

from outbox import conf, database, topics, transactional
from outbox.brokers.base import Broker
from outbox.check_backs.ask import Ask, in_process
from outbox.check_backs.loop import Checker
from outbox.errors import HalfNotStored
from outbox.failpoints import VARIABLE, FailpointReached
from outbox.half_first import producers as brokers
from outbox.message import COMMIT, ROLLBACK, UNKNOWN, Half, Resolution, TopicType
from outbox.models import Batch, CheckBack, MessageRow, State
from outbox.relay.rounds import Relay
from project.servers.rocketmq import FAST_CHECKS
from tests.outbox.half_first.orders import announce, make_group
from tests.outbox.half_first.programs import PLACES, start
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

BACKEND = "outbox.brokers.rocketmq.RocketMQBroker"


class Broken(Exception):
    """Raised by work that is told to."""


@pytest.fixture(autouse=True)
def outbox(server: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings, as JSON can write them."""
    server.make_topic("orders", TopicType.TRANSACTION)
    monkeypatch.setattr(brokers, "listen_in_this_process", lambda alias, ask: None)  # each test says who listens
    options = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
    options |= {"REQUEST_TIMEOUT": "PT10S", "COMMIT_WINDOW": "PT5S"}  # a busy machine keeps them, too
    settings.OUTBOX = {
        "BROKERS": {"default": {"BACKEND": BACKEND, "OPTIONS": options}},
        "TOPICS": {"orders": {"TYPE": "transaction"}},
        "CELERY_WAKEUP": False,
    }
    topics.forget("default")
    yield settings.OUTBOX
    server.set("transactionTimeOut", FAST_CHECKS["transactionTimeOut"])
    brokers.close_idle()
    topics.forget("default")


@pytest.fixture
def listen() -> Iterator[Callable[[Ask], None]]:
    """Answer the server's questions in this process."""
    checkers: list[Checker] = []

    def listen(ask: Ask) -> None:
        checkers.append(Checker("default", "default", ask))
        checkers[-1].turn()

    yield listen
    for checker in checkers:
        checker.close()


@pytest.fixture
def listening(listen: Callable[[Ask], None]) -> None:
    listen(in_process("default"))


@pytest.fixture
def broker(outbox: dict[str, Any]) -> Iterator[Broker]:
    """A broker of another process."""
    with closing(conf.make_broker("default")) as broker:
        yield broker


def answers() -> list[str]:
    return list(CheckBack.objects.order_by("id").values_list("answer", flat=True))


def last_answer_to(message_id: str) -> str | None:
    found = CheckBack.objects.filter(message_id=message_id).order_by("id").last()
    return found and found.answer


def is_shown(broker: Broker, message_id: object) -> bool:
    return "visible" in {found.state for found in broker.find(str(message_id))}


def would_be_shown_by_now(broker: Broker) -> None:
    """Wait until a message that was committed later is shown."""
    Group.objects.all().delete()
    make_group()
    later = MessageRow.objects.order_by("id").last()
    assert later is not None
    wait_until(lambda: is_shown(broker, later.id), 120)


class TestHalfFirst:
    def test_publishes_with_the_database_commit(self, broker, listening):
        make_group()

        message = MessageRow.objects.get()
        wait_until(lambda: is_shown(broker, message.id), 120)
        assert Batch.objects.get().state == State.SENT or COMMIT in answers()  # where the machine was too slow

    def test_rolls_both_back(self, broker, listening):
        made = []

        @transactional(half_first=announce)
        def work(message):
            made.append(MessageRow.objects.get().id)
            raise Broken

        with pytest.raises(Broken):
            work()

        assert Group.objects.count() == MessageRow.objects.filter(topic_id__gt=0).count() == 0
        would_be_shown_by_now(broker)
        assert not is_shown(broker, made[0])

    def test_does_not_begin_while_the_server_is_away(self, outbox, settings):
        default = {"BACKEND": BACKEND, "OPTIONS": {"ENDPOINTS": "127.0.0.1:1"}}
        settings.OUTBOX = {**outbox, "BROKERS": {"default": default}}

        with pytest.raises(HalfNotStored, match="unavailable"):
            make_group()

        assert Group.objects.count() == MessageRow.objects.count() == 0


@pytest.mark.parametrize(("place", "is_committed"), PLACES.items())
class TestAProcessKilled:
    def test_leaves_what_the_check_back_ends_rightly(self, server, outbox, broker, listening, place, is_committed):
        assert start(outbox, f"{place}=kill").wait(120) == -signal.SIGKILL
        server.set("transactionTimeOut", 500)  # nobody is left who might still end it

        assert Group.objects.count() == is_committed
        if is_committed:
            message = MessageRow.objects.get(topic_id__gt=0)
            wait_until(lambda: is_shown(broker, message.id), 120)
        elif place != "half_first.after_prepare":
            wait_until(lambda: ROLLBACK in answers(), 120)
            server.set("transactionTimeOut", FAST_CHECKS["transactionTimeOut"])
            would_be_shown_by_now(broker)
            assert not is_shown(broker, MessageRow.objects.get(topic_id=0).id)


class TestATransactionThatIsOpenWhenTheServerAsks:
    @pytest.fixture
    def make_slowly(self):
        """Make a group, and go on when the condition is true, or raise."""

        def make_slowly(condition, error=None):
            @transactional(half_first=announce)
            def work(message):
                Group.objects.create(pk=message.group_id)
                wait_until(condition, 120)
                if error:
                    raise error
                return MessageRow.objects.get().id

            return work()

        return make_slowly

    def test_is_waited_for_and_committed_by_the_check_back(self, settings, outbox, broker, listen, make_slowly):
        settings.OUTBOX = {**outbox, "CHECK_BACK": {"LOCK_TIMEOUT": timedelta(milliseconds=200)}}
        given: list[Resolution] = []
        ask = in_process("default")
        listen(lambda half: given.append(ask(half)) or given[-1])

        message_id = make_slowly(lambda: UNKNOWN in given)

        assert Batch.objects.get().state == State.PREPARED  # its own commit would have come too late
        wait_until(lambda: is_shown(broker, message_id), 120)
        assert given[0] is UNKNOWN
        assert last_answer_to(str(message_id)) == COMMIT

    def test_is_rolled_back_by_the_check_back_where_it_fails(self, settings, outbox, broker, listen, make_slowly):
        settings.OUTBOX = {**outbox, "CHECK_BACK": {"LOCK_TIMEOUT": timedelta(milliseconds=200)}}
        given: list[tuple[Half, Resolution]] = []
        ask = in_process("default")
        listen(lambda half: given.append((half, ask(half))) or given[-1][1])

        with pytest.raises(Broken):
            make_slowly(lambda: given, Broken())

        would_be_shown_by_now(broker)
        assert not is_shown(broker, given[0][0].message_id)
        assert {answer for half, answer in given if half.message_id == given[0][0].message_id} <= {UNKNOWN, ROLLBACK}

    def test_loses_its_message_where_the_business_row_is_looked_up(self, broker, listen, make_slowly, monkeypatch):
        """The control: the look-up of RocketMQ's examples, and a process that dies. Only our relay gets the message back."""
        given: dict[str, Resolution] = {}

        def naive(half: Half) -> Resolution:
            """Keep to the first answer: it ends the half message, and the server may ask again before it has noted so."""
            found = COMMIT if Group.objects.filter(pk=half.key).exists() else ROLLBACK
            connections.close_all()
            return given.setdefault(str(half.message_id), found)

        listen(naive)

        monkeypatch.setenv(VARIABLE, "half_first.after_commit=raise")
        with pytest.raises(FailpointReached):
            make_slowly(lambda: str(MessageRow.objects.get().id) in given)
        monkeypatch.delenv(VARIABLE)
        message_id = MessageRow.objects.get().id

        assert Group.objects.count() == 1
        assert given[str(message_id)] is ROLLBACK
        would_be_shown_by_now(broker)
        assert not is_shown(broker, message_id)


class TestSweep:
    def test_commits_a_half_message_that_no_check_back_saved(self, outbox, broker):
        """Nobody listens, and the process dies before it commits the half message."""
        assert start(outbox, "half_first.after_commit=kill").wait(120) == -signal.SIGKILL
        message = MessageRow.objects.get()

        def sweep() -> int:
            """Once nobody else may end it any more, and the broker has answered for a while."""
            Batch.objects.update(ends_until=message.created_at - timedelta(minutes=1))
            return relay.sweep().sent

        with database.connect("default") as connection, closing(conf.make_broker("default")) as another:
            relay = Relay(connection, another, 1)
            wait_until(sweep, 120)

        wait_until(lambda: is_shown(broker, message.id), 120)
        assert Batch.objects.get().state == State.SENT
