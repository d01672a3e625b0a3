"""Failed deliveries: the log of them, and how an error is told to people."""

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
MAX_REMEMBERED = 1_000

_NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in {
        *site.getsitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *outbox.__path__,
    }
)

_met: dict[str, None] = {}  # fingerprints, the latest one last
_meeting = threading.Lock()


def record_duplicate(arrival: DeliveryInfo, using: str) -> None:
    """Record that a delivery is dropped as a duplicate."""
    Duplicate.objects.using(using).create(
        consumer_group=arrival.group,
        message_id=arrival.message_id,
        topic=arrival.topic,
        delivery_count=arrival.delivery_count,
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and the members of exception groups, each once."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        cause = todo.pop()
        if cause is None or any(cause is other for other in seen):
            continue
        seen.append(cause)
        yield cause
        todo += [cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ())]


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
    """Return whether this process has not seen a similar error among its last thousand."""
    looks = fingerprint(error)
    with _meeting:
        was_met = looks in _met
        _met.pop(looks, None)
        _met[looks] = None
        if len(_met) > MAX_REMEMBERED:
            del _met[next(iter(_met))]
    return not was_met


def text_of(error: BaseException) -> str:
    """Return an error's text in a form that PostgreSQL can store; a note where its `__str__` raises."""
    return storable(cut(safe_text(error)))


def describe(error: BaseException) -> str:
    """Return an error for operators: its type, then its text."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fingerprint(error: BaseException) -> str:
    """Return a string that is equal for similar errors: type, place in the user's code, text without numbers."""
    words = shape_of(cut(safe_text(error)))
    return cut(storable(f"{type(error).__name__} in {_place(error.__traceback__)}: {words}"), MAX_FINGERPRINT_CHARACTERS)


def shape_of(text: str) -> str:
    """Return the beginning of the first line of a text, with `#` for each id and number in it."""
    return cut(without_numbers(text.partition("\n")[0]), MAX_FINGERPRINT_CHARACTERS)


def _place(trace: TracebackType | None) -> str:
    """Return the innermost function of the user's code, without its line number, which changes with each edit."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_THE_USERS)]
    if not frames:
        return "no frame"
    innermost = (own or frames)[-1]
    return f"{innermost.f_globals.get('__name__', '?')}.{innermost.f_code.co_qualname}"
