from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

RAISE = "`version = 2` in class Meta of OrderPlaced, and add a function with @OrderPlaced.upgrade_from(1)."


@dataclass
class Place:
    street: str


@dataclass
class PlaceWithCity:
    street: str
    city: str


class Card(msgspec.Struct, tag="card"):
    number: str


class Invoice(msgspec.Struct, tag="invoice"):
    days: int


class Closed(msgspec.Struct, forbid_unknown_fields=True):
    street: str


class Pair(msgspec.Struct, array_like=True):
    x: int


class Triple(msgspec.Struct, array_like=True):
    x: int
    y: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class FewerColours(Enum):
    RED = "red"


class Tree(msgspec.Struct):
    leaves: list[Tree] = []
    size: int = 0


class OtherTree(msgspec.Struct):
    leaves: list[OtherTree] = []
    size: str = ""


class TestAFieldThat:
    @pytest.fixture
    def break_of(self, define, changed):
        """Return text and hint of the only change, which breaks others, between two types of a field; None: it is not there."""

        def break_of(before, after, **defaults):
            def release(field):
                return lambda: define(fields={"order_id": int} | ({} if field is None else {"thing": field}), defaults=defaults)

            (change,) = changed(release(before), release(after))
            assert change.type == "OrderPlaced"
            assert change.breaks
            return change.text, change.hint

        return break_of

    def test_is_removed_is_named(self, break_of):
        text, hint = break_of(str, None)

        assert text == "has lost the field thing, which older messages have"
        assert hint == f"Restore it. Or write {RAISE}"

    def test_is_new_and_required_is_named(self, break_of):
        text, hint = break_of(None, str)

        assert text == "requires the field thing, which older messages lack"
        assert hint == f"Give it a default. Or write {RAISE}"

    def test_is_renamed_is_named_with_its_new_name(self, define, changed):
        (change,) = changed(
            lambda: define(fields={"order_id": int, "customer": str}), lambda: define(fields={"order_id": int, "client": str})
        )

        assert change.text == (
            "has renamed the field customer to client: older messages have customer, and readers of the last release look for it"
        )
        assert change.hint == f'Write `client: ... = msgspec.field(name="customer")`. Or write {RAISE}'

    def test_keeps_its_name_in_the_body_is_not(self, define, changed):
        found = changed(
            lambda: define(fields={"order_id": int, "customer": str}),
            lambda: define(fields={"order_id": int, "client": str}, defaults={"client": msgspec.field(name="customer")}),
        )

        assert found == []

    @pytest.mark.parametrize(
        ("before", "after", "refused", "taken"),
        [
            (int, str, "integer", "string"),
            (float, int, "number", "integer"),
            (int | None, int, "null", "integer"),
            (int | str, int, "string", "integer"),
            (Any, int, "anything", "integer"),
            (str, datetime, "string", "string (date-time)"),
            (datetime | None, Decimal | None, "string (date-time)", "string (decimal)"),
            (
                str,
                Annotated[str, msgspec.Meta(max_length=3)],
                "string",
                "string (at most 3 characters)",
            ),
            (int, Annotated[int, msgspec.Meta(ge=1)], "integer", "integer (at least 1)"),
            (
                Annotated[int, msgspec.Meta(ge=0)],
                Annotated[int, msgspec.Meta(ge=1)],
                "integer (at least 0)",
                "integer (at least 1)",
            ),
            (str, Literal["a", "b"], "string", "'a', 'b'"),
            (Literal["a", "b"], Literal["a"], "'b'", "'a'"),
            (Colour, FewerColours, "'blue'", "'red'"),
            (Card | Invoice, Card, "Invoice", "Card"),
        ],
        ids=str,
    )
    def test_is_narrowed_is_named(self, break_of, before, after, refused, taken):
        text, hint = break_of(before, after)

        assert text == f"no longer accepts {refused} in the field thing, only {taken}: older messages cannot be read"
        assert hint == f"Write {RAISE}"

    @pytest.mark.parametrize(
        ("before", "after", "field"),
        [
            (list[int], list[str], "thing[]"),
            (dict[str, int], dict[str, str], "thing{}"),
            (tuple[int, int], tuple[int, str], "thing[1]"),
            (Tree, OtherTree, "thing.size"),
            (list[Tree] | None, list[OtherTree] | None, "thing[].size"),
        ],
        ids=str,
    )
    def test_is_narrowed_inside_is_named_with_its_path(self, break_of, before, after, field):
        text, _ = break_of(before, after)

        assert text == f"no longer accepts integer in the field {field}, only string: older messages cannot be read"

    @pytest.mark.parametrize(
        ("before", "after", "text"),
        [
            (Place, PlaceWithCity, "requires the field thing.city, which older messages lack"),
            (PlaceWithCity | None, Place | None, "has lost the field thing.city, which older messages have"),
            (
                PlaceWithCity,
                Closed,
                "no longer accepts string in the field thing.city, only no field: older",
            ),
            (
                Pair,
                Triple,
                "no longer accepts array (at least 1 items) in the field thing, only array (at least 2",
            ),
        ],
        ids=["new", "lost", "forbidden", "array"],
    )
    def test_is_a_class_that_changes_is_named_with_its_path(self, break_of, before, after, text):
        assert break_of(before, after)[0].startswith(text)

    @pytest.mark.parametrize(
        ("before", "after", "refused", "taken"),
        [
            (int, int | None, "null", "integer"),
            (int, float, "number", "integer"),
            (
                Literal["a"],
                Literal["a", "b"],
                "'b'",
                "'a'",
            ),
            (Card, Card | Invoice, "Invoice", "Card"),
        ],
        ids=str,
    )
    def test_is_widened_under_the_same_version_is_named(self, break_of, before, after, refused, taken):
        text, hint = break_of(before, after)

        assert text == f"accepts {refused} in the field thing, but readers of the last release accept only {taken}"
        assert hint == f"Write {RAISE}"

    @pytest.mark.parametrize("kind", [str, Place, list[int], Any, Card | Invoice | None])
    def test_is_new_with_a_default_breaks_nobody(self, define, changed, kind):
        (change,) = changed(define, lambda: define(fields={"order_id": int, "new": kind}, defaults={"new": None}))

        assert (change.text, change.hint, change.breaks) == ("differs, in a way that breaks nobody", "", False)

    @pytest.mark.parametrize(
        "kind", [Place | None, dict[str, Any], list[Tree], tuple[int, ...], Card | Invoice | None, set[Colour]]
    )
    def test_stays_breaks_nobody(self, define, changed, kind):
        assert changed(*[lambda: define(fields={"order_id": int, "thing": kind})] * 2) == []

    def test_gets_a_default_breaks_nobody(self, define, changed):
        (change,) = changed(define, lambda: define(defaults={"order_id": 0}))

        assert not change.breaks

    def test_changes_under_a_new_version_with_an_upgrade_breaks_nobody(self, define, changed):
        (change,) = changed(define, lambda: define(fields={"order_id": str, "client": str}, version=2, upgrades=(1,)))

        assert not change.breaks


class TestATypeThat:
    @pytest.mark.parametrize(
        ("before", "after", "text", "hint"),
        [
            (
                {},
                {"topic": "sales"},
                "has the topic 'sales', and had 'orders', from which readers of the last release receive it",
                'Write `topic = "orders"` in class Meta of OrderPlaced, or give the new topic to a new type.',
            ),
            (
                {"tag": "eu"},
                {"tag": "europe"},
                "has the tag 'europe', and had 'eu', by which readers of the last release may subscribe",
                'Write `tag = "eu"` in class Meta of OrderPlaced, or give the new tag to a new type.',
            ),
            (
                {},
                {"key": ""},
                "has the key '', and had 'order_id': order and searches use another value",
                'Write `key = "order_id"` in class Meta of OrderPlaced, or give the new key to a new type.',
            ),
            (
                {"version": 3, "upgrades": (2,)},
                {"version": 2, "upgrades": (2,)},
                "has version 2, and had 3",
                "Write `version = 3` in class Meta of OrderPlaced, or more.",
            ),
            (
                {},
                {"version": 3, "upgrades": (2,)},
                "has version 3, but no upgrade from version 1: messages of that version cannot be read",
                "Add a function with @OrderPlaced.upgrade_from(1).",
            ),
            (
                {"version": 3, "upgrades": (1, 2)},
                {"version": 3, "upgrades": (2,)},
                "has lost its upgrade from version 1: messages of that version cannot be read",
                "Restore the function with @OrderPlaced.upgrade_from(1). If no such message can arrive any more, run "
                "outbox_schema --write --accept-breaks.",
            ),
        ],
        ids=["topic", "tag", "key", "lower", "upgrade", "lost upgrade"],
    )
    def test_changes_its_options_is_named(self, define, changed, before, after, text, hint):
        (change,) = changed(lambda: define(**before), lambda: define(**after))

        assert (change.type, change.text, change.hint, change.breaks) == ("OrderPlaced", text, hint, True)

    def test_is_gone_is_named(self, define, changed):
        (change,) = changed(define, lambda: None)

        assert change.text == "was removed: its messages that wait, or are dead letters, cannot be read"
        assert change.hint.startswith(
            "Restore the class, and only remove the code that publishes it. If no such message can arrive any more, run "
        )

    def test_is_renamed_is_named_with_its_new_name(self, define, changed):
        gone, new = changed(define, lambda: define("OrderTaken"))

        assert gone.text.startswith("is OrderTaken now: no handler handles its older messages")
        assert gone.hint == 'Write `type = "OrderPlaced"` in class Meta of OrderTaken.'
        assert (new.type, new.text, new.breaks) == ("OrderTaken", "is new", False)

    def test_is_renamed_and_keeps_its_name_on_the_wire_breaks_nobody(self, define, changed):
        assert changed(define, lambda: define("OrderTaken", type="OrderPlaced")) == []

    def test_is_gone_while_another_one_is_new_is_not_called_renamed(self, define, changed):
        gone, _ = changed(define, lambda: define("OrderPaid", fields={"order_id": int, "cents": int}))

        assert gone.text.startswith("was removed")

    def test_gets_a_tag_breaks_nobody(self, define, changed):
        (change,) = changed(define, lambda: define(tag="eu"))

        assert not change.breaks

    def test_is_new_breaks_nobody(self, define, changed):
        (change,) = changed(lambda: None, define)

        assert (change.text, change.breaks) == ("is new", False)

    def test_differs_in_several_ways_is_named_for_each(self, define, changed):
        found = changed(
            lambda: define(fields={"order_id": int, "a": str, "b": int}), lambda: define(topic="sales", fields={"order_id": str})
        )

        assert [one.text.partition(":")[0] for one in found] == [
            "has the topic 'sales', and had 'orders', from which readers of the last release receive it",
            "has lost the field a, which older messages have",
            "has lost the field b, which older messages have",
            "no longer accepts integer in the field order_id, only string",
        ]
