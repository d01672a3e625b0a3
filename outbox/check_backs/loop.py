"""The check loop of brokers that do not ask by themselves: a host calls it now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from outbox import conf
from outbox.check_backs.ask import Ask, in_process, over_http
from outbox.database.loop_errors import Loop, noting
from outbox.errors import ConfigurationError

if TYPE_CHECKING:  # settings make it; this room needs no broker
    from outbox.brokers.capabilities import NeedsCheckLoop

LIMIT = 20  # halves per turn; the endpoint may be slow to answer


def ask_as_set(database: str) -> Ask:
    """
    Make the `ask` that settings want: over HTTP where `OUTBOX["CHECK_BACK"]["URL"]` is given, else in this process.

    Args:
        database: for halves without a token of ours, in this process.

    Raises:
        ConfigurationError: a URL is given and no secret to sign with.
    """
    check_back = conf.settings().check_back
    if check_back.url:
        if not check_back.secrets:
            raise ConfigurationError(
                'OUTBOX["CHECK_BACK"]["SECRETS"] is empty: the check-back URL takes signed requests only. Add one of '
                "the endpoint's secrets."
            )
        return over_http(check_back.url, check_back.secrets[0])
    return in_process(database)


def brokers_to_ask_for(aliases: set[str]) -> list[str]:
    """Return those of the brokers that need a check loop."""
    return [alias for alias in sorted(aliases) if conf.broker_class(alias).needs_check_loop]


class CheckLoop:
    """
    Asks about the half messages of one broker that are due, in the thread that calls `turn`.

    Args:
        alias: the broker. It is created at the first turn, and again after trouble with it.
        database: as for `ask_as_set`.
    """

    def __init__(self, alias: str, database: str) -> None:
        self._alias = alias
        self._ask = ask_as_set(database)
        self._broker: NeedsCheckLoop | None = None

    def turn(self) -> bool:
        """
        Ask about some half messages; return whether more may be due.

        Raises:
            BrokerUnavailable: the broker is out of reach. Nothing is lost: what was not answered is asked again.
        """
        try:
            with noting(Loop("check loop", broker=self._alias)):
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
