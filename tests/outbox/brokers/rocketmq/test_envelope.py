"""Our messages as RocketMQ's, and back. Needs no server."""

from __future__ import annotations

import gzip
import random
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rocketmq.envelope import group_of, open_delivery, open_half, seal
from outbox.brokers.rocketmq.stubs import definition
from outbox.message import TopicType

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOPIC = definition.Resource(name="orders")
LONG = b"an order, and again " * 500


def sealed(kind: TopicType = TopicType.NORMAL, *, compress_above: int | None = 4096, **fields: Any) -> Any:
    message = Outgoing(**{"message_id": "m", "topic": "orders", "body": b"order", **fields})
    return seal(message, kind, f"{message.message_id}.1", TOPIC, now=NOW.timestamp(), compress_above=compress_above)


def time_of(stamp: Any) -> datetime:
    return stamp.ToDatetime(UTC)


class TestSeal:
    def test_dates_a_half_message_back_so_that_clocks_may_differ_a_little(self):
        assert time_of(sealed(TopicType.TRANSACTION).system_properties.born_timestamp) == NOW - timedelta(seconds=1)
        assert time_of(sealed().system_properties.born_timestamp) == NOW

    def test_delivers_at_once_what_was_due_before(self):
        due = sealed(TopicType.DELAY, deliver_at=NOW - timedelta(hours=1)).system_properties.delivery_timestamp

        assert time_of(due) == NOW


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
        assert open_delivery(message, "group").body == open_half(message).body == LONG

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

        assert open_delivery(message, "group").body == LONG

    def test_hands_over_as_it_is_what_it_cannot_read(self, caplog: pytest.LogCaptureFixture):
        zstd = b"\x28\xb5\x2f\xfd and so on"
        message = sealed(body=zstd)
        message.system_properties.body_encoding = definition.Encoding.GZIP

        assert open_delivery(message, "group").body == zstd
        assert "neither gzip nor zlib" in caplog.text
