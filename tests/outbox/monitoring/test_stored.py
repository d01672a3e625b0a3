"""Stored messages, as the code of the next release reads them."""

import json
import tracemalloc
from contextlib import closing
from datetime import timedelta
from uuid import uuid4

import pytest

from outbox import Message, conf, consumer, database
from outbox.brokers.base import Outgoing
from outbox.brokers.capabilities import HalfMessages
from outbox.message import Header
from outbox.models import State
from outbox.monitoring import stored
from outbox.monitoring.stored import read_stored
from outbox.testing.factories import DeadMessageFactory, DeferredFactory
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_definitions")]

MEMORY = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}

OLD = {Header.TYPE: "OrderPlaced", Header.VERSION: "1", Header.CONTENT_TYPE: "application/json"}

NO_UPGRADE = ("no upgrade from version 1", "Add a function with @OrderPlaced.upgrade_from(1), or restore it.")


@pytest.fixture(autouse=True)
def _outbox(settings):
    topics = {"orders": {"TYPE": "normal"}, "sales": {"TYPE": "normal"}}
    settings.OUTBOX = {"BROKERS": {"default": MEMORY}, "TOPICS": topics, "CELERY_WAKEUP": False}


@pytest.fixture
def topic():
    return TopicFactory(name="orders")


@pytest.fixture
def old(topic):
    """Make so many message rows of version 1."""

    def old(number=1, body=b'{"kilos": 1.5}'):
        return MessageRowFactory.create_batch(number, topic=topic, headers=json.dumps(OLD), body=body)

    return old


@pytest.fixture
def problems():
    """Return the problems without their examples, each with its hint."""

    def problems(alias="default", **options):
        return [(text.partition(" (such as ")[0], hint) for text, hint in read_stored(alias, **options).problems()]

    return problems


def release(version=2, *, group="", name="OrderPlaced", topic="orders", fields=None, **meta):
    """Define OrderPlaced as a release has it, with a handler if a group is given."""
    options = {"topic": topic, "version": version, **meta}
    body = {"__module__": "shop.messages", "__annotations__": fields or {"grams": int}, "Meta": type("Meta", (), options)}
    kind = type(Message)(name, (Message,), body)
    if group:
        consumer(kind, group=group)(lambda message, context: None)
    return kind


class TestAnOldVersionWithoutAnUpgrade:
    def test_is_named_among_waiting_messages(self, old, problems):
        release()
        for row in old(17):
            TicketFactory(message=row)

        assert problems() == [(f"17 waiting messages of OrderPlaced version 1 have {NO_UPGRADE[0]}", NO_UPGRADE[1])]

    def test_is_named_with_an_example(self, old):
        release()
        (row,) = old()
        TicketFactory(message=row)

        ((text, _),) = read_stored("default").problems()

        assert text == f"1 waiting message of OrderPlaced version 1 has no upgrade from version 1 (such as {row.id})"

    def test_is_named_among_delayed_messages(self, old, problems):
        release()
        for row in old(2):
            DelayedFactory(message=row)

        assert problems() == [(f"2 delayed messages of OrderPlaced version 1 have {NO_UPGRADE[0]}", NO_UPGRADE[1])]

    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.PREPARED])
    def test_is_named_among_claimed_messages(self, topic, old, problems, state):
        release()
        BatchFactory(topic=topic, message_ids=[row.id for row in old(4)], split=[2], state=state)

        assert problems() == [(f"3 claimed messages of OrderPlaced version 1 have {NO_UPGRADE[0]}", NO_UPGRADE[1])]

    def test_is_named_once_in_a_batch_of_several_pages(self, topic, old, problems):
        release()
        for number in (250, 100, 1):
            BatchFactory(topic=topic, message_ids=[row.id for row in old(number)])

        ((text, _),) = problems(everything=True)

        assert text == "351 claimed messages of OrderPlaced version 1 have no upgrade from version 1"

    def test_is_named_among_dead_messages_whose_day_was_dropped(self, topic, old, problems):
        release()
        kept, dropped = old(2)
        BatchFactory(topic=topic, message_ids=[kept.id], dead=True)
        batch = BatchFactory(topic=topic, message_ids=[dropped.id], dead=True)
        DeadMessageFactory(batch=batch, topic="orders", headers=dropped.headers, body=dropped.body)
        dropped.delete()

        assert problems() == [(f"2 dead messages of OrderPlaced version 1 have {NO_UPGRADE[0]}", NO_UPGRADE[1])]

    @pytest.mark.parametrize(("is_dead", "noun"), [(True, "dead letter"), (False, "deferred message")])
    def test_is_named_among_deferred_messages_with_their_group(self, is_dead, noun, old, problems):
        release(group="mail")
        [row] = old()
        DeferredFactory(consumer_group="mail", message_id=row.id, headers=row.headers, body=row.body, dead=is_dead)

        assert problems() == [(f"1 {noun} of group 'mail' of OrderPlaced version 1 has {NO_UPGRADE[0]}", NO_UPGRADE[1])]

    @pytest.mark.parametrize("state", [State.SENT, State.DISCARDED])
    def test_is_not_named_among_messages_that_are_done(self, topic, old, problems, state):
        release()
        BatchFactory(topic=topic, message_ids=[row.id for row in old(2)], state=state)

        assert problems() == []

    def test_is_not_named_where_it_has_an_upgrade(self, old):
        kind = release()
        kind.upgrade_from(1)(lambda body: {"grams": round(body["kilos"] * 1000)})
        for row in old(3):
            TicketFactory(message=row)

        readings = read_stored("default")

        assert readings.unreadable == {}
        assert readings.text == "3 waiting messages read"


class TestABody:
    def test_that_does_not_fit_is_named_with_its_field(self, old, problems):
        release(1)
        TicketFactory(message=old(body=b'{"grams": "1"}')[0])

        ((text, hint),) = problems()

        assert text == "1 waiting message of OrderPlaced version 1 cannot be read: Expected `int`, got `str` - at `$.grams`"
        assert hint == "Correct OrderPlaced, or raise its version to 2 and add @OrderPlaced.upgrade_from(1)."

    def test_that_fails_in_an_upgrade_is_named_with_its_error(self, old, problems):
        kind = release()
        kind.upgrade_from(1)(lambda body: {"grams": body["pounds"]})
        TicketFactory(message=old()[0])

        assert problems() == [
            (
                "1 waiting message of OrderPlaced version 1 cannot be read: an upgrade fails with KeyError: 'pounds'",
                "Correct the upgrade.",
            )
        ]

    def test_of_a_newer_version_that_does_not_fit_is_named(self, topic, problems):
        release(1)
        newer = json.dumps({**OLD, Header.VERSION: "3"})
        TicketFactory(message=MessageRowFactory(topic=topic, headers=newer, body=b'{"tons": 1}'))

        ((text, hint),) = problems()

        assert text.startswith("1 waiting message of OrderPlaced version 3 cannot be read: the version here is 1: Object missing")
        assert hint == "Deploy the code that published it."

    def test_that_a_handler_of_all_messages_cannot_parse_is_named(self, topic, problems):
        consumer(topic="orders", group="mail")(lambda message, context: None)
        headers = json.dumps({Header.CONTENT_TYPE: "application/json"})
        TicketFactory(message=MessageRowFactory(topic=topic, headers=headers, body=b"{"))

        ((text, _),) = problems()

        assert text == "1 waiting message of no type cannot be read: Input data was truncated"

    def test_that_differs_in_its_values_is_counted_with_others_like_it(self, old, problems):
        kind = release()
        kind.upgrade_from(1)(lambda body: int(str(body["kilos"])))
        for number in range(3):
            TicketFactory(message=old(body=b'{"kilos": %d.5}' % number)[0])

        ((text, _),) = problems()

        assert text.startswith("3 waiting messages of OrderPlaced version 1 cannot be read: an upgrade fails with ValueError: ")

    def test_with_one_of_very_many_problems_is_counted_with_the_others(self, topic, monkeypatch):
        monkeypatch.setattr(stored, "MAX_PROBLEMS", 2)
        release(1, group="mail")
        for name in "ABCDE":
            TicketFactory(message=MessageRowFactory(topic=topic, headers=json.dumps({**OLD, Header.TYPE: name})))

        texts = [text.partition(" cannot be read")[0] for text, _ in read_stored("default").problems()]

        assert texts == [
            "1 waiting message of A version 1",
            "1 waiting message of B version 1",
            "3 waiting messages of other types",
        ]


class TestATypeThatIsGone:
    def test_is_named_where_a_group_takes_its_topic(self, old, problems):
        release(1, name="OrderTaken", group="mail")
        TicketFactory(message=old()[0])

        assert problems() == [
            (
                "1 waiting message of OrderPlaced version 1 cannot be read: no module here defines the type",
                "Restore its class, or name it in `type` of the class Meta of its new class.",
            )
        ]

    def test_is_foreign_where_no_group_here_takes_its_topic(self, old):
        TicketFactory(message=old()[0])

        readings = read_stored("default")

        assert readings.unreadable == {}
        assert readings.text == "1 waiting message read; 1 of them have neither a handler nor a message type here"

    def test_is_named_where_the_type_has_another_topic_now(self, old, problems):
        release(1, group="mail", topic="sales")
        TicketFactory(message=old(body=b'{"grams": 1}')[0])

        assert problems() == [
            (
                "1 waiting message of OrderPlaced version 1 cannot be read: its type has another topic than 'orders' now",
                "Keep a handler of topic 'orders' until none of its messages is left.",
            )
        ]


class TestWhatIsRead:
    @pytest.fixture
    def many(self, topic):
        """Store so many waiting messages, the third of them of version 1, in one statement."""

        def many(number):
            release(2, fields={"order_id": int})
            with database.connect("default") as connection:
                connection.execute(
                    "WITH made AS (INSERT INTO outbox_message (id, topic_id, body, headers)"
                    " SELECT (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || '70008'"
                    " || lpad(to_hex(n), 15, '0'))::uuid, %s, '{\"order_id\": 1}', CASE WHEN n = 3 THEN %s ELSE %s END"
                    " FROM generate_series(1, %s) n RETURNING id)"
                    " INSERT INTO outbox_ticket (message_id, topic_id) SELECT id, %s FROM made ORDER BY id",
                    [topic.id, json.dumps(OLD), json.dumps({**OLD, Header.VERSION: "2"}), number, topic.id],
                )

        return many

    def test_are_the_oldest_and_the_newest_of_a_list(self, many):
        many(2500)

        readings = read_stored("default")

        assert readings.read == {"waiting message": stored.SAMPLE}
        assert readings.text == "1,000 waiting messages (not all) read"
        assert len(list(readings.problems())) == 1

    def test_is_each_message_once(self, many):
        many(stored.SAMPLE)

        readings = read_stored("default")

        assert readings.read == {"waiting message": stored.SAMPLE}

    def test_is_everything_on_demand_with_progress(self, many):
        many(2500)
        told = []

        readings = read_stored("default", everything=True, progress=lambda noun, number: told.append((noun, number)))

        assert readings.text == "2,500 waiting messages read"
        assert told == [("waiting message", number) for number in range(100, 2600, 100)]

    def test_needs_no_more_memory_for_more_messages(self, many):
        many(20_000)
        read_stored("default")
        tracemalloc.start()

        read_stored("default", everything=True)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert peak < 2_000_000

    def test_are_messages_of_every_topic(self, topic, old, problems):
        release()
        TicketFactory.create_batch(3, topic=TopicFactory(name="sales"))
        TicketFactory(message=old()[0])

        assert [text for text, _ in problems()] == ["1 waiting message of OrderPlaced version 1 has no upgrade from version 1"]


class TestOnTheEmbeddedBroker:
    @pytest.fixture(autouse=True)
    def _embedded(self, settings):
        name = f"orders-{uuid4().hex[:8]}"
        broker = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
        settings.OUTBOX = {"BROKERS": {"default": broker}, "TOPICS": {name: {"TYPE": "normal"}}, "CELERY_WAKEUP": False}
        self.topic = name

    @pytest.fixture
    def kept(self, settings):
        """Have the broker keep so many messages of version 1; return what receives them for a group."""
        broker = conf.make_broker("default")

        def kept(number=1):
            broker.send([Outgoing(str(uuid4()), self.topic, b'{"kilos": 1.5}', headers=OLD) for _ in range(number)])
            return lambda group: broker.receive(
                group, [self.topic], limit=10, invisible_for=timedelta(minutes=20), wait=timedelta()
            )

        kept.broker = broker
        yield kept
        broker.close()

    def test_what_a_group_has_not_read_is_named(self, kept, problems):
        release(group="mail", topic=self.topic)
        kept(0)("mail")
        kept(3)

        assert problems() == [(f"3 unread messages of group 'mail' of OrderPlaced version 1 have {NO_UPGRADE[0]}", NO_UPGRADE[1])]

    def test_what_a_new_group_will_read_is_named(self, kept, problems):
        kept(3)
        release(group="new", topic=self.topic)

        assert [text for text, _ in problems()] == [
            f"3 unread messages of group 'new' of OrderPlaced version 1 have {NO_UPGRADE[0]}"
        ]

    def test_what_a_group_holds_is_named(self, kept, problems):
        release(group="mail", topic=self.topic)
        _, handled = kept(2)("mail")
        kept.broker.ack([handled])

        assert [text for text, _ in problems()] == [
            f"1 unfinished message of group 'mail' of OrderPlaced version 1 has {NO_UPGRADE[0]}"
        ]

    def test_what_may_still_be_committed_is_named(self, problems, settings):
        settings.OUTBOX["TOPICS"][self.topic]["TYPE"] = "transaction"
        release(topic=self.topic)
        with closing(conf.make_broker("default")) as broker:
            HalfMessages.of(broker).send_halves(
                [Outgoing(str(uuid4()), self.topic, b"{}", headers=OLD, token=f"here:1:1:{number}") for number in (1, 2)]
            )

        assert [text for text, _ in problems()] == [f"2 half messages of OrderPlaced version 1 have {NO_UPGRADE[0]}"]

    def test_what_a_group_has_handled_is_not(self, kept, problems):
        release(group="mail", topic=self.topic)
        kept.broker.ack(kept(3)("mail"))

        assert problems() == []


class TestDatabases:
    def test_are_those_of_the_outbox_and_of_brokers(self, settings):
        broker = {"BACKEND": "outbox.embedded.EmbeddedBroker", "OPTIONS": {"DATABASE": "other"}}
        settings.OUTBOX = {"BROKERS": {"default": broker}, "TOPICS": {"orders": {"TYPE": "normal"}}}
        settings.DATABASE_ROUTERS = ["tests.outbox.monitoring.test_stored.OnlyDefault"]

        assert stored.databases() == ["default", "other"]


class OnlyDefault:
    def allow_migrate(self, db, app_label, **hints):
        return db == "default" or app_label != "outbox"
