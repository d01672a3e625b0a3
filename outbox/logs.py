"""
Loggers of the package, whose records are one line each: a message id with a line break in it cannot forge a log line.

Every logger of the package comes from `get_logger`. It writes the same line once a minute, with the number of times that it was
left out, and its traceback only at first: an outage does not fill the log, however often something is tried again. Lines are the
same if they come from the same place in the code, and differ in ids and numbers only; or if they have the same cause, as lines
about requests do, which anybody can send.

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
REPEAT_SECONDS = 60.0  # between two lines that are the same
MOST_LINES = 20  # different ones from one place in the code, in that time
MOST_REMEMBERED = 1_000

_UUID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)
_CONTINUED = re.compile(r"\n[ \t]+")  # a line that goes on indented, as libpq writes its errors
_HEX = re.compile(r"\b(?:0x[0-9a-f]+|(?=[a-f]*[0-9])[0-9a-f]{8,})\b", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")

_format_exception = logging.Formatter().formatException


def cut(text: str, most: int = MAX_ERROR_CHARACTERS) -> str:
    """Return the text of an error as it may be stored or logged: its beginning and `…`, if it has more characters than `most`."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def storable(text: str) -> str:
    """Escape what PostgreSQL's text cannot hold: NUL, and lone surrogates."""
    return text.encode(errors="backslashreplace").decode().replace("\x00", "\\x00")


def cut_traceback(text: str) -> str:
    """Return a formatted traceback without its middle, if it is longer than `MAX_TRACEBACK_CHARACTERS`."""
    half = MAX_TRACEBACK_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[: half - 1]}…{text[-half:]}"


def safe_text(error: BaseException) -> str:
    """Return the text of an error; a note where its `__str__` raises."""
    try:
        return str(error)
    except Exception as trouble:
        return f"(its __str__ raised {type(trouble).__name__})"


def error_text(error: BaseException) -> str:
    """Return the class and the text of an error."""
    return f"{type(error).__name__}: {safe_text(error)}"


def line_of(error: BaseException) -> str:
    """Return the text of an error in one line, and cut."""
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

    The same line is written once a minute.
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
    """Return a value as text; a note where its own code raises."""
    try:
        return convert(value)
    except Exception as error:
        return f"({type(value).__name__}, whose text cannot be had: {type(error).__name__})"


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() and len(value) <= MAX_ERROR_CHARACTERS else _OneLine(value)
    return value if value is None or isinstance(value, Number) else _OneLine(value)


def _admit(record: logging.LogRecord) -> bool:
    """Keep a record to one line; return whether it is written."""
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
    Decides which records are written: the same one once a minute, and not too many different ones from one place in the code.

    Records at INFO are the same only if their numbers are, too, and may be as many as there are.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[tuple[str, int, str], tuple[float, int]] = {}  # written at, left out since; the least recent first
        self._places: dict[tuple[str, int], list[float]] = {}  # when lines of a place were written in the last minute
        self._lock = ForkSafeLock()

    def admit(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record, after adding to it how often it was left out, and removing a repeated traceback."""
        if record.levelno <= logging.DEBUG:
            return True
        is_failure = record.levelno > logging.INFO
        text = record.getMessage()
        place = record.pathname, record.lineno
        key = (*place, vars(record).get(CAUSE) or (without_numbers(text) if is_failure else text))
        with self._lock.current:
            now = self._clock()
            written_at, left_out = self._lines.pop(key, (float("-inf"), 0))
            is_left_out = now - written_at < REPEAT_SECONDS or (is_failure and not self._has_room(place, now))
            self._lines[key] = (written_at, left_out + 1) if is_left_out else (now, 0)
            if len(self._lines) > MOST_REMEMBERED:
                del self._lines[next(iter(self._lines))]
        if is_left_out:
            return False
        if left_out:
            record.msg = f"{record.msg} ({left_out} more {'time' if left_out == 1 else 'times'})"
        if written_at > float("-inf") and record.exc_info:
            record.exc_info = record.exc_text = None
        return True

    def forget(self) -> None:
        """Forget what was written, as at the beginning of a test."""
        with self._lock.current:
            self._lines.clear()
            self._places.clear()

    def _has_room(self, place: tuple[str, int], now: float) -> bool:
        recent = [at for at in self._places.get(place, ()) if now - at < REPEAT_SECONDS]
        has_room = len(recent) < MOST_LINES
        self._places[place] = [*recent, now] if has_room else recent
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
        attempt: of the batch.
        cause: one of a few fixed names. Lines of one place with the same cause are the same line, whatever their text.
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
