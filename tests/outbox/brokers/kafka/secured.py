"""The Kafka that asks for a password: what its users may do, and clients of the broker as one of them."""

import uuid
from functools import cache
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from outbox.brokers.kafka import KafkaBroker
from outbox.message import TopicSpec, TopicType
from tests.kafka_node import PASSWORD, secured_server
from tests.waiting import wait_until

READ, WRITE, CREATE, DESCRIBE = AclOperation.READ, AclOperation.WRITE, AclOperation.CREATE, AclOperation.DESCRIBE
SECONDS = 30


def login(user: str, password: str = PASSWORD) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": password,
    }


@cache  # one that is thrown away gives no answer any more
def admin() -> AdminClient:
    return AdminClient({"bootstrap.servers": secured_server().address, "log_level": 0, **login("admin")})


def create_topic(name: str = "", *, partitions: int = 1, **config: str) -> str:
    name = name or f"orders-{uuid.uuid4().hex[:8]}"
    for created in admin().create_topics([NewTopic(name, partitions, config=config)]).values():
        created.result(SECONDS)
    wait_until(lambda: name in admin().list_topics(timeout=SECONDS).topics)  # the node learns of it from the controller
    return name


def allow(topic: str, *operations: AclOperation) -> None:
    _allow(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, *operations)


def allow_transactions(source: str) -> None:
    name = f"outbox.{source.rpartition(':')[2]}."
    _allow(ResourceType.TRANSACTIONAL_ID, name, ResourcePatternType.PREFIXED, WRITE)


def allow_group(group: str) -> None:
    _allow(ResourceType.GROUP, group, ResourcePatternType.LITERAL, READ)


def forbid(topic: str) -> None:
    """Take all that was allowed on a topic back."""
    found = AclBindingFilter(
        ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:relay", None, AclOperation.ANY, AclPermissionType.ANY
    )
    for deleted in admin().delete_acls([found]).values():
        deleted.result(SECONDS)


def _allow(kind: ResourceType, name: str, pattern: ResourcePatternType, *operations: AclOperation) -> None:
    bindings = [AclBinding(kind, name, pattern, "User:relay", "*", one, AclPermissionType.ALLOW) for one in operations]
    for created in admin().create_acls(bindings).values():
        created.result(SECONDS)


def open_broker(*topics: str, client: dict[str, str] | None = None, **options: Any) -> KafkaBroker:
    settings = {"SERVERS": [secured_server().address], "CLIENT": {**login("relay"), **(client or {})}, **options}
    return KafkaBroker("default", settings, [TopicSpec(topic, TopicType.NORMAL) for topic in topics])
