"""Describes a broker in an AsyncAPI document: its servers, its headers, and the bindings of its protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from outbox.message import TopicSpec

TEXT = {"type": "string"}


class BrokerInterface(msgspec.Struct, frozen=True):
    """
    How programs without the outbox find a broker and read its messages.

    A method that returns a dict returns a part of AsyncAPI's object of the same name. Nothing here may be secret, since the
    document is for other teams.

    Source: AsyncAPI 3.0.0.

    Args:
        protocol: the protocol of the servers; "": the broker's `system`.
        hosts: host or host:port of each server in the options.
        pathname: the path of the servers, such as `/` and a virtual host.
        reading: instructions for readers of the topics, in one or more sentences.
    """

    protocol: str = ""
    hosts: Sequence[str] = ()
    pathname: str = ""
    reading: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return the description of a broker with these OPTIONS."""
        return cls()

    def how_to_read(self, topic: TopicSpec) -> str:
        """Return instructions for readers of a topic, in one or more sentences; "" if there are none."""
        return self.reading

    def header_name(self, name: str) -> str:
        """Return the name that one of the outbox's headers has on the broker."""
        return name

    def more_headers(self) -> Mapping[str, Any]:
        """Return the schemas of headers that messages on the broker have in addition to the outbox's."""
        return {}

    def channel(self, topic: TopicSpec) -> dict[str, Any]:
        """Return the address of a topic, with its parameters and bindings."""
        return {"address": topic.name}

    def message(self, key: str) -> dict[str, Any]:
        """Return the bindings of a message type. `key` is the field with the key of a message; "" if there is none."""
        return {}

    def send(self) -> dict[str, Any]:
        """Return the bindings of the operation with which this project sends."""
        return {}

    def receive(self, group: str) -> dict[str, Any]:
        """Return the bindings of the operation with which a consumer group receives."""
        return {}
