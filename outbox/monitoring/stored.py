"""
Read stored messages as consumers will: unsent, dead and deferred messages, and those of brokers that are stored in a database.

A message that this code cannot read becomes a dead letter when it is delivered. So the doctor, and
`outbox_schema --against-database` before a deployment, read stored messages in advance.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from django.db import connections

from outbox import conf, database
from outbox.brokers.base import Delivery, ReadPage, StoredList, TopicSpec
from outbox.brokers.capabilities import StoredInDatabase
from outbox.consuming.failures import shape_of
from outbox.consuming.read import find_consumer, read, read_as, version_of
from outbox.consuming.register import groups
from outbox.database import Connection
from outbox.errors import ConfigurationError, UnknownMessageType, UnreadableBody
from outbox.logs import line_of, one_line
from outbox.message import Header, message_type, read_headers
from outbox.models import UNFINISHED, State
from outbox.monitoring.connection import connected
from outbox.monitoring.text import count

PAGE = 100  # bodies that are read at once
SAMPLE = 1000  # messages that are read of each list: the oldest ones, and the newest `PAGE`
MAX_PROBLEMS = 100  # other kinds of problems are counted together

TOPICS = "SELECT id FROM outbox_topic ORDER BY id"

# These return a page of keys and message ids behind the key `after`, in the order of an index on the key. The key of a message in
# a batch is made of the batch's id and the message's position in it.
WAITING = """
SELECT pos, message_id FROM outbox_ticket WHERE topic_id = %(topic)s AND pos > %(after)s ORDER BY pos {order} LIMIT %(limit)s
"""
DELAYED = """
SELECT message_id, message_id FROM outbox_delayed WHERE message_id > %(after)s ORDER BY message_id {order} LIMIT %(limit)s
"""
IN_BATCHES = """
SELECT b.id * 32768 + u.n, u.id FROM outbox_batch b, unnest(b.message_ids) WITH ORDINALITY u (id, n)
WHERE b.state {states} AND b.id >= %(after)s / 32768 AND b.id * 32768 + u.n > %(after)s AND u.n <> ALL (b.split)
ORDER BY b.id {order}, u.n {order} LIMIT %(limit)s
"""
DEFERRED = """
SELECT id, consumer_group, topic, own_id, headers, body FROM outbox_deferred
WHERE (dead_at IS NOT NULL) = %(is_dead)s AND id > %(after)s ORDER BY id {order} LIMIT %(limit)s
"""

# Topics, headers and bodies of messages. If a dead message has lost its message row, its copy is read.
BODIES = """
SELECT m.id, t.name, m.headers, m.body FROM outbox_message m JOIN outbox_topic t ON t.id = m.topic_id
WHERE m.id = ANY(%(ids)s) AND m.topic_id <> 0
UNION ALL
SELECT d.message_id, d.topic, d.headers, d.body FROM outbox_dead d
WHERE d.message_id = ANY(%(ids)s) AND d.body IS NOT NULL AND NOT EXISTS (SELECT FROM outbox_message WHERE id = d.message_id)
"""

FIRST_ID = UUID(int=0)
NO_UPGRADE = "no upgrade"


class Unreadable(NamedTuple):
    """
    Messages that cannot be read for one reason.

    Args:
        noun: their kind, in the singular: "waiting message", "dead letter".
        group: the group that is to get them; "" for all.
        problem, hint: the problem, without details that differ between messages; what to do about it.
    """

    noun: str
    group: str
    type: str
    version: int | None
    problem: str
    hint: str


class Readings(msgspec.Struct):
    """
    The result of reading stored messages.

    Args:
        read: noun -> number of messages that were read.
        cut: nouns of lists that have, or may have, more messages than were read.
        foreign: number of messages for which this code has neither a handler nor a message type.
        unreadable: kind of unreadable messages -> their number; the problem and the id of the first one.
    """

    read: Counter[str] = msgspec.field(default_factory=Counter)
    cut: set[str] = msgspec.field(default_factory=set)
    foreign: int = 0
    unreadable: dict[Unreadable, tuple[int, str, str]] = msgspec.field(default_factory=dict)

    @property
    def text(self) -> str:
        """The numbers of messages read, as a sentence without a full stop."""
        read = ", ".join(f"{count(number, noun)}{' (not all)' if noun in self.cut else ''}" for noun, number in self.read.items())
        foreign = f"; {self.foreign:,} of them have neither a handler nor a message type here" if self.foreign else ""
        return f"{read or 'no stored messages'} read{foreign}"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a sentence about each kind of unreadable messages, and what to do about it."""
        for kind, (number, problem, example) in self.unreadable.items():
            subject = f"{count(number, kind.noun)}{f' of group {kind.group!r}' if kind.group else ''} of {kind.type or 'no type'}"
            version = "" if kind.version is None else f" version {kind.version}"
            verb = ("has" if number == 1 else "have") if problem.startswith(NO_UPGRADE) else "cannot be read:"
            yield one_line(f"{subject}{version} {verb} {problem} (such as {example})"), kind.hint


Progress = Callable[[str, int], None]


# Brokers of one class, which share tables: the class, the OPTIONS of the first broker, and the topics of all of them.
_StoredBroker = tuple[type[StoredInDatabase], Mapping[str, Any], list[TopicSpec]]


def databases() -> list[str]:
    """Return the aliases of databases that may hold messages, of the outbox or of brokers that are stored in a database."""
    return list(dict.fromkeys([*database.outbox_databases(), *_stored_brokers()]))


def read_stored(
    alias: str, *, everything: bool = False, progress: Progress = lambda noun, number: None, **limits: Any
) -> Readings:
    """
    Read the messages in a database that consumers are still to get, or `SAMPLE` of each list.

    Args:
        everything: read all messages, page by page, so that the use of memory does not grow.
        progress: called after each `PAGE` messages of a noun, with the noun and the number read until then.
        limits: keyword arguments of `connected`.

    Raises:
        NotMigrated: the database has no tables of the outbox, or of a broker.
        psycopg.Error: it cannot be reached.
    """
    readings = Readings()
    has_outbox = database.is_outbox_database(alias)
    name = "outbox schema"
    with connected(alias, name, **limits) if has_outbox else database.connect(alias, application_name=name) as connection:
        lists = list(_lists(connection)) if has_outbox else []
        for kind, options, topics in _stored_brokers().get(alias, ()):
            lists += kind.list_stored(options, topics, connection)
        for noun, read_page in lists:
            for delivery in _deliveries(noun, read_page, readings, everything=everything):
                _read_into(readings, noun, delivery)
                if readings.read[noun] % PAGE == 0:
                    progress(noun, readings.read[noun])
    return readings


def _stored_brokers() -> dict[str, list[_StoredBroker]]:
    """Return the brokers that are stored in databases, by the alias of the database."""
    brokers_of: dict[str, dict[type, _StoredBroker]] = {}
    for alias, settings in conf.settings().brokers.items():
        try:
            kind = conf.broker_class(alias)
            topics = conf.topics_of(alias)
        except ConfigurationError:  # check E003 reports it
            continue
        if issubclass(kind, StoredInDatabase) and topics:
            home = conf.database_of_broker(alias)
            if home not in connections.settings:
                hint = f"Choices are: {', '.join(connections)}."
                raise ConfigurationError(f"Broker {alias!r} is stored in database {home!r}, which is not in settings.", hint=hint)
            shared = brokers_of.setdefault(home, {})
            shared.setdefault(kind, (kind, settings.options, []))[2].extend(topics)
    return {alias: list(shared.values()) for alias, shared in brokers_of.items()}


def _deliveries(noun: str, read_page: ReadPage, readings: Readings, *, everything: bool) -> Iterator[Delivery]:
    """Yield all messages of a list; or its oldest, and a page of its newest."""
    after, remaining = None, SAMPLE - PAGE
    while everything or remaining > 0:
        page = read_page(after, PAGE, False)
        yield from (delivery for _, delivery in page if delivery is not None)
        if len(page) < PAGE:
            return
        after, remaining = page[-1][0], remaining - PAGE
    newest = read_page(after, PAGE, True)
    yield from (delivery for _, delivery in newest if delivery is not None)
    if len(newest) == PAGE:
        readings.cut.add(noun)


def _lists(connection: Connection) -> Iterator[StoredList]:
    """Yield the lists of the outbox itself, and of the groups in this database."""
    for (topic,) in connection.execute(TOPICS).fetchall():
        yield _list(connection, "waiting message", WAITING, 0, topic=topic)
    yield _list(connection, "delayed message", DELAYED, FIRST_ID)
    yield _list(connection, "claimed message", IN_BATCHES.replace("{states}", f"IN {UNFINISHED}"), 0)
    yield _list(connection, "dead message", IN_BATCHES.replace("{states}", f"= {State.DEAD}"), 0)
    yield "deferred message", partial(_read_deferred, connection, False)
    yield "dead letter", partial(_read_deferred, connection, True)


def _list(connection: Connection, noun: str, query: str, first: object, **arguments: object) -> StoredList:
    return noun, partial(_read_page, connection, query, first, arguments)


def _read_page(
    connection: Connection, query: str, first: object, arguments: Mapping[str, object], after: Any, limit: int, newest: bool
) -> list[tuple[Any, Delivery | None]]:
    """Return keys with their messages; None for a message that is in no table any more."""
    parameters = {**arguments, "after": first if after is None else after, "limit": limit}
    keys = connection.execute(query.replace("{order}", "DESC" if newest else "ASC"), parameters).fetchall()
    rows = connection.execute(BODIES, {"ids": [message_id for _, message_id in keys]}).fetchall()
    deliveries = {message_id: _delivery("", topic, message_id, headers, body) for message_id, topic, headers, body in rows}
    return [(key, deliveries.get(message_id)) for key, message_id in keys]


def _read_deferred(
    connection: Connection, is_dead: bool, after: Any, limit: int, newest: bool
) -> list[tuple[Any, Delivery | None]]:
    query = DEFERRED.replace("{order}", "DESC" if newest else "ASC")
    rows = connection.execute(query, {"is_dead": is_dead, "after": after or 0, "limit": limit}).fetchall()
    return [(key, _delivery(*columns)) for key, *columns in rows]


def _delivery(group: str, topic: str, message_id: object, headers: str, body: bytes) -> Delivery:
    parsed = read_headers(headers)
    return Delivery(group, topic, str(message_id), bytes(body), receipt="", tag=parsed.get(Header.TAG, ""), headers=parsed)


class _Reading(enum.Enum):
    READ = enum.auto()
    FOREIGN = enum.auto()  # this code has neither a handler nor a message type for it
    MOVED = enum.auto()  # its type has another topic now, and its handlers read only that topic


def _read_into(readings: Readings, noun: str, delivery: Delivery) -> None:
    """Read a message as its groups do, and add the result to `readings`."""
    readings.read[noun] += 1
    try:
        reading = _read_for_groups(delivery)
    except UnknownMessageType as error:
        _add(readings, noun, delivery, *_explain_unknown(delivery, error))
    except UnreadableBody as error:
        _add(readings, noun, delivery, *_explain_unreadable(delivery, error))
    except Exception as error:  # raised by an upgrade function of the project
        _add(readings, noun, delivery, f"an upgrade fails with {type(error).__name__}: {line_of(error)}", "Correct the upgrade.")
    else:
        readings.foreign += reading is _Reading.FOREIGN
        if reading is _Reading.MOVED:
            hint = f"Keep a handler of topic {delivery.topic!r} until none of its messages is left."
            _add(readings, noun, delivery, f"its type has another topic than {delivery.topic!r} now", hint)


def _read_for_groups(delivery: Delivery) -> _Reading:
    """
    Decode a message as the group that gets it does. If it is for no particular group, decode it as each group that reads its
    topic does; if none of them has a handler for it, as the message type that it names.

    Raises:
        UnreadableBody, UnknownMessageType: a consumer would raise it.
    """
    known = groups()
    names = [delivery.group] if delivery.group else [name for name, group in known.items() if delivery.topic in group.topics]
    handlers = [find_consumer(known[name], delivery) for name in names if name in known]
    consumers = {handler.type: handler for handler in handlers if handler is not None}
    for consumer in consumers.values():
        read(consumer, delivery)
    kind = message_type(delivery.headers.get(Header.TYPE, ""))
    if consumers or kind is None:
        return _Reading.READ if consumers else _Reading.FOREIGN
    read_as(kind, delivery)
    has_handler = any(kind._meta.type in group.consumers for group in known.values())
    return _Reading.MOVED if has_handler and kind._meta.topic != delivery.topic else _Reading.READ


def _explain_unknown(delivery: Delivery, error: UnknownMessageType) -> tuple[str, str]:
    """Return why a type or version is unknown, in the same words for all messages with that problem, and what to do."""
    kind = message_type(delivery.headers.get(Header.TYPE, ""))
    if kind is None:
        return "no module here defines the type", "Restore its class, or name it in `type` of the class Meta of its new class."
    return f"the version here is {kind._meta.version}: {line_of(error.__cause__ or error)}", "Deploy the code that published it."


def _explain_unreadable(delivery: Delivery, error: UnreadableBody) -> tuple[str, str]:
    """Return why a body cannot be read, in the same words for all messages with that problem, and what to do."""
    kind, written = message_type(delivery.headers.get(Header.TYPE, "")), version_of(delivery)
    why = line_of(error.__cause__ or error)
    if kind is None:
        return why, "Correct the code that publishes it: a handler of its topic expects JSON."
    version = kind._meta.version
    for step in range(version if written is None else written, version):
        if step not in kind._upgrades:
            return (
                f"{NO_UPGRADE} from version {step}",
                f"Add a function with @{kind.__name__}.upgrade_from({step}), or restore it.",
            )
    hint = f"Correct {kind.__name__}, or raise its version to {version + 1} and add @{kind.__name__}.upgrade_from({version})."
    return why, hint


def _add(readings: Readings, noun: str, delivery: Delivery, problem: str, hint: str) -> None:
    name = delivery.headers.get(Header.TYPE, "")
    key = Unreadable(noun, delivery.group, name, version_of(delivery), shape_of(problem), hint)
    if key not in readings.unreadable and len(readings.unreadable) >= MAX_PROBLEMS:
        key = Unreadable(noun, "", "other types", None, "there are too many problems to tell apart", "Correct the others first.")
    number, text, example = readings.unreadable.get(key, (0, problem, delivery.message_id))
    readings.unreadable[key] = number + 1, text, example
