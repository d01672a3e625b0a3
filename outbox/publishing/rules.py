"""
All rules for messages. `publish()` checks them, so that the traceback of an error leads to its caller.

| what | rule | why |
|---|---|---|
| topic | 1 to 127 letters, digits, `%`, `_`, `-`; in `OUTBOX["TOPICS"]` | RocketMQ's rule; other brokers accept such names too |
| key | string of up to 255 characters, no control characters; not empty on topics of type fifo | headers; order per key |
| tag | up to 255 characters, no blank, no `|`, no control character, not `*` | `a || b` and `*` mean sets of tags |
| headers | strings, at most 64, names and values together at most 8 KiB | RocketMQ: 128 and 16 KiB with the outbox's headers |
| a header's name | up to 128 letters, digits, `.`, `_`, `-`; neither `ce-...` nor `content-type` | the outbox writes these |
| a header's value | no control character | may be sent over HTTP |
| body | 1 byte up to `max_body_bytes` of the topic's broker | the broker rejects others |
| delay | a timedelta from 0 to 365 days; none on topics of type fifo | it would delay all later messages of the key |
| content type | string of 1 to 255 characters, no control characters | may be sent over HTTP |
| idempotency key | string of 1 to 255 characters, no control characters | part of a primary key |

The types of a message's fields are checked by `draft.py`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache

from outbox.errors import BodyTooLarge, InvalidMessage
from outbox.message import Header

MAX_TEXT = 255
MAX_HEADERS = 64
MAX_HEADER_BYTES = 8 * 1024
MAX_DELAY = timedelta(days=365)
MAX_ABOUT_BYTES = 2692  # the longest text that an entry of PostgreSQL's index holds uncompressed

TOPIC_RULE = "A topic's name is 1 to 127 letters, digits, %, _ and -."

_TOPIC = re.compile(r"[%a-zA-Z0-9_-]{1,127}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

# Values are shortened in error texts, so that the texts stay readable.
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = MAX_TEXT
_shorten = _repr.repr

# Control characters; and lone surrogates, which UTF-8 cannot encode.
_FORBIDDEN_IN_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_FORBIDDEN_IN_TAG = re.compile(rf"[\s|]|{_FORBIDDEN_IN_TEXT.pattern}")


@lru_cache(maxsize=1024)
def is_topic_name(name: str) -> bool:
    """Return whether a name is allowed as a topic's name."""
    return _TOPIC.fullmatch(name) is not None


def check_topic(subject: str, name: object) -> None:
    """Raise InvalidMessage unless the name is allowed as a topic's name. `subject`: the message's name in the error text."""
    if not isinstance(name, str) or not is_topic_name(name):
        raise InvalidMessage(f"{subject} cannot go to topic {_shorten(name)}.", hint=TOPIC_RULE)


def check_key(subject: str, key: object, *, topic: str, is_ordered: bool) -> None:
    """Raise InvalidMessage unless the key is valid."""
    _check_text(subject, "key", key)
    if is_ordered and not key:
        raise InvalidMessage(
            f"{subject} has no key, and topic {topic!r} is of type fifo: it keeps the order per key.",
            hint="Name the field in `class Meta: key = ...`, or pass key=.",
        )


def check_about(subject: str, about: str) -> None:
    """Raise InvalidMessage unless an index can hold the text for the row that the message is about."""
    if (size := len(about.encode())) > MAX_ABOUT_BYTES:
        raise InvalidMessage(
            f"{subject} has in about= a row whose label and primary key have {size} bytes, more than {MAX_ABOUT_BYTES}.",
            hint="Publish it without about=, or about a row with a shorter key.",
        )


def check_tag(subject: str, tag: object) -> None:
    """Raise InvalidMessage unless the tag is valid."""
    if not isinstance(tag, str) or len(tag) > MAX_TEXT or tag == "*" or _FORBIDDEN_IN_TAG.search(tag):
        raise InvalidMessage(
            f"{subject} cannot have the tag {_shorten(tag)}.",
            hint=f"A tag is a string of at most {MAX_TEXT} characters without blanks, | and control characters, and not *.",
        )


def check_headers(subject: str, headers: Mapping[str, str]) -> None:
    """Raise InvalidMessage unless the user's headers are valid."""
    if not hasattr(headers, "items"):
        text = f"{subject} has headers of type {type(headers).__name__}."
        raise InvalidMessage(text, hint='Pass a dict: headers={"name": "value"}.')
    if len(headers) > MAX_HEADERS:
        raise InvalidMessage(f"{subject} has {len(headers)} headers.", hint=f"Pass at most {MAX_HEADERS}.")
    size = 0
    for name, value in headers.items():
        _check_header_name(subject, name)
        if not isinstance(value, str) or _FORBIDDEN_IN_TEXT.search(value):
            raise InvalidMessage(
                f"{subject} has the header {_shorten(name)} with the value {_shorten(value)}.",
                hint="A header's value is a string without control characters.",
            )
        size += len(name) + len(value.encode())
    if size > MAX_HEADER_BYTES:
        raise InvalidMessage(
            f"{subject} has headers of {size} bytes, more than {MAX_HEADER_BYTES}.", hint="Put the rest into the body."
        )


def check_body(subject: str, body: bytes, *, topic: str, limit: int) -> None:
    """Raise InvalidMessage or BodyTooLarge unless the broker accepts a body of that size."""
    if not body:
        raise InvalidMessage(f"{subject} has an empty body.", hint="A body has at least 1 byte.")
    if len(body) > limit:
        raise BodyTooLarge(
            f"{subject} has a body of {len(body)} bytes; the broker of topic {topic!r} accepts at most {limit}.",
            hint="Store the content elsewhere and publish a reference to it.",
        )


def check_delay(subject: str, delay: object, *, topic: str, is_ordered: bool) -> None:
    """Raise InvalidMessage unless the delay is valid."""
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= MAX_DELAY:
        raise InvalidMessage(
            f"{subject} cannot be delayed by {delay!r}.", hint=f"A delay is a timedelta from 0 to {MAX_DELAY.days} days."
        )
    if delay and is_ordered:
        raise InvalidMessage(
            f"{subject} cannot be delayed: topic {topic!r} is of type fifo, where each message waits for the one before.",
            hint="Publish it without delay=, or to a topic of another type.",
        )


def check_content_type(subject: str, content_type: object) -> None:
    """Raise InvalidMessage unless the content type is valid."""
    _check_text(subject, "content type", content_type)
    if not content_type:
        raise InvalidMessage(f"{subject} cannot have the content type ''.", hint="Leave content_type= out, or name one.")


def check_idempotency_key(subject: str, idempotency_key: object) -> None:
    """Raise InvalidMessage unless the idempotency key is valid."""
    _check_text(subject, "idempotency key", idempotency_key)
    if not idempotency_key:
        raise InvalidMessage(f"{subject} has an empty idempotency key.", hint="Leave idempotency_key= out, or pass a string.")


def _check_text(subject: str, label: str, text: object) -> None:
    if not isinstance(text, str) or len(text) > MAX_TEXT or _FORBIDDEN_IN_TEXT.search(text):
        raise InvalidMessage(
            f"{subject} cannot have the {label} {_shorten(text)}.",
            hint=f"A {label} is a string of at most {MAX_TEXT} characters without control characters.",
        )


def _check_header_name(subject: str, name: object) -> None:
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise InvalidMessage(
            f"{subject} has a header called {_shorten(name)}.", hint="A name is 1 to 128 letters, digits, dots, _ and -."
        )
    if name.lower().startswith(Header.RESERVED_PREFIX) or name.lower() == Header.CONTENT_TYPE:
        raise InvalidMessage(
            f"{subject} has a header called {name!r}, which the outbox writes itself.", hint="Choose another name."
        )
