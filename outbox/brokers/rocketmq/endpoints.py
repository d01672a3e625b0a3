"""The proxies in routes and settings, and the queues that they serve."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from outbox.brokers.rocketmq.options import parse_address
from outbox.brokers.rocketmq.stubs import definition

SCHEMES = {
    definition.AddressScheme.IPv4: "ipv4:",
    definition.AddressScheme.IPv6: "ipv6:",
    definition.AddressScheme.DOMAIN_NAME: "dns:",
}

WRITABLE = {definition.Permission.WRITE, definition.Permission.READ_WRITE}


class Endpoint(msgspec.Struct, frozen=True):
    """One proxy, or several proxies for the same queues. `target` is the gRPC address with all of their hosts."""

    target: str
    proto: Any

    @classmethod
    def of(cls, proto: Any) -> Endpoint:
        """Return the endpoint of a route's protobuf message."""
        hosts = ",".join(sorted(f"{_bracketed(address.host)}:{address.port}" for address in proto.addresses))
        return cls(SCHEMES.get(proto.scheme, "dns:") + hosts, proto)

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint in OPTIONS["ENDPOINTS"]."""
        pairs = [parse_address(address) for address in text.split(";")]
        proto = definition.Endpoints(
            scheme=_scheme(pairs[0][0]), addresses=[definition.Address(host=host, port=port) for host, port in pairs]
        )
        return cls.of(proto)


class Queue(msgspec.Struct, frozen=True):
    """One queue of a topic, and the proxy that serves it."""

    proto: Any
    endpoint: Endpoint
    is_writable: bool

    @property
    def broker(self) -> str:
        """The name of its broker."""
        return str(self.proto.broker.name)

    @classmethod
    def all_of(cls, answer: Any) -> list[Queue]:
        """Return the queues of a route, always in the same order, so that a key keeps its proxy."""
        queues = [
            cls(message_queue, Endpoint.of(message_queue.broker.endpoints), message_queue.permission in WRITABLE)
            for message_queue in answer.message_queues
        ]
        return sorted(queues, key=lambda queue: (queue.proto.broker.name, queue.proto.id))


def _scheme(host: str) -> int:
    try:
        kind = ipaddress.ip_address(host).version
    except ValueError:
        return int(definition.AddressScheme.DOMAIN_NAME)
    return int(definition.AddressScheme.IPv4 if kind == 4 else definition.AddressScheme.IPv6)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
