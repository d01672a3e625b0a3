"""A fuzzer for each server: odd messages of another program between good ones, on two topics of one group."""

from __future__ import annotations

import os
import re
import struct
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from random import Random
from typing import Any
from zlib import compress

import pytest

from outbox import Message, conf, consumer, publish_raw
from outbox.brokers.base import Broker, Delivery
from outbox.consuming import handle, register
from outbox.consuming.outcome import Outcome
from outbox.consuming.worker import ConsumerThreads, Worker
from outbox.message import TopicType
from outbox.models import Deferred, MessageRow, Topic
from outbox.topics import write_topics
from tests.journeys import outcome as report
from tests.outbox.brokers.foreign import KINDS, TEXTS, Foreign, good, odd
from tests.waiting import wait_until

SEED = int(os.environ.get("FUZZ_SEED", 20))
GOOD, ODD = 200, int(os.environ.get("FUZZ_ODD", 2000))
SECONDS = 60 + ODD // 20
MARK = re.compile(r"(?:good|odd) \d+\.")

Write = Callable[[Sequence[Foreign]], list[Foreign]]  # returns those that the server took


@pytest.fixture(
    params=[
        pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.timeout(240 + SECONDS)])
        for name in ("rabbitmq", "kafka", "rocketmq")
    ]
)
def write(request: pytest.FixtureRequest, topics: list[str], settings: Any) -> Write:
    """Write messages by the server's own protocol, past the client that reads them."""
    backend, options, write = SERVERS[request.param](topics)
    settings.OUTBOX = {
        **settings.OUTBOX,
        "BROKERS": {"default": {"BACKEND": backend, "OPTIONS": options}},
        "TOPICS": {topics[0]: {}, topics[1]: {"TYPE": "fifo"}, "echoes": {}},
    }
    write_topics("default")
    return write


@pytest.fixture
def topics() -> list[str]:
    """A topic whose handler reads a type, and an ordered one whose handler takes all."""
    return [f"{name}-{uuid.uuid4().hex[:8]}" for name in ("typed", "plain")]


@pytest.fixture
def troubles(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What went wrong outside of single messages."""
    found: list[BaseException] = []
    monkeypatch.setattr("outbox.consuming.worker.Worker._log_error", lambda self, error, pause: found.append(error))
    return found


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Delivery, Outcome]]:
    """The outcome of each delivery, and of each dead letter of the server."""
    found: list[tuple[Delivery, Outcome]] = []
    settle, defer = Worker._settle, handle.defer

    def noted(self: Worker, taken: Any, results: Any) -> bool:
        found.extend((held.delivery, result.outcome) for held, result in zip(taken, results, strict=True))
        return settle(self, taken, results)

    def noted_dead_letters(group: Any, deferrals: Any) -> Any:
        results = defer(group, deferrals)
        found.extend((delivery, result.outcome) for (delivery, _), result in zip(deferrals, results, strict=True))
        return results

    monkeypatch.setattr(Worker, "_settle", noted)
    monkeypatch.setattr("outbox.consuming.worker.defer", noted_dead_letters)
    return found


@pytest.fixture
def consumers(write: Write, topics: list[str], ends: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConsumerThreads]:
    """Consumers of a group, whose handlers write the mark of each message into their transaction, as a message of theirs."""
    monkeypatch.setattr("outbox.message.registered", {})

    class Noted(Message):
        text: str

        class Meta:
            topic = topics[0]
            type = "shop.Noted"

    def echo(message: object) -> None:
        publish_raw("echoes", mark_of(message).encode() or b"no mark")

    consumer(Noted, group="cart")(lambda message, context: echo(message))
    consumer(topic=topics[1], group="cart", on_dead="skip")(lambda message, context: echo(message))
    threads = ConsumerThreads([register.group("cart")])
    threads.start()
    yield threads
    threads.stop()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_odd_messages_are_handled_ignored_or_dead_and_hold_up_no_good_one(
    request, write, topics, no_consumers, troubles, ends, consumers
):
    written = mixed(topics)

    messages = write(written)
    with closing(conf.make_broker("default")) as broker:
        is_calm = Calm(consumers, broker, len(messages))
        with suppress(AssertionError):
            wait_until(lambda: troubles or is_calm(), SECONDS)
        was_done = is_calm()
    was_working = consumers.is_working()
    consumers.stop()
    consumers.join()

    became = outcomes(ends)
    show(written, messages, became)
    handled = [message for message in messages if message.kind == "good" and "handled" in became[message.mark]]
    report.Outcome(
        run="foreign bytes",
        broker=request.node.callspec.params["write"],
        seconds=None,
        faults={"foreign message": len(messages) - GOOD},
        messages=GOOD,
        lost=GOOD - len(handled),
        ghosts=None,
        copies=None,
        applied_twice=sum(became[message.mark].count("handled") > 1 for message in handled),
        out_of_order=None,
        settled_seconds=None,
    ).write()
    assert [(error, mark_of(error)) for error in troubles] == []
    assert was_working
    ended = [(message, became[message.mark]) for message in messages if message.mark]
    assert [(message.text(), its_ends) for message, its_ends in ended if len(its_ends) != 1] == []
    assert [message.text() for message in messages if message.kind == "good" and became[message.mark] != ["handled"]] == []
    assert was_done, consumers.counts()
    assert not Deferred.objects.filter(error="", dead_at__isnull=False).exists()


def mixed(topics: Sequence[str]) -> list[Foreign]:
    """Return odd messages with good ones at even distances between them."""
    step = ODD // GOOD
    odds = [odd(SEED, number, topics) for number in range(ODD)]
    return [one for number in range(GOOD) for one in (good(number, topics), *odds[number * step : (number + 1) * step])]


class Calm:
    """Whether each message was counted, nothing waits but for code of another release, and no count has changed for a while."""

    SECONDS = 2.0  # a message that the server gave up, or that a process holds, is counted within this time

    def __init__(self, consumers: ConsumerThreads, broker: Broker, number: int) -> None:
        self.consumers, self.broker, self.number = consumers, broker, number
        self.ended, self.since = 0, time.monotonic()

    def __call__(self) -> bool:
        (counts,) = self.consumers.counts().values()
        ended = counts.handled + counts.duplicates + counts.ignored + counts.deferred + counts.dead_letters
        if ended != self.ended:
            self.ended, self.since = ended, time.monotonic()
        waits = Deferred.objects.filter(dead_at=None).exclude(reason="no handler").exclude(error__startswith="UnknownMessageType")
        return (
            ended >= self.number
            and time.monotonic() - self.since > self.SECONDS
            and not any(self.broker.backlog("cart").waiting.values())
            and not waits.exists()
        )


def outcomes(ends: Iterable[tuple[Delivery, Outcome]]) -> dict[str, list[str]]:
    """Return what became of messages, by their marks."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in MessageRow.objects.filter(topic_id=Topic.objects.get(name="echoes").id):
        found[mark_of(bytes(row.body))].append("handled")
    for row in Deferred.objects.all():
        found[mark_of(bytes(row.body))].append("dead letter" if row.dead_at else "waits for code")
    for delivery, outcome in ends:
        mark = mark_of(delivery.body)
        if outcome is Outcome.IGNORED or (outcome is Outcome.DUPLICATE and not (mark and found[mark])):
            found[mark].append(outcome)
    return found


def mark_of(message: object) -> str:
    return "".join(MARK.findall(str(message))[:1])


def show(written: Sequence[Foreign], taken: Sequence[Foreign], became: Mapping[str, Sequence[str]]) -> None:
    """Print what became of each kind."""
    print(f"\nFUZZ_SEED={SEED}")  # noqa: T201  (with -s, or where the test fails)
    refused = [message for message in written if message not in taken]
    for kind in ("good", *KINDS):
        ends = Counter(str(end) for message in taken if message.kind == kind and message.mark for end in became[message.mark])
        ends["refused by the server"] = len([message for message in refused if message.kind == kind])
        print(f"{kind:30} {dict(sorted(ends.items()))}")  # noqa: T201
    print(f"{'without a mark':30} {dict(Counter(map(str, became[''])))}")  # noqa: T201
    for message in refused:
        print("refused", message.text())  # noqa: T201


def on_kafka(topics: Sequence[str]) -> tuple[str, dict[str, Any], Write]:
    from tests.kafka_node import server
    from tests.outbox.brokers.kafka.cluster import create_topic
    from tests.outbox.brokers.kafka.raw_records import Record, produce_raw

    for topic in topics:
        create_topic(topic, config={"message.timestamp.after.max.ms": str(2**63 - 1)})

    def record(message: Foreign) -> Record:
        headers = [(name.replace(b"ce-", b"ce_"), value) for name, value in message.headers.items()]
        headers += [(b"outbox-tag", message.tag)] if message.tag else []
        return Record(message.topic, message.body, message.key or None, headers, message.time)

    def write(messages: Sequence[Foreign]) -> list[Foreign]:
        produce_raw(map(record, messages))
        return list(messages)

    return "outbox.brokers.kafka.KafkaBroker", {"SERVERS": [server().address]}, write


def on_rabbitmq(topics: Sequence[str]) -> tuple[str, dict[str, Any], Write]:
    import amqp

    from outbox.brokers.rabbitmq.topology import queue_name, state_of
    from tests.outbox.brokers.rabbitmq.raw_frames import publish_bytes
    from tests.rabbitmq_node import server

    def write(messages: Sequence[Foreign]) -> list[Foreign]:
        with amqp.Connection(server().address) as connection, connection.channel() as channel:
            for queue in (queue_name(topic, "cart") for topic in topics):
                wait_until(lambda queue=queue: (state_of(channel, queue) or (0, 0))[1])  # bound, and consumed
        taken: list[Foreign] = []
        confirmed: list[int] = []
        left = deque(messages)
        while left:
            with suppress(amqp.AMQPError), amqp.Connection(server().address) as connection, connection.channel() as channel:
                channel.confirm_select()
                channel.events["basic_ack"].add(lambda tag, multiple: confirmed.append(tag))
                while left:
                    message = left.popleft()  # the server ends the connection where it does not take a message
                    body = message.body or b""
                    publish_bytes(channel, message.topic, *amqp_properties(message), body, routing_key=message.tag)
                    while not confirmed:
                        connection.drain_events(timeout=SECONDS)
                    confirmed.clear()
                    taken.append(message)
        return taken

    options = {"NODES": [server().address], "GROUPS": {topic: ["cart"] for topic in topics}}
    return "outbox.brokers.rabbitmq.RabbitMQBroker", options, write


def amqp_properties(message: Foreign) -> tuple[int, bytes]:
    """Return the flags of a message's properties, and the properties; its headers have values of various types."""
    from tests.outbox.brokers.rabbitmq.raw_frames import long, short, table

    random = Random(message.mark)
    number = struct.pack(">q", message.time if message.time is not None else 7)
    typed = [
        *(
            b"b\xff",
            b"B\xff",
            b"s\x80\0",
            b"u\xff\xff",
            b"I" + bytes(4),
            b"i\xff\xff\xff\xff",
            b"l" + number,
            b"f\x7f\x7f\xff\xff",
            b"V",
        ),
        *(
            b"d\x7f\xef" + b"\xff" * 6,
            b"D\xff\0\0\0\1",
            b"T" + number,
            b"t\1",
            b"F" + table([(b"\xff", b"V")]),
            b"A" + long(b"t\1" * 3),
        ),
        *(b"x" + long(b"\xff\0"), deep(b"A", 200)),
    ]
    is_odd = message.kind != "good"
    headers = [(name, b"S" + long(value)) for name, value in message.headers.items()]
    if is_odd:
        headers += [(b"t%d" % n, random.choice(typed)) for n in range(random.randrange(4))]
        headers = [(name, random.choice(typed) if random.random() < 0.05 else value) for name, value in headers]
    headers.append((b"outbox-key", b"S" + long(message.key)))
    content_type = message.headers.get(b"content-type", b"")
    fields = [
        (0x8000, short(content_type[:255]) if content_type and random.random() < 0.5 else None),
        (0x4000, short(b"\xff") if is_odd and random.random() < 0.1 else None),
        (0x2000, table(headers) if message.headers else None),
        (0x1000, b"\2"),
        (0x0800, bytes([message.priority]) if message.priority is not None else None),
        (0x0400, short(b"\xff\0") if is_odd and random.random() < 0.1 else None),
        (0x0100, short(message.expiration.encode()) if message.expiration else None),
        (0x0080, short(message.headers[b"ce-id"][:255]) if b"ce-id" in message.headers and random.random() < 0.5 else None),
        (0x0040, number if message.time is not None else None),
        (0x0008, short(b"\xff") if is_odd and random.random() < 0.05 else None),
    ]
    return sum(flag for flag, value in fields if value is not None), b"".join(value for _, value in fields if value is not None)


def deep(kind: bytes, levels: int) -> bytes:
    """Return arrays in arrays."""
    from tests.outbox.brokers.rabbitmq.raw_frames import long

    value = b"V"
    for _ in range(levels):
        value = kind + long(value)
    return value


def on_rocketmq(topics: Sequence[str]) -> tuple[str, dict[str, Any], Write]:
    from outbox.brokers.rocketmq.remoting.frames import COMPRESSED, Request
    from outbox.brokers.rocketmq.remoting.requests import send
    from project.servers.remoting import exchange
    from tests.rocketmq_node import server

    server().make_topic(topics[0], TopicType.NORMAL)
    server().make_topic(topics[1], TopicType.FIFO)

    def request(message: Foreign) -> Request:
        random = Random(message.mark)
        properties = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in message.headers.items()}
        properties |= {"outbox-key": message.key.decode(errors="replace")} if message.key else {}
        properties |= {"TAGS": message.tag.decode(errors="replace")} if message.tag else {}
        body, flag = message.body or b"", 0
        if message.kind != "good":
            body, flag = random.choice(
                [(body, 0)] * 3 + [(body, random.getrandbits(11) & (COMPRESSED | 0b111 << 8)), (compress(body), COMPRESSED)]
            )
            names = ROCKETMQ_PROPERTIES if random.random() < 0.2 else []
            properties |= {name: random.choice(TEXTS).decode(errors="replace") for name in names if random.random() < 0.2}
        queue = sum(message.key) % 4
        born_at = message.time and min(message.time, LAST_BORN)
        return send(message.topic, queue, body, properties, group="theirs", flag=flag, born_at=born_at)

    def write(messages: Sequence[Foreign]) -> list[Foreign]:
        return [message for message in messages if exchange(server().broker_address, request(message)).code == 0]

    options = {"ENDPOINTS": server().endpoints, "NAME_SERVERS": [server().name_server]}
    return "outbox.brokers.rocketmq.RocketMQBroker", options, write


SERVERS = {"kafka": on_kafka, "rabbitmq": on_rabbitmq, "rocketmq": on_rocketmq}

LAST_BORN = 253_402_300_799_999  # milliseconds; a proxy fails at later ones, see rocketmq/test_undeliverable.py

# Properties that mean something to a server or a client; those that make a half message or a delayed one of it are left out.
ROCKETMQ_PROPERTIES = (
    "KEYS", "UNIQ_KEY", "BORN_TIMESTAMP", "__BORNHOST", "__SHARDINGKEY", "POP_CK", "1ST_POP_TIME", "CONSUME_START_TIME",
    "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "ORIGIN_MESSAGE_ID", "DUP_INFO", "TRACE_ON",
    "INSTANCE_ID", "MSG_REGION", "PGROUP", "MIN_OFFSET", "MAX_OFFSET", "CLUSTER", "EXTEND_UNIQ_INFO", "WAIT", "BUYER_ID",
    "TRANSACTION_CHECK_TIMES", "CHECK_IMMUNITY_TIME_IN_SECONDS", "__transactionId__", "CORRELATION_ID", "TTL", "REPLY_TO_CLIENT",
)  # fmt: skip
