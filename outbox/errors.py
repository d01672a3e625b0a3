"""What can go wrong. One family; each text says what happened, to which row or topic, and what to do next."""

from __future__ import annotations

from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured


class OutboxError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(OutboxError, ImproperlyConfigured):
    """Raised when `OUTBOX` holds a wrong or unknown value, or a decorator contradicts another."""


class NotInTransaction(OutboxError):
    """Raised when a message is published outside a database transaction."""


class NotOutermost(OutboxError):
    """Raised when a message is to go half first inside a transaction that is open already."""


class HalfNotStored(OutboxError):
    """Raised when a message is to go half first and its broker has not surely stored it. Nothing was done."""


class WrongDatabase(OutboxError):
    """Raised when a message would go to another database than the rows it speaks of."""


class InvalidMessage(OutboxError, ValueError):
    """Raised by `publish()` when topic, key, tag, headers or body break a rule."""


class BodyTooLarge(InvalidMessage):
    """Raised by `publish()` when the body is larger than the topic's broker takes."""


class UnknownTopic(InvalidMessage):
    """Raised when a topic is not in `OUTBOX["TOPICS"]`."""


class UnsupportedByBroker(OutboxError):
    """Raised when a broker is asked for what its flags say it does not offer."""


class BrokerUnavailable(OutboxError):
    """Raised when a broker cannot be reached by a call that has no outcome to say so: receive, ack, backlog, find."""


class BrokerCannotTell(BrokerUnavailable):
    """Raised when a broker's OPTIONS do not let it be asked what it holds. It carries messages as ever."""


class NotMigrated(OutboxError):
    """Raised when a database lacks the tables of the outbox, or of a broker that keeps messages there, or takes no writes."""


class LaneNotHeld(OutboxError):
    """Raised when a relay asks for a lane that another relay holds."""


class UnknownMessageType(OutboxError):
    """Raised when a received message names a type, or a newer version of one, that no module defines (any more)."""


class BrokenTransaction(OutboxError):
    """Raised by a transaction that swallowed an error and commits nothing, or whose connection was left in the middle of one."""


class ClosedByHandler(BrokenTransaction):
    """Raised after a handler that has closed the connection of its own transaction."""


class NeverEnded(OutboxError):
    """Raised instead of calling a handler that was begun with a message five times and has never ended."""


class StaleRow(OutboxError):
    """Raised by the precondition helper when the row is no longer in the expected version or state."""


class Reject(OutboxError):
    """Raised by a handler: this message can never be handled. It becomes a dead letter at once."""


class UnreadableBody(OutboxError):
    """Raised when a received body does not fit its type, or is not the JSON it claims to be. It never will."""


class TimeLimitExceeded(BaseException):  # no `except Exception` of the handler's holds it up
    """Raised in a handler that has run for longer than its `time_limit`."""


class RetryLater(OutboxError):
    """Raised by a handler: deliver the message again after that time, given in seconds or as a timedelta."""

    def __init__(self, after: float | timedelta, reason: str = "") -> None:
        if not isinstance(after, int | float | timedelta):
            raise TypeError(f"RetryLater takes seconds or a timedelta, then a reason, not {after!r}.")
        self.after = after if isinstance(after, timedelta) else timedelta(seconds=after)
        super().__init__(reason or f"to be retried after {self.after}")
