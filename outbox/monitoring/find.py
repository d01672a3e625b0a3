"""
Find messages by an id, a key, the row that they are about, or a field of their body.

Ids, keys and rows have an index. Bodies have none, since every publish would pay for it. So a search by a field reads the newest
`MAX_MESSAGES_READ` messages of its time range, for at most `MAX_SECONDS`, and returns how far it got.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import LiteralString
from uuid import UUID

import msgspec
import psycopg
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import DatabaseError, router
from django.db.models import CompositePrimaryKey, Model
from psycopg.rows import class_row

from outbox.database import Connection
from outbox.ids import first_id_at
from outbox.message import Header, read_headers
from outbox.publishing.transactions import describe, describe_key

MAX_MESSAGES_READ = 100_000  # the newest messages of a time range that a search by a field reads
MAX_SECONDS = 10.0
BODY_BYTES = 256 * 1024  # larger bodies are not searched
CHUNK = 100  # bodies that are read at once

FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)

# Rows with the topic id 0 are tombstones, not messages.
IS_ID = "SELECT EXISTS (SELECT FROM outbox_message WHERE id = %s AND topic_id <> 0)"
IS_KEY_OR_ROW = """
SELECT EXISTS (SELECT FROM outbox_message WHERE key = %(text)s AND key <> '' AND topic_id <> 0)
    OR EXISTS (SELECT FROM outbox_message WHERE about = ANY(%(about)s::text[]) AND topic_id <> 0)
"""

BY_KEY_OR_ROW = """
SELECT id FROM outbox_message WHERE (key = %(text)s AND key <> '' OR about = ANY(%(about)s::text[])) AND topic_id <> 0
    AND id >= %(first)s AND id < %(end)s ORDER BY id DESC LIMIT %(limit)s
"""

# The oldest message that a search by a field reads, if the range has more than `MAX_MESSAGES_READ`.
FLOOR = "SELECT id FROM outbox_message WHERE id >= %s AND id < %s ORDER BY id DESC OFFSET %s LIMIT 1"

# Bodies that contain the name of the field and the value somewhere; JSON is parsed in Python, since PostgreSQL would fail at the
# first body that is not JSON. The planner reads the range along the primary key, from its newest message.
CANDIDATES = """
SELECT id, headers, body FROM outbox_message WHERE id >= %(first)s AND id < %(end)s AND topic_id <> 0
    AND octet_length(body) <= %(bytes)s AND position(%(name)s::bytea IN body) > 0 AND position(%(value)s::bytea IN body) > 0
ORDER BY id DESC LIMIT %(chunk)s
"""

# Texts of characters that every JSON encoder writes without escapes.
PLAIN = re.compile(r"[A-Za-z0-9 _.:,@#*=()\[\]{}|!?;%$^~-]*")

READ = """
SELECT message.id, current.topic, message.headers, message.key, coalesce(message.about, '') AS about, message.created_at,
    current.state
FROM outbox_message message JOIN outbox_message_state current ON current.id = message.id
WHERE message.id = ANY(%s) ORDER BY message.id DESC
"""

MayRead = Callable[[Mapping[str, str], str], bool]


class Search(msgspec.Struct, frozen=True):
    """
    A search text, and its possible meanings.

    Args:
        id: the text, if it has the form of an id.
        about: the rows that the text can name, in the form of the column `about`.
        path: the names of the fields on the way to a field of a body, from the top level; empty if the text names no field.
        value: the value of the field as in JSON, but a string without its quotes.
    """

    text: str
    id: UUID | None
    about: tuple[str, ...]
    path: tuple[str, ...]
    value: str


class Found(msgspec.Struct, frozen=True):
    """
    The result of a search, newest first.

    Args:
        is_cut: more messages match, or may match, than were returned.
        reached: the oldest message that a search by a field has read, if it ended before the end of its range.
        is_late: the search took longer than `MAX_SECONDS`; then `reached` is None if nothing was read.
    """

    ids: list[UUID]
    is_cut: bool = False
    reached: UUID | None = None
    is_late: bool = False


class FoundMessage(msgspec.Struct, frozen=True):
    """A message in a list of results. `state`: as in `outbox_message_state`."""

    id: UUID
    topic: str
    headers: str
    key: str
    about: str
    created_at: datetime
    state: str

    @property
    def type(self) -> str:
        """The type of the message; of a Celery task, its name."""
        return read_headers(self.headers).get(Header.TYPE, "")


def parse(text: str) -> Search:
    """Return the possible meanings of a text: `0198…`, `536365`, `shop.order:4711`, `invoice=536365` or `customer.id=7`."""
    text = text.strip()
    try:
        message_id = UUID(text)
    except ValueError:
        message_id = None
    name, is_field, value = text.partition("=")
    path = tuple(part.strip() for part in name.split(".")) if is_field else ()
    return Search(text, message_id, tuple(_rows(text)), path if all(path) else (), value.strip())


def _rows(text: str) -> Iterator[str]:
    """Yield the text; if it names a row in another form than `publish()` does, then the form of `publish()`."""
    yield text
    label, colon, key = text.partition(":")
    try:
        model = apps.get_model(label.strip()) if colon else None
        if model is not None and (row := describe_key(model, _key(model, key.strip()), router.db_for_write(model))) != text:
            yield row
    except (LookupError, ValueError, TypeError, ArithmeticError, ValidationError, DatabaseError):
        return


def _key(model: type[Model], text: str) -> object:
    """Return a primary key from its text; a composite key, which is written like a tuple, as a tuple of values."""
    fields = model._meta.pk_fields
    if not isinstance(model._meta.pk, CompositePrimaryKey):
        return text
    parts = [part.strip().strip("'\"") for part in text.strip("()").split(",")]
    return tuple(field.to_python(part) for field, part in zip(fields, parts, strict=True))


def has_id(connection: Connection, search: Search) -> bool:
    """Return whether a text is the id of a message."""
    return search.id is not None and _exists(connection, IS_ID, [search.id])


def is_key_or_row(connection: Connection, search: Search) -> bool:
    """Return whether messages have a text as their key, or are about the row that it names."""
    return bool(search.text) and _exists(connection, IS_KEY_OR_ROW, _texts(search))


def is_field_search(connection: Connection, search: Search) -> bool:
    """
    Return whether a text means a field of a body, and no message has it as its key or is about the row that it names.
    """
    return bool(search.path) and not is_key_or_row(connection, search)


def find(
    connection: Connection, search: Search, *, since: datetime | None = None, until: datetime | None = None, limit: int
) -> Found:
    """
    Return at most `limit` messages, the newest first.

    Args:
        since, until: the range of times of publishing; a message is found by its id at any time.
    """
    first, end = FIRST_ID if since is None else first_id_at(since), LAST_ID if until is None else first_id_at(until)
    if search.id is not None and has_id(connection, search):
        return Found([search.id])
    if is_field_search(connection, search):
        return find_by_field(connection, search, first=first, end=end, limit=limit)
    return _find_indexed(connection, _texts(search) | {"first": first, "end": end, "limit": limit + 1})


def find_about(connection: Connection, row: Model, alias: str, *, limit: int) -> Found:
    """Return at most `limit` messages about a row, or about its rows of parent models (multi-table inheritance), newest first."""
    model = row._meta.concrete_model or row._meta.model
    keys = {parent: row.serializable_value(parent._meta.pk.attname) for parent in model._meta.all_parents}
    about = [describe(row, alias), *(describe_key(parent, key, alias) for parent, key in keys.items())]
    return _find_indexed(connection, {"text": "", "about": about, "first": FIRST_ID, "end": LAST_ID, "limit": limit + 1})


def find_by_field(
    connection: Connection,
    search: Search,
    *,
    first: UUID,
    end: UUID,
    limit: int,
    may_read: MayRead = lambda headers, field: True,
) -> Found:
    """
    Return messages whose body, in JSON, has a value in a field.

    If the path leads through a list, or the field is one, any item may match. Bodies that are not JSON, or larger than
    `BODY_BYTES`, are left out.

    Args:
        first, end: the range of ids.
        may_read: is called with a message's headers and the top-level name in the path; returns whether the user may read it.
    """
    deadline = time.monotonic() + MAX_SECONDS
    asked_end = end
    row = connection.execute(FLOOR, [first, end, MAX_MESSAGES_READ]).fetchone()
    floor = row[0] if row else first
    arguments = {
        "first": floor,
        "bytes": BODY_BYTES,
        "name": _needle(search.path[-1], '"{}"'),
        "value": _needle(search.value, "{}"),
        "chunk": CHUNK,
    }
    ids: list[UUID] = []
    while True:
        try:
            rows = _read_candidates(connection, deadline - time.monotonic(), arguments | {"end": end})
        except psycopg.errors.QueryCanceled:
            return Found(ids, is_cut=True, reached=None if end == asked_end else end, is_late=True)
        for message_id, headers, body in rows:
            end = message_id
            if has_value(bytes(body), search.path, search.value) and may_read(read_headers(headers), search.path[0]):
                if len(ids) == limit:
                    return Found(ids, is_cut=True, reached=ids[-1])
                ids.append(message_id)
        if len(rows) < CHUNK:
            return Found(ids, is_cut=floor != first, reached=floor if floor != first else None)


def has_value(body: bytes, path: Sequence[str], value: str) -> bool:
    """Return whether a body in JSON has a value in a field; False for other bodies."""
    try:
        return _has_value(msgspec.Raw(body), path, value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _has_value(raw: msgspec.Raw, path: Sequence[str], value: str) -> bool:
    text = bytes(raw).strip()
    match text[:1]:
        case b"[":
            return any(_has_value(item, path, value) for item in msgspec.json.decode(text, type=list[msgspec.Raw]))
        case b"{":
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            return bool(path) and path[0] in fields and _has_value(fields[path[0]], path[1:], value)
        case b'"':
            return not path and msgspec.json.decode(text, type=str) == value
        case _:
            return not path and text == value.encode()


def read_found(connection: Connection, ids: Sequence[UUID]) -> list[FoundMessage]:
    """Return the messages with some ids for a list of results, the newest first."""
    return connection.cursor(row_factory=class_row(FoundMessage)).execute(READ, [list(ids)]).fetchall()


def _needle(text: str, form: str) -> bytes:
    """Return the bytes that every body with this text contains; nothing if an encoder may write the text with escapes."""
    return form.format(text).encode() if PLAIN.fullmatch(text) else b""


def _texts(search: Search) -> dict[str, object]:
    return {"text": search.text, "about": list(search.about)}


def _exists(connection: Connection, query: LiteralString, arguments: Sequence[object] | dict[str, object]) -> bool:
    return bool(connection.execute(query, arguments).fetchone() == (True,))


def _find_indexed(connection: Connection, arguments: dict[str, object]) -> Found:
    ids = [row[0] for row in connection.execute(BY_KEY_OR_ROW, arguments).fetchall()]
    limit = int(str(arguments["limit"])) - 1
    return Found(ids[:limit], is_cut=len(ids) > limit)


def _read_candidates(connection: Connection, seconds: float, arguments: dict[str, object]) -> list[tuple[UUID, str, bytes]]:
    """Return the rows of `CANDIDATES`. The timeout of the connection is replaced by `seconds` for this query only."""
    with connection.transaction():
        previous = connection.execute("SELECT current_setting('statement_timeout')").fetchone()
        set_to = "SELECT set_config('statement_timeout', %s, true)"
        connection.execute(set_to, [f"{max(1, int(seconds * 1000))}ms"])
        rows = connection.execute(CANDIDATES, arguments).fetchall()
        connection.execute(set_to, previous)
    return rows
