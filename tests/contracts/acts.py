"""What tests of the contract do all the time, said shortly."""

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.brokers.base import Broker, DeadLetter, Delivery, Ended, Found, HalfRef, Outgoing, Verdict
from outbox.message import COMMIT, Resolution, TopicType
from tests.contracts.harness import Harness

INVISIBLE = timedelta(seconds=60)
NO_TIME = timedelta()


@dataclass
class Acts:
    harness: Harness
    broker: Broker

    def message(
        self,
        kind: TopicType = TopicType.NORMAL,
        *,
        body: bytes = b"{}",
        key: str = "",
        tag: str = "",
        headers: dict[str, str] | None = None,
        deliver_at: datetime | None = None,
    ) -> Outgoing:
        is_half = kind is TopicType.TRANSACTION
        return Outgoing(
            message_id=str(uuid.uuid4()),
            topic=self.harness.topic(kind),
            body=body,
            key=key,
            tag=tag,
            headers=headers or {},
            token=f"here:1:1:{uuid.uuid4().int % 1000}" if is_half else "",
            deliver_at=deliver_at,
        )

    def send(self, *messages: Outgoing) -> None:
        assert [outcome.verdict for outcome in self.broker.send(messages)] == [Verdict.ACCEPTED] * len(messages)

    def send_bodies(self, *bodies: bytes, kind: TopicType = TopicType.NORMAL, key: str = "") -> list[Outgoing]:
        messages = [self.message(kind, body=body, key=key) for body in bodies]
        self.send(*messages)
        return messages

    def send_halves(self, *messages: Outgoing) -> list[HalfRef]:
        outcomes = self.broker.send_halves(messages)
        assert [outcome.verdict for outcome in outcomes] == [Verdict.ACCEPTED] * len(messages)
        return [
            HalfRef(message.topic, outcome.half_id, message.message_id)
            for message, outcome in zip(messages, outcomes, strict=True)
        ]

    def half(self) -> HalfRef:
        return self.send_halves(self.message(TopicType.TRANSACTION))[0]

    def end(self, *halves: HalfRef, resolution: Resolution = COMMIT) -> list[Ended | None]:
        return [outcome.ended for outcome in self.broker.end(halves, resolution)]

    def receive(
        self,
        kind: TopicType = TopicType.NORMAL,
        *,
        group: str = "group",
        limit: int = 100,
        tags: Iterable[str] | None = None,
        broker: Broker | None = None,
        wait: timedelta = NO_TIME,
    ) -> list[Delivery]:
        wanted = None if tags is None else frozenset(tags)
        topics = {self.harness.topic(kind): wanted}
        return (broker or self.broker).receive(group, topics, limit=limit, invisible_for=INVISIBLE, wait=wait)

    def receive_again(self, kind: TopicType = TopicType.NORMAL, *, group: str = "group") -> list[Delivery]:
        """Receive what is due again by now."""
        return self.receive(kind, group=group, wait=self.harness.lateness)

    def bodies(self, kind: TopicType = TopicType.NORMAL, *, group: str = "group", limit: int = 100) -> list[bytes]:
        return [delivery.body for delivery in self.receive(kind, group=group, limit=limit)]

    def waiting(self, kind: TopicType = TopicType.NORMAL, group: str = "group") -> int:
        return self.broker.backlog(group).get(self.harness.topic(kind), 0)

    def dead_letters(self, group: str = "group", *, count: int = 0) -> list[DeadLetter]:
        """List those of this test, so many at least as soon as they can be seen."""
        topics = {topic.name for topic in self.harness.topics.values()}
        deadline = time.monotonic() + self.harness.lateness.total_seconds()
        while True:
            found = [letter for letter in self.broker.dead_letters(group, limit=10_000) if letter.topic in topics]
            if len(found) >= count or time.monotonic() >= deadline:
                return found

    def find(self, message_id: str, *states: str) -> list[Found]:
        """Look a message up, again until it is in these states: a server's index follows its log a little later."""
        deadline = time.monotonic() + self.harness.lateness.total_seconds()
        while True:
            found = self.broker.find(message_id)
            if [one.state for one in found] == list(states):
                return found
            assert time.monotonic() < deadline, f"{message_id} is {[one.state for one in found]}, not {list(states)}"
