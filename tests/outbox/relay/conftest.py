"""Fixtures for relays with the memory broker, on Django's connection or on connections of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F

from outbox import conf, database
from outbox.brokers.base import EndSemantics, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.message import TopicSpec, TopicType
from outbox.models import Batch, Topic
from outbox.outages import Backoff
from outbox.relay import commit as commit_module
from outbox.relay.breaker import Breakers, Budget
from outbox.relay.commit import Committer
from outbox.relay.rounds import Relay
from outbox.relay.splitter import Splitter
from tests.clock import Clock
from tests.factories import TicketFactory, TopicFactory, stored

LANE = 1


@dataclass
class Topics:
    """Creates a topic in the database and adds it to the broker."""

    specs: dict[str, TopicSpec] = field(default_factory=dict)

    def __call__(self, kind: str = "normal", **fields: Any) -> Topic:
        topic = TopicFactory(type=kind, **fields)
        self.specs[topic.name] = TopicSpec(topic.name, TopicType(kind))
        return topic


@pytest.fixture
def make_topic() -> Topics:
    return Topics()


@pytest.fixture
def make_broker(make_topic: Topics) -> Callable[..., MemoryBroker]:
    def make(end: EndSemantics = EndSemantics.IDEMPOTENT, *, window: timedelta | None = None, **options: Any) -> MemoryBroker:
        broker = MemoryBroker("default", {"END": end, "COMMIT_WINDOW": window, **options}, [])
        broker.topics = make_topic.specs  # as they come
        return broker

    return make


@pytest.fixture
def broker(make_broker: Callable[..., MemoryBroker]) -> MemoryBroker:
    return make_broker()


@pytest.fixture
def connect() -> Iterator[Callable[[], database.Connection]]:
    opened: list[database.Connection] = []

    def connect() -> database.Connection:
        opened.append(database.connect("default"))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def own() -> Iterator[database.Connection]:
    """A connection of the test's own; with it ends what relays have announced."""
    with database.connect("default") as own:
        yield own
        own.execute("DELETE FROM outbox_wakeup")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_relay(broker: MemoryBroker, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Relay]:
    monkeypatch.setattr("outbox.relay.rounds.RETRY_BASE", timedelta(0))

    def make(connection: database.Connection | None = None, *, lane: int = LANE, **options: Any) -> Relay:
        settings = conf.RelaySettings(**{"lease": timedelta(seconds=30), "sweep_age": timedelta(0)} | options)
        connection = connection or database.raw("default")
        return Relay(connection, broker, lane, settings=settings, clock=clock, random=lambda: 0.5)

    return make


@pytest.fixture
def hold_budget(monkeypatch: pytest.MonkeyPatch) -> Callable[[Breakers, int], None]:
    """Keep the budget of a call at a number of bytes, however fast the calls are."""

    def hold(breakers: Breakers, size: int) -> None:
        monkeypatch.setattr(Budget, "MIN_SIZE", size)
        monkeypatch.setattr(Budget, "MAX_SIZE", size)
        breakers.budget.size = size

    return hold


@pytest.fixture
def relay(db: None, make_relay: Callable[..., Relay]) -> Relay:
    return make_relay()


@pytest.fixture
def splitter(db) -> Splitter:
    retry = Backoff(timedelta(seconds=100), timedelta(seconds=1000), lambda: 1.0)
    return Splitter(database.raw("default"), retry, misconfigured_wait=timedelta(hours=1))


@pytest.fixture
def make_committer() -> Callable[..., Committer]:
    def make(broker: MemoryBroker, connection: database.Connection | None = None, **options: Any) -> Committer:
        connection = connection or database.raw("default")
        splitter = Splitter(connection, Backoff(timedelta(0), timedelta(0)), timedelta(0))
        return Committer(connection, broker, splitter, **{"source": "urn:uuid:1"} | options)

    return make


@pytest.fixture
def committer(make_committer: Callable[..., Committer], broker: MemoryBroker) -> Committer:
    return make_committer(broker)


@pytest.fixture
def prepare(broker: MemoryBroker, make_topic: Topics, make_relay: Callable[..., Relay]) -> Callable[..., Batch]:
    """Store a batch that was decided that long ago, and whose commits were lost."""

    def prepare(size: int = 2, ago: timedelta = timedelta(hours=1)) -> Batch:
        topic = make_topic("transaction")
        TicketFactory.create_batch(size, topic=topic)
        broker.fail("end", SendStatus.UNSURE, times=None)
        make_relay().step()
        broker.heal()
        batch = Batch.objects.get(topic_id=topic.id)
        Batch.objects.filter(pk=batch.id).update(decided_at=F("decided_at") - ago, ends_until=F("ends_until") - ago)
        found: Batch = stored(batch)
        return found

    return prepare


@pytest.fixture
def ends(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, timedelta | None]]:
    """The calls of the broker's `end`: of how many halves each was, and within which time."""
    calls: list[tuple[int, timedelta | None]] = []
    end = broker.end

    def listen(halves: Any, resolution: Any, *, within: timedelta | None = None) -> Any:
        calls.append((len(halves), within))
        return end(halves, resolution, within=within)

    monkeypatch.setattr(broker, "end", listen)
    return calls


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a sweep take one batch at once, and stop after a number of them."""

    def pages(batches: int = 1, seconds: float = 0) -> None:
        monkeypatch.setattr(commit_module, "PAGE_LIMIT", {"batches": batches, "messages": 2000})
        monkeypatch.setattr(commit_module, "SWEEP_SECONDS", seconds)

    return pages
