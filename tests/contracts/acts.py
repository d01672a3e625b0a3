"""Short forms of what tests of the contract do often."""

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from msgspec.structs import replace

from outbox.brokers.base import (
    Broker,
    Delivery,
    Ended,
    HalfRef,
    HalfStatus,
    Outgoing,
    SendStatus,
    StoredCopy,
)
from outbox.brokers.capabilities import HalfMessages
from outbox.message import COMMIT, Resolution, TopicType
from tests.contracts.harness import Harness

INVISIBLE = timedelta(seconds=60)  # for tests that let this time pass
HELD = timedelta(minutes=20)  # for all others: long enough that no message is delivered again, even on a slow machine
NO_TIME = timedelta()

# Two projects: the ids of their outboxes, and their names.
SHOP = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000a", "shop"
BLOG = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000b", "blog"


@dataclass(frozen=True, slots=True)
class AgedDelivery:
    """A delivery, and the age of the harness when it was received."""

    delivery: Delivery
    age: timedelta


@dataclass
class Acts:
    harness: Harness
    broker: Broker

    def message(
        self,
        kind: TopicType = TopicType.NORMAL,
        *,
        body: bytes | None = None,
        key: str = "",
        tag: str = "",
        headers: dict[str, str] | None = None,
        deliver_at: datetime | None = None,
    ) -> Outgoing:
        is_half = kind is TopicType.TRANSACTION
        return Outgoing(
            message_id=str(uuid.uuid4()),
            topic=self.harness.topic(kind),
            body=self.harness.body if body is None else body,
            key=key,
            tag=tag,
            headers=headers or {},
            token=f"here:1:1:{uuid.uuid4().int % 1000}" if is_half else "",
            deliver_at=deliver_at,
        )

    def send(self, *messages: Outgoing) -> None:
        results = self.broker.send(messages)
        failed = [one for one in results if one.status is not SendStatus.ACCEPTED]
        assert not failed, failed[0]

    def send_bodies(self, *bodies: bytes, kind: TopicType = TopicType.NORMAL, key: str = "") -> list[Outgoing]:
        messages = [self.message(kind, body=body, key=key) for body in bodies]
        self.send(*messages)
        return messages

    def send_halves(self, *messages: Outgoing) -> list[HalfRef]:
        outcomes = self.broker.send_halves(messages)
        assert [outcome.status for outcome in outcomes] == [SendStatus.ACCEPTED] * len(messages)
        return [
            HalfRef(message.topic, outcome.half_id, message.message_id, outcome.place)
            for message, outcome in zip(messages, outcomes, strict=True)
        ]

    def half(self) -> HalfRef:
        return self.send_halves(self.message(TopicType.TRANSACTION))[0]

    def decide(self, half: HalfRef) -> HalfRef:
        """Return the reference to a half message that is decided now."""
        return replace(half, decided_at=self.harness.clock())

    def decided_half(self) -> HalfRef:
        return self.decide(self.half())

    def unknown_half(self, *, place: str = "") -> HalfRef:
        """Return the reference to a half message that was decided but never arrived."""
        topic = self.harness.topic(TopicType.TRANSACTION)
        message_id = str(uuid.uuid4())
        return self.decide(HalfRef(topic, HalfMessages.of(self.broker).new_half_id(message_id), message_id, place))

    def look_up(self, half: HalfRef) -> HalfStatus:
        """Return the status of a half message; tries again while it is UNKNOWN."""
        for _ in self.harness.tries():
            [status] = self.broker.look_up_halves([half])
            if status is not HalfStatus.UNKNOWN:
                break
        return status

    def end(self, *halves: HalfRef, resolution: Resolution = COMMIT) -> list[Ended | None]:
        return [outcome.ended for outcome in self.broker.end(halves, resolution)]

    def receive(
        self,
        kind: TopicType = TopicType.NORMAL,
        *,
        group: str = "group",
        limit: int = 100,
        broker: Broker | None = None,
        wait: timedelta = NO_TIME,
        hold: timedelta = HELD,
        count: int = 0,
    ) -> list[Delivery]:
        """Receive messages; tries again until there are `count`."""
        topics = [self.harness.topic(kind)]
        found: list[Delivery] = []
        for _ in self.harness.tries():
            left = limit - len(found)
            found += (broker or self.broker).receive(group, topics, limit=left, invisible_for=hold, wait=wait)
            if len(found) >= count:
                break
        return found

    def receive_again(self, kind: TopicType = TopicType.NORMAL, *, group: str = "group", count: int = 1) -> list[Delivery]:
        """Receive messages that are due again."""
        return self.receive(kind, group=group, count=count)

    def receive_while_time_passes(self, span: timedelta, kind: TopicType = TopicType.NORMAL, *, count: int) -> list[AgedDelivery]:
        """Receive repeatedly during that time, and after it until there are `count` messages."""
        found: list[AgedDelivery] = []

        def receive(count: int = 0) -> None:
            found.extend(AgedDelivery(delivery, self.harness.age()) for delivery in self.receive(kind, count=count))

        for _ in range(10):
            receive()
            self.harness.pass_time(span / 10)
        receive(count - len(found))
        return found

    def bodies(
        self, kind: TopicType = TopicType.NORMAL, *, group: str = "group", limit: int = 100, count: int = 0
    ) -> list[bytes]:
        return [delivery.body for delivery in self.receive(kind, group=group, limit=limit, count=count)]

    def waiting(self, kind: TopicType = TopicType.NORMAL, group: str = "group", *, count: int | None = None) -> int:
        """Return the backlog of a group; tries again until it is `count`, because a server may count late."""
        for _ in self.harness.tries():
            found = self.broker.backlog(group).waiting.get(self.harness.topic(kind), 0)
            if count is None or found == count:
                break
        return found

    def find(self, message_id: str, *states: str) -> list[StoredCopy]:
        """Look up a message; tries again until its copies have these states, because a server's index may lag behind its log."""
        for _ in self.harness.tries():
            found = self.broker.find(message_id)
            if [one.state for one in found] == list(states):
                return found
        raise AssertionError(f"{message_id} is {[one.state for one in found]}, not {list(states)}")
