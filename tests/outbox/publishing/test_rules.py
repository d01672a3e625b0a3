import random
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.contrib.sessions.models import Session

from outbox import Envelope, Message, publish, publish_many, publish_raw
from outbox.errors import BodyTooLarge, ConfigurationError, InvalidMessage, UnknownTopic
from outbox.publishing.rules import is_topic_name
from tests.outbox.publishing.rows import OrderMade, ParcelMoved, message_rows

pytestmark = pytest.mark.usefixtures("in_transaction")


class KeyedByNothing(Message):
    text: str = ""

    class Meta:
        topic = "made"
        key = "txt"


class Odd(Message):
    thing: object

    class Meta:
        topic = "made"


class TestAbout:
    def test_is_a_row_whose_key_an_index_can_hold(self):
        row = Session(session_key="".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9FA0), k=900))))

        with pytest.raises(InvalidMessage, match="in about= a row whose label and primary key have 2717 bytes"):
            publish(OrderMade(order_id=1), about=row)
        with pytest.raises(InvalidMessage, match="in about= a row whose label and primary key have 2717 bytes"):
            publish_many([Envelope(OrderMade(order_id=1), about=row)])

        assert message_rows() == []

    def test_may_have_a_long_key(self):
        row = Session(session_key="".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9FA0), k=800))))

        publish(OrderMade(order_id=1), about=row)

        assert message_rows()[0].about == f"sessions.session:{row.pk}"


class TestAMessage:
    def test_is_of_a_declared_type(self):
        with pytest.raises(InvalidMessage, match=r"not \{'a': 1\}\. Define one, or use publish_raw"):
            publish({"a": 1})  # type: ignore[arg-type]

    def test_names_its_topic(self, own_types):
        class Homeless(Message):
            text: str = ""

        with pytest.raises(InvalidMessage, match=r"Homeless names no topic. Add `class Meta: topic"):
            publish(Homeless())

    def test_names_a_topic_of_the_settings(self, own_types):
        class Stray(Message):
            class Meta:
                topic = "mad"

        with pytest.raises(UnknownTopic, match=r"'mad' is not in OUTBOX\[\"TOPICS\"\]. Did you mean 'made'\?"):
            publish(Stray())

    def test_is_refused_when_its_broker_cannot_be_imported(self, settings):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": "nowhere.Broker"}}, "TOPICS": {"made": {}}}

        with pytest.raises(ConfigurationError, match=r"'nowhere\.Broker' cannot be imported"):
            publish(OrderMade(order_id=1))

    def test_is_an_instance_and_not_the_type(self):
        with pytest.raises(InvalidMessage, match=r"not <class '.*OrderMade'>\. Write OrderMade\(\.\.\.\)\.$"):
            publish(OrderMade)  # type: ignore[arg-type]

    def test_has_fields_of_their_types(self):
        with pytest.raises(InvalidMessage, match=r"OrderMade has a field .*order_id: Expected `int`, got `str`"):
            publish(OrderMade(order_id="seven"))  # type: ignore[arg-type]

    def test_has_fields_that_json_can_hold(self):
        with pytest.raises(InvalidMessage) as caught:
            publish(Odd(thing=object()))

        assert str(caught.value) == (
            "Odd cannot be written as JSON: its field 'thing' holds a builtins.object. Encoding objects of type object is "
            "unsupported. Put what others need of it into fields of plain types: its primary key, a text, a number."
        )

    def test_names_the_entry_of_a_dict_that_json_cannot_hold(self):
        with pytest.raises(InvalidMessage, match=r"its entry 'who' holds a django\.contrib\.auth\.models\.Group\."):
            publish_raw("made", {"order": 1, "who": Group(name="staff")})

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_has_numbers_that_json_can_hold(self, number):
        with pytest.raises(InvalidMessage, match="its field 'thing' has a number that is infinite or not a number"):
            publish(Odd(thing={"prices": [1.5, {"gross": number}]}))
        with pytest.raises(InvalidMessage, match="its entry 'price' has a number that is infinite or not a number"):
            publish_raw("made", {"price": number})

    def test_has_texts_that_utf8_can_hold(self):
        with pytest.raises(InvalidMessage, match="OrderMade cannot be written as JSON"):
            publish(OrderMade(order_id=1, customer="\ud800"))

    def test_leaves_nothing_behind_when_it_breaks_a_rule(self):
        with pytest.raises(InvalidMessage):
            publish(OrderMade(order_id=1), tag="a b")

        assert message_rows() == []


class TestTheTopicsName:
    @pytest.mark.parametrize("name", ["a", "%RETRY%_a-Z9", "x" * 127])
    def test_may_be(self, name):
        assert is_topic_name(name)

    @pytest.mark.parametrize("name", ["", "x" * 128, "a.b", "a b", "a\n", "größe", "a|b"])
    def test_may_not_be(self, name):
        assert not is_topic_name(name)
        with pytest.raises(InvalidMessage, match=r"cannot go to topic .*1 to 127 letters"):
            publish_raw(name, b"x")


class TestTheKey:
    @pytest.mark.parametrize("key", ["", "ä ö", "x" * 255])
    def test_may_be(self, key):
        assert publish(OrderMade(order_id=1), key=key).key == key

    def test_is_cut_in_the_error_about_it(self):
        with pytest.raises(InvalidMessage, match="cannot have the key") as caught:
            publish_raw("made", b"1", key="x" * 20_000_000)

        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize("key", ["x" * 256, "a\x00", "a\x1f", "a\x7f", "a\x85", "a\ud800", 7])
    def test_may_not_be(self, key):
        with pytest.raises(InvalidMessage, match="OrderMade cannot have the key"):
            publish(OrderMade(order_id=1), key=key)

    @pytest.mark.parametrize("parcel", [None, ""])
    def test_is_needed_where_order_is_kept(self, parcel):
        with pytest.raises(InvalidMessage, match="ParcelMoved has no key, and topic 'moved' is of type fifo"):
            publish(ParcelMoved(parcel=parcel))

    def test_is_needed_where_order_is_kept_in_raw_messages_too(self):
        with pytest.raises(InvalidMessage, match="A raw message to topic 'moved' has no key"):
            publish_raw("moved", b"x")

    def test_comes_from_a_field_that_exists(self):
        with pytest.raises(InvalidMessage, match=r"KeyedByNothing.Meta.key names 'txt', .* Its fields are text"):
            publish(KeyedByNothing())


class TestTheTag:
    @pytest.mark.parametrize("tag", ["new", "größe", "x" * 255])
    def test_may_be(self, tag):
        publish(OrderMade(order_id=1), tag=tag)

        assert f'"ce-tag":"{tag}"' in message_rows()[0].headers

    def test_may_be_left_out(self):
        publish(OrderMade(order_id=1), tag="")

        assert "ce-tag" not in message_rows()[0].headers

    @pytest.mark.parametrize("tag", ["a|b", "a b", "a\t", "*", "x" * 256, "a\x00", "\u2003", 7])
    def test_may_not_be(self, tag):
        with pytest.raises(InvalidMessage, match="OrderMade cannot have the tag"):
            publish(OrderMade(order_id=1), tag=tag)


class TestTheHeaders:
    @pytest.mark.parametrize("name", ["ce-mine", "CE-type", "content-type", "Content-Type"])
    def test_leave_the_outboxs_own_alone(self, name):
        with pytest.raises(InvalidMessage, match=rf"OrderMade has a header called '{name}', which the outbox writes itself"):
            publish(OrderMade(order_id=1), headers={name: "x"})

    @pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 129, "ä", 7])
    def test_have_plain_names(self, name):
        with pytest.raises(InvalidMessage, match="OrderMade has a header called"):
            publish(OrderMade(order_id=1), headers={name: "x"})

    @pytest.mark.parametrize("value", [7, None, b"x", "a\r\nb", "\ud800"])
    def test_have_texts_as_values(self, value):
        with pytest.raises(InvalidMessage, match="OrderMade has the header 'a' with the value"):
            publish(OrderMade(order_id=1), headers={"a": value})

    def test_are_a_mapping(self):
        with pytest.raises(InvalidMessage, match=r"OrderMade has headers of type list.*Pass a dict"):
            publish(OrderMade(order_id=1), headers=[("a", "b")])

    def test_are_not_too_many(self):
        publish(OrderMade(order_id=1), headers={f"h{n}": "x" for n in range(64)})

        with pytest.raises(InvalidMessage, match="OrderMade has 65 headers"):
            publish(OrderMade(order_id=1), headers={f"h{n}": "x" for n in range(65)})

    def test_are_not_too_long(self):
        publish(OrderMade(order_id=1), headers={"ab": "ä" * 4095})

        with pytest.raises(InvalidMessage, match="OrderMade has headers of 8193 bytes"):
            publish(OrderMade(order_id=1), headers={"abc": "ä" * 4095})


class TestTheBody:
    def test_is_not_empty(self):
        with pytest.raises(InvalidMessage, match="'made' has an empty body"):
            publish_raw("made", b"")

    def test_may_be_as_large_as_the_broker_takes(self, monkeypatch):
        monkeypatch.setattr("outbox.brokers.memory.MemoryBroker.max_body_bytes", 10)

        publish_raw("made", b"x" * 10)
        with pytest.raises(BodyTooLarge, match=r"a body of 11 bytes; the broker of topic 'made' accepts at most 10"):
            publish_raw("made", b"x" * 11)

    def test_may_have_4_mib_by_default(self):
        publish_raw("made", b"x" * 4_194_304)
        with pytest.raises(BodyTooLarge):
            publish_raw("made", b"x" * 4_194_305)

    def test_is_bytes_or_a_dict(self):
        with pytest.raises(InvalidMessage, match=r"has a body of type str\. Pass bytes, or a dict"):
            publish_raw("made", "text")  # type: ignore[arg-type]

    def test_is_a_dict_that_json_can_hold(self):
        with pytest.raises(InvalidMessage, match="has a body that cannot be written as JSON"):
            publish_raw("made", {"a": object()})


class TestTheContentType:
    @pytest.mark.parametrize("content_type", ["", "a\nb", "x" * 256])
    def test_may_not_be(self, content_type):
        with pytest.raises(InvalidMessage, match="cannot have the content type"):
            publish_raw("made", b"x", content_type=content_type)


class TestTheDelay:
    @pytest.mark.parametrize("delay", [timedelta(seconds=-1), timedelta(days=365, seconds=1), 5])
    def test_may_not_be(self, delay):
        with pytest.raises(InvalidMessage, match=r"OrderMade cannot be delayed by .* from 0 to 365 days"):
            publish(OrderMade(order_id=1), delay=delay)

    def test_does_not_go_with_order(self):
        with pytest.raises(InvalidMessage, match="ParcelMoved cannot be delayed: topic 'moved' is of type fifo"):
            publish(ParcelMoved(parcel="A"), delay=timedelta(seconds=1))
