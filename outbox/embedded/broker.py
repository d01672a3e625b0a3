"""The embedded broker, whose calls are implemented by the other modules of this package."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import Any, ClassVar, Self

import psycopg
from psycopg.errors import UndefinedTable

from outbox.brokers.base import (
    Backlog,
    BrokerInterface,
    Delivery,
    EndSemantics,
    HalfRef,
    HalfStatus,
    Limits,
    Outgoing,
    SendGuarantee,
    SendResult,
    ServerResource,
    StoredCopy,
    StoredList,
    TopicSpec,
)
from outbox.brokers.capabilities import ListsResources, NeedsCheckLoop, Receives, StoredInDatabase
from outbox.brokers.options import read_options
from outbox.brokers.validation import TOO_LATE, send_valid
from outbox.database import Connection
from outbox.embedded import checks, halves, lookup, monitoring, receiver, retention, sender, settlement, wakeup
from outbox.embedded.client import NOT_VALID, EmbeddedClient, missing_tables, requiring_tables, results_of
from outbox.embedded.options import EmbeddedOptions, problems
from outbox.embedded.rows import delivery
from outbox.embedded.topics import Topics, differences, resources, write_topics
from outbox.errors import BrokerUnavailable
from outbox.findings import Finding, misconfigured
from outbox.logs import get_logger
from outbox.message import Half, Header, Resolution, TopicType

logger = get_logger(__name__)

INTERNAL = "Only consumers of the outbox can read it, because its tables are internal."


class EmbeddedInterface(BrokerInterface, frozen=True):
    """States that other programs cannot read the messages."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        return cls(reading=INTERNAL)


class EmbeddedBroker(Receives, NeedsCheckLoop, StoredInDatabase, ListsResources):
    """A broker that keeps messages in tables of PostgreSQL. Its guarantees are in docs/guarantees.md."""

    app: ClassVar[str] = "outbox.embedded"
    interface = EmbeddedInterface
    end_semantics = EndSemantics.IDEMPOTENT
    supports_order: ClassVar[bool] = True
    deduplicates_sends: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        options: Mapping[str, Any],
        topics: Sequence[TopicSpec],
        *,
        clock: Callable[[], datetime] | None = None,  # by default, the database's clock
    ) -> None:
        super().__init__(alias, options, topics)
        self._clock = clock
        self._settings = read_options(EmbeddedOptions, options)
        self._client = EmbeddedClient(self._settings)
        self._renewal_client = EmbeddedClient(self._settings)  # a second thread may call renew() and release()
        self._stored_topics = Topics(self.topics)
        # Group and topic id -> `Topics.read_at` when the group's offsets were last stored. When the topics are read again, the
        # offsets are stored again, since they may have been deleted together with the topics.
        self._joined: dict[tuple[str, int], float] = {}
        self._receive_numbers = itertools.count()

    @classmethod
    def check_settings(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec] = ()) -> list[Finding]:
        return problems(options)

    @classmethod
    def limits(cls, options: Mapping[str, Any], topic: TopicSpec) -> Limits:
        """Return the limits. `redelivery` is zero, because `may_deliver_again` names all messages that may be delivered again."""
        settings = read_options(EmbeddedOptions, options)
        return Limits(
            SendGuarantee.ONCE,
            send=settings.max_send_duration,
            redelivery=timedelta(),
            check_back=settings.max_check_back_age,
        )

    @classmethod
    def read_status(cls, database: str, connection: Connection) -> tuple[dict[str, int], list[str]]:
        with requiring_tables(database):
            return monitoring.read_status(connection)

    @classmethod
    def read_copies(cls, database: str, connection: Connection, message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
        with requiring_tables(database):
            return monitoring.read_copies(connection, message_id, half_ids)

    @classmethod
    def list_stored(cls, options: Mapping[str, Any], topics: Sequence[TopicSpec], connection: Connection) -> list[StoredList]:
        settings = read_options(EmbeddedOptions, options)
        with requiring_tables(settings.database):
            return monitoring.list_stored(connection, topics, reads_from_first=settings.start == "earliest")

    def check(self) -> list[Finding]:
        """Return problems of the options, and differences between the stored topics and settings."""
        problems = self.check_settings(self.options)
        if not problems:
            with self._client.translating_errors() as connection:
                try:
                    problems = differences(connection, self.topics)
                except UndefinedTable:
                    missing = missing_tables(self._settings.database)
                    problems = [misconfigured(missing.message, missing.hint)]
        return problems

    def list_resources(self, *, sources: Collection[str], lanes: int, readers: Collection[str]) -> list[ServerResource]:
        """Return the topics. Groups need no resources, because they are stored when they first receive."""
        with self._client.translating_errors() as connection:
            return list(resources(connection, self.topics, self._create_topic))

    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        """Make messages visible. A message that was sent before is not stored again."""

        def operation(connection: Connection, good: Sequence[Outgoing]) -> list[SendResult]:
            return sender.send(connection, self._stored_topics, good, now=self._now())

        return send_valid(self, messages, partial(results_of, self._client, operation=operation))

    def send_halves(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        check_after = self._settings.check_after

        def operation(connection: Connection, good: Sequence[Outgoing]) -> list[SendResult]:
            return sender.send_halves(connection, self._stored_topics, good, check_after=check_after, now=self._now())

        return send_valid(self, messages, partial(results_of, self._client, operation=operation), is_half=True)

    def new_half_id(self, message_id: str) -> str:
        """Return an id for a half message. Retries once over a new connection, which is safe because this stores nothing."""
        with self._client.translating_errors() as connection:
            try:
                return halves.new_id(connection)
            except psycopg.OperationalError:
                return halves.new_id(self._client.connection())

    def end(self, refs: Sequence[HalfRef], resolution: Resolution, *, within: timedelta | None = None) -> list[SendResult]:
        """Commit or roll back half messages. The first end of each wins; later calls return its state."""
        if resolution is Resolution.UNKNOWN:
            raise ValueError("A half message is ended with COMMIT or ROLLBACK, not UNKNOWN.")
        deadline = inf if within is None else time.monotonic() + within.total_seconds()

        def operation(connection: Connection, given: Sequence[HalfRef]) -> list[SendResult]:
            if time.monotonic() >= deadline:
                return [TOO_LATE] * len(given)
            return halves.end(connection, given, resolution, now=self._now())

        return results_of(self._client, refs, operation)

    def look_up_halves(self, refs: Sequence[HalfRef]) -> list[HalfStatus]:
        retention = {topic.name: topic.retention for topic in self.topics.values()}
        try:
            with self._client.translating_errors() as connection:
                return halves.look_up(connection, refs, retention, now=self._now())
        except BrokerUnavailable as error:
            logger.warning("Half messages cannot be looked up now: %s", error)
            return [HalfStatus.UNKNOWN] * len(refs)

    def check_halves(self, ask: Callable[[Half], Resolution], *, limit: int = 100) -> int:
        settings = self._settings
        with self._client.translating_errors() as connection:
            checks.park(connection, check_limit=settings.check_limit, now=self._now())
            due = checks.take_due(
                connection,
                limit=limit,
                check_limit=settings.check_limit,
                interval=settings.check_interval,
                now=self._now(),
            )
        for half in due:
            self._ask(ask, half)
        return len(due)

    def check_half(self, ask: Callable[[Half], Resolution], half_id: str) -> Resolution | None:
        """Check back about one half message now, even a parked one, and end it as answered. None if it had ended before."""
        with self._client.translating_errors() as connection:
            interval = self._settings.check_interval
            half = checks.take_one(connection, int(half_id), interval=interval, now=self._now())
        return self._ask(ask, half) if half else None

    def ask_again(self, half_id: str) -> bool:
        """Resume check-backs about a parked half message. Return False if it is not parked."""
        with self._client.translating_errors() as connection:
            return checks.ask_again(connection, int(half_id), now=self._now())

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        with self._client.translating_errors() as connection:
            request = self._prepare_receive(connection, group, topics, invisible_for)
            rows = wakeup.take(self._client, request, limit, wait)
        names = {topic.id: topic.name for topic in request.topics}
        return [delivery(group, names[row.topic_id], row) for row in rows]

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries longer, over a separate connection, because `receive` may be waiting on the other one."""
        self._client.deregister_while_idle()
        with self._renewal_client.translating_errors() as connection:
            return settlement.renew(connection, deliveries, invisible_for, now=self._now())

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries, over the connection of `renew`. Their messages can be received again at once."""
        with self._renewal_client.translating_errors() as connection:
            settlement.release(connection, deliveries, now=self._now())

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        with self._client.translating_errors() as connection:
            if any(
                self.topics[delivery.topic].type is TopicType.FIFO for delivery in deliveries if delivery.topic in self.topics
            ):
                self._client.scan_validity = NOT_VALID  # because the next messages of their keys are due now
            return settlement.ack(connection, deliveries)

    def backlog(self, group: str) -> Backlog:
        with self._client.translating_errors() as connection:
            return Backlog(lookup.backlog(connection, group))

    def may_deliver_again(self, group: str, message_ids: Collection[str]) -> set[str]:
        with self._client.translating_errors() as connection:
            return lookup.unfinished_ids(connection, group, message_ids)

    def find(self, message_id: str) -> list[StoredCopy]:
        with self._client.translating_errors() as connection:
            return lookup.find(connection, message_id)

    def prune(self, *, keep_since: datetime | None = None, limit: int = 10_000) -> int:
        """Delete rows that are past their retention (`retention.py`). Return the number of rows."""
        with self._client.translating_errors() as connection:
            topics = [(self._stored_topics.stored(connection, spec.name), spec.retention) for spec in self.topics.values()]
            return retention.prune(connection, topics, keep_since=keep_since, limit=limit, now=self._now())

    def forget_group(self, group: str, topics: Collection[str]) -> None:
        with self._client.translating_errors() as connection:
            retention.forget_group(connection, group, topics)
        self._joined = {joined: at for joined, at in self._joined.items() if joined[0] != group}

    def close(self) -> None:
        self._client.close()
        self._renewal_client.close()

    def _create_topic(self, spec: TopicSpec) -> None:
        with self._client.translating_errors() as connection:
            write_topics(connection, [spec])

    def _now(self) -> datetime | None:
        return self._clock() if self._clock else None

    def _ask(self, ask: Callable[[Half], Resolution], half: Half) -> Resolution:
        """Return the answer about a half message, after ending it as answered."""
        answer = checks.answer(ask, half)
        if answer is not Resolution.UNKNOWN:
            source = half.headers.get(Header.SOURCE, "")
            self.end([HalfRef(half.topic, half.half_id, half.message_id, source=source)], answer)
        return answer

    def _prepare_receive(
        self, connection: Connection, group: str, topics: Collection[str], invisible_for: timedelta
    ) -> receiver.PreparedReceive:
        """Store the group's offsets in topics that are new to the group. Return the arguments of the receive."""
        stored = [self._stored_topics.stored(connection, name) for name in topics]
        request = receiver.PreparedReceive(group, stored, invisible_for, next(self._receive_numbers), self._now)
        read_at, wanted = self._stored_topics.read_at, [(group, topic.id) for topic in stored]
        if any(self._joined.get(group_topic) != read_at for group_topic in wanted):
            # If the tables were emptied after the group had joined, the group begins at the first message, whatever START is.
            is_new = any(group_topic not in self._joined for group_topic in wanted)
            receiver.join(connection, request, at_end=is_new and self._settings.start == "latest")
            self._joined |= dict.fromkeys(wanted, read_at)
        return request
