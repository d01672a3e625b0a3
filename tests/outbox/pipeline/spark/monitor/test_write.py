"""What micro-batches add up to, held to plain sets; and that none is applied twice."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from outbox.failpoints import VARIABLE, FailpointReached
from outbox.pipeline.models import MonitorBucket, MonitorJob, MonitorLane, MonitorMissing
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.monitor.aggregate import Change
from outbox.pipeline.spark.monitor.lane import pack
from outbox.pipeline.spark.monitor.write import apply
from outbox.pipeline.spark.transforms.numbers import BUCKET
from tests.factories import BatchFactory, TopicFactory, message_id

GROUPS = {"orders": ["cart"]}
Row = tuple[str, str, int]  # role, group, number


def changes(rows: list[Row], topic: str = "orders", source: str = "us") -> list[Change]:
    """Make of rows what `aggregate` makes of them."""
    found = defaultdict(list)
    for role, group, number in rows:
        found[role, group, (number - 1) // BUCKET].append(number)
    made = []
    for (role, group, bucket), numbers in found.items():
        bits = np.zeros(BUCKET, bool)
        bits[[(number - 1) % BUCKET for number in numbers]] = True
        made.append(Change(role, group, source, topic, 1, bucket, pack(bits), len(numbers), min(numbers), max(numbers)))
    return made


def unnumbered(role: str, group: str, n: int) -> Change:
    return Change(role, group, "", "orders", None, None, bytes(BUCKET // 8), n, 0, 0)


def standing(group: str = "") -> tuple[int, int | None, int, int | None, int | None, int]:
    one = MonitorLane.objects.get(consumer_group=group, lane=1)
    return one.seen, one.missing, one.duplicates, one.highest, one.first_missing, one.failed


def sent(*numbers: int) -> list[Row]:
    return [("sent", "", number) for number in numbers]


def handled(*numbers: int, group: str = "cart") -> list[Row]:
    return [("handled", group, number) for number in numbers]


class TestALane:
    def test_misses_what_lies_below_the_highest_number_and_did_not_come(self, url):
        apply(url, "job", 0, changes(sent(1, 2, 4, 7) + handled(1, 7)), GROUPS)

        assert standing() == (4, 3, 0, 7, 3, 0)
        assert standing("cart") == (2, 2, 0, 7, 2, 0)  # of what was sent: 2 and 4

    def test_misses_no_longer_what_came_later(self, url):
        apply(url, "job", 0, changes(sent(1, 4) + handled(4)), GROUPS)
        apply(url, "job", 1, changes(sent(2, 3) + handled(1, 2)), GROUPS)

        assert standing() == (4, 0, 0, 4, None, 0)
        assert standing("cart") == (3, 1, 0, 4, 3, 0)
        assert list(MonitorMissing.objects.values_list("consumer_group", "count")) == [("cart", 1)]

    def test_misses_nothing_that_is_explained(self, url):
        dead_letter = [("dead letter", "cart", 2), ("retry", "cart", 2)]
        apply(url, "job", 0, changes([*sent(1, 2, 4), ("explained", "", 3), *dead_letter, *handled(1, 4)]), GROUPS)

        assert standing() == (3, 0, 0, 4, None, 0)
        assert standing("cart") == (2, 0, 0, 4, None, 2)

    def test_misses_a_whole_block(self, url):
        top = 3 * BUCKET + 5
        apply(url, "job", 0, changes(sent(1) + handled(1)), GROUPS)
        apply(url, "job", 1, changes(sent(top, BUCKET + 9) + handled(top)), GROUPS)

        assert standing() == (3, top - 3, 0, top, 2, 0)
        assert standing("cart") == (2, 1, 0, top, BUCKET + 9, 0)

    def test_that_was_pruned_begins_with_its_oldest_batch(self, url, source):
        topic = TopicFactory(name="orders")
        BatchFactory(topic=topic, lane=1, first_seq=100, message_ids=[message_id()])

        apply(url, "job", 0, changes(sent(102), source=source), GROUPS)

        assert standing()[1:5] == (2, 0, 102, 100)

    def test_is_not_judged_for_a_group_that_does_not_owe_all_of_it(self, url):
        apply(url, "job", 0, changes(sent(1, 2) + handled(2, group="some")), GROUPS)

        assert standing("some") == (1, None, 0, 2, None, 0)

    def test_counts_numbers_that_come_again(self, url):
        apply(url, "job", 0, changes(handled(1, 2, 2)), GROUPS)
        apply(url, "job", 1, changes(handled(2, 3)), GROUPS)

        assert standing("cart")[:3] == (3, 0, 2)

    def test_remembers_since_when_the_same_number_is_the_first_one_missing(self, url):
        def since():
            return MonitorLane.objects.get(consumer_group="cart").first_missing_since

        apply(url, "job", 0, changes(sent(1, 2, 3) + handled(3)), GROUPS)
        began = since()
        apply(url, "job", 1, changes(handled(2)), GROUPS)
        assert since() == began

        apply(url, "job", 2, changes(sent(4) + handled(1, 4)), GROUPS)
        assert since() is None

    def test_takes_a_number_beyond_all_that_was_sent_without_looking_for_what_lies_between(self, url):
        apply(url, "job", 0, changes(sent(1, 2) + handled(1, BUCKET << 33)), GROUPS)

        assert standing("cart")[1:4] == (1, 0, BUCKET << 33)
        assert MonitorBucket.objects.count() == 3

    def test_of_messages_without_a_number_is_only_counted(self, url):
        rows = [unnumbered("sent", "", 5), unnumbered("handled", "cart", 4), unnumbered("dropped", "cart", 2)]
        apply(url, "job", 0, rows, GROUPS)
        apply(url, "job", 1, [*rows, unnumbered("retry", "cart", 3)], GROUPS)

        found = {one.consumer_group: (one.seen, one.duplicates, one.failed) for one in MonitorLane.objects.filter(lane=-1)}
        assert found == {"": (10, 0, 0), "cart": (8, 4, 3)}


class TestRandomHistories:
    @pytest.mark.parametrize("seed", range(2))
    def test_add_up_to_what_plain_sets_hold(self, url, seed):
        chance = random.Random(seed)
        numbers = range(BUCKET - 40, BUCKET + 60)
        rows = [*sent(*range(1, BUCKET - 40), *numbers), *handled(*range(1, BUCKET - 40), *numbers)]
        rows += handled(*chance.choices(numbers, k=9)) + [("dead letter", "cart", n) for n in chance.sample(numbers, 3)]
        gone = {("sent", n) for n in chance.sample(numbers, 7)} | {("handled", n) for n in chance.sample(numbers, 9)}
        rows = [row for row in rows if (row[0], row[2]) not in gone]
        rows += [("explained", "", n) for role, n in sorted(gone)[:3] if role == "sent"]
        chance.shuffle(rows)
        cuts = sorted(chance.sample(range(len(rows)), 3))

        for batch, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
            apply(url, "job", batch, changes(rows[start:end]), GROUPS)

        by_role = defaultdict(Counter)
        for role, _, number in rows:
            by_role[role][number] += 1
        out, came = by_role["sent"], by_role["handled"]
        top = max(*out, *by_role["explained"])
        missing = [n for n in range(1, top + 1) if n not in out and n not in by_role["explained"]]
        highest = max(*came, *by_role["dead letter"])
        owed = sorted(n for n in out if n <= highest and n not in came and n not in by_role["dead letter"])
        assert standing() == (len(out), len(missing), 0, top, missing[0] if missing else None, 0)
        again = came.total() - len(came)
        assert standing("cart") == (len(came), len(owed), again, highest, owed[0] if owed else None, 3)


class TestABatch:
    def test_that_was_applied_is_not_applied_again(self, url):
        rows = [*changes(handled(1, 1)), unnumbered("retry", "cart", 3)]
        assert apply(url, "job", 0, rows, GROUPS)
        before = list(MonitorLane.objects.values())

        assert not apply(url, "job", 0, rows, GROUPS)

        assert list(MonitorLane.objects.values()) == before

    def test_is_applied_as_a_whole_or_not_at_all(self, url, monkeypatch):
        monkeypatch.setenv(VARIABLE, "monitor.in_transaction=raise")
        with pytest.raises(FailpointReached):
            apply(url, "job", 0, changes(sent(1)), GROUPS)
        monkeypatch.delenv(VARIABLE)
        assert not MonitorJob.objects.exists()

        apply(url, "job", 0, changes(sent(1)), GROUPS)
        monkeypatch.setenv(VARIABLE, "monitor.in_transaction=raise")
        with pytest.raises(FailpointReached):
            apply(url, "job", 1, changes(sent(2)), GROUPS)
        monkeypatch.delenv(VARIABLE)
        assert (MonitorJob.objects.get().batch, standing()[0]) == (0, 1)

        assert apply(url, "job", 1, changes(sent(2)), GROUPS)

        assert (MonitorJob.objects.get().batch, standing()[0]) == (1, 2)

    def test_of_a_new_job_forgets_what_others_saw(self, url):
        apply(url, "old", 0, changes(sent(1, 2, 9)), GROUPS)

        apply(url, "new", 0, changes(sent(1, 2)), GROUPS)

        assert standing()[:4] == (2, 0, 0, 2)
        assert MonitorJob.objects.get().job == "new"

    @pytest.mark.parametrize("batch", [1, 3])
    def test_that_does_not_follow_upon_the_last_one_is_refused(self, url, batch):
        if batch == 3:
            for one in range(2):
                apply(url, "job", one, changes(sent(one + 1)), GROUPS)

        with pytest.raises(PipelineError, match=r"goes on with batch \d, .* Name another folder for the checkpoint"):
            apply(url, "job", batch, [], GROUPS)
