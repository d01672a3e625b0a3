"""The testing kit, for pytest and unittest: published messages, and relays and consumers that run when the test calls them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import msgspec

from outbox import conf
from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.worker import Counts
from outbox.logs import forget_lines
from outbox.message import Half, Header, Message, Resolution
from outbox.models import Deferred
from outbox.publishing.draft import Draft, compose, compose_raw
from outbox.relay.cloudevents import SPEC_VERSION
from outbox.testing import explain
from outbox.testing.clock import Clock, age_rows
from outbox.testing.crash import crash
from outbox.testing.drive import Consumers, Relays, ask_database, open_databases, require_commit
from outbox.testing.published import Kind, Published, check_fields, read
from outbox.testing.stand_in import memory_brokers

if TYPE_CHECKING:
    from unittest import TestCase as Base
else:
    Base = object

MAX_ROUNDS = 1_000


class RunResult(msgspec.Struct, frozen=True):
    """The result of `run_until_idle()`: messages sent to brokers, and deliveries by outcome."""

    sent: int
    deliveries: Counts


class Outbox:
    """
    The outbox of one test, a context manager. Inside, a memory broker replaces each broker of the settings.

    In pytest it is the fixture `outbox`; in unittest, `OutboxTestMixin` provides it as `self.outbox`.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._relays = Relays(self._clock)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        forget_lines()  # repeated log lines are suppressed, so forget those of earlier tests
        self._stack.enter_context(memory_brokers(self._clock))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # --- published messages ---

    def published(self, kind: Kind | None = None, /, **fields: object) -> list[Published]:
        """
        Return the messages published in transactions that were not rolled back, in order.

        Args:
            kind: a message type or, for raw messages, the name of a topic; None: all messages.
            fields: only messages with these values.
        """
        check_fields(kind, fields)
        return [message for message in read(open_databases()) if message.is_of(kind) and not message.differences(fields)]

    def assert_published(self, kind: Kind, /, *, times: int = 1, **fields: object) -> None:
        """Assert that a message with these values was published, exactly `times` times."""
        matching = self.published(kind, **fields)
        if len(matching) != times:
            others = [message for message in self.published() if message not in matching]
            raise AssertionError(explain.miscounted(kind, fields, times=times, matching=matching, others=others))

    def assert_nothing_published(self, kind: Kind | None = None, /, **fields: object) -> None:
        """Assert that nothing was published, or no message of a type (or topic) with these values."""
        if matching := self.published(kind, **fields):
            raise AssertionError(explain.unexpected(kind, fields, matching))

    # --- relays and consumers ---

    def run_until_idle(self, *, raise_errors: bool = True) -> RunResult:
        """
        Run relays and consumers until nothing is due any more.

        Messages that are due later (delays, retries) stay; `advance()` lets time pass. Only `check_back()` sends check-backs.

        Args:
            raise_errors: raise the first error of a handler. False: its message is retried, as in production.
        """
        sent, deliveries = 0, Counts()
        with self._clock.still():
            for _ in range(MAX_ROUNDS):
                drained = self._relays.run(self._ready_databases())
                counts = self._consume(raise_errors=raise_errors)
                sent += drained.sent
                deliveries += counts
                if not drained.batches and counts == Counts():
                    return RunResult(sent, deliveries)
        newest = ", ".join(str(message) for message in self.published()[-3:])
        raise AssertionError(
            f"Not idle after {MAX_ROUNDS:,} rounds. Does a handler publish what it handles? Published last: {newest}."
        )

    def deliver(self, message: Message, *, times: int = 1, headers: Mapping[str, str] | None = None) -> Counts:
        """
        Deliver a message to its consumers, `times` times, as a broker does. It need not have been published.

        Messages that its handlers publish wait for `run_until_idle()`.

        Raises:
            AssertionError: no consumer handles it.
        """
        return self._deliver(_as_sent(compose(message, headers=headers)), times)

    def deliver_raw(
        self,
        topic: str,
        body: bytes | Mapping[str, Any],
        *,
        key: str = "",
        tag: str = "",
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        type_name: str = "",
        version: int = 1,
        times: int = 1,
    ) -> Counts:
        """
        Deliver any body to the consumers of a topic, like a message of another producer.

        Args:
            type_name, version: the message type of the body, for example an older version of one.
        """
        draft = compose_raw(topic, body, key=key, tag=tag, headers=headers, content_type=content_type)
        claims = {Header.TYPE: type_name, Header.VERSION: str(version)} if type_name else {}
        return self._deliver(_as_sent(draft, claims), times)

    # --- when things go wrong ---

    def crash(self, place: str) -> AbstractContextManager[None]:
        """
        Stop the relay or consumer that reaches a failpoint inside the block, as if it were killed there.

        Args:
            place: `after_half`, `after_decide`, `consumer.after_commit`, …; `outbox.testing.crash.PLACES` lists all.
        """
        return crash(place)

    def advance(self, time: timedelta) -> None:
        """Advance the time of outbox and brokers, by moving all stored times back. Python's clocks do not change."""
        self._clock.advance(time)
        for alias in self._ready_databases():
            age_rows(alias, time)
        for broker in self.brokers.values():
            broker.age(time)

    def pending_check_backs(self) -> list[Half]:
        """Return the half messages that are neither committed nor rolled back, about which brokers check back."""
        return [half for broker in self.brokers.values() for half in broker.undecided()]

    def check_back(self) -> list[Resolution]:
        """Send check-backs about all pending half messages now; return the answers."""
        databases = self._ready_databases()
        answers: list[Resolution] = []

        def ask(half: Half) -> Resolution:
            answers.append(ask_database(half, databases))
            return answers[-1]

        with self._clock.still():
            for broker in self.brokers.values():
                broker.check_halves(ask, limit=len(broker.undecided()))
        return answers

    def dead_letters(self, group: str) -> list[Deferred]:
        """Return the dead letters of a consumer group, in the order of their arrival."""
        dead = {"consumer_group": group, "dead_at__isnull": False}
        return [row for alias in open_databases() for row in Deferred.objects.using(alias).filter(**dead).order_by("id")]

    @property
    def broker(self) -> MemoryBroker:
        """The only broker of the settings, or the one called "default": `broker.fail(...)`, `broker.visible(...)`."""
        brokers = self.brokers
        broker = brokers.get("default") or (next(iter(brokers.values())) if len(brokers) == 1 else None)
        if broker is None:
            raise AssertionError(f"There are several brokers. Use outbox.brokers[...]; choices are: {', '.join(brokers)}.")
        return broker

    @property
    def brokers(self) -> dict[str, MemoryBroker]:
        """The brokers of the settings, each by its alias."""
        made = {alias: conf.make_broker(alias) for alias in conf.settings().brokers}
        return {alias: broker for alias, broker in made.items() if isinstance(broker, MemoryBroker)}

    def _ready_databases(self) -> list[str]:
        aliases = open_databases()
        for alias in aliases:
            require_commit(alias)
        return aliases

    def _consume(self, *, raise_errors: bool) -> Counts:
        consumers = Consumers()
        counts = consumers.run(self._ready_databases())
        if raise_errors and consumers.failures:
            text, error = consumers.failures[0]
            hint = "To see it retried instead: run_until_idle(raise_errors=False)."
            raise AssertionError(f"{text.rstrip('.')}. {hint}") from error
        return counts

    def _deliver(self, message: Outgoing, times: int) -> Counts:
        for _ in range(times):
            self.brokers[conf.topic_settings(message.topic).broker].show(message)
        total = Counts()
        with self._clock.still():
            while (counts := self._consume(raise_errors=True)) != Counts():
                total += counts
        if total == Counts():
            raise AssertionError(
                f"No consumer handles {message.headers.get(Header.TYPE, 'the message')} of topic {message.topic!r}. Is its "
                "module called consumers.py, its app in INSTALLED_APPS, and may the test use the database that it writes to?"
            )
        return total


class OutboxTestMixin(Base):
    """
    Mixin for `TestCase` and `TransactionTestCase` that provides the outbox as `self.outbox`::

        class OrderTests(OutboxTestMixin, TestCase):
            def test_tells_the_others(self):
                self.client.post("/orders/")
                self.outbox.assert_published(OrderPlaced)
    """

    _outbox: Outbox | None = None

    def setUp(self) -> None:
        super().setUp()
        self._outbox = self.enterContext(Outbox())

    @property
    def outbox(self) -> Outbox:
        """The testing kit of this test."""
        if self._outbox is None:
            raise AssertionError(f"{type(self).__name__}.setUp() must call super().setUp() before it uses self.outbox.")
        return self._outbox


def _as_sent(draft: Draft, claims: Mapping[str, str] = {}) -> Outgoing:
    """Return a draft as the message that a relay would send, but without a number, and with a source that no database has."""
    headers = json.loads(draft.headers) | claims | {Header.ID: str(draft.id), Header.SOURCE: f"urn:outbox:test:{uuid4()}"}
    if Header.TYPE in headers:
        headers[Header.SPEC_VERSION] = SPEC_VERSION
    return Outgoing(str(draft.id), draft.topic, draft.body, draft.key, headers.get(Header.TAG, ""), headers)
