"""
Create topics, consumer groups and users at a RocketMQ, through the broker's remoting port.

RocketMQ's own tool mqadmin exits with code 0 even if it fails, so it is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from outbox.brokers.rocketmq.group_checks import MIN_RETRIES
from outbox.brokers.rocketmq.remoting.requests import update_group, update_topic
from outbox.message import TopicType
from project.servers.remoting import call, exchange

CLUSTER_INFO = 106
MASTERS = re.compile(rb'"brokerAddrs":\{[^}]*\b0:"([^"]+)"')  # no valid JSON, since numbers are names in it
CREATE_USER, CREATE_ACL = 3001, 3006

Address = tuple[str, int]


def make_topic(broker: Address, name: str, kind: TopicType, queues: int = 4, *, keys: tuple[str, str] = ("", "")) -> None:
    """
    Create a topic, if it does not exist. The name server knows it within 30 s, mostly at once.

    Raises:
        RemotingError: the broker refuses it, for example because the topic exists with another type.
    """
    exchange(broker, update_topic(name, kind, queues), keys=keys).checked()


def make_group(
    broker: Address, name: str, *, is_ordered: bool = False, retries: int = MIN_RETRIES, keys: tuple[str, str] = ("", "")
) -> None:
    """Create a consumer group, or change the settings of an existing one."""
    exchange(broker, update_group(name, is_ordered=is_ordered, retries=retries), keys=keys).checked()


def make_user(broker: Address, name: str, secret: str, rights: Mapping[str, Sequence[str]], *, keys: tuple[str, str]) -> None:
    """
    Create a user (ACL 2.0) with only these rights.

    Args:
        rights: resource, such as Topic:orders or Group:cart -> actions: Pub, Sub, Get and so on.
        keys: access key and secret key of an administrator.
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
    return sorted(address.decode() for address in MASTERS.findall(call(name_server, CLUSTER_INFO)))
