import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import msgspec
import pytest

from outbox.message import Message, MessageOptions, Token, message_type, message_types


@pytest.fixture(autouse=True)
def _own_types(monkeypatch):
    monkeypatch.setattr("outbox.message.registered", {})


def make(name="Order", **meta):
    """Return a message type with that Meta and one field."""
    return type(Message)(
        name,
        (Message,),
        {"__module__": __name__, "__annotations__": {"total": Decimal}, "Meta": type("Meta", (), meta)},
        frozen=True,
    )


class TestAMessageType:
    def test_reads_its_meta(self):
        kind = make(topic="orders", key="total", tag="new", version=2, type="shop.Order")

        assert kind._meta == MessageOptions(topic="orders", key="total", tag="new", version=2, type="shop.Order")

    def test_is_called_as_its_class_on_the_wire(self):
        assert make()._meta.type == "Order"

    def test_is_found_by_its_name_on_the_wire(self):
        kind = make(type="shop.Order")

        assert message_type("shop.Order") is message_types()["shop.Order"] is kind
        assert message_type("Order") is None

    @pytest.mark.parametrize("version", ["2", -1, 1.5, True, None])
    def test_refuses_a_version_that_is_no_whole_number(self, version):
        with pytest.raises(TypeError, match=r"Order\.Meta\.version must be an integer, 0 or greater, not "):
            make(version=version)

    def test_refuses_an_upgrade_from_a_version_that_is_no_whole_number(self):
        with pytest.raises(TypeError, match=r"@Order\.upgrade_from takes the older version as an integer, not '1'\."):
            make(version=2).upgrade_from("1")

    @pytest.mark.parametrize("name", ["topic", "key", "tag", "type"])
    def test_refuses_a_name_that_is_no_text(self, name):
        with pytest.raises(TypeError, match=rf"Order\.Meta\.{name} must be a string, not 7\."):
            make(**{name: 7})

    def test_takes_a_list_of_fields_to_mask(self):
        assert make(mask=["total"])._meta.mask == ("total",)

    def test_refuses_a_mask_that_is_one_text(self):
        with pytest.raises(TypeError, match=r'Order\.Meta\.mask must be a list of fields, such as \["customer"\], not \'total\''):
            make(mask="total")

    def test_refuses_an_unknown_option(self):
        known = r"Order\.Meta has unknown options \['topics'\]\. Choices are: \['abstract', 'key', 'mask', 'tag'"
        with pytest.raises(TypeError, match=known):
            make(topics="orders")

    def test_refuses_a_name_that_another_has(self):
        make("Order", type="same")

        with pytest.raises(TypeError, match=r"'same' is defined twice: .*Order and .*Bill\. Give one of them another `type`"):
            make("Bill", type="same")

    def test_may_be_defined_again_as_when_a_module_is_reloaded(self):
        make()

        again = make()

        assert message_type("Order") is again

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            make()(total=Decimal(1)).total = Decimal(2)


class TestRepr:
    def test_shows_fields(self):
        assert repr(make()(total=Decimal("1.50"))) == "Order(total=Decimal('1.50'))"

    def test_hides_masked_ones(self):
        assert repr(make(mask=["total"])(total=Decimal("1.50"))) == "Order(total=***)"


class TestFromBody:
    def test_reads_the_body(self):
        kind = make()

        assert kind.from_body(b'{"total": "1.20"}') == kind(total=Decimal("1.20"))

    def test_names_the_field_that_does_not_fit(self):
        with pytest.raises(msgspec.ValidationError, match=r"at `\$.total`"):
            make().from_body(b'{"total": []}')

    def test_refuses_what_is_no_json(self):
        with pytest.raises(msgspec.DecodeError):
            make().from_body(b"total")

    def test_goes_through_the_upgrades_of_an_older_body(self):
        kind = make(version=3)
        kind.upgrade_from(1)(lambda body: {"amount": body["sum"]})
        kind.upgrade_from(2)(lambda body: {"total": body["amount"]})

        assert kind.from_body(b'{"sum": "5"}', version=1).total == 5
        assert kind.from_body(b'{"amount": "5"}', version=2).total == 5
        assert kind.from_body(b'{"total": "5"}', version=3).total == 5

    def test_reads_a_body_of_a_later_version_as_todays(self):
        assert make(version=3).from_body(b'{"total": "5", "news": 1}', version=4).total == 5

    def test_names_the_upgrade_that_lacks(self):
        with pytest.raises(msgspec.ValidationError, match=r"Order has no upgrade from version 1, @Order\.upgrade_from\(1\)$"):
            make(version=2).from_body(b"{}", version=1)


FIRST_USES = """
import sys, threading
from typing import Annotated, Literal
import msgspec
from outbox.message import Message

sys.setswitchinterval(1e-6)
for n in range(500):
    class Order(Message):
        state: Literal["new", "old"] = "new"
        total: Annotated[int, msgspec.Meta(ge=1)] | None = 15
        class Meta:
            type = f"order-{n}"

    started = []
    def read():
        while not started:
            pass
        Order.from_body(b'{"state": "old", "total": 3}')
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.append(True)
    for thread in threads:
        thread.join()
"""


class TestPrepare:
    def test_lets_threads_use_a_type_for_the_first_time_together(self):
        """Without it the process ends by SIGSEGV."""
        done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=60)

        assert (done.returncode, done.stderr) == (0, "")


class TestAToken:
    def test_is_read_as_it_was_written(self):
        token = Token("urn:uuid:0a1b", 17, 2, 500)

        assert str(token) == "urn:uuid:0a1b:17:2:500"
        assert Token.parse(str(token)) == token

    @pytest.mark.parametrize("text", ["", "17:2:500", ":17:2:500", "urn:a:b:c", "urn:uuid:0a1b:17:2:x"])
    def test_is_nothing_else(self, text):
        with pytest.raises(ValueError, match=r"Token|values to unpack|invalid literal"):
            Token.parse(text)


class TestMeta:
    def test_of_a_base_is_that_of_a_type_without_one(self):
        class Base(Message):
            class Meta:
                topic = "orders"
                key = "order_id"
                type = "shop.Base"

        class OrderPaid(Base):
            order_id: int

        assert OrderPaid._meta == MessageOptions(topic="orders", key="order_id", type="OrderPaid")

    def test_that_inherits_changes_some_of_its_base(self):
        class Base(Message):
            class Meta:
                topic = "orders"
                tag = "new"
                mask = ("customer",)

        class OrderPaid(Base):
            customer: str

            class Meta(Base.Meta):
                tag = "paid"
                version = 2

        assert OrderPaid._meta == MessageOptions(topic="orders", tag="paid", mask=("customer",), type="OrderPaid", version=2)

    def test_that_inherits_nothing_stands_alone(self):
        class Base(Message):
            class Meta:
                topic = "orders"

        class OrderPaid(Base):
            class Meta:
                tag = "paid"

        assert OrderPaid._meta == MessageOptions(tag="paid", type="OrderPaid")

    def test_of_an_abstract_base_is_that_of_a_type_without_one(self):
        class Base(Message):
            class Meta:
                abstract = True
                topic = "orders"
                key = "order_id"

        class OrderPaid(Base):
            order_id: int

        assert OrderPaid._meta == MessageOptions(topic="orders", key="order_id", type="OrderPaid")

    def test_that_inherits_from_an_abstract_one_is_of_a_type(self):
        class Base(Message):
            class Meta:
                abstract = True
                topic = "orders"

        class OrderPaid(Base):
            class Meta(Base.Meta):
                tag = "paid"

        assert OrderPaid._meta == MessageOptions(topic="orders", tag="paid", type="OrderPaid")
        assert message_types() == {"OrderPaid": OrderPaid}

    @pytest.mark.parametrize("abstract", ["yes", 1, None])
    def test_refuses_an_abstract_that_is_neither_true_nor_false(self, abstract):
        with pytest.raises(TypeError, match=r"Order\.Meta\.abstract must be True or False, not "):
            make(abstract=abstract)

    def test_refuses_a_name_on_the_wire_for_an_abstract_base(self):
        with pytest.raises(TypeError, match=r"Order is abstract, so no message has its Meta\.type 'order'\. Remove one"):
            make(abstract=True, type="order")


class TestAnAbstractBase:
    class Base(Message):
        order_id: int

        class Meta:
            abstract = True

    def test_is_not_a_type(self):
        make(abstract=True)

        assert message_types() == {}

    def test_may_have_the_name_of_a_type(self):
        make("Order", abstract=True)

        kind = make("Bill", type="Order")

        assert message_types() == {"Order": kind}

    def test_has_no_messages(self):
        with pytest.raises(TypeError, match=r"^Base is abstract: it is only a base of message types\. Use one"):
            self.Base(order_id=1)

    def test_has_no_upgrades(self):
        with pytest.raises(TypeError, match=r"^Base is abstract, so no body is upgraded to it\. Decorate the upgrades of its"):
            self.Base.upgrade_from(1)

    def test_gives_its_fields_to_its_types(self):
        class OrderPaid(self.Base):
            cents: int

        assert OrderPaid.from_body(b'{"order_id": 1, "cents": 7}') == OrderPaid(1, 7)


class TestAMixin:
    def test_adds_fields_to_a_type(self):
        class WithCustomer(Message):
            customer: str

            class Meta:
                abstract = True

        class Printable:
            def text(self):
                return self.customer

        class OrderPaid(WithCustomer, Printable):
            cents: int

        assert OrderPaid("Ann", 7).text() == "Ann"

    def test_with_fields_that_is_not_a_message_is_refused(self):
        class WithCustomer:
            customer: str

        with pytest.raises(TypeError) as raised:

            class OrderPaid(WithCustomer, Message):
                cents: int

        assert str(raised.value) == (
            "WithCustomer.customer would not be a field of OrderPaid, since WithCustomer is not a message. "
            "Write class WithCustomer(Message), with `abstract = True` in its class Meta."
        )
        assert message_types() == {}

    def test_that_annotates_fields_of_the_type_is_taken(self):
        class Printable:
            names: ClassVar[list[str]] = []
            customer: str

        class OrderPaid(Message, Printable):
            customer: str

        assert OrderPaid.__struct_fields__ == ("customer",)

    def test_that_is_a_dataclass_is_refused(self):
        @dataclass
        class WithCustomer:
            customer: str

        with pytest.raises(TypeError, match=r"OrderPaid cannot inherit from WithCustomer, which has an __init__ .*abstract"):

            class OrderPaid(WithCustomer, Message):
                cents: int

    def test_beside_another_base_with_fields_is_refused(self):
        class Base(Message):
            order_id: int

        class WithCustomer(Message):
            customer: str = ""

        with pytest.raises(TypeError, match=r"two bases with fields, WithCustomer and Base, .*class WithCustomer\(Base\)"):

            class OrderPaid(WithCustomer, Base):
                cents: int = 0


class TestFields:
    class GiftOrdered(Message):
        order_id: int
        customer: str
        gift: bool = False

    @pytest.mark.parametrize(
        ("args", "values", "text"),
        [
            ((), {"order_id": 1}, "GiftOrdered needs 'customer'. Its fields are: order_id, customer, gift."),
            ((1,), {"custmer": "Ann"}, "GiftOrdered has no field 'custmer' and needs 'customer'. Its fields are: "),
            ((), {}, "GiftOrdered needs 'order_id', 'customer'. "),
            ((1, "Ann", True, 4), {}, "GiftOrdered was given 4 values. Its fields are: "),
        ],
        ids=["missing", "misspelt", "none", "too many"],
    )
    def test_that_are_wrong_are_named_with_their_class(self, args, values, text):
        with pytest.raises(TypeError) as raised:
            self.GiftOrdered(*args, **values)

        assert str(raised.value).startswith(text)

    def test_keep_the_error_of_a_default(self):
        def fail():
            raise TypeError("No clock here.")

        class OrderPaid(Message):
            at: str = msgspec.field(default_factory=fail)

        with pytest.raises(TypeError, match="No clock here"):
            OrderPaid()

    def test_that_are_required_behind_a_default_are_named_with_what_to_do(self):
        with pytest.raises(TypeError, match=r"OrderPaid\.cents is required, and .*class OrderPaid\(Message, kw_only=True\)"):

            class OrderPaid(Message):
                currency: str = "EUR"
                cents: int

    def test_may_follow_a_default_where_they_are_given_by_name(self):
        class OrderPaid(Message, kw_only=True):
            currency: str = "EUR"
            cents: int

        assert OrderPaid(cents=7).currency == "EUR"
