"""
Relays and consumers in the thread of the test, over Django's connections.

So they see the rows that the test's transaction has written, and the rows that they write are rolled back with that transaction.
A relay's statements, which run in autocommit in production, join it here; a relay's transactions become savepoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.test.testcases import DatabaseOperationForbidden  # type: ignore[attr-defined]
from msgspec.structs import replace
from psycopg.pq import TransactionStatus

from outbox import conf, database
from outbox.check_backs.answer import answer_on
from outbox.check_backs.sources import READ_SOURCE
from outbox.consuming.delivery_info import Context
from outbox.consuming.register import Consumer, Group, groups
from outbox.consuming.worker import Counts, Worker
from outbox.database.guarded import is_in_callers_transaction
from outbox.errors import Reject, RetryLater
from outbox.half_first.message import HalfFirstMessage
from outbox.message import Half, Resolution
from outbox.models import FailedDelivery
from outbox.relay.breaker import Breakers
from outbox.relay.claims import MOVE_LIMIT, move_due
from outbox.relay.rounds import Relay, RelayResult, make_breakers
from outbox.testing.clock import Clock
from outbox.topics import match_topics

LANE = 1
ASKED_BY = "test"


def open_databases() -> list[str]:
    """
    Return the aliases of databases that may hold messages and that the test may use.

    Raises:
        AssertionError: there is none.
    """
    aliases = [alias for alias in database.outbox_databases() if _is_allowed(alias)]
    if not aliases:
        raise AssertionError(
            "This test may not use any database with messages. Use the fixture outbox or @pytest.mark.django_db, or in unittest "
            "a TestCase or TransactionTestCase, and name the databases that it needs: databases={...}."
        )
    return aliases


def require_commit(alias: str) -> None:
    """
    Require that the rows of the test are committed, apart from the transaction around the test.

    Raises:
        AssertionError: the test itself is inside a transaction.
        django.db.IntegrityError: the rows could not be committed.
        TransactionManagementError: the transaction around the test is broken.
    """
    connection = connections[alias]
    connection.validate_no_broken_transaction()
    if is_in_callers_transaction(alias):
        raise AssertionError(
            f"A transaction of database {alias!r} is open in this test. A relay sees messages after their commit: leave the "
            "atomic() block first."
        )
    check_deferred(alias)


def check_deferred(alias: str) -> None:
    """
    Check deferred constraints such as foreign keys, as COMMIT would, since the transaction around a test is never committed.

    The savepoint of the check is rolled back, so that the constraints stay deferred. In a transaction that is broken already,
    nothing is checked, since other code reports that.

    Raises:
        django.db.IntegrityError: a constraint is violated.
    """
    connection = connections[alias]
    if connection.in_atomic_block and not connection.needs_rollback and _is_alive(connection):
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            transaction.set_rollback(True, using=alias)


def _is_alive(connection: Any) -> bool:
    return connection.connection is not None and connection.connection.info.transaction_status is TransactionStatus.INTRANS


def finish_commits(alias: str) -> None:
    """Run the hooks that commit half-first messages, since `on_commit()` hooks do not run in the transaction around a test."""
    hooks = connections[alias].run_on_commit
    for entry in [hook for hook in hooks if isinstance(getattr(hook[1], "__self__", None), HalfFirstMessage)]:
        hooks.remove(entry)
        entry[1]()


def _is_allowed(alias: str) -> bool:
    try:
        with connections[alias].cursor():
            return True
    except DatabaseOperationForbidden:
        return False


class Relays:
    """The relays of a test: one for each of its databases and each broker that has topics."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: dict[tuple[str, str], Breakers] = {}

    def run(self, databases: Sequence[str]) -> RelayResult:
        """Run each relay until it has nothing to do."""
        done = RelayResult()
        for alias in databases:
            finish_commits(alias)
            match_topics(database.raw(alias))  # as a relay does at its start
            while move_due(database.raw(alias)) == MOVE_LIMIT:
                pass
            for broker in conf.settings().brokers:
                if conf.topics_of(broker):
                    done.add(self._drain(alias, broker))
        return done

    def _drain(self, alias: str, broker: str) -> RelayResult:
        breakers = self._breakers.setdefault((alias, broker), make_breakers(self._clock.seconds, _longest))
        relay = Relay(database.raw(alias), conf.make_broker(broker), LANE, breakers=breakers, random=_longest)
        done = relay.drain()
        relay.sweep()
        return done


def _longest() -> float:
    """Return 1.0, with which each random wait takes its longest time, so that tests know when it is over."""
    return 1.0


class Consumers:
    """
    The consumer groups of the project, each with a worker for each of its brokers.

    Attributes:
        failures: texts about failed deliveries, each with the exception that the handler raised, or None if the delivery failed
            outside of the handler. Retries and rejections that a handler asked for are left out.
    """

    def __init__(self) -> None:
        self.failures: list[tuple[str, Exception | None]] = []
        self._intended = 0  # failed deliveries for which a handler of the current worker raised Reject or RetryLater

    def run(self, databases: Sequence[str]) -> Counts:
        """Run the worker of each group once."""
        counts = Counts()
        for group in groups().values():
            if group.using in databases:
                for alias in group.brokers:
                    counts += self._work(group, alias)
        return counts

    def _work(self, group: Group, alias: str) -> Counts:
        failures_before = len(self.failures)
        self._intended = 0
        log = FailedDelivery.objects.using(group.using).filter(consumer_group=group.name).order_by("-id")
        newest_id = log.values_list("id", flat=True).first() or 0
        worker = Worker(
            replace(group, consumers={key: self._watch(consumer) for key, consumer in group.consumers.items()}), alias
        )
        try:
            worker.step(timedelta(0))
        finally:
            worker.close()
        rows = list(log.filter(id__gt=newest_id))
        if len(rows) - self._intended > len(self.failures) - failures_before:  # a delivery failed outside of the handler
            row = rows[0]
            self.failures.append((f"Group {group.name!r} failed over message {row.message_id}: {row.error}", None))
        return worker.counts

    def _watch(self, consumer: Consumer) -> Consumer:
        """Return the consumer with a handler that records errors, and with retries without jitter, so at known times."""
        return replace(consumer, handler=partial(self._call, consumer), retry=replace(consumer.retry, jitter=0.0))

    def _call(self, consumer: Consumer, message: Any, context: Context) -> object:
        try:
            result = consumer.handler(message, context)
            check_deferred(consumer.using)
            return result
        except (Reject, RetryLater):
            self._intended += 1
            raise
        except Exception as error:
            self.failures.append((f"{consumer.name} failed over {message!r}: {type(error).__name__}: {error}", error))
            raise


def ask_database(half: Half, databases: Sequence[str]) -> Resolution:
    """Answer a check-back like the endpoint, from the transaction around the test."""
    for alias in databases:  # find the database whose source the token names
        connection = database.raw(alias)
        row = connection.execute(READ_SOURCE).fetchone()
        if row is not None and half.token.startswith(f"{row[0]}:"):
            break
    with connection.transaction():
        return answer_on(connection, half, asked_by=ASKED_BY).resolution
