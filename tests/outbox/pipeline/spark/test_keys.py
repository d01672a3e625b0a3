"""Keys of rows, their digests, and the digest of a history, held to plain Python. No session is needed."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.config import Business
from outbox.pipeline.spark.history import FRAMES
from outbox.pipeline.spark.keys import (
    ABOUT,
    BUCKETS,
    DIGEST_COLUMNS,
    LAST_BIT,
    PLACE,
    Candidates,
    Digest,
    Keys,
    bucket_of,
    candidates,
    hashed,
    row_hashes,
    sliced,
    unequal_hashes,
)
from outbox.pipeline.spark.keys import TEXTS as TEXT_COLUMNS

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


SALT = np.uint64(7)
TEXTS = st.lists(st.text(max_size=40), min_size=1, max_size=30)
KEYS = st.lists(st.integers(0, 5), max_size=12)


def hashes_of(keys):
    return hashed(pa.array([f"shop.order:{key}" for key in keys], pa.string()), SALT)


def differing(left, right):
    """Return the keys, of both sides, that differ."""
    sums = Counter()
    for sign, keys in (-1, left), (1, right):
        digest = Digest()
        digest.add(0, sign, hashes_of(keys))
        for batch in digest.batches():
            for row in batch.to_pylist():
                sums.update({(row["bucket"], name): row[name] for name in ("n", "high", "low", "check")})
    buckets = {bucket for (bucket, _), value in sums.items() if value}
    names = ("n", "high", "low", "check")
    rows = [SimpleNamespace(pair=0, bucket=bucket, **{name: sums[bucket, name] for name in names}) for bucket in buckets]
    hashes, dirty = candidates(rows)
    if dirty:
        old, new = (side[dirty[0][bucket_of(side)]] for side in (hashes_of(left), hashes_of(right)))
        table = pa.Table.from_batches([sliced(0, old & ~LAST_BIT), sliced(0, new | LAST_BIT)])
        for part in set(table["slice"].to_pylist()):
            hashes[0] += unequal_hashes(table.filter(pc.equal(table["slice"], part)))["hash"].to_numpy().view(np.uint64).tolist()
    found = Candidates(np.unique(np.array(hashes[0], np.uint64) | LAST_BIT))
    both = sorted({*left, *right})
    return {key for key, differs in zip(both, found.has(hashes_of(both)), strict=True) if differs}


class TestTheHash:
    @settings(deadline=None)
    @given(TEXTS)
    def test_is_of_the_text_alone(self, texts):
        together = hashed(pa.array(texts), SALT)

        assert [int(one) for one in together] == [int(hashed(pa.array([text]), SALT)[0]) for text in texts]
        assert len(set(together.tolist())) == len(set(texts))

    def test_reads_a_slice_as_it_stands(self):
        texts = pa.array([str(n) * (n % 13) for n in range(100)])

        assert (hashed(texts.slice(31, 40), SALT) == hashed(texts, SALT)[31:71]).all()

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 36])
    def test_takes_the_length_for_a_part_of_it(self, size):
        texts = ["\0" * n for n in range(40)]

        assert len({int(one) for one in hashed(pa.array(texts), SALT)}) == len(texts)
        assert hashed(pa.array([texts[size]] * 3), SALT).tolist() == [hashed(pa.array(texts), SALT)[size]] * 3

    def test_differs_with_the_salt(self):
        assert hashed(pa.array(["a"]), SALT) != hashed(pa.array(["a"]), np.uint64(8))


class TestCandidates:
    @settings(deadline=None)
    @given(KEYS, KEYS)
    def test_are_the_keys_that_differ(self, left, right):
        unequal = {key for key in {*left, *right} if left.count(key) != right.count(key)}

        assert differing(left, right) == unequal

    def test_are_those_of_a_bucket_in_which_several_differ(self):
        buckets = bucket_of(hashes_of(range(3 * BUCKETS))).tolist()
        fullest, _ = Counter(buckets).most_common(1)[0]
        first, second, third, *_ = (key for key, bucket in enumerate(buckets) if bucket == fullest)

        assert differing([first, second, third], [first]) == {second, third}
        assert differing([first, second, third], [first, first, second, second]) == {first, second, third}
        assert differing([first, second, third], [first, second]) == {third}


def rows_of(frame, *rows):
    """Make rows in which a text is its column's name and a number its place, but for what is given."""
    names = DIGEST_COLUMNS[frame]
    usual = {name: name if name in TEXT_COLUMNS else place for place, name in enumerate(names)}
    schema = pa.schema({name: pa.string() if name in TEXT_COLUMNS else pa.int64() for name in names})
    return pa.RecordBatch.from_pylist([{**usual, **row} for row in rows], schema)


class TestTheHashOfARow:
    @pytest.mark.parametrize("frame", FRAMES)
    def test_is_another_where_any_column_is(self, frame):
        others = [
            {name: other}
            for name in DIGEST_COLUMNS[frame]
            for other in ((None, "", "another") if name in TEXT_COLUMNS else (None, 0, 1 << 40, -1))
            if other != rows_of(frame, {}).to_pylist()[0][name]
        ]

        found = row_hashes(frame, rows_of(frame, {}, *others))

        assert len(set(found.tolist())) == 1 + len(others)

    def test_is_another_where_two_columns_change_places(self):
        one, other = {"key": "a", "type": "b"}, {"key": "b", "type": "a"}

        assert len(set(row_hashes("messages", rows_of("messages", one, other)).tolist())) == 2

    def test_is_of_the_row_alone(self):
        rows = [{"about": f"shop.order:{n}"} for n in range(5)]

        assert row_hashes("business", rows_of("business", *rows)).tolist() == [
            row_hashes("business", rows_of("business", row))[0] for row in rows
        ]
