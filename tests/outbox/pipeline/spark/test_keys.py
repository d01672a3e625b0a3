"""Which key of which pair a row has, held to plain Python. No session is needed."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.config import Business
from outbox.pipeline.spark.keys import ABOUT, PLACE, Keys

ALL = SimpleNamespace(has=lambda hashes: np.ones(len(hashes), bool))
ENTRIES = [
    Business("paid", "orders", "shop.order", "OrderPaid"),
    Business("any", "orders", "shop.order", ""),
    Business("carts", "orders", "shop.cart", "", also=["shop.basket", "shop.box"]),
    Business("bills", "bills", "shop.order", "BillSent"),
]
MESSAGE = st.tuples(
    st.sampled_from(["orders", "bills", "mail", None]),
    st.sampled_from(["OrderPaid", "OrderPlaced", "BillSent", None]),
    st.sampled_from(["shop.order:1", "shop.cart:2", "shop.basket:2", "shop.box:3", "shop.orders:3", "shop.order", "", None]),
)


def keys_of(*pairs, business=ENTRIES, since=None):
    return Keys(business, since, 4711, pairs)


def batch_of(**columns):
    return pa.RecordBatch.from_pydict(columns)


def found(keys, frame, batch):
    """Return (pair, subject, key, left, right) of each row."""
    rows = [row for part in keys.candidates({ABOUT: ALL, PLACE: ALL}, frame, iter([batch])) for row in part.to_pylist()]
    return [(row["pair"], row["subject"], row["key"], row["left"], row["right"]) for row in rows]


def entry_of(topic, kind, about):
    """Return the name of the entry, and the row: a row of a child is that of its parent."""
    label, _, key = (about or "").partition(":")
    for one in ENTRIES:
        if one.topic == topic and one.type in ("", kind) and label in (one.about, *one.also) and about != label:
            return one.name, f"{one.about}:{key}"
    return None


class TestMessages:
    @settings(deadline=None)
    @given(st.lists(MESSAGE, min_size=1, max_size=12))
    def test_are_of_the_first_entry_that_they_fit(self, messages):
        topics, kinds, abouts = (pa.array(column, pa.string()) for column in zip(*messages, strict=True))
        batch = batch_of(topic=topics, type=kinds, about=abouts)

        expected = [(ABOUT, *entry, 0, 1) for message in messages if (entry := entry_of(*message))]

        assert found(keys_of(ABOUT), "messages", batch) == expected

    def test_are_of_both_pairs(self):
        batch = batch_of(message_id=["m1", "m2"], topic=["orders", "mail"], type=["OrderPaid", ""], about=["shop.order:1", ""])

        assert found(keys_of(ABOUT, PLACE), "messages", batch) == [
            (ABOUT, "paid", "shop.order:1", 0, 1),
            (PLACE, "", "m1", 1, 0),
            (PLACE, "", "m2", 1, 0),
        ]


class TestColumns:
    @pytest.mark.parametrize(
        ("pairs", "since", "expected"),
        [
            ([ABOUT], None, {"business": ("subject", "about"), "messages": ("topic", "type", "about")}),
            ([ABOUT], 1, {"business": ("subject", "about", "at"), "messages": ("topic", "type", "about", "at")}),
            ([PLACE], None, {"messages": ("message_id", "topic"), "places": ("message_id", "topic")}),
            ([PLACE], 1, {"messages": ("message_id", "topic", "at"), "places": ("message_id", "topic")}),
            (
                [ABOUT, PLACE],
                None,
                {
                    "business": ("subject", "about"),
                    "messages": ("topic", "type", "about", "message_id"),
                    "places": ("message_id", "topic"),
                },
            ),
        ],
    )
    def test_are_those_of_the_pairs_that_are_looked_at(self, pairs, since, expected):
        assert keys_of(*pairs, since=since).columns() == expected
