"""
The catalogue as an AsyncAPI document. Programs in any language can read it, validate messages with it, and generate code from it.

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

VERSION_DIGITS = 12  # digits of the document's digest that make its version
NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._-]+")
UNKNOWN_HOST = "The settings do not name the host."
NOT_IN_SETTINGS = 'The topic is not in OUTBOX["TOPICS"], so nothing is published to it.'
OTHER = "Any other message"
OF_OTHERS = "The message has no type, or a type that is not defined in this project."
JSON = "application/json"

# Each message with a type has these headers; all other headers may be missing.
REQUIRED = [
    *(Header.ID, Header.SOURCE, Header.TYPE, Header.SPEC_VERSION, Header.TIME),
    *(Header.VERSION, Header.CORRELATION_ID, Header.CONTENT_TYPE),
]

HEADERS: dict[str, dict[str, str]] = {
    Header.ID: {"format": "uuid", "description": "The message's id. Drop messages whose source and id you have seen."},
    Header.SOURCE: {"format": "uri", "description": "Identifies the database that the message was published to."},
    Header.TIME: {"format": "date-time", "description": "When the message was published."},
    Header.CORRELATION_ID: {"description": "The id of the first message of the chain."},
    Header.CONTENT_TYPE: {"description": "The content type of the body."},
    Header.TYPE: {"description": "The type's name."},
    Header.VERSION: {"description": "The version of the type."},
    Header.SPEC_VERSION: {"const": "1.0", "description": "The version of CloudEvents."},
    Header.SUBJECT: {"description": "The message's key, if it has one."},
    Header.TAG: {"description": "The message's tag, if it has one."},
    Header.ABOUT: {"description": "The row that the message is about, such as shop.order:4711."},
    Header.CAUSATION_ID: {"description": "The id of the message whose handler published this one."},
    Header.TRACEPARENT: {"description": "W3C Trace Context."},
    Header.LANE: {"description": "The series that the number belongs to."},
    Header.NUMBER: {"description": "The message's number within source, topic and lane, without gaps."},
}
HEADERS_OF_TYPES: dict[TopicType, dict[str, dict[str, str]]] = {
    TopicType.DELAY: {Header.DELIVER_AT: {"format": "date-time", "description": "When the message is due."}},
    TopicType.TRANSACTION: {Header.TOKEN: {"description": "Identifies the half message in a check-back."}},
}


def document(topics: Sequence[TopicEntry]) -> dict[str, Any]:
    """
    Return the AsyncAPI document of topics. It is always the same for the same code and settings.

    A broker's reserved topics are left out, because other programs do not read them.

    Raises:
        InvalidMessageType: a type cannot be described by a schema.
        ConfigurationError: a broker's client is not installed, or its options are wrong.
    """
    described = [
        topic for topic in topics if not topic.broker or topic.name not in conf.broker_class(topic.broker).reserved_topics
    ]
    built = _Document(described).build()
    digest = hashlib.sha256(json.dumps(built, sort_keys=True).encode()).hexdigest()
    built["info"]["version"] = digest[:VERSION_DIGITS]
    return built


class _Document:
    """Builds a document. Each object is in it once, under a key that needs no escapes in a reference."""

    def __init__(self, topics: Sequence[TopicEntry]) -> None:
        self._topics = topics
        aliases = sorted({topic.broker for topic in topics if topic.broker})
        self._interfaces = {alias: _interface(alias) for alias in aliases}
        self._specs = {spec.name: spec for alias in aliases for spec in conf.topics_of(alias)}
        self._types = {kind.name: kind for topic in topics for kind in topic.types}
        payloads, self._schemas = schemas_of([message_types()[name] for name in self._types], "#/components/schemas/{name}")
        self._payloads = dict(zip(self._types, payloads, strict=True))

        # Key of each object in the document, by the parts of its name.
        self._servers = _keys((alias, *suffix) for alias in aliases for suffix in _suffixes(self._interfaces[alias]))
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
                "description": "The messages that this project publishes with its outbox, and that its consumers handle.",
            },
            "servers": {key: self._server(*parts) for parts, key in self._servers.items()},
            "channels": {self._channels[topic.name,]: self._channel(topic) for topic in self._topics},
            "operations": {keys[parts]: operation for parts, operation in operations},
            "components": {
                "messages": {key: message for topic in self._topics for key, message in self._messages_of(topic)},
                "schemas": {name: _as_draft_7(schema) for name, schema in sorted(self._schemas.items())},
            },
        }

    def _server(self, alias: str, number: str = "1") -> dict[str, Any]:
        interface = self._interfaces[alias]
        server: dict[str, Any] = {"host": "{host}", "variables": {"host": {"description": UNKNOWN_HOST}}}
        if interface.hosts:
            server = {"host": interface.hosts[int(number) - 1]}
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
        """Yield the messages of a topic by their keys; the last one stands for any other message, if there may be others."""
        for kind in topic.types:
            yield self._messages[kind.name,], self._message(topic, kind)
        if not topic.types or any(not handler.takes for handler in topic.handlers):
            headers = self._headers(topic, [], {})  # none is required, because other programs may publish to the topic
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
        Return the headers and the correlation id of a message.

        Args:
            known: for some headers, what is known about their values in messages of this type.
        """
        interface, spec = self._interface(topic), self._specs.get(topic.name)
        fields = HEADERS | (HEADERS_OF_TYPES.get(spec.type, {}) if spec else {})
        properties = {interface.header_name(name): {**TEXT, **field, **known.get(name, {})} for name, field in fields.items()}
        headers = {
            "type": "object",
            "properties": {**properties, **interface.more_headers()},
            "required": sorted(map(interface.header_name, required)),
        }
        location = f"$message.header#/{interface.header_name(Header.CORRELATION_ID)}"
        return {"headers": headers, "correlationId": {"location": location}}

    def _operations(self, topic: TopicEntry) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield the operations of this project on a topic, each with the parts of its key."""
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
                    summary=f"The consumer group {handler.group} handles it with {handler.name}.",
                    description=f"After a failure: {handler.retry}.{only}",
                    bindings=interface.receive(handler.group),
                ),
            )

    def _rest(self, topic: TopicEntry, group: str) -> list[tuple[str, ...]]:
        """Return the messages that the handler of a topic gets: those for which its group has no other handler."""
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


def _suffixes(interface: BrokerInterface) -> list[tuple[str, ...]]:
    """Return the suffixes of the keys of a broker's servers: numbers if there are several servers."""
    return [(str(number),) for number in range(1, len(interface.hosts) + 1)] if len(interface.hosts) > 1 else [()]


def _keys(names: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Return a unique key for each name, made of characters that need no escapes in a reference."""
    keys: dict[tuple[str, ...], str] = {}
    for parts in names:
        plain = NOT_IN_KEYS.sub("-", ".".join(parts))
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        keys[parts] = next(key for key in itertools.chain([plain], numbered) if key not in keys.values())
    return keys


def _as_draft_7(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of msgspec, which is one of draft 2020-12, in the form that AsyncAPI requires."""
    for node in nodes(schema):
        node.pop("discriminator", None)  # not needed, because the schemas of the alternatives require their tags
        if "prefixItems" in node:
            node["items"], node["additionalItems"] = node.pop("prefixItems"), node["items"]
    return schema


def _without_empty(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
