"""Records of failed sends, and copies of dead messages."""

from outbox.batches.batch import SplitReason, Unaccepted
from outbox.batches.split import split_at_send
from outbox.models import Batch, DeadMessage, FailedSend, MessageRow, State
from tests.factories import BatchFactory, MessageRowFactory, TopicFactory
from tests.outbox.relay.batches import children, claimed, make_claimed, result_of


class TestBooks:
    def test_hold_each_send_that_failed(self, splitter):
        batch = make_claimed(size=4, attempt=5)

        splitter.split(batch, result_of(batch, unsure=[1, 2], held=3).unaccepted, split_at_send)

        (note,) = FailedSend.objects.all()
        assert (note.batch_id, note.attempt, note.verdict, note.reason) == (
            batch.id, 5, "unsure", "unsure, says the broker",
        )  # fmt: skip
        assert [str(message_id) for message_id in note.message_ids] == batch.message_ids[:2]

    def test_hold_a_copy_of_each_message_given_up(self, splitter):
        topic = TopicFactory(name="parts")
        message = MessageRowFactory(topic=topic, key="k", headers='{"a": "1"}', about="shop.order:1", body=b"\x00")
        other = MessageRowFactory(topic=topic)
        batch = make_claimed(topic=topic, message_ids=[other.id, message.id], lane=2, first_seq=10)

        splitter.split(batch, result_of(batch, refused=2).unaccepted, split_at_send)

        (dead,) = DeadMessage.objects.all()
        assert (dead.message_id, dead.topic, dead.key, dead.headers, dead.about, bytes(dead.body)) == (
            message.id, "parts", "k", '{"a": "1"}', "shop.order:1", b"\x00",
        )  # fmt: skip
        assert (dead.lane, dead.number, dead.reason) == (2, 11, "refused, says the broker")
        assert dead.batch_id == children(batch)[0].id

    def test_hold_a_message_whose_row_is_gone_without_its_body(self, splitter):
        row = BatchFactory(first_seq=3)
        MessageRow.objects.all().delete()

        splitter.return_batch(claimed(row), result_of(claimed(row), refused=1).unaccepted)

        (dead,) = DeadMessage.objects.all()
        assert (dead.message_id, dead.body, dead.number) == (row.message_ids[0], None, 3)

    def test_hold_the_newest_reason_of_a_message_that_died_twice(self, splitter):
        row = BatchFactory()
        splitter.return_batch(claimed(row), {1: Unaccepted(SplitReason.REFUSED, "first")})
        Batch.objects.filter(pk=row.id).update(state=State.CLAIMED)

        splitter.return_batch(claimed(row), {1: Unaccepted(SplitReason.REFUSED, "second")})

        assert [dead.reason for dead in DeadMessage.objects.all()] == ["second"]

    def test_leave_out_positions_that_were_split_off(self, splitter):
        batch = make_claimed(size=2, split=[1])

        splitter.return_batch(batch, result_of(batch, refused=2).unaccepted)

        assert [str(dead.message_id) for dead in DeadMessage.objects.all()] == [batch.message_ids[1]]
