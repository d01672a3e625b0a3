"""
Loggers of the package. Their records are one line each, so that a message id with a line break cannot forge a log line.

Every logger of the package comes from `get_logger`. It writes a repeated line at most once a minute, with the number of times
that the line was left out, and without the traceback of the first one, so that an outage does not fill the log. A line is a
repeated one if it comes from the same statement and differs from an earlier line only in ids and numbers. It is also a repeated
one if it has the same `cause`, such as lines about requests, which anybody can send.

Records have fields, so that JSON logs can be searched: `extra=log_fields(topic=..., message_id=...)`.
"""

from __future__ import annotations

import logging
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any

from outbox.forks import ForkSafeLock

PREFIX = "outbox_"  # no attribute of a LogRecord begins with it

CAUSE = f"{PREFIX}cause"

MAX_ERROR_CHARACTERS = 2_000
"""The text of an error is cut at this length, wherever it is stored or logged."""

MAX_TRACEBACK_CHARACTERS = 10 * MAX_ERROR_CHARACTERS
REPEAT_SECONDS = 60.0  # the minimum time between two lines that are the same
MAX_LINES = 20  # different lines of one statement within REPEAT_SECONDS
MAX_REMEMBERED = 1_000  # lines by which repeated ones are recognized

_UUID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)
_CONTINUED = re.compile(r"\n[ \t]+")  # an indented continuation line, as in libpq's errors
_HEX = re.compile(r"\b(?:0x[0-9a-f]+|(?=[a-f]*[0-9])[0-9a-f]{8,})\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")

_format_exception = logging.Formatter().formatException


def cut(text: str, limit: int = MAX_ERROR_CHARACTERS) -> str:
    """Return the text of an error, cut to `limit` characters with `…` as the last one, so that it can be stored or logged."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def storable(text: str) -> str:
    """Return a text with NUL and lone surrogates escaped, which PostgreSQL's type text cannot store."""
    return text.encode(errors="backslashreplace").decode().replace("\x00", "\\x00")


def cut_traceback(text: str) -> str:
    """Return a formatted traceback; if it is longer than `MAX_TRACEBACK_CHARACTERS`, without its middle."""
    half = MAX_TRACEBACK_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[: half - 1]}…{text[-half:]}"


def safe_text(error: BaseException) -> str:
    """Return the text of an error; if its `__str__` raises, a text that says so."""
    try:
        return str(error)
    except Exception as other:
        return f"(its __str__ raised {type(other).__name__})"


def error_text(error: BaseException) -> str:
    """Return the class and the text of an error."""
    return f"{type(error).__name__}: {safe_text(error)}"


def line_of(error: BaseException) -> str:
    """Return the text of an error in one line, cut to `MAX_ERROR_CHARACTERS`."""
    return one_line(cut(" ".join(safe_text(error).split())))


def without_numbers(text: str) -> str:
    """Return a text with `#` for each id and number in it."""
    for pattern in (_UUID, _HEX, _DIGITS):
        text = pattern.sub("#", text)
    return text


def one_line(text: str) -> str:
    """Return a text with control characters, line ends and invisible characters escaped as in Python literals."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in _CONTINUED.sub(" ", text))


def get_logger(name: str) -> logging.Logger:
    """
    Return a logger whose records are one line each, apart from tracebacks, whose lines are indented.

    A repeated line is written at most once a minute.
    """
    logger = logging.getLogger(name)
    if _admit not in logger.filters:
        logger.addFilter(_admit)
    return logger


class _OneLine:
    """An argument of a record, which is converted to text only when the record is formatted."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(cut(_converted(str, self._value)))

    def __repr__(self) -> str:
        return one_line(cut(_converted(repr, self._value)))


def _converted(convert: Callable[[object], str], value: object) -> str:
    """Return a value as text; if the value's own code raises, a text that says so."""
    try:
        return convert(value)
    except Exception as error:
        return f"({type(value).__name__}, whose text cannot be had: {type(error).__name__})"


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() and len(value) <= MAX_ERROR_CHARACTERS else _OneLine(value)
    return value if value is None or isinstance(value, Number) else _OneLine(value)


def _admit(record: logging.LogRecord) -> bool:
    """Change a record so that it is one line; return whether it is written."""
    _keep_to_one_line(record)
    return _repeats.admit(record)


def _keep_to_one_line(record: logging.LogRecord) -> None:
    record.msg = one_line(cut(record.msg)) if isinstance(record.msg, str) else _OneLine(record.msg)
    if isinstance(record.args, Mapping):
        record.args = {name: _argument(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(_argument(value) for value in record.args)
    if record.exc_info and record.exc_info[0] and not record.exc_text:
        record.exc_text = textwrap.indent(cut_traceback(_format_exception(record.exc_info)), "  ")


class Repeats:
    """
    Decides which records are written: a repeated one at most once a minute, and not too many different ones of one statement.

    A record at INFO is a repeated one only if its ids and numbers are the same, too; the number of different ones is not limited.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Line -> when it was written, and how often it was left out since then; in the order of their last records.
        self._lines: dict[tuple[str, int, str], tuple[float, int]] = {}
        # (file, line number) of a statement -> the times at which its lines were written in the last minute.
        self._statements: dict[tuple[str, int], list[float]] = {}
        self._lock = ForkSafeLock()

    def admit(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; if so, append how often it was left out, and remove a repeated traceback."""
        if record.levelno <= logging.DEBUG:
            return True
        is_failure = record.levelno > logging.INFO
        text = record.getMessage()
        statement = record.pathname, record.lineno
        key = (*statement, vars(record).get(CAUSE) or (without_numbers(text) if is_failure else text))
        with self._lock.current:
            now = self._clock()
            written_at, left_out = self._lines.pop(key, (float("-inf"), 0))
            is_left_out = now - written_at < REPEAT_SECONDS or (is_failure and not self._has_room(statement, now))
            self._lines[key] = (written_at, left_out + 1) if is_left_out else (now, 0)
            if len(self._lines) > MAX_REMEMBERED:
                del self._lines[next(iter(self._lines))]
        if is_left_out:
            return False
        if left_out:
            record.msg = f"{record.msg} ({left_out} more {'time' if left_out == 1 else 'times'})"
        if written_at > float("-inf") and record.exc_info:
            record.exc_info = record.exc_text = None
        return True

    def forget(self) -> None:
        """Forget all written records, as at the beginning of a test."""
        with self._lock.current:
            self._lines.clear()
            self._statements.clear()

    def _has_room(self, statement: tuple[str, int], now: float) -> bool:
        """Return whether a statement may write another different line; if so, record that it does now."""
        recent = [at for at in self._statements.get(statement, ()) if now - at < REPEAT_SECONDS]
        has_room = len(recent) < MAX_LINES
        self._statements[statement] = [*recent, now] if has_room else recent
        return has_room


_repeats = Repeats()
forget_lines = _repeats.forget


def log_fields(
    *,
    message_id: object = None,
    message_ids: Iterable[object] | None = None,
    topic: str | None = None,
    topics: Iterable[str] | None = None,
    batch: int | None = None,
    batches: Iterable[int] | None = None,
    attempt: int | None = None,
    delivery_count: int | None = None,
    group: str | None = None,
    broker: str | None = None,
    database: str | None = None,
    lane: int | None = None,
    cause: str | None = None,
) -> dict[str, Any]:
    """
    Return the fields of a log record: `outbox_topic`, `outbox_message_id`, … Arguments that are None are left out.

    Args:
        message_id, message_ids: converted to text.
        message_ids, topics, batches: lists, for a record about several.
        attempt: the batch's attempt.
        cause: one of a few fixed names. Lines of one statement with the same cause are repeated ones, whatever their text.
    """
    fields = {
        "message_id": None if message_id is None else str(message_id),
        "message_ids": None if message_ids is None else [str(message_id) for message_id in message_ids],
        "topic": topic,
        "topics": None if topics is None else sorted(set(topics)),
        "batch": batch,
        "batches": None if batches is None else sorted(set(batches)),
        "attempt": attempt,
        "delivery_count": delivery_count,
        "group": group,
        "broker": broker,
        "database": database,
        "lane": lane,
        "cause": cause,
    }
    return {f"{PREFIX}{name}": value for name, value in fields.items() if value is not None}
