"""Creates topics, consumer groups and users at a RocketMQ, by the broker's own port: mqadmin ends with 0 whatever happens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from outbox.brokers.rocketmq.group_checks import MIN_RETRIES
from outbox.brokers.rocketmq.remoting.requests import update_group, update_topic
from outbox.message import TopicType
from project.servers.remoting import call, exchange

CLUSTER_INFO = 106
MASTERS = re.compile(rb'"brokerAddrs":\{[^}]*\b0:"([^"]+)"')  # its JSON has numbers for names
CREATE_USER, CREATE_ACL = 3001, 3006

Address = tuple[str, int]


def make_topic(broker: Address, name: str, kind: TopicType, queues: int = 4, *, keys: tuple[str, str] = ("", "")) -> None:
    """
    Create a topic; nothing changes where it is there already. The name server tells of it within 30 s, mostly at once.

    Raises:
        RemotingError: the broker refuses, such as another type for a topic that is there.
    """
    exchange(broker, update_topic(name, kind, queues), keys=keys).checked()


def make_group(
    broker: Address, name: str, *, is_ordered: bool = False, retries: int = MIN_RETRIES, keys: tuple[str, str] = ("", "")
) -> None:
    """Create a consumer group, or give one that is there already these settings."""
    exchange(broker, update_group(name, is_ordered=is_ordered, retries=retries), keys=keys).checked()


def make_user(broker: Address, name: str, secret: str, rights: Mapping[str, Sequence[str]], *, keys: tuple[str, str]) -> None:
    """
    Create a user (ACL 2.0) who may do only that.

    Args:
        rights: resource, such as Topic:orders or Group:cart, -> actions: Pub, Sub, Get and so on.
        keys: of a user who may do everything.
    """
    user = {"username": name, "password": secret, "userType": "Normal"}
    call(broker, CREATE_USER, {"username": name}, json.dumps(user).encode(), keys=keys)
    entries = [
        {"resource": resource, "actions": list(actions), "sourceIps": [], "decision": "Allow"}
        for resource, actions in rights.items()
    ]
    acl = {"subject": f"User:{name}", "policies": [{"policyType": "Custom", "entries": entries}]}
    call(broker, CREATE_ACL, {"subject": f"User:{name}"}, json.dumps(acl).encode(), keys=keys)


def brokers_of(name_server: Address) -> list[str]:
    """Return host:port of each master that a name server knows."""
    return sorted(one.decode() for one in MASTERS.findall(call(name_server, CLUSTER_INFO)))
