"""Proxies and the queues they lead to, as routes and settings name them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from outbox.brokers.rocketmq.options import address
from outbox.brokers.rocketmq.stubs import definition

SCHEMES = {
    definition.AddressScheme.IPv4: "ipv4:",
    definition.AddressScheme.IPv6: "ipv6:",
    definition.AddressScheme.DOMAIN_NAME: "dns:",
}

WRITABLE = {definition.Permission.WRITE, definition.Permission.READ_WRITE}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One proxy, or one set of them behind a name. `target` is gRPC's name for it."""

    target: str
    proto: Any

    @classmethod
    def of(cls, proto: Any) -> Endpoint:
        """Read an endpoint as routes name it."""
        hosts = ",".join(sorted(f"{_bracketed(one.host)}:{one.port}" for one in proto.addresses))
        return cls(SCHEMES.get(proto.scheme, "dns:") + hosts, proto)

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read an endpoint as settings name it."""
        pairs = [address(one) for one in text.split(";")]
        proto = definition.Endpoints(
            scheme=_scheme(pairs[0][0]), addresses=[definition.Address(host=host, port=port) for host, port in pairs]
        )
        return cls.of(proto)


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue of a topic, and the proxy that leads to it."""

    proto: Any
    endpoint: Endpoint
    is_writable: bool

    @property
    def broker(self) -> str:
        """The name of its broker."""
        return str(self.proto.broker.name)

    @classmethod
    def all_of(cls, answer: Any) -> list[Queue]:
        """Read the queues that a route names, in an order that is the same at every answer: a key keeps its place in it."""
        queues = [cls(one, Endpoint.of(one.broker.endpoints), one.permission in WRITABLE) for one in answer.message_queues]
        return sorted(queues, key=lambda queue: (queue.proto.broker.name, queue.proto.id))


def _scheme(host: str) -> int:
    try:
        kind = ipaddress.ip_address(host).version
    except ValueError:
        return int(definition.AddressScheme.DOMAIN_NAME)
    return int(definition.AddressScheme.IPv4 if kind == 4 else definition.AddressScheme.IPv6)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
