"""Keys of two sides, held to each other by digests. No session is needed."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark.keys import BUCKETS, LAST_BIT, Candidates, Digest, bucket_of, candidates, different, hashed, sliced

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
            hashes[0] += different(table.filter(pc.equal(table["slice"], part)))["hash"].to_numpy().view(np.uint64).tolist()
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
