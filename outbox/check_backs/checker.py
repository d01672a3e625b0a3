"""
Checkers, for brokers that ask by themselves: whoever sends half messages also listens for the questions about them.

As many as there are share the questions; one that dies leaves its questions to the others, and each comes again.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, cast

import psycopg

from outbox import conf, database
from outbox.check_backs.ask import Ask, NoteSent, in_process, note_in_process
from outbox.database import heartbeats
from outbox.logs import get_logger, log_fields

if TYPE_CHECKING:  # settings make it; this room needs no broker
    from outbox.brokers.capabilities import AsksProducers

logger = get_logger(__name__)


def brokers_that_ask(aliases: set[str]) -> list[str]:
    """Return those of the brokers that ask by themselves."""
    return [alias for alias in sorted(aliases) if conf.broker_class(alias).asks_producers]


class Checker:
    """
    Answers what one broker asks, in threads of the broker's, from the first `turn` to `close`.

    Args:
        using: the database where it says that it lives.
        note_sent: takes what the broker was sent instead of an answer; by default it is recorded, from `using`.
    """

    def __init__(self, alias: str, using: str, ask: Ask, *, note_sent: NoteSent | None = None) -> None:
        self.alias = alias
        self._using = using
        self._ask = ask
        self._note_sent = note_sent or note_in_process(using)
        self._broker: AsksProducers | None = None

    def turn(self) -> bool:
        """Listen, if not yet, and say that this process lives. Nothing more is to be done until the next beat."""
        if self._broker is None:
            self._broker = cast("AsksProducers", conf.make_broker(self.alias))
            self._broker.listen(self._ask, note_sent=self._note_sent)
        with database.connect(self._using, application_name="outbox checker") as connection:
            heartbeats.beat(connection, "checker", broker=self.alias)
        return False

    def close(self) -> None:
        """Listen no more. Where the database is away, the heartbeat stays until it is stale."""
        broker, self._broker = self._broker, None
        if broker is None:
            return
        broker.close()
        try:
            with database.connect(self._using, application_name="outbox checker") as connection:
                heartbeats.leave(connection, "checker", broker=self.alias)
        except psycopg.OperationalError as error:
            logger.warning(
                "The heartbeat of the checker of broker %r stays: %s",
                self.alias,
                str(error).strip(),
                extra=log_fields(broker=self.alias),
            )


_mine: dict[tuple[int, str], AsksProducers] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def listen_in_this_process(alias: str, using: str) -> None:
    """
    Answer in this process what a broker asks, until the process ends; once for each broker, however often it is called.

    Args:
        using: the database for halves without a token; others go where their token says.
    """
    with _lock:
        key = os.getpid(), alias  # a child of a fork listens for itself
        if key not in _mine and conf.broker_class(alias).asks_producers:
            broker = cast("AsksProducers", conf.make_broker(alias))
            broker.listen(in_process(using), note_sent=note_in_process(using))
            _mine[key] = broker
