"""The messages that a test published, decoded from the message rows that it can see."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from outbox import conf
from outbox.errors import UnknownTopic
from outbox.message import Header, Message, message_type
from outbox.models import Delayed, MessageRow, Topic

Kind = type[Message] | str
"""A message type, or the name of a topic."""


class Published(msgspec.Struct, frozen=True):
    """
    A published message.

    Args:
        message: an instance of its type; for a raw message the decoded JSON, or bytes if it is not JSON.
        about: the row that it is about, for example `shop.order:4711`.
        due_at: when it will be sent, if it was published with a delay that is not over.
    """

    message: Any
    id: UUID
    topic: str
    key: str
    tag: str
    headers: Mapping[str, str]
    about: str | None
    due_at: datetime | None
    database: str

    def is_of(self, kind: Kind | None) -> bool:
        return kind is None or (self.topic == kind if isinstance(kind, str) else isinstance(self.message, kind))

    def differences(self, fields: Mapping[str, object]) -> list[str]:
        """Return a description of each field whose value differs from the given one; empty if all match."""
        values = self.message if isinstance(self.message, Mapping) else _fields(self.message)
        missing = object()
        return [
            f"{name} is {values[name]!r}, not {value!r}" if name in values else f"{name} is missing"
            for name, value in fields.items()
            if values.get(name, missing) != value
        ]

    def __str__(self) -> str:
        return repr(self.message) if isinstance(self.message, Message) else f"{self.message!r} to {self.topic!r}"


def read(databases: Sequence[str]) -> list[Published]:
    """Return all messages of some databases, in the order in which they were published."""
    return [message for alias in databases for message in _read(alias)]


def check_fields(kind: Kind | None, fields: Mapping[str, object]) -> None:
    """Raise an error for a topic that settings do not have, or a field that the type does not have, since nothing could match."""
    if isinstance(kind, str):
        try:
            conf.topic_settings(kind)
        except UnknownTopic as error:
            raise AssertionError(str(error)) from error
    if kind is None or isinstance(kind, str):
        return
    if not (isinstance(kind, type) and issubclass(kind, Message)):
        raise AssertionError(f"{kind!r} is neither a message type nor the name of a topic. Pass the class, then its fields.")
    for name in fields:
        if name not in kind.__struct_fields__:
            close = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Its fields are {', '.join(kind.__struct_fields__)}."
            raise AssertionError(f"{kind.__name__} has no field {name!r}. {hint}")


def _read(alias: str) -> list[Published]:
    topics = dict(Topic.objects.using(alias).values_list("id", "name"))
    due = dict(Delayed.objects.using(alias).values_list("message_id", "due_at"))
    rows = MessageRow.objects.using(alias).filter(topic_id__in=topics).order_by("created_at", "id")
    return [_published(row, topics[row.topic_id], due.get(row.id), alias) for row in rows]


def _published(row: MessageRow, topic: str, due_at: datetime | None, alias: str) -> Published:
    headers = json.loads(row.headers)
    return Published(
        message=_message(bytes(row.body), headers),
        id=row.id,
        topic=topic,
        key=row.key,
        tag=headers.get(Header.TAG, ""),
        headers=headers,
        about=row.about,
        due_at=due_at,
        database=alias,
    )


def _message(body: bytes, headers: Mapping[str, str]) -> Any:
    kind = message_type(headers.get(Header.TYPE, ""))
    if kind is not None:
        return kind.from_body(body, int(headers[Header.VERSION]))
    is_json = headers.get(Header.CONTENT_TYPE, "").startswith("application/json")
    return msgspec.json.decode(body) if is_json else body


def _fields(message: object) -> dict[str, object]:
    return msgspec.structs.asdict(message) if isinstance(message, Message) else {}
