import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, connection, transaction
from django.utils.safestring import SafeString

from outbox import Envelope, Message, database, publish, publish_many, publish_raw
from outbox.database.message_rows import INSERT_WAITING
from outbox.errors import ConfigurationError
from outbox.message import Cause, Header, Receipt, current_cause
from outbox.publishing.statements import KEPT_BODY_BYTES
from outbox.topics import forget
from tests.outbox.publishing.rows import (
    OrderMade,
    ParcelMoved,
    ReminderSet,
    bodies,
    delayed_rows,
    headers_of,
    message_rows,
    tickets,
    waiting_ids,
)

pytestmark = pytest.mark.django_db


@pytest.mark.usefixtures("in_transaction")
class TestPublish:
    def test_writes_the_message_and_its_ticket(self):
        receipt = publish(OrderMade(order_id=7))

        (row,) = message_rows()
        assert receipt == Receipt(row.id, "made", "7")
        assert (row.key, row.about, bytes(row.body)) == ("7", None, b'{"order_id":7,"customer":"Ann"}')
        assert [(t.message_id, t.topic_id, t.order_key) for t in tickets()] == [(row.id, row.topic_id, None)]

    def test_takes_one_statement(self, django_assert_num_queries):
        publish(OrderMade(order_id=1))  # finds the topic

        with django_assert_num_queries(1):
            publish(OrderMade(order_id=2))

    def test_gives_ids_in_the_order_of_time(self):
        before = datetime.now(UTC)

        ids = [publish(OrderMade(order_id=n)).message_id for n in range(3)]

        times = [datetime.fromtimestamp((i.int >> 80) / 1000, UTC) for i in ids]
        assert ids == sorted(ids)
        assert all(i.version == 7 for i in ids)
        assert all(abs(time - before) < timedelta(seconds=5) for time in times)

    def test_is_gone_with_its_savepoint(self):
        kept = publish(OrderMade(order_id=1))

        with transaction.atomic():
            publish(OrderMade(order_id=2))
            transaction.set_rollback(True)

        assert [row.id for row in message_rows()] == waiting_ids() == [kept.message_id]

    def test_notes_the_row_it_is_about(self):
        group = Group.objects.create(name="staff")

        publish(OrderMade(order_id=1), about=group)

        assert message_rows()[0].about == f"auth.group:{group.pk}"

    def test_calls_a_proxy_by_its_tables_model(self):
        class Team(Group):
            class Meta:
                proxy = True
                app_label = "auth"

        publish(OrderMade(order_id=1), about=Team.objects.create(name="staff"))

        assert message_rows()[0].about.startswith("auth.group:")

    def test_takes_key_and_tag_of_the_call_before_those_of_the_type(self):
        receipt = publish(OrderMade(order_id=7), key="mine", tag="late")

        assert receipt.key == message_rows()[0].key == "mine"
        assert headers_of(receipt)[Header.TAG] == "late"

    def test_holds_no_large_body_after_it(self):
        connection.ensure_connection()
        connection.connection.__dict__.pop("outbox_cursors", None)

        publish_raw("made", b"x" * (KEPT_BODY_BYTES + 1))

        assert INSERT_WAITING not in connection.connection.__dict__.get("outbox_cursors", {})

    def test_gives_errors_of_the_database_as_djangos(self):
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_ticket RENAME TO outbox_gone")

        with pytest.raises(DatabaseError, match="outbox_ticket"):
            publish(OrderMade(order_id=1))


@pytest.mark.usefixtures("in_transaction")
class TestTheHeaders:
    def test_are_those_of_cloudevents(self):
        receipt = publish(OrderMade(order_id=7))

        assert headers_of(receipt) == {
            "ce-type": "OrderMade",
            "ce-typeversion": "3",
            "ce-tag": "new",
            "ce-correlationid": str(receipt.message_id),
            "content-type": "application/json",
        }

    def test_carry_the_callers_own(self):
        receipt = publish(OrderMade(order_id=7), headers={"traceparent": "00-ab-cd-01", "Tenant": "größe"})

        assert headers_of(receipt)["traceparent"] == "00-ab-cd-01"
        assert headers_of(receipt)["Tenant"] == "größe"

    def test_name_the_message_that_is_being_handled_as_the_cause(self):
        token = current_cause.set(Cause("the-cause", "the-story"))
        try:
            receipt = publish(OrderMade(order_id=7))
        finally:
            current_cause.reset(token)

        assert headers_of(receipt)[Header.CAUSATION_ID] == "the-cause"
        assert headers_of(receipt)[Header.CORRELATION_ID] == "the-story"

    @pytest.mark.parametrize(("given", "kept"), [({}, "00-handled"), ({"traceparent": "00-own"}, "00-own")])
    def test_go_on_with_the_trace_of_the_message_that_is_being_handled(self, given, kept):
        token = current_cause.set(Cause("the-cause", "the-story", "00-handled"))
        try:
            receipt = publish(OrderMade(order_id=7), headers=given)
        finally:
            current_cause.reset(token)

        assert headers_of(receipt)[Header.TRACEPARENT] == kept


@pytest.mark.usefixtures("in_transaction")
class TestPublishRaw:
    def test_writes_a_dict_as_json(self):
        receipt = publish_raw("made", {"total": Decimal("1.20")}, key="k", tag="t", headers={"a": "b"})

        (row,) = message_rows()
        assert receipt == Receipt(row.id, "made", "k")
        assert bytes(row.body) == b'{"total":"1.20"}'
        assert headers_of(receipt) == {
            "a": "b",
            "ce-tag": "t",
            "ce-correlationid": str(receipt.message_id),
            "content-type": "application/json",
        }

    def test_may_have_a_nul_character_in_a_text(self):
        publish(OrderMade(order_id=1, customer="a\0b"))

        assert OrderMade.from_body(bytes(message_rows()[0].body)).customer == "a\0b"

    def test_leaves_bytes_as_they_are(self):
        receipt = publish_raw("made", b"\x00\xff")

        assert bytes(message_rows()[0].body) == b"\x00\xff"
        assert headers_of(receipt)["content-type"] == "application/octet-stream"

    def test_takes_the_content_type_of_the_call(self):
        receipt = publish_raw("made", b"<a/>", content_type="application/xml")

        assert headers_of(receipt)["content-type"] == "application/xml"


@pytest.mark.usefixtures("in_transaction")
class TestPublishMany:
    def test_takes_one_statement(self, django_assert_num_queries):
        publish(OrderMade(order_id=1))

        with django_assert_num_queries(1):
            publish_many([OrderMade(order_id=n) for n in range(100)])

        assert len(message_rows()) == len(tickets()) == 101

    def test_keeps_the_order_given(self):
        receipts = publish_many([OrderMade(order_id=n) for n in range(50)])

        assert waiting_ids() == [receipt.message_id for receipt in receipts]
        assert [receipt.key for receipt in receipts] == [str(n) for n in range(50)]

    def test_writes_what_publish_writes(self):
        group = Group.objects.create(name="staff")
        with transaction.atomic():
            one = publish(OrderMade(order_id=1), about=group, headers={"a": "b"})
            first = message_rows()[0]
            headers = headers_of(one)
            transaction.set_rollback(True)

        (many,) = publish_many([Envelope(OrderMade(order_id=1), about=group, headers={"a": "b"})])

        (row,) = message_rows()
        assert (row.topic_id, row.key, row.about, bytes(row.body)) == (first.topic_id, first.key, first.about, bytes(first.body))
        assert headers_of(many) == {**headers, "ce-correlationid": str(many.message_id)}

    def test_writes_the_bodies_where_strings_have_escapes(self):
        connection.cursor().execute("SET LOCAL standard_conforming_strings = off")

        publish_many([OrderMade(order_id=1), OrderMade(order_id=2)])

        assert [body["order_id"] for body in bodies()] == [1, 2]

    def test_gives_ordered_topics_their_order_key(self):
        publish(ParcelMoved(parcel="A"))

        publish_many([ParcelMoved(parcel="A"), OrderMade(order_id=1), ParcelMoved(parcel="B")])

        first, same, plain, other = [ticket.order_key for ticket in tickets()]
        assert first == same != other
        assert plain is None

    def test_delays_those_that_say_so(self):
        publish_many([Envelope(OrderMade(order_id=1), delay=timedelta(hours=1)), OrderMade(order_id=2)])

        assert (len(delayed_rows()), len(tickets())) == (1, 1)

    def test_does_nothing_with_nothing(self, django_assert_num_queries):
        with django_assert_num_queries(0):
            assert publish_many([]) == []


@pytest.mark.usefixtures("in_transaction")
class TestDelay:
    def test_keeps_the_ticket_back(self, django_assert_num_queries):
        publish(OrderMade(order_id=1))

        with django_assert_num_queries(1):
            receipt = publish(OrderMade(order_id=2), delay=timedelta(minutes=5))

        (row,) = delayed_rows()
        assert row.message_id == receipt.message_id
        assert receipt.message_id not in waiting_ids()
        assert abs(row.due_at - datetime.now(UTC) - timedelta(minutes=5)) < timedelta(seconds=5)
        assert Header.DELIVER_AT not in headers_of(receipt)

    def test_of_nothing_is_none(self):
        receipt = publish(OrderMade(order_id=1), delay=timedelta(0))

        assert waiting_ids() == [receipt.message_id]

    def test_is_left_to_the_broker_by_a_topic_of_type_delay(self):
        receipt = publish(ReminderSet(text="tea"), delay=timedelta(minutes=5))

        deliver_at = datetime.fromisoformat(headers_of(receipt)[Header.DELIVER_AT])
        assert waiting_ids() == [receipt.message_id]
        assert abs(deliver_at - datetime.now(UTC) - timedelta(minutes=5)) < timedelta(seconds=5)

    def test_beyond_the_brokers_limit_is_kept_here_until_then(self, monkeypatch):
        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.max_delay", timedelta(days=1))

        receipt = publish(ReminderSet(text="tea"), delay=timedelta(days=3))

        (row,) = delayed_rows()
        deliver_at = datetime.fromisoformat(headers_of(receipt)[Header.DELIVER_AT])
        assert timedelta(hours=23) < deliver_at - row.due_at < timedelta(days=1) - timedelta(seconds=50)


class TestAnIdleRelay:
    @pytest.fixture
    def listener(self):
        with database.connect("default") as connection:
            connection.execute("LISTEN outbox")
            connection.execute("INSERT INTO outbox_wakeup VALUES ('default', 1)")
            yield connection
            connection.execute("DELETE FROM outbox_wakeup")

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("call", [lambda m: publish(m), lambda m: publish_many([m])], ids=["publish", "publish_many"])
    def test_is_woken_by_the_commit(self, listener, call):
        with transaction.atomic():
            call(OrderMade(order_id=1))

        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1

    @pytest.mark.django_db(transaction=True)
    def test_is_woken_by_nobody_when_none_is_idle(self, listener):
        listener.execute("DELETE FROM outbox_wakeup")
        with transaction.atomic():
            publish(OrderMade(order_id=1))

        listener.execute("NOTIFY outbox, 'the only one'")
        assert [n.payload for n in listener.notifies(timeout=5, stop_after=1)] == ["the only one"]


@pytest.mark.usefixtures("in_transaction")
class TestADatabaseWithoutTables:
    def test_is_named_with_what_to_do(self):
        forget("default")
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_topic RENAME TO outbox_gone")

        with pytest.raises(ConfigurationError, match=r"'default' has no tables of the outbox.*migrate --database default"):
            publish(OrderMade(order_id=1))


class TestImport:
    def test_needs_no_celery(self):
        code = (
            "import sys, django; from django.conf import settings\n"
            "settings.configure(INSTALLED_APPS=['outbox'], DATABASES={}); django.setup()\n"
            "import outbox.publishing.functions\n"
            "print('celery' in sys.modules)"
        )

        outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

        assert outcome.stdout.strip() == "False", outcome.stderr


class Colour(str, Enum):  # noqa: UP042  (its text is not its value)
    RED = "red"
    MADE = "made"


class Painted(Message):
    colour: Colour

    class Meta:
        topic = Colour.MADE
        key = "colour"
        tag = Colour.RED


@pytest.mark.django_db
class TestATextOfASubclass:
    @pytest.mark.parametrize("text", [Colour.RED, SafeString("red")], ids=["enum", "safe string"])
    def test_is_stored_as_its_value(self, text):
        with transaction.atomic():
            receipt = publish(OrderMade(order_id=1), key=text, tag=text, headers={text: text}, idempotency_key=text)
            publish_raw(Colour.MADE, b"{}", key=text, tag=text, content_type=SafeString("text/plain"))

        assert [row.key for row in message_rows()] == ["red", "red"]
        assert (headers_of(receipt)[Header.TAG], headers_of(receipt)["red"]) == ("red", "red")
        assert type(receipt.key) is str

    def test_of_a_field_is_the_key_that_the_body_has(self):
        with transaction.atomic():
            receipt = publish(Painted(Colour.RED))

        assert (receipt.topic, receipt.key, bodies()) == ("made", "red", [{"colour": "red"}])
        assert headers_of(receipt)[Header.TAG] == "red"
