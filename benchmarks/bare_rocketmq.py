"""The minimal RocketMQ client: handwritten requests, 32 in flight, each outcome an assertion."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from outbox.brokers.rocketmq.stubs import Code, MessagingServiceStub, definition, service

IN_FLIGHT = 32

METADATA = grpc.aio.Metadata(
    ("x-mq-language", "PYTHON"),
    ("x-mq-protocol", "GRPC_V2"),
    ("x-mq-client-version", "5.1.2"),
    ("x-mq-date-time", "20260101T000000Z"),
    ("x-mq-client-id", "bare"),
    ("x-mq-namespace", ""),
)


def send(endpoints: str, topic: str, properties: dict[str, str], body: bytes, count: int) -> float:
    """Send whole messages; return how many in a second."""
    return asyncio.run(_run(endpoints, lambda stub: _send(stub, topic, properties, body, is_half=False), count))


def send_and_commit(endpoints: str, topic: str, properties: dict[str, str], body: bytes, count: int) -> float:
    """Store half messages, each committed as soon as it is stored; return how many in a second."""
    return asyncio.run(_run(endpoints, lambda stub: _send_and_commit(stub, topic, properties, body), count))


async def _run(endpoints: str, act: Callable[[Any], Any], count: int) -> float:
    async with grpc.aio.insecure_channel(endpoints) as channel:
        stub = MessagingServiceStub(channel)
        await act(stub)  # the connection is there
        turns = iter(range(count))
        began = time.perf_counter()
        await asyncio.gather(*[_work(stub, act, turns) for _ in range(IN_FLIGHT)])
        return count / (time.perf_counter() - began)


async def _work(stub: Any, act: Callable[[Any], Any], turns: Iterator[int]) -> None:
    for _ in turns:
        await act(stub)


async def _send(stub: Any, topic: str, properties: dict[str, str], body: bytes, *, is_half: bool) -> tuple[str, str]:
    """Return message id and transaction id."""
    message_id = str(uuid.uuid4())
    system = definition.SystemProperties(
        message_id=message_id,
        message_type=definition.MessageType.TRANSACTION if is_half else definition.MessageType.NORMAL,
        keys=[message_id],
        body_encoding=definition.Encoding.IDENTITY,
        born_host="bare",
    )
    system.born_timestamp.FromMilliseconds(time.time_ns() // 1_000_000)
    resource = definition.Resource(name=topic)
    message = definition.Message(topic=resource, system_properties=system, user_properties=properties, body=body)
    answer = await stub.SendMessage(service.SendMessageRequest(messages=[message]), metadata=METADATA, timeout=5)
    assert answer.status.code == Code.OK, answer
    return message_id, answer.entries[0].transaction_id


async def _send_and_commit(stub: Any, topic: str, properties: dict[str, str], body: bytes) -> None:
    message_id, transaction_id = await _send(stub, topic, properties, body, is_half=True)
    request = service.EndTransactionRequest(
        topic=definition.Resource(name=topic),
        message_id=message_id,
        transaction_id=transaction_id,
        resolution=definition.TransactionResolution.COMMIT,
        source=definition.TransactionSource.SOURCE_CLIENT,
    )
    answer = await stub.EndTransaction(request, metadata=METADATA, timeout=5)
    assert answer.status.code == Code.OK, answer
