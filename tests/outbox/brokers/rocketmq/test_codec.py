"""Conversion of messages to RocketMQ's formats and back. Needs no server."""

import gzip
import random
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rocketmq.codec import born_at, group_of, to_delivery, to_half, to_proto, to_remoting
from outbox.brokers.rocketmq.remoting.frames import COMPRESSED, HALF
from outbox.brokers.rocketmq.stubs import definition
from outbox.message import TopicType

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOPIC = definition.Resource(name="orders")
LONG = b"an order, and again " * 500
UNREADABLE = {
    "zstd": (b"\x28\xb5\x2f\xfd and so on", "neither gzip nor zlib"),
    "cut off": (zlib.compress(LONG)[:-9], "cut off"),
    "a bomb": (zlib.compress(bytes(17 * 1024 * 1024)), "decompresses to more than 16777216 bytes"),
}


def sealed(kind: TopicType = TopicType.NORMAL, *, compress_above: int | None = 4096, **fields: Any) -> Any:
    message = Outgoing(**{"message_id": "m", "topic": "orders", "body": b"order", **fields})
    return to_proto(message, kind, f"{message.message_id}.1", TOPIC, now=NOW.timestamp(), compress_above=compress_above)


def time_of(stamp: Any) -> datetime:
    return stamp.ToDatetime(UTC)


class TestSeal:
    def test_dates_a_half_message_back_so_that_clocks_may_differ_a_little(self):
        assert time_of(sealed(TopicType.TRANSACTION).system_properties.born_timestamp) == NOW - timedelta(seconds=1)
        assert time_of(sealed().system_properties.born_timestamp) == NOW

    def test_delivers_at_once_what_was_due_before(self):
        due = sealed(TopicType.DELAY, deliver_at=NOW - timedelta(hours=1)).system_properties.delivery_timestamp

        assert time_of(due) == NOW


class TestSealForPort:
    """As the proxy writes what `to_proto` makes; that a real one does shows test_stored_alike.py."""

    def sealed(self, kind: TopicType = TopicType.NORMAL, above: int | None = None, **fields: Any) -> Any:
        message = Outgoing(**{"message_id": "m", "topic": "orders", "body": b"order", **fields})
        return to_remoting(message, kind, "m.1", now=NOW.timestamp(), compress_above=above)

    def test_writes_a_half_message(self):
        fields = {"key": "4711", "tag": "placed", "token": "here:1:1:1", "headers": {"ce-type": "order", "who": "\x00"}}

        properties, body, flag = self.sealed(TopicType.TRANSACTION, **fields)

        assert properties == {
            "ce-type": "order",
            "outbox-headers": '{"who":"\\u0000","outbox-key":"4711"}',
            "outbox-token": "here:1:1:1",
            "UNIQ_KEY": "m.1",
            "KEYS": "m 4711",
            "TAGS": "placed",
            "PGROUP": "orders",
            "__BORNHOST": "outbox",
            "BORN_TIMESTAMP": str(round((NOW.timestamp() - 1) * 1000)),
            "TRAN_MSG": "true",
        }
        assert (body, flag) == (b"order", HALF)

    def test_writes_a_message(self):
        properties, _, flag = self.sealed()

        assert (properties["KEYS"], flag) == ("m", 0)
        assert not {"TRAN_MSG", "TAGS", "outbox-key", "outbox-token"} & properties.keys()
        assert (
            properties["BORN_TIMESTAMP"] == str(round(NOW.timestamp() * 1000)) == str(born_at(TopicType.NORMAL, NOW.timestamp()))
        )

    def test_has_the_properties_of_the_other_way(self):
        fields = {"key": "two words", "tag": "a", "headers": {"subject": "Zoë"}}

        properties, _, _ = self.sealed(**fields)

        other = sealed(**fields)
        assert {name: text for name, text in properties.items() if name[0].islower()} == dict(other.user_properties)
        assert properties["KEYS"].split(" ") == list(other.system_properties.keys)
        assert properties["TAGS"] == other.system_properties.tag

    @pytest.mark.parametrize(("kind", "bit"), [(TopicType.NORMAL, 0), (TopicType.TRANSACTION, HALF)])
    def test_compresses_a_long_body(self, kind: TopicType, bit: int):
        _, body, flag = self.sealed(kind, above=4096, body=LONG)

        assert (zlib.decompress(body), flag) == (LONG, COMPRESSED | bit)


class TestGroupOf:
    @pytest.mark.parametrize("key", ["4711", "ключ", "x" * 63])
    def test_is_the_key(self, key: str):
        assert group_of(key) == key

    @pytest.mark.parametrize("key", ["x" * 64, "ключ" * 16, "two words", " ", "a\tb"])
    def test_is_a_digest_where_the_server_would_not_take_the_key(self, key: str):
        assert len(group_of(key)) == 32
        assert group_of(key) == group_of(key) != group_of(key + "y")


class TestCompression:
    def test_makes_a_long_body_shorter_and_gives_it_back(self):
        message = sealed(body=LONG)

        assert len(message.body) < len(LONG) / 10
        assert message.system_properties.body_encoding == definition.Encoding.GZIP
        assert to_delivery(message, "group").body == to_half(message).body == LONG

    def test_speaks_the_kind_that_every_client_reads(self):
        assert zlib.decompress(sealed(body=LONG).body) == LONG

    @pytest.mark.parametrize("body", [b"short" * 10, bytes(range(256)) * 16], ids=["short", "at the limit"])
    def test_leaves_short_bodies_alone(self, body: bytes):
        message = sealed(body=body)

        assert (message.body, message.system_properties.body_encoding) == (body, definition.Encoding.IDENTITY)

    def test_leaves_a_body_alone_that_it_would_make_longer(self):
        noise = random.Random(1).randbytes(5000)

        assert sealed(body=noise).body == noise

    def test_is_off_when_told(self):
        assert sealed(body=LONG, compress_above=None).body == LONG

    def test_reads_what_other_clients_have_made(self):
        message = sealed(body=gzip.compress(LONG))
        message.system_properties.body_encoding = definition.Encoding.GZIP

        assert to_delivery(message, "group").body == LONG

    @pytest.mark.parametrize(("body", "why"), UNREADABLE.values(), ids=UNREADABLE)
    def test_names_a_body_that_it_cannot_read_and_hands_it_over_as_it_is(self, body: bytes, why: str):
        message = sealed(body=body, compress_above=None)
        message.system_properties.body_encoding = definition.Encoding.GZIP

        delivery = to_delivery(message, "group")

        assert (delivery.body, delivery.message_id) == (body, "")
        assert why in delivery.headers["outbox-unreadable"]
