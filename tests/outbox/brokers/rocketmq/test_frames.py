"""Requests, answers and stored messages as bytes. Needs no server."""

import base64
import hashlib
import hmac
import json
import struct
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import (
    RemotingAnswer,
    Request,
    StoredMessage,
    decode,
    encode,
    frame_size,
    read_properties,
    stored_message,
    stored_messages,
    write_properties,
)
from tests.outbox.brokers.rocketmq.port_log import IPV6, write_stored

AT = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
STORED = StoredMessage(
    "7F00000100002A9F0000000000000FA0", "orders", 3, {"UNIQ_KEY": "m.1", "KEYS": "m 4711"}, 1, 2, AT, b"order", 17, 4000
)


def head_and_body(frame: bytes) -> tuple[dict[str, Any], bytes]:
    size, head_size = struct.unpack(">ii", frame[:8])
    assert len(frame) == 4 + size
    return json.loads(frame[8 : 8 + head_size]), frame[8 + head_size :]


def answer_frame(body: bytes = b"", **head: object) -> bytes:
    data = json.dumps({"code": 0, "flag": 1, "opaque": 7, "language": "JAVA", **head}).encode()
    return struct.pack(">ii", 4 + len(data) + len(body), len(data)) + data + body


class TestEncode:
    def test_writes_head_and_body_behind_their_lengths(self):
        frame = encode(Request(310, {"a": "orders", "e": -1, "k": False, "m": True}, b"body"), 7)

        head, body = head_and_body(frame)
        assert (head["code"], head["opaque"], head["flag"], body) == (310, 7, 0, b"body")
        assert head["extFields"] == {"a": "orders", "e": "-1", "k": "false", "m": "true"}  # a broker reads text only

    def test_signs_the_fields_in_the_order_of_their_names_and_the_body(self):
        frame = encode(Request(310, {"b": "orders", "a": "group", "e": -1}, b"body"), 7, ("me", "secret"))

        fields = head_and_body(frame)[0]["extFields"]
        signature = hmac.new(b"secret", b"me" + b"group" + b"orders" + b"-1" + b"body", hashlib.sha1).digest()
        assert fields["AccessKey"] == "me"
        assert base64.b64decode(fields["Signature"]) == signature

    def test_signs_nothing_without_keys(self):
        fields = head_and_body(encode(Request(28), 7))[0]["extFields"]

        assert fields == {}


class TestFrameSize:
    def test_is_known_when_both_lengths_have_come(self):
        frame = answer_frame(b"body")

        assert [frame_size(frame[:7]), frame_size(frame[:8]), frame_size(frame)] == [None, len(frame), len(frame)]

    def test_is_that_of_the_frame_at_a_place(self):
        first, second = answer_frame(), answer_frame(b"another")

        assert frame_size(bytearray(first + second), len(first)) == len(second)


class TestDecode:
    def test_reads_an_answer(self):
        frame = answer_frame(b"body", code=1, remark="offset wrong", extFields={"msgId": "7F"})

        assert decode(frame) == (7, RemotingAnswer(1, "offset wrong", {"msgId": "7F"}, b"body"))

    def test_reads_an_answer_that_says_little(self):
        assert decode(answer_frame()) == (7, RemotingAnswer(0, "", {}, b""))

    @pytest.mark.parametrize(("flag", "code"), [(0, 39), (2, 40)], ids=["request", "one-way request"])
    def test_takes_a_request_of_the_brokers_own_for_no_answer(self, flag: int, code: int):
        assert decode(answer_frame(flag=flag, code=code)) == (7, None)


class TestStored:
    @pytest.mark.parametrize(
        "fields",
        [{}, {"topic": "t" * 127}, {"topic": "t" * 128}, {"topic": "%DLQ%" + "t" * 250}, {"properties": {}}, {"body": b""}],
        ids=["plain", "127 bytes of topic", "128 bytes of topic", "long topic", "no properties", "no body"],
    )
    def test_is_read_as_it_was_written(self, fields: dict[str, Any]):
        stored = replace(STORED, **fields)

        assert stored_message(write_stored(stored)) == stored

    def test_is_read_where_addresses_are_of_the_sixth_version(self):
        found = stored_message(write_stored(STORED, IPV6))

        assert found.id == (IPV6 + struct.pack(">q", 4000)).hex().upper()
        assert (found.topic, found.body, found.properties) == (STORED.topic, STORED.body, STORED.properties)
        assert (found.stored_at, found.log_offset, found.queue_offset, found.retries) == (AT, 4000, 17, 2)

    def test_is_read_one_behind_the_other(self):
        others = [replace(STORED, topic="t" * 200, queue=0), replace(STORED, body=b"x" * 100_000)]

        assert list(stored_messages(b"".join(map(write_stored, [STORED, *others])))) == [STORED, *others]

    @pytest.mark.parametrize("data", [b"", b"\x00" * 200, b"\xff" * 200, write_stored(STORED)[3:]], ids=repr)
    def test_is_nothing_where_no_message_begins(self, data: bytes):
        assert requests.viewed(RemotingAnswer(0, "", {}, data)) is None

    @pytest.mark.parametrize("size", [8, 30, 60, 90])
    def test_is_nothing_where_it_is_cut_off(self, size: int):
        assert requests.viewed(RemotingAnswer(0, "", {}, write_stored(STORED)[:size])) is None


class TestProperties:
    @pytest.mark.parametrize("properties", [{}, {"KEYS": "m 4711", "ce-about": "shop.order:1"}, {"empty": "", "who": "Zoë"}])
    def test_are_read_as_they_were_written(self, properties: dict[str, str]):
        assert read_properties(write_properties(properties)) == properties

    def test_may_lack_the_last_end(self):
        assert read_properties("a\x011\x02b\x012") == {"a": "1", "b": "2"}


class TestFound:
    def test_has_only_what_has_that_very_key(self):
        """The broker's index knows hashes."""
        others = [replace(STORED, properties={"UNIQ_KEY": "m.11", "KEYS": "m1 m.1x"}), replace(STORED, properties={})]
        answer = RemotingAnswer(0, "", {}, b"".join(map(write_stored, [*others, STORED])))

        assert [requests.found(answer, key) for key in ("m.1", "m", "4711", "m.")] == [[STORED]] * 3 + [[]]
