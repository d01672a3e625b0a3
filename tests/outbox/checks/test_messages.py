import inspect
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import Group
from django.db.models import Model

from outbox import transactional
from outbox.message import Message, TopicType
from tests.outbox.checks.conftest import BROKERS, ONE_PHASE
from tests.outbox.choices import OrderState, Stars


@dataclass
class Place:
    street: str
    within: "Place | None" = None


@dataclass
class WithAGroup:
    group: Group


@pytest.fixture(autouse=True)
def _topics(settings):
    settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}, "in-order": {"TYPE": "fifo"}}}


class TestE005:
    def test_finds_a_message_type_without_a_topic(self, found):
        class Homeless(Message):
            pass

        (problem,) = found()
        assert problem.id == "outbox.E005"
        assert "Homeless has no topic, so it cannot be published." in problem.msg
        assert "or `abstract = True` if it is only the base of other types." in problem.hint

    def test_leaves_an_abstract_base_alone(self, found):
        class Base(Message):
            class Meta:
                abstract = True

        class Derived(Base):
            class Meta:
                topic = "orders"

        assert found() == []


class TestE006:
    def test_finds_a_message_type_whose_topic_is_not_in_settings(self, found):
        class Stray(Message):
            class Meta:
                topic = "oders"

        (problem,) = found()
        assert problem.id == "outbox.E006"
        assert problem.msg.endswith("Stray: Topic 'oders' is not in OUTBOX[\"TOPICS\"].")
        assert problem.hint == "Did you mean 'orders'?"


class TestE013:
    def test_finds_a_key_that_is_no_field(self, found):
        class Mistyped(Message):
            order_id: int

            class Meta:
                topic = "orders"
                key = "order"

        (problem,) = found()
        assert problem.id == "outbox.E013"
        assert problem.msg.endswith("Mistyped has Meta.key = 'order', which is not a field of it.")
        assert problem.hint == "Its fields are: order_id."

    def test_finds_a_mask_that_hides_no_field(self, found):
        class Told(Message):
            customer: str

            class Meta:
                topic = "orders"
                mask = ["custmer"]

        (problem,) = found()
        assert problem.id == "outbox.E013"
        assert problem.msg.endswith("Told masks 'custmer', which is not a field of it, so this hides nothing.")
        assert problem.hint == "Its fields are: customer."

    def test_takes_a_property(self, found):
        class Derived(Message):
            order_id: int

            @property
            def ref(self):
                return f"order-{self.order_id}"

            class Meta:
                topic = "orders"
                key = "ref"

        assert found() == []

    def test_takes_a_field_that_only_the_types_of_an_abstract_base_have(self, found):
        class Base(Message):
            class Meta:
                abstract = True
                topic = "orders"
                key = "order_id"

        class OrderPaid(Base):
            order_id: int

        assert found() == []


class TestE047:
    @pytest.mark.parametrize(
        "annotation", [Group, list[Group], dict[str, Group | None], tuple[int, Group], WithAGroup, complex], ids=str
    )
    def test_finds_a_field_that_json_cannot_hold(self, found, annotation):
        class Odd(Message):
            order_id: int
            who: annotation

            class Meta:
                topic = "orders"

        (problem,) = found()
        assert problem.id == "outbox.E047"
        what = "builtins.complex" if annotation is complex else "django.contrib.auth.models.Group"
        assert problem.msg.endswith(f"Odd has the field 'who' of type {what}, which JSON cannot represent.")

    def test_finds_annotations_that_lead_nowhere(self, found):
        class Odd(Message):
            who: "Nobody"  # type: ignore[name-defined]  # noqa: F821

            class Meta:
                topic = "orders"

        (problem,) = found()
        assert problem.id == "outbox.E047"
        assert "Odd has annotations that cannot be read: name 'Nobody' is not defined" in problem.msg

    def test_leaves_alone_what_json_can_hold(self, found):
        class Line(Message):
            at: datetime
            total: Decimal | None
            raw: bytes
            kind: TopicType
            state: OrderState
            stars: list[Stars] | None
            thing: object
            anything: Any
            tags: frozenset[str]
            place: Place

            class Meta:
                topic = "orders"

        assert found() == []


class TestW060:
    def test_finds_an_attribute_that_is_no_field(self, found):
        class Odd(Message):
            order_id: int
            total = 5

            class Meta:
                topic = "orders"

        (problem,) = found()

        assert problem.id == "outbox.W060"
        assert problem.msg.endswith("has the attribute 'total' without an annotation, so it is no field of the body.")
        assert problem.hint.startswith("Write `total: int = 5`")

    def test_leaves_constants_and_methods_alone(self, found):
        class Fine(Message):
            order_id: int
            limit: ClassVar = 5
            MOST = 7
            Kind = TopicType

            class Meta:
                topic = "orders"

            @property
            def place(self):
                return self.order_id

            @staticmethod
            def now(): ...

        assert found() == []


class TestW014:
    def test_warns_of_a_type_without_key_where_order_is_kept_by_key(self, found):
        class Keyless(Message):
            class Meta:
                topic = "in-order"

        (problem,) = found()
        assert problem.id == "outbox.W014"
        assert "Keyless has no key, and its topic 'in-order' is of type fifo" in problem.msg
        assert "key = " in problem.hint


class TestE015:
    def test_finds_a_missing_step(self, found):
        class Changed(Message):
            class Meta:
                topic = "orders"
                version = 3

        Changed.upgrade_from(0)(dict)
        Changed.upgrade_from(2)(dict)

        (problem,) = found()
        assert problem.id == "outbox.E015"
        assert problem.msg.endswith("Changed has an upgrade from version 0, but not from version 1.")
        assert problem.hint == "Add @Changed.upgrade_from(1)."

    def test_finds_a_step_that_nothing_reaches(self, found):
        class Forgotten(Message):
            class Meta:
                topic = "orders"

        Forgotten.upgrade_from(1)(dict)

        (problem,) = found()
        assert problem.id == "outbox.E015"
        assert problem.msg.endswith("Forgotten is at version 1 but has an upgrade from version 1.")
        assert "Raise Meta.version to 2" in problem.hint

    def test_finds_a_version_without_any_upgrade(self, found):
        class Raised(Message):
            class Meta:
                topic = "orders"
                version = 2

        (problem,) = found()
        assert problem.id == "outbox.E015"
        assert "Raised is at version 2 and has no upgrade from version 1" in problem.msg
        assert problem.hint.startswith("Add @Raised.upgrade_from(1);")

    def test_takes_a_type_that_forgot_its_first_versions(self, found):
        class Grown(Message):
            class Meta:
                topic = "orders"
                version = 4

        Grown.upgrade_from(2)(dict)
        Grown.upgrade_from(3)(dict)

        assert found() == []


class TestE035:
    @pytest.mark.parametrize(
        ("topic_name", "text"),
        [("in-order", "topic 'in-order' is of type fifo"), ("elsewhere", "(OnePhaseBroker), which has no")],
    )
    def test_finds_what_goes_half_first_to_a_topic_without_half_messages(self, found, settings, topic_name, text):
        one_phase = {"one-phase": ONE_PHASE["default"]}
        topics = {**settings.OUTBOX["TOPICS"], "elsewhere": {"TYPE": "transaction", "BROKER": "one-phase"}}
        settings.OUTBOX = {"BROKERS": {**BROKERS, **one_phase}, "TOPICS": topics}

        class Misled(Message):
            order_id: int

            class Meta:
                topic = topic_name
                key = "order_id"

        go_half_first(Misled)

        (problem,) = [one for one in found() if one.id == "outbox.E035"]
        assert "build returns Misled for half_first" in problem.msg
        assert text in problem.msg
        assert "publish()" in problem.hint

    @pytest.mark.parametrize("annotate", [lambda kind: kind, lambda kind: tuple[kind, Model], lambda kind: kind | None])
    def test_looks_into_the_annotation(self, found, annotate):
        class Misled(Message):
            order_id: int

            class Meta:
                topic = "in-order"
                key = "order_id"

        go_half_first(annotate(Misled), times=2)

        assert [one.id for one in found()] == ["outbox.E035"]

    @pytest.mark.parametrize("annotation", ["OrderPlaced", None, inspect.Parameter.empty, Model])
    def test_leaves_what_it_cannot_read_to_the_first_call(self, found, annotation):
        go_half_first(annotation)

        assert found() == []


def go_half_first(annotation, *, times=1):
    def build(request):
        pass

    build.__annotations__ = {} if annotation is inspect.Parameter.empty else {"return": annotation}

    def work(request, message):
        pass

    for _ in range(times):
        transactional(half_first=build)(work)
