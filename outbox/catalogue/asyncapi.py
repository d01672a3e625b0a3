"""
The catalogue as an AsyncAPI document, which programs in any language can read, check messages by and generate code from.

Source: AsyncAPI 3.0.0. Its schemas are a superset of JSON Schema's draft 7.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from outbox import conf
from outbox.brokers.asyncapi import TEXT, BrokerInterface
from outbox.catalogue.entries import TopicEntry, TypeEntry
from outbox.message import Header, TopicType, message_types
from outbox.schema.json_schema import nodes, schemas_of

VERSION_DIGITS = 12  # of a digest
NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._-]+")
UNKNOWN_HOST = "The settings do not name it."
NOT_IN_SETTINGS = 'It is not in OUTBOX["TOPICS"], so nothing is published to it.'
OTHER = "Any other message"
OF_OTHERS = "Its type is not defined in this project, or it has none."
JSON = "application/json"

# Each message with a type has these; all others may be missing.
REQUIRED = [
    *(Header.ID, Header.SOURCE, Header.TYPE, Header.SPEC_VERSION, Header.TIME),
    *(Header.VERSION, Header.CORRELATION_ID, Header.CONTENT_TYPE),
]

HEADERS: dict[str, dict[str, str]] = {
    Header.ID: {"format": "uuid", "description": "The message's id. Drop those whose source and id you have seen."},
    Header.SOURCE: {"format": "uri", "description": "Identifies the database that the message was published to."},
    Header.TIME: {"format": "date-time", "description": "When it was published."},
    Header.CORRELATION_ID: {"description": "The id of the first message of its chain."},
    Header.CONTENT_TYPE: {"description": "That of the body."},
    Header.TYPE: {"description": "The type's name."},
    Header.VERSION: {"description": "The version of the type."},
    Header.SPEC_VERSION: {"const": "1.0", "description": "That of CloudEvents."},
    Header.SUBJECT: {"description": "The key, if it has one."},
    Header.TAG: {"description": "The tag, if it has one."},
    Header.ABOUT: {"description": "The row that it is about, such as shop.order:4711."},
    Header.CAUSATION_ID: {"description": "The id of the message that was being handled."},
    Header.TRACEPARENT: {"description": "W3C Trace Context."},
    Header.LANE: {"description": "The series that its number belongs to."},
    Header.NUMBER: {"description": "Its number within source, topic and lane, without gaps."},
}
ON_TOPICS: dict[TopicType, dict[str, dict[str, str]]] = {
    TopicType.DELAY: {Header.DELIVER_AT: {"format": "date-time", "description": "When it is due."}},
    TopicType.TRANSACTION: {Header.TOKEN: {"description": "Identifies the half message in a check-back."}},
}


def document(topics: Sequence[TopicEntry]) -> dict[str, Any]:
    """
    Return the AsyncAPI document of topics, the same for the same code and settings.

    Topics that a broker has for itself are left out: other programs do not read them.

    Raises:
        InvalidMessageType: a type cannot be described.
        ConfigurationError: a broker's client is not installed, or its options are wrong.
    """
    described = [
        topic for topic in topics if not topic.broker or topic.name not in conf.broker_class(topic.broker).reserved_topics
    ]
    made = _Document(described).build()
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    made["info"]["version"] = digest[:VERSION_DIGITS]
    return made


class _Document:
    """Builds a document: each object once, under a key that a reference names without escapes."""

    def __init__(self, topics: Sequence[TopicEntry]) -> None:
        self._topics = topics
        aliases = sorted({topic.broker for topic in topics if topic.broker})
        self._interfaces = {alias: _interface(alias) for alias in aliases}
        self._specs = {spec.name: spec for alias in aliases for spec in conf.topics_of(alias)}
        self._types = {kind.name: kind for topic in topics for kind in topic.types}
        payloads, self._schemas = schemas_of([message_types()[name] for name in self._types], "#/components/schemas/{name}")
        self._payloads = dict(zip(self._types, payloads, strict=True))

        self._servers = _keys((alias, *place) for alias in aliases for place in _places(self._interfaces[alias]))
        self._channels = _keys((topic.name,) for topic in topics)
        types = [(name,) for name in self._types]
        self._messages = _keys([*types, *((topic.name, "other") for topic in topics)])

    def build(self) -> dict[str, Any]:
        """Return the document without its version."""
        operations = [operation for topic in self._topics for operation in self._operations(topic)]
        keys = _keys(parts for parts, _ in operations)
        return {
            "asyncapi": "3.0.0",
            "info": {
                "title": conf.project() or "A project without a name",
                "description": "What this project publishes by its transactional outbox, and what its consumers handle.",
            },
            "servers": {key: self._server(*parts) for parts, key in self._servers.items()},
            "channels": {self._channels[topic.name,]: self._channel(topic) for topic in self._topics},
            "operations": {keys[parts]: operation for parts, operation in operations},
            "components": {
                "messages": {key: message for topic in self._topics for key, message in self._messages_of(topic)},
                "schemas": {name: _as_draft_7(schema) for name, schema in sorted(self._schemas.items())},
            },
        }

    def _server(self, alias: str, place: str = "1") -> dict[str, Any]:
        interface = self._interfaces[alias]
        server: dict[str, Any] = {"host": "{host}", "variables": {"host": {"description": UNKNOWN_HOST}}}
        if interface.hosts:
            server = {"host": interface.hosts[int(place) - 1]}
        if interface.pathname:
            server["pathname"] = interface.pathname
        return server | {"protocol": interface.protocol, "title": f"Broker {alias}"}

    def _channel(self, topic: TopicEntry) -> dict[str, Any]:
        messages = {key: {"$ref": f"#/components/messages/{key}"} for key, _ in self._messages_of(topic)}
        channel: dict[str, Any] = {"title": topic.name, "messages": messages}
        spec = self._specs.get(topic.name)
        if spec is None:
            return channel | {"address": None, "description": NOT_IN_SETTINGS}
        interface = self._interfaces[topic.broker]
        promise = topic.promise
        sentences = [promise.published, promise.order, promise.duplicates, promise.check_backs] if promise else []
        servers = [{"$ref": f"#/servers/{key}"} for parts, key in self._servers.items() if parts[0] == topic.broker]
        description = " ".join([*sentences, interface.how_to_read(spec)]).rstrip()
        return channel | interface.channel(spec) | {"description": description, "servers": servers}

    def _messages_of(self, topic: TopicEntry) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages of a topic by their keys; the last one is any other message, where one may be there."""
        for kind in topic.types:
            yield self._messages[kind.name,], self._message(topic, kind)
        if not topic.types or any(not handler.takes for handler in topic.handlers):
            headers = self._headers(topic, [], {})  # another program may leave out each
            yield self._messages[topic.name, "other"], _without_empty(title=OTHER, summary=OF_OTHERS, **headers)

    def _message(self, topic: TopicEntry, kind: TypeEntry) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {
            Header.TYPE: {"const": kind.name},
            Header.VERSION: {"const": str(kind.version)},
            Header.CONTENT_TYPE: {"const": JSON},
            Header.SUBJECT: {"description": f"The key: the field {kind.key}, as text."} if kind.key else {},
            Header.TAG: {"examples": [kind.tag]} if kind.tag else {},
        }
        summary, _, more = kind.description.partition("\n\n")
        return _without_empty(
            name=kind.name,
            title=kind.location.rpartition(".")[2],
            summary=summary.replace("\n", " "),
            description=more,
            contentType=JSON,
            payload=self._payloads[kind.name],
            examples=[] if kind.example is None else [{"payload": kind.example}],
            bindings=self._interface(topic).message(kind.key),
            **self._headers(topic, REQUIRED, known),
        )

    def _headers(self, topic: TopicEntry, required: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """
        Return headers and correlation id of a message.

        Args:
            known: the headers of a type beside those of all messages.
        """
        interface, spec = self._interface(topic), self._specs.get(topic.name)
        ours = HEADERS | (ON_TOPICS.get(spec.type, {}) if spec else {})
        properties = {interface.header_name(name): {**TEXT, **field, **known.get(name, {})} for name, field in ours.items()}
        headers = {
            "type": "object",
            "properties": {**properties, **interface.more_headers()},
            "required": sorted(map(interface.header_name, required)),
        }
        location = f"$message.header#/{interface.header_name(Header.CORRELATION_ID)}"
        return {"headers": headers, "correlationId": {"location": location}}

    def _operations(self, topic: TopicEntry) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield what is done with a topic here, each with the parts of its key."""
        interface = self._interface(topic)
        for kind in topic.types if topic.broker else ():
            yield ("send", kind.name), self._operation("send", topic, [(kind.name,)], bindings=interface.send())
        for handler in topic.handlers:
            only = f" It handles only messages with the tag {' or '.join(handler.tags)}." if handler.tags else ""
            yield (
                ("receive", handler.group, *([handler.takes] if handler.takes else [topic.name, "other"])),
                self._operation(
                    "receive",
                    topic,
                    [(handler.takes,)] if handler.takes else self._rest(topic, handler.group),
                    summary=f"The consumer group {handler.group} handles it by {handler.name}.",
                    description=f"After a failure: {handler.retry}.{only}",
                    bindings=interface.receive(handler.group),
                ),
            )

    def _rest(self, topic: TopicEntry, group: str) -> list[tuple[str, ...]]:
        """Return the messages that the handler of a topic gets: those that no other one of its group takes."""
        types = [
            (kind.name,)
            for kind in topic.types
            if any(not handler.takes for handler in topic.handlers_of(kind.name) if handler.group == group)
        ]
        return [*types, (topic.name, "other")]

    def _operation(self, action: str, topic: TopicEntry, messages: Sequence[tuple[str, ...]], **more: Any) -> dict[str, Any]:
        channel = f"#/channels/{self._channels[topic.name,]}"
        references = [{"$ref": f"{channel}/messages/{self._messages[parts]}"} for parts in messages]
        return _without_empty(action=action, channel={"$ref": channel}, messages=references, **more)

    def _interface(self, topic: TopicEntry) -> BrokerInterface:
        return self._interfaces.get(topic.broker, BrokerInterface())


def _interface(alias: str) -> BrokerInterface:
    kind = conf.broker_class(alias)
    interface = kind.interface.of(conf.settings().brokers[alias].options)
    return interface if interface.protocol else replace(interface, protocol=kind.system)


def _places(interface: BrokerInterface) -> list[tuple[str, ...]]:
    """Return the ends of the keys of a broker's servers: numbers where there are several."""
    return [(str(number),) for number in range(1, len(interface.hosts) + 1)] if len(interface.hosts) > 1 else [()]


def _keys(names: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return a key for each name, of the characters that a reference has without escapes."""
    by_tags: dict[tuple[str, ...], str] = {}
    for parts in names:
        plain = NOT_IN_KEYS.sub("-", ".".join(parts))
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        by_tags[parts] = next(key for key in itertools.chain([plain], numbered) if key not in by_tags.values())
    return by_tags


def _as_draft_7(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of msgspec, which writes those of draft 2020-12, as AsyncAPI has it."""
    for node in nodes(schema):
        node.pop("discriminator", None)  # the schemas that it chooses from require their tags themselves
        if "prefixItems" in node:
            node["items"], node["additionalItems"] = node.pop("prefixItems"), node["items"]
    return schema


def _without_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
