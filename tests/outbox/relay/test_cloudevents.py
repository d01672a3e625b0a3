"""The headers, key and token of an outgoing message."""

from datetime import UTC, datetime

import msgspec
import pytest

from outbox.batches.batch import ClaimedBatch
from outbox.message import TopicType
from outbox.relay.cloudevents import OutgoingBuilder
from tests.factories import message_id

PUBLISHED_AT = datetime(2010, 12, 1, 8, 26, 0, 7000, UTC)
ID = str(message_id(PUBLISHED_AT))
OTHER_ID = str(message_id())


def batch(**fields) -> ClaimedBatch:
    defaults = {"id": 17, "attempt": 3, "topic": "orders", "type": TopicType.NORMAL, "lane": 2, "first_seq": 40}
    return ClaimedBatch(**defaults | {"message_ids": [OTHER_ID, ID]} | fields)


def sealed(headers: str = "{}", *, key: str = "", about: str | None = None, is_half: bool = False, **fields):
    return OutgoingBuilder(batch(**fields), source="urn:uuid:1", is_half=is_half).build(2, key, headers, about, b"body")


class TestSeal:
    def test_gives_the_message_its_attributes(self):
        message = sealed('{"ce-type": "OrderPlaced", "mine": "1"}', key="536365", about="shop.order:4711")

        assert (message.message_id, message.topic, message.key, message.body) == (ID, "orders", "536365", b"body")
        assert message.headers == {
            "ce-id": ID,
            "ce-source": "urn:uuid:1",
            "ce-specversion": "1.0",
            "ce-time": "2010-12-01T08:26:00.007Z",
            "ce-subject": "536365",
            "ce-type": "OrderPlaced",
            "ce-about": "shop.order:4711",
            "ce-lane": "2",
            "ce-number": "41",
            "mine": "1",
        }

    def test_writes_its_attributes_behind_the_stored_headers_always_in_one_order(self):
        """So a broker that stores them as text stores the same bytes for the same message."""
        message = sealed('{"mine": "1", "ce-type": "OrderPlaced"}', key="k", about="shop.order:4711", is_half=True)

        names = ["mine", "ce-type", "ce-id", "ce-source", "ce-time", "ce-specversion", "ce-subject", "ce-about", "ce-lane"]
        assert list(message.headers) == [*names, "ce-number", "ce-token"]

    def test_leaves_out_what_there_is_not(self):
        message = sealed(lane=None, first_seq=None)

        assert set(message.headers) == {"ce-id", "ce-source", "ce-time"}
        assert (message.key, message.tag, message.token, message.deliver_at) == ("", "", "", None)

    @pytest.mark.parametrize(("stored", "is_one"), [('{"ce-type": "OrderPlaced"}', True), ("{}", False)])
    def test_calls_a_message_a_cloud_event_where_it_has_the_type_that_makes_it_one(self, stored, is_one):
        message = sealed(stored)

        assert ("ce-specversion" in message.headers) is is_one

    def test_gives_a_half_message_the_token_of_its_batch_attempt_and_position(self):
        message = sealed(is_half=True)

        assert message.token == message.headers["ce-token"] == "urn:uuid:1:17:3:2"

    def test_takes_the_tag_from_the_headers(self):
        assert sealed('{"ce-tag": "placed"}').tag == "placed"

    def test_lets_no_header_pose_as_an_attribute(self):
        message = sealed('{"ce-id": "x", "ce-source": "y", "ce-number": "0"}')

        assert (message.headers["ce-id"], message.headers["ce-source"]) == (ID, "urn:uuid:1")
        assert message.headers["ce-number"] == "41"

    def test_hands_the_time_to_a_topic_of_type_delay(self):
        headers = '{"ce-deliverat": "2010-12-01T09:00:00+00:00"}'

        assert sealed(headers, type=TopicType.DELAY).deliver_at == datetime(2010, 12, 1, 9, tzinfo=UTC)
        assert sealed(headers, type=TopicType.NORMAL).deliver_at is None

    @pytest.mark.parametrize("headers", ["", "[]", '{"a": 1}'])
    def test_refuses_headers_that_cannot_be_read(self, headers):
        with pytest.raises(msgspec.DecodeError):
            sealed(headers)
