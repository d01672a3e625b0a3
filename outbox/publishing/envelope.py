"""A message with all that a publisher may say beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import Model

from outbox.message import Message


@dataclass(frozen=True, slots=True)
class Envelope:
    """
    A message with the options that `publish()` takes one by one, for `publish_many()`.

    Args:
        message: what is published.
        about: the row that the message speaks of. The message goes to the row's database, and the admin links the two.
        key, tag: instead of those that the type's Meta names.
        headers: the publisher's own, beside those of the outbox.
        delay: the message is not sent before so long from now.
        dedupe_key: a second message with it, within `DEDUPE_RETENTION`, is not written.
    """

    message: Message
    about: Model | None = None
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] | None = None
    delay: timedelta | None = None
    dedupe_key: str | None = None
