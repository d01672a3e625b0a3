"""
How brokers ask about half messages.

Some brokers do not ask by themselves: a relay or Celery task periodically calls `CheckLoop.turn`, which looks for half messages
that are due. Other brokers ask producers, so a process that sends half messages also answers check-backs with a `Checker`. Such a
broker distributes its check-backs among all checkers; if one dies, the broker asks the others.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, cast

import psycopg

from outbox import conf, database
from outbox.check_backs.answer import record_sent
from outbox.check_backs.ask import Ask, OnOtherAnswer, in_process, over_http
from outbox.database import heartbeats, loop_errors
from outbox.database.loop_errors import Loop, recording
from outbox.errors import ConfigurationError
from outbox.forks import ForkSafeLock
from outbox.logs import get_logger, log_fields

if TYPE_CHECKING:  # brokers are created from settings; this package does not import them at run time
    from outbox.brokers.capabilities import AsksProducers, NeedsCheckLoop

logger = get_logger(__name__)

LIMIT = 20  # half messages per turn; a turn is short, because the endpoint may answer slowly


def make_asker(database: str) -> Ask:
    """
    Return the function that gets answers to check-backs: from `OUTBOX["CHECK_BACK"]["URL"]`, or without a URL from the database.

    Args:
        database: the database for half messages without a token of the outbox; used only without a URL.

    Raises:
        ConfigurationError: a URL is given, but no secret to sign requests with.
    """
    check_back = conf.settings().check_back
    if check_back.url:
        if not check_back.secrets:
            raise ConfigurationError(
                'OUTBOX["CHECK_BACK"]["SECRETS"] is empty, but the check-back URL accepts signed requests only.',
                hint="Add one of the endpoint's secrets.",
            )
        return over_http(check_back.url, check_back.secrets[0])
    return in_process(database)


def brokers_to_ask_for(aliases: set[str]) -> list[str]:
    """Return the brokers among `aliases` that need a check loop."""
    return [alias for alias in sorted(aliases) if conf.broker_has(alias, "NeedsCheckLoop")]


class CheckLoop:
    """
    Checks half messages of one broker for which a check-back is due, in the thread that calls `turn`.

    Args:
        alias: the broker. It is created at the first turn, and again after an error.
        database: as for `make_asker`.
    """

    def __init__(self, alias: str, database: str) -> None:
        self._alias = alias
        self._ask = make_asker(database)
        self._broker: NeedsCheckLoop | None = None

    def turn(self) -> bool:
        """
        Check some half messages that are due; return whether more may be due.

        Raises:
            BrokerUnavailable: the broker cannot be reached. Nothing is lost: half messages without an answer are due again later.
        """
        try:
            with recording(Loop("check loop", broker=self._alias)):
                self._broker = self._broker or cast("NeedsCheckLoop", conf.make_broker(self._alias))
                return self._broker.check_halves(self._ask, limit=LIMIT) == LIMIT
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the broker."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()


def brokers_that_ask(aliases: set[str]) -> list[str]:
    """Return the brokers among `aliases` that ask producers."""
    return [alias for alias in sorted(aliases) if conf.broker_has(alias, "AsksProducers")]


class Checker:
    """
    Answers the check-backs of one broker, in the broker's threads, from the first `turn` until `close`.

    Args:
        using: the database for the checker's heartbeat.
        on_other_answer: called if the broker was sent another answer than the decided one; by default, the answer is recorded in
            `using`.
    """

    def __init__(self, alias: str, using: str, ask: Ask, *, on_other_answer: OnOtherAnswer | None = None) -> None:
        self.alias = alias
        self._using = using
        self._ask = ask
        self._on_other_answer = on_other_answer or partial(record_sent, using=using)
        self._broker: AsksProducers | None = None

    def turn(self) -> None:
        """Start listening for check-backs, unless this broker listens already; write a heartbeat in any case."""
        try:
            with recording(Loop("checker", broker=self.alias)):
                self._listen()
        finally:
            with database.connect(self._using, application_name="outbox checker") as connection:
                heartbeats.beat(
                    connection, "checker", broker=self.alias, errors=loop_errors.read("checker", self._using, self.alias)
                )

    def _listen(self) -> None:
        if self._broker is None:
            broker = cast("AsksProducers", conf.make_broker(self.alias))
            broker.listen(self._ask, on_other_answer=self._on_other_answer)
            self._broker = broker  # set last, so that the next turn tries again if `listen` raised

    def close(self) -> None:
        """Stop listening and delete the heartbeat. If the database is unreachable, the heartbeat stays until it is stale."""
        broker, self._broker = self._broker, None
        if broker is None:
            return
        broker.close()
        try:
            with database.connect(self._using, application_name="outbox checker") as connection:
                heartbeats.delete_heartbeat(connection, "checker", broker=self.alias)
        except psycopg.OperationalError as error:
            logger.warning(
                "The heartbeat of the checker of broker %r could not be deleted: %s",
                self.alias,
                str(error).strip(),
                extra=log_fields(broker=self.alias),
            )


_listening: dict[tuple[int, str], AsksProducers] = {}  # (process id, alias) -> the broker that listens
_lock = ForkSafeLock()


def listen_in_this_process(alias: str, using: str) -> None:
    """
    Answer a broker's check-backs in this process until the process ends. Further calls for the same broker do nothing.

    Args:
        using: the database for half messages without a token; tokens name their database.
    """
    with _lock.current:
        key = os.getpid(), alias  # a forked child has to listen itself
        if key not in _listening and conf.broker_has(alias, "AsksProducers"):
            broker = cast("AsksProducers", conf.make_broker(alias))
            broker.listen(in_process(using), on_other_answer=partial(record_sent, using=using))
            _listening[key] = broker
