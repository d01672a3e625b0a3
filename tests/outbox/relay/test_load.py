"""Loading messages in slices."""

from typing import Any

import pytest

from outbox import database
from outbox.batches.batch import ClaimedBatch
from outbox.models import Batch as StoredBatch
from outbox.models import MessageRow
from outbox.relay.breaker import Budget
from outbox.relay.send import slices
from tests.factories import MessageRowFactory, TopicFactory, message_id
from tests.outbox.relay.batches import make_claimed

pytestmark = pytest.mark.django_db


def batch_of(messages: list[MessageRow], **fields: Any) -> ClaimedBatch:
    return make_claimed(topic=TopicFactory(), message_ids=[message.id for message in messages], **fields)


def load(*batches: ClaimedBatch, slice_bytes: int = 1000):
    return list(slices(database.raw("default"), batches, Budget(slice_bytes)))


def places(found) -> list[list[tuple[int, int]]]:
    """Return the batch and the position of each message, slice by slice."""
    return [[(batch.id, position) for batch, rows in parts for _, position, *_ in rows] for parts in found]


def bodies(found) -> list[list[bytes]]:
    return [[body for _, rows in parts for *_, body in rows] for parts in found]


class TestSlices:
    def test_give_the_messages_of_all_batches_in_order(self):
        messages = MessageRowFactory.create_batch(3, topic=TopicFactory(), key="k", headers='{"a": "1"}', about="shop.order:1")
        second, first = batch_of(messages[:1]), batch_of(messages[1:])

        found = load(first, second)

        assert places(found) == [[(first.id, 1), (first.id, 2), (second.id, 1)]]
        assert found[0][0][1][0] == (first.id, 1, "k", '{"a": "1"}', "shop.order:1", messages[1].body)

    def test_give_the_body_as_it_was_published(self):
        message = MessageRowFactory(body=bytes(range(256)))

        assert bodies(load(batch_of([message]))) == [[bytes(range(256))]]

    def test_hold_no_more_bytes_than_told(self):
        messages = [MessageRowFactory(body=b"x" * size) for size in (400, 600, 1, 999, 1)]

        found = load(batch_of(messages), slice_bytes=1000)

        assert [[len(body) for body in part] for part in bodies(found)] == [[400, 600], [1, 999], [1]]

    def test_hold_one_message_that_is_larger_than_told(self):
        messages = [MessageRowFactory(body=b"x" * size) for size in (5000, 1)]

        found = load(batch_of(messages), slice_bytes=1000)

        assert [len(part) for part in bodies(found)] == [1, 1]

    def test_go_on_where_the_slice_before_ended_whichever_batch_that_was(self):
        batches = [batch_of([MessageRowFactory(body=b"x" * 400) for _ in range(size)]) for size in (2, 1, 3)]

        found = load(*batches, slice_bytes=800)

        a, b, c = (batch.id for batch in batches)
        assert places(found) == [[(a, 1), (a, 2)], [(b, 1), (c, 1)], [(c, 2), (c, 3)]]

    def test_give_each_position_its_own_message_whatever_was_split_off_since_the_claim(self):
        """Another relay may have taken the batch over and split it."""
        batch = batch_of([MessageRowFactory(body=body) for body in (b"a", b"b", b"c")])
        StoredBatch.objects.filter(pk=batch.id).update(split=[1])

        found = load(batch)

        assert places(found) == [[(batch.id, 1), (batch.id, 2), (batch.id, 3)]]
        assert bodies(found) == [[b"a", b"b", b"c"]]

    def test_say_which_rows_are_gone(self):
        messages = [MessageRowFactory(), MessageRowFactory.build(id=message_id(), topic=None, topic_id=1), MessageRowFactory()]

        (((_, rows),),) = load(batch_of(messages))

        assert [(position, headers is None) for _, position, _, headers, *_ in rows] == [(1, False), (2, True), (3, False)]

    @pytest.mark.parametrize("gone", [0, 1, 2])
    def test_leave_out_a_batch_whose_row_is_gone(self, gone):
        batches = [batch_of([MessageRowFactory()]) for _ in range(3)]
        StoredBatch.objects.filter(pk=batches[gone].id).delete()

        found = load(*batches)

        assert places(found) == [[(batch.id, 1) for batch in batches if batch is not batches[gone]]]
