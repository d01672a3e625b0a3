"""Record failed deliveries and duplicates, and describe errors for people."""

from __future__ import annotations

import site
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import outbox
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.logs import cut, cut_traceback, safe_text, storable, without_numbers
from outbox.models import Duplicate, FailedDelivery

MAX_FINGERPRINT_CHARACTERS = 200
MAX_REMEMBERED = 1_000  # fingerprints in _seen_errors

_NOT_USER_CODE = tuple(
    f"{Path(folder).resolve()}/"
    for folder in {
        *site.getsitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *outbox.__path__,
    }
)

_seen_errors: dict[str, None] = {}  # an ordered set of fingerprints; the one that occurred last comes last
_lock = threading.Lock()


def record_duplicate(arrival: DeliveryInfo, using: str) -> None:
    """Record that a delivery is dropped as a duplicate."""
    Duplicate.objects.using(using).create(
        consumer_group=arrival.group,
        message_id=arrival.message_id,
        topic=arrival.topic,
        delivery_count=arrival.delivery_count,
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and recursively its cause, its context, and the members of an exception group; each only once."""
    yielded: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        cause = todo.pop()
        if cause is None or any(cause is other for other in yielded):
            continue
        yielded.append(cause)
        yield cause
        todo += [cause.__cause__, cause.__context__, *(cause.exceptions if isinstance(cause, BaseExceptionGroup) else ())]


def record_failure(arrival: DeliveryInfo, outcome: str, error: BaseException, using: str) -> None:
    """Record a failed delivery, in the caller's transaction."""
    FailedDelivery.objects.using(using).create(
        consumer_group=arrival.group,
        message_id=arrival.message_id,
        topic=arrival.topic,
        delivery_count=arrival.delivery_count,
        source=arrival.source,
        lane=arrival.lane,
        number=arrival.number,
        outcome=outcome,
        fingerprint=fingerprint(error),
        error=describe(error),
        traceback=storable(cut_traceback("".join(traceback.format_exception(error)))),
    )


def is_new_error(error: BaseException) -> bool:
    """Return whether no error with the same fingerprint is among the last 1,000 different ones of this process; remember it."""
    key = fingerprint(error)
    with _lock:
        was_seen = key in _seen_errors
        _seen_errors.pop(key, None)
        _seen_errors[key] = None
        if len(_seen_errors) > MAX_REMEMBERED:
            del _seen_errors[next(iter(_seen_errors))]
    return not was_seen


def text_of(error: BaseException) -> str:
    """Return an error's text, shortened, in a form that PostgreSQL can store; if its `__str__` fails, a text that says so."""
    return storable(cut(safe_text(error)))


def describe(error: BaseException) -> str:
    """Return a description of an error for operators: its type, then its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fingerprint(error: BaseException) -> str:
    """Return a string that is the same for similar errors: their type, the user's function, and the text without numbers."""
    words = shape_of(cut(safe_text(error)))
    return cut(storable(f"{type(error).__name__} in {_user_function(error.__traceback__)}: {words}"), MAX_FINGERPRINT_CHARACTERS)


def shape_of(text: str) -> str:
    """Return the beginning of the first line of a text, with `#` for each id and number in it."""
    return cut(without_numbers(text.partition("\n")[0]), MAX_FINGERPRINT_CHARACTERS)


def _user_function(trace: TracebackType | None) -> str:
    """Return the innermost function of the user's code in a traceback; without a line number, which each edit may change."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    user_frames = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_USER_CODE)]
    if not frames:
        return "no frame"
    innermost = (user_frames or frames)[-1]
    return f"{innermost.f_globals.get('__name__', '?')}.{innermost.f_code.co_qualname}"
