"""A harness for each broker that implements the contract. A new broker is one class and one line."""

import abc
import importlib.util
import itertools
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from django.db import connections
from psycopg import OperationalError

from outbox import database
from outbox.brokers.base import Broker, Outgoing, SendResult, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.celery import CeleryBroker
from outbox.celery.canvas import CapturingProducer, capture
from outbox.celery.stored import TOPIC
from outbox.embedded import EmbeddedBroker, halves, wakeup
from outbox.message import TopicSpec, TopicType
from tests.outbox.celery.app import add, app
from tests.quotes import python_blocks

CHECK_AFTER = timedelta(seconds=6)
CHECK_INTERVAL = timedelta(seconds=10)
CHECK_LIMIT = 3

TERMINATE = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE application_name = 'outbox embedded broker' AND datname = current_database()
"""


def broker_of_page(page: str) -> type[Broker]:
    """Return the broker that the Python blocks of a page of docs/ define, the only one."""
    names: dict[str, Any] = {"__name__": f"docs.{page}"}
    exec(compile("\n\n".join(python_blocks(page)), page, "exec", dont_inherit=True), names)  # noqa: S102
    [found] = [one for one in names.values() if isinstance(one, type) and issubclass(one, Broker) and not one.__abstractmethods__]
    return found


class Harness(abc.ABC):
    """One broker for one test, with topics of its own and a clock that the test advances."""

    broker_class: type[Broker]
    marks: ClassVar[list[pytest.MarkDecorator]] = []  # of each test that runs on it
    body = b"{}"  # one that the broker takes
    is_shared_by_processes = True
    lateness = timedelta()  # in real time, how late effects and due messages may become visible
    confirms_ends = True  # an accepted end has taken effect
    places_halves = False  # SendResult.place says where a half message is stored
    remembers_ends = True  # the first end of a half message is the answer to every later one, and to find()
    refuses_second_ack = True  # a repeated ack returns False
    ends_late = False  # an expired delivery can be ended or renewed until its message is delivered again
    knows_open_deliveries = False  # may_deliver_again() returns messages whose deliveries have not ended
    can_start_at_the_end = True  # START="latest"
    forgets_groups = False  # forget_group() works
    keeps_owners = ""  # what sets two projects apart where the server knows which outbox a group belongs to
    gives_back_at_once = False  # the deliveries of a process that died; otherwise when their time is over
    moves_between_members = True  # a message that was handed back goes to any member of its group
    reassigns_queues = False  # to another member of the group, while deliveries of the queue are open
    counts_what_is_handled = True  # backlog() includes messages that were received and not finished
    can_lose_ends = False  # lose_ends() works
    can_restart = False  # restart() works

    def __init__(self) -> None:
        unique = uuid.uuid4().hex[:8]
        self.source = f"urn:uuid:{uuid.uuid4()}"  # of an outbox of its own
        self.topics = {kind: TopicSpec(f"{kind}-{unique}", kind) for kind in TopicType}
        self.now = self._made_at = datetime.now(UTC)
        self._opened: list[Broker] = []

    def topic(self, kind: TopicType) -> str:
        return self.topics[kind].name

    def pass_time(self, span: timedelta) -> None:
        self.now += span

    def age(self) -> timedelta:
        """Return the time since the harness was made, by the broker's clock."""
        return self.now - self._made_at

    def tries(self) -> Iterator[int]:
        """Yield the numbers of tries, at least 1, while an effect may still become visible."""
        deadline = time.monotonic() + self.lateness.total_seconds()
        yield 1
        for number in itertools.count(2):
            if time.monotonic() >= deadline:
                return
            yield number

    def options(self) -> dict[str, Any]:
        return {
            "CLOCK": lambda: self.now,
            "CHECK_AFTER": CHECK_AFTER,
            "CHECK_INTERVAL": CHECK_INTERVAL,
            "CHECK_LIMIT": CHECK_LIMIT,
        }

    def open(self, **options: Any) -> Broker:
        """Create a broker as in another process: with the same server, and a connection of its own."""
        broker = self.broker_class("default", {**self.options(), **options}, list(self.topics.values()))
        self._opened.append(broker)
        return broker

    def options_elsewhere(self) -> dict[str, Any]:
        """Return options for another process, which JSON can represent, with the real time."""
        return {}

    def clock(self) -> datetime:
        """Return the current time of the clock for decisions, which may differ from the broker's a little."""
        return self.now

    def lose_ends(self, broker: Broker, *, arrive: bool) -> AbstractContextManager[None]:
        """
        Lose the answers to ends that a broker sends in the block, as a broken network does. See `can_lose_ends`.

        The caller's results are UNSURE; where none can have arrived, they may be UNAVAILABLE, too.

        Args:
            arrive: whether the server gets the requests. True: they take effect, and only the answers are lost.
        """
        raise NotImplementedError

    def new_group(self, name: str) -> str:
        """Return another name at each call, of a group that is there if the server makes none itself."""
        return f"{name}-{uuid.uuid4().hex[:8]}"

    def give_up(self, group: str, messages: Sequence[Outgoing]) -> None:
        """Have the server give up messages that wait for a group, all that do. See `Broker.gives_up`."""
        raise NotImplementedError

    def restart(self) -> None:
        """
        Kill the broker's server with SIGKILL, start it again, and return when it is ready. See `can_restart`.

        Connections break. Results that the server has answered hold as far as the broker's guarantees say.
        """
        raise NotImplementedError

    def is_now(self, time: datetime | None) -> bool:
        """Return whether something happened just now."""
        return time == self.now

    def without_polls(self, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: B027  (nothing wakes most brokers)
        """Disable polling during waits for messages, so that only notifications end them."""

    @abc.abstractmethod
    def open_unreachable(self) -> Broker:
        """Create a broker whose server cannot be reached."""

    def close(self) -> None:
        for broker in self._opened:
            broker.close()


class MemoryHarness(Harness):
    broker_class = MemoryBroker
    is_shared_by_processes = False
    places_halves = True
    ends_late = True
    knows_open_deliveries = True
    forgets_groups = True
    can_lose_ends = True

    def options(self) -> dict[str, Any]:
        return {**super().options(), "NAME": str(id(self)), "TRANSACTIONS": True}

    def open_unreachable(self) -> Broker:
        broker = self.open()
        assert isinstance(broker, MemoryBroker)
        for call in ("send", "send_halves", "end", "send_transaction", "look_up_halves"):
            broker.fail(call, SendStatus.UNAVAILABLE, times=None)
        return broker

    @contextmanager
    def lose_ends(self, broker: Broker, *, arrive: bool) -> Iterator[None]:
        assert isinstance(broker, MemoryBroker)
        broker.fail("end", SendStatus.UNSURE, times=None, stored=arrive)
        yield
        broker.heal()

    def give_up(self, group: str, messages: Sequence[Outgoing]) -> None:
        broker = self.open()
        assert isinstance(broker, MemoryBroker)
        for message in messages:
            broker.give_up(group, message, "delivered too often")

    def close(self) -> None:
        forget(str(id(self)))


class StatelessMemoryHarness(MemoryHarness):
    """Ends with RocketMQ's semantics: every COMMIT makes a copy."""

    remembers_ends = False

    def options(self) -> dict[str, Any]:
        return {**super().options(), "END": "stateless", "COMMIT_WINDOW": timedelta(seconds=2)}


class EmbeddedHarness(Harness):
    broker_class = EmbeddedBroker
    ends_late = True
    knows_open_deliveries = True
    forgets_groups = True
    can_lose_ends = True
    can_restart = True

    def open(self, **options: Any) -> Broker:
        """Create a broker; CLOCK=None: by the database's clock."""
        given = {**self.options(), **options}
        broker = EmbeddedBroker("default", given, list(self.topics.values()), clock=given.pop("CLOCK"))
        self._opened.append(broker)
        return broker

    def without_polls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wakeup, "POLL_SECONDS", 50)

    def open_unreachable(self) -> Broker:
        connections.settings["away"] = {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": "1"}
        return self.open(DATABASE="away")

    @contextmanager
    def lose_ends(self, broker: Broker, *, arrive: bool) -> Iterator[None]:
        end = halves.end

        def end_unheard(connection: database.Connection, *args: Any, **options: Any) -> list[SendResult]:
            if not arrive:
                self.restart()
                return end(connection, *args, **options)
            end(connection, *args, **options)
            connection.close()
            raise OperationalError("consuming input failed: server closed the connection unexpectedly")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(halves, "end", end_unheard)
            yield

    def restart(self) -> None:
        """End the server's processes that serve brokers; a crash of all of it would meet other tests, too."""
        with database.connect("default") as connection:
            connection.execute(TERMINATE)

    def close(self) -> None:
        super().close()
        if connections.settings.pop("away", None):
            del connections["away"]
        with database.connect("default") as connection:
            for table in ("delivery", "offset", "half", "message", "queue", "wakeup", "topic"):
                connection.execute(f"DELETE FROM outbox_embedded_{table}")  # TRUNCATE takes ten times as long for a few rows


class PageHarness(Harness):
    """The broker that docs/how-to/write-a-broker.md builds, as the page has it."""

    broker_class = broker_of_page("how-to/write-a-broker.md")
    ends_late = True
    can_start_at_the_end = False

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp()

    def options(self) -> dict[str, Any]:
        return {**self.options_elsewhere(), "CLOCK": lambda: self.now.timestamp()}

    def options_elsewhere(self) -> dict[str, Any]:
        return {"FILE": f"{self._folder}/outbox.db"}

    def open_unreachable(self) -> Broker:
        return self.open(FILE=f"{self._folder}/away/outbox.db")

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder)


class CeleryHarness(Harness):
    """The broker of Celery's tasks, before a broker of Celery's in memory. What it sent, `tests/outbox/celery` reads."""

    broker_class = CeleryBroker

    def __init__(self) -> None:
        super().__init__()
        self.topics = {TopicType.NORMAL: TopicSpec(TOPIC, TopicType.NORMAL)}
        producer = CapturingProducer(app)
        capture(add.s(1, 2), producer)
        [(_, _, self.body)] = producer.captured

    def options(self) -> dict[str, Any]:
        return {"APP": "tests.outbox.celery.app.app"}

    def open_unreachable(self) -> Broker:
        return self.open(APP="tests.outbox.celery.app.away")


HARNESSES: dict[str, type[Harness]] = {
    "memory": MemoryHarness,
    "stateless": StatelessMemoryHarness,
    "embedded": EmbeddedHarness,
    "page": PageHarness,
    "celery": CeleryHarness,
}

if importlib.util.find_spec("amqp"):
    from tests.contracts.rabbitmq import RabbitMQHarness

    HARNESSES["rabbitmq"] = RabbitMQHarness

# Deselected unless asked for (`make test-kafka`, `make test-rocketmq`), and not even imported where the client is not installed.
if importlib.util.find_spec("confluent_kafka"):
    from tests.contracts.kafka import KafkaHarness

    HARNESSES["kafka"] = KafkaHarness

if importlib.util.find_spec("rocketmq"):
    from tests.contracts.rocketmq import RocketMQHarness

    HARNESSES["rocketmq"] = RocketMQHarness
