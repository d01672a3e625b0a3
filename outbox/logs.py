"""
Loggers of the package, whose records are one line each: a message id with a line break in it cannot forge a log line.

Every logger of the package comes from `get_logger`. `LimitedLog` is for lines that an unauthenticated request can cause. Records
have fields, so that JSON logs can be searched: `extra=log_fields(topic=..., message_id=...)`.
"""

from __future__ import annotations

import logging
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any, Protocol

from outbox.forks import ForkSafeLock

PREFIX = "outbox_"  # no attribute of a LogRecord begins with it

_format_exception = logging.Formatter().formatException


def one_line(text: str) -> str:
    """Return a text with control characters, line ends and invisible characters escaped as in Python literals."""
    return text if text.isprintable() else repr(text)[1:-1]


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose records are one line each, apart from tracebacks, whose lines are indented."""
    logger = logging.getLogger(name)
    if _keep_to_one_line not in logger.filters:
        logger.addFilter(_keep_to_one_line)
    return logger


class _OneLine:
    """An argument of a record, which is converted to text only when the record is formatted."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(str(self._value))

    def __repr__(self) -> str:
        return one_line(repr(self._value))


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else _OneLine(value)
    return value if value is None or isinstance(value, Number) else _OneLine(value)


def _keep_to_one_line(record: logging.LogRecord) -> bool:
    record.msg = one_line(record.msg) if isinstance(record.msg, str) else _OneLine(record.msg)
    if isinstance(record.args, Mapping):
        record.args = {name: _argument(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(_argument(value) for value in record.args)
    if record.exc_info and record.exc_info[0] and not record.exc_text:
        record.exc_text = textwrap.indent(_format_exception(record.exc_info), "  ")
    return True


class HasTopic(Protocol):
    """A message or half message with a topic and an id."""

    @property
    def topic(self) -> str: ...
    @property
    def message_id(self) -> object: ...


def fields_of(message: HasTopic) -> dict[str, Any]:
    """Return the fields of a log record about one message."""
    return log_fields(message_id=message.message_id, topic=message.topic)


def log_fields(
    *,
    message_id: object = None,
    message_ids: Iterable[object] | None = None,
    topic: str | None = None,
    topics: Iterable[str] | None = None,
    batch: int | None = None,
    batches: Iterable[int] | None = None,
    attempt: int | None = None,
    group: str | None = None,
    broker: str | None = None,
    database: str | None = None,
    lane: int | None = None,
) -> dict[str, Any]:
    """
    Return the fields of a log record: `outbox_topic`, `outbox_message_id`, … Arguments that are None are left out.

    Args:
        message_id, message_ids: converted to text.
        message_ids, topics, batches: lists, for a record about several.
        attempt: of the batch or the delivery.
    """
    found = {
        "message_id": None if message_id is None else str(message_id),
        "message_ids": None if message_ids is None else [str(one) for one in message_ids],
        "topic": topic,
        "topics": None if topics is None else sorted(set(topics)),
        "batch": batch,
        "batches": None if batches is None else sorted(set(batches)),
        "attempt": attempt,
        "group": group,
        "broker": broker,
        "database": database,
        "lane": lane,
    }
    return {f"{PREFIX}{name}": value for name, value in found.items() if value is not None}


class LimitedLog:
    """
    Writes at most one line per cause and interval. The next line of the cause has the number of lines left out.

    Args:
        interval: seconds.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, logger: logging.Logger, *, interval: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._written: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def log(self, level: int, cause: str, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """
        Write a line, or count it.

        Args:
            cause: one of a few fixed names; never text from a request.
            text, args: as for a logger.
        """
        with _lock.current:
            now = self._clock()
            if cause in self._written and now - self._written[cause] < self._interval:
                self._left_out[cause] += 1
                return
            left_out, self._left_out[cause], self._written[cause] = self._left_out.get(cause, 0), 0, now
        more = f" ({left_out} more since the last such line.)" if left_out else ""
        self._logger.log(level, text + more, *args, exc_info=exc_info)


_lock = ForkSafeLock()
