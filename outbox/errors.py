"""The exceptions of this package. The text of each says what happened, to which row or topic, and what to do next."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property

from django.core.exceptions import ImproperlyConfigured


class OutboxError(Exception):
    """
    Base of all errors of this package. `message` says what happened, `hint` what to do next; `str(error)` has both.

    Both are read from `args`: pickle and Celery create an error again from its `args`, and an instance of a subclass that does
    not call `super().__init__` has them, too.
    """

    def __init__(self, message: object = "", hint: str = "", *more: object) -> None:
        if more:
            super().__init__(message, hint, *more)
        elif hint:
            super().__init__(message, str(hint))
        else:
            super().__init__(message)

    @cached_property
    def message(self) -> str:
        """What happened, in a sentence."""
        return self._texts()[0]

    @cached_property
    def hint(self) -> str:
        """What to do next; "" if there is no hint."""
        return self._texts()[1]

    def __str__(self) -> str:
        return " ".join(filter(None, self._texts()))

    def _texts(self) -> tuple[str, str]:
        if len(self.args) == 2 and isinstance(self.args[1], str):
            return str(self.args[0]), self.args[1]
        return super().__str__(), ""


class ConfigurationError(OutboxError, ImproperlyConfigured):
    """Raised when `OUTBOX` has a wrong or unknown value, or two decorators contradict each other."""


class NotInTransaction(OutboxError):
    """Raised when a message is published outside a database transaction."""


class NotOutermost(OutboxError):
    """Raised if a transaction is already open when a message should go half first, or when a handler enters a durable block."""


class HalfNotStored(OutboxError):
    """Raised when a message should go half first, but its broker did not confirm the half message. The block was not run."""


class NotAwaited(OutboxError):
    """Raised when a call of `apublish()` was not awaited before its transaction ended, or was made in synchronous code."""


class WrongDatabase(OutboxError):
    """Raised when a message would be stored in another database than the row that it is about."""


class InvalidMessage(OutboxError, ValueError):
    """Raised by `publish()` when topic, key, tag, headers or body break a rule."""


class BodyTooLarge(InvalidMessage):
    """Raised by `publish()` when the body is larger than the topic's broker accepts."""


class InvalidMessageType(OutboxError):
    """Raised when the fields of a message type cannot be described as a JSON Schema."""


class UnreadableSnapshot(OutboxError):
    """Raised when the file with the snapshot of the message types cannot be read or written, or is not a snapshot."""


class UnknownTopic(InvalidMessage):
    """Raised when a topic is not in `OUTBOX["TOPICS"]`."""


class UnsupportedByBroker(OutboxError):
    """Raised when a broker is asked for something that it does not support."""


class BrokerUnavailable(OutboxError):
    """Raised when a broker cannot be reached, by calls whose result cannot say so: receive, ack, backlog, find."""


class BrokerMisconfigured(BrokerUnavailable):
    """Raised when a broker can be reached, but refuses a call until somebody corrects settings or permissions."""


class LaneBlocked(BrokerUnavailable):
    """Raised when a broker works, but a relay's lane cannot be opened there: the lane's last transaction cannot end now."""


class BrokerCannotTell(BrokerUnavailable):
    """Raised when stored messages cannot be looked up with a broker's OPTIONS. Sending and receiving still work."""


class NotMigrated(OutboxError):
    """Raised when a database is read-only, lacks the tables of the outbox or of a broker that it stores, or hides their rows."""


class OtherProject(NotMigrated):
    """Raised when the tables of the outbox in a database belong to another project."""


class TablesLocked(OutboxError):
    """Raised when a query of the tables takes too long. If it waits for a lock, the text names the session that holds it."""


class LaneNotHeld(OutboxError):
    """Raised when a relay asks for a lane that another relay holds."""


class FenceLost(OutboxError):
    """Raised by a write to a batch that another process has taken over, or an earlier call has written. The relay continues."""


class UnknownMessageType(OutboxError):
    """Raised when a received message has a type, or a newer version of a type, that no module defines."""


class BrokenTransaction(OutboxError):
    """Raised when a transaction would not commit, because an error was caught inside it or earlier code has left it open."""


class ClosedByHandler(BrokenTransaction):
    """Raised after a handler has closed the connection of its own transaction."""


class InboxRefused(OutboxError):
    """Raised when the database refuses a consumer's own writes, such as inbox rows, for example for a missing permission."""


class NeverEnded(OutboxError):
    """Raised instead of calling a handler that was started five times with a message and never finished."""


class StaleRow(OutboxError):
    """Raised by `update_or_raise` when a row no longer has the expected version or state."""


class Reject(OutboxError):
    """Raised by a handler for a message that can never be handled. The message becomes a dead letter at once."""


class UnreadableBody(OutboxError):
    """Raised when a received body does not fit its type, or is not valid JSON. The message becomes a dead letter at once."""


class TimeLimitExceeded(BaseException):  # so that an `except Exception` in the handler does not catch it
    """Raised inside a handler that has run for longer than its `time_limit`."""


class RetryLater(OutboxError):
    """Raised by a handler so that the message is delivered again after a time, which is in seconds or a timedelta."""

    def __init__(self, after: float | timedelta, reason: str = "") -> None:
        if not isinstance(after, int | float | timedelta):
            raise TypeError(f"RetryLater takes seconds or a timedelta, then a reason, not {after!r}.")
        self.after = after if isinstance(after, timedelta) else timedelta(seconds=after)
        super().__init__(self.after.total_seconds(), reason)

    @cached_property
    def after(self) -> timedelta:
        """The time to wait; a minute for an instance of a subclass that does not pass one to `super().__init__`."""
        value = self.args[0] if self.args else None
        if isinstance(value, timedelta):
            return value
        return timedelta(seconds=value) if isinstance(value, int | float) else timedelta(minutes=1)

    def _texts(self) -> tuple[str, str]:
        reason = self.args[1] if len(self.args) > 1 else ""
        return str(reason or f"to be retried after {self.after}"), ""
