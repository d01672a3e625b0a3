"""The outbox in the hands of a test: what was published, and relays and consumers that work when the test says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self
from uuid import uuid4

from outbox import conf
from outbox.brokers.base import DeadLetter, Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.consuming.tally import Tally
from outbox.message import Half, Header, Message, Resolution
from outbox.publishing.draft import Draft, compose, compose_raw
from outbox.relay.cloudevents import SPEC_VERSION
from outbox.testing import explain
from outbox.testing.clock import Clock, age_rows
from outbox.testing.crash import crash
from outbox.testing.drive import Consumers, Failure, Relays, ask_database, insist_on_commit, open_databases
from outbox.testing.published import Kind, Published, check_fields, read
from outbox.testing.stand_in import memory_brokers

MAX_ROUNDS = 1_000


@dataclass(frozen=True, slots=True)
class Ran:
    """What `run_until_idle()` did: messages sent to brokers, and deliveries by their outcome."""

    sent: int
    deliveries: Tally


class Outbox:
    """
    The outbox of one test, as a context manager: inside, a memory broker stands in for each broker of the settings.

    pytest has it as the fixture `outbox`, unittest as `self.outbox` by `OutboxTestMixin`.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._relays = Relays(self._clock)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(memory_brokers(self._clock))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # --- what was published ---

    def published(self, kind: Kind | None = None, /, **fields: object) -> list[Published]:
        """
        List what was published in transactions that were not rolled back, in order.

        Args:
            kind: a message type or, for raw messages, the name of a topic; None for all.
            fields: only messages with these values.
        """
        check_fields(kind, fields)
        return [one for one in read(open_databases()) if one.is_of(kind) and not one.differences(fields)]

    def assert_published(self, kind: Kind, /, *, times: int = 1, **fields: object) -> None:
        """Insist that a message with these values was published, and that often."""
        matching = self.published(kind, **fields)
        if len(matching) != times:
            others = [one for one in self.published() if one not in matching]
            raise AssertionError(explain.miscounted(kind, fields, times=times, matching=matching, others=others))

    def assert_nothing_published(self, kind: Kind | None = None, /, **fields: object) -> None:
        """Insist that nothing was published, or nothing of a type (or topic) with these values."""
        if matching := self.published(kind, **fields):
            raise AssertionError(explain.unexpected(kind, fields, matching))

    # --- relays and consumers ---

    def run_until_idle(self, *, raise_errors: bool = True) -> Ran:
        """
        Relay and consume, again and again, until nothing is due any more.

        What waits for its time (a delay, a retry) stays; `advance()` has time pass. Nobody asks about half messages;
        `check_back()` does.

        Args:
            raise_errors: let the first error of a handler end the test. False: it is retried, as in production.
        """
        sent, deliveries = 0, Tally()
        with self._clock.still():
            for _ in range(MAX_ROUNDS):
                drained = self._relays.turn(self._ready_databases())
                tally = self._consume(raise_errors=raise_errors)
                sent += drained.sent
                deliveries += tally
                if not drained.batches and tally == Tally():
                    return Ran(sent, deliveries)
        newest = ", ".join(str(one) for one in self.published()[-3:])
        raise AssertionError(
            f"Still not idle after {MAX_ROUNDS:,} rounds: does a handler publish what it handles? Published last: {newest}."
        )

    def deliver(self, message: Message, *, times: int = 1, headers: Mapping[str, str] | None = None) -> Tally:
        """
        Hand a message to its consumers as the broker would, `times` times; nobody has to have published it.

        What its handlers publish waits for `run_until_idle()`.

        Raises:
            AssertionError: no consumer takes it.
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
    ) -> Tally:
        """
        Hand a body of any kind to the consumers of a topic, as another producer's message.

        Args:
            type_name, version: the message type that the body claims to be: an older version of one, for instance.
        """
        draft = compose_raw(topic, body, key=key, tag=tag, headers=headers, content_type=content_type)
        claims = {Header.TYPE: type_name, Header.VERSION: str(version)} if type_name else {}
        return self._deliver(_as_sent(draft, claims), times)

    # --- when things go wrong ---

    def crash(self, place: str) -> AbstractContextManager[None]:
        """
        Stop the relay or consumer that reaches a place inside the block, as if it were killed there.

        Args:
            place: `after_half`, `after_decide`, `consumer.after_commit`, …; `outbox.testing.crash.PLACES` lists them.
        """
        return crash(place)

    def advance(self, time: timedelta) -> None:
        """Advance the time of outbox and brokers by making everything stored older. Python's clocks stay as they are."""
        self._clock.advance(time)
        for alias in self._ready_databases():
            age_rows(alias, time)
        for broker in self.brokers.values():
            broker.age(time)

    def pending_check_backs(self) -> list[Half]:
        """Return the half messages that are neither committed nor rolled back. Their brokers will ask about them."""
        return [half for broker in self.brokers.values() for half in broker.undecided()]

    def check_back(self) -> list[Resolution]:
        """Make the brokers ask about all pending half messages now; return the answers."""
        databases = self._ready_databases()
        answers: list[Resolution] = []

        def ask(half: Half) -> Resolution:
            answers.append(ask_database(half, databases))
            return answers[-1]

        with self._clock.still():
            for broker in self.brokers.values():
                broker.check_halves(ask, limit=len(broker.undecided()))
        return answers

    def dead_letters(self, group: str) -> list[DeadLetter]:
        """List what a consumer group gave up."""
        return [letter for broker in self.brokers.values() for letter in broker.dead_letters(group)]

    @property
    def broker(self) -> MemoryBroker:
        """The broker of the settings, where there is one or one called default: `broker.fail(...)`, `broker.visible(...)`."""
        brokers = self.brokers
        found = brokers.get("default") or (next(iter(brokers.values())) if len(brokers) == 1 else None)
        if found is None:
            raise AssertionError(f"There are several brokers, so name one: outbox.brokers[...] of {', '.join(brokers)}.")
        return found

    @property
    def brokers(self) -> dict[str, MemoryBroker]:
        """The brokers of the settings, each by its alias."""
        made = {alias: conf.make_broker(alias) for alias in conf.settings().brokers}
        return {alias: broker for alias, broker in made.items() if isinstance(broker, MemoryBroker)}

    def _ready_databases(self) -> list[str]:
        found = open_databases()
        for alias in found:
            insist_on_commit(alias)
        return found

    def _consume(self, *, raise_errors: bool) -> Tally:
        consumers = Consumers()
        tally = consumers.turn(self._ready_databases())
        if raise_errors and consumers.failures:
            _raise(consumers.failures[0])
        return tally

    def _deliver(self, message: Outgoing, times: int) -> Tally:
        for _ in range(times):
            self.brokers[conf.topic_settings(message.topic).broker].show(message)
        total = Tally()
        with self._clock.still():
            while (tally := self._consume(raise_errors=True)) != Tally():
                total += tally
        if total == Tally():
            raise AssertionError(
                f"No consumer takes {message.headers.get(Header.TYPE, 'the message')} of topic {message.topic!r}. Is its module "
                "called consumers.py, its app in INSTALLED_APPS, and does the test have the database that it writes to?"
            )
        return total


def _as_sent(draft: Draft, claims: Mapping[str, str] = {}) -> Outgoing:
    """Make what travels of a message that no relay sends: it comes from nowhere and has no number."""
    headers = json.loads(draft.headers) | claims | {Header.ID: str(draft.id), Header.SOURCE: f"urn:outbox:test:{uuid4()}"}
    if Header.TYPE in headers:
        headers[Header.SPEC_VERSION] = SPEC_VERSION
    return Outgoing(str(draft.id), draft.topic, draft.body, draft.key, headers.get(Header.TAG, ""), headers)


def _raise(failure: Failure) -> None:
    hint = "To see it retried instead: run_until_idle(raise_errors=False)."
    raise AssertionError(f"{str(failure).rstrip('.')}. {hint}") from failure.error
