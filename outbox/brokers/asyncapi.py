"""The description of a broker in an AsyncAPI document: its servers, the headers there, and the bindings of its protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from outbox.message import TopicSpec

TEXT = {"type": "string"}


class BrokerInterface(msgspec.Struct, frozen=True):
    """
    How programs without the outbox find a broker and read its messages.

    The dicts are parts of AsyncAPI's objects of the same names. Nothing here is secret: the document is for other teams.

    Source: AsyncAPI 3.0.0.

    Args:
        protocol: of its servers; "": named as the broker's `system`.
        hosts: host or host:port of each server that the options name.
        pathname: of its servers, such as `/` and a virtual host.
        reading: what readers of its topics have to know, in a sentence or more.
    """

    protocol: str = ""
    hosts: Sequence[str] = ()
    pathname: str = ""
    reading: str = ""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return what a broker's OPTIONS tell."""
        return cls()

    def how_to_read(self, topic: TopicSpec) -> str:
        """Return what readers of a topic have to know, in a sentence or more; "" for nothing."""
        return self.reading

    def header_name(self, name: str) -> str:
        """Return the name on the broker of a header of ours."""
        return name

    def more_headers(self) -> Mapping[str, Any]:
        """Return the schemas of headers that the broker's messages have beside ours."""
        return {}

    def channel(self, topic: TopicSpec) -> dict[str, Any]:
        """Return the address of a topic, with its parameters and bindings."""
        return {"address": topic.name}

    def message(self, key: str) -> dict[str, Any]:
        """Return the bindings of a message type. `key`: the field with its messages' key; "" for none."""
        return {}

    def send(self) -> dict[str, Any]:
        """Return the bindings of what this project sends."""
        return {}

    def receive(self, group: str) -> dict[str, Any]:
        """Return the bindings of what a consumer group receives."""
        return {}
