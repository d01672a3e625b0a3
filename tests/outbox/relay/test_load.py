"""Loading in slices."""

from __future__ import annotations

from typing import Any

import pytest

from outbox import database
from outbox.batches.batch import Batch
from outbox.message import TopicType
from outbox.models import MessageRow
from outbox.relay.load import slices
from tests.factories import MessageRowFactory, TopicFactory, message_id

pytestmark = pytest.mark.django_db


def batch_of(messages: list[MessageRow], **fields: Any) -> Batch:
    ids = [str(message.id) for message in messages]
    defaults = {"id": 1, "attempt": 1, "topic": "t", "type": TopicType.NORMAL, "lane": 1, "first_seq": 1}
    return Batch(**defaults | {"message_ids": ids} | fields)


def load(*batches: Batch, slice_bytes: int = 1000):
    return list(slices(database.raw("default"), batches, slice_bytes=slice_bytes))


class TestSlices:
    def test_give_the_messages_of_all_batches_in_order(self):
        messages = MessageRowFactory.create_batch(3, topic=TopicFactory(), key="k", headers='{"a": "1"}', about="shop.order:1")
        batches = [batch_of(messages[1:], id=1), batch_of(messages[:1], id=2)]

        (found,) = load(*batches)

        assert [(one.batch.id, one.position) for one in found] == [(1, 1), (1, 2), (2, 1)]
        assert (found[0].row.key, found[0].row.headers, found[0].row.about) == ("k", '{"a": "1"}', "shop.order:1")

    def test_give_the_body_as_it_was_published(self):
        message = MessageRowFactory(body=bytes(range(256)))

        ((loaded,),) = load(batch_of([message]))

        assert loaded.row.body == bytes(range(256))

    def test_hold_no_more_bytes_than_told(self):
        messages = [MessageRowFactory(body=b"x" * size) for size in (400, 600, 1, 999, 1)]

        found = load(batch_of(messages), slice_bytes=1000)

        assert [[len(one.row.body) for one in part] for part in found] == [[400, 600], [1, 999], [1]]

    def test_hold_one_message_that_is_larger_than_told(self):
        messages = [MessageRowFactory(body=b"x" * size) for size in (5000, 1)]

        found = load(batch_of(messages), slice_bytes=1000)

        assert [len(part) for part in found] == [1, 1]

    def test_pass_over_positions_that_were_split_off(self):
        messages = MessageRowFactory.create_batch(3)

        (found,) = load(batch_of(messages, split=frozenset({2})))

        assert [one.position for one in found] == [1, 3]

    def test_say_which_rows_are_gone(self):
        messages = [MessageRowFactory(), MessageRowFactory.build(id=message_id(), topic=None, topic_id=1), MessageRowFactory()]

        (found,) = load(batch_of(messages))

        assert [one.row is None for one in found] == [False, True, False]
