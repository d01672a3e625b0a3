"""Creates topics and consumer groups at a RocketMQ, by the broker's own port: mqadmin ends with 0 whatever happens."""

from __future__ import annotations

import json

from outbox.message import TopicType
from project.servers.remoting import call

UPDATE_TOPIC, UPDATE_GROUP = 17, 200
CLUSTER_INFO = 106

Address = tuple[str, int]


def make_topic(broker: Address, name: str, kind: TopicType, queues: int = 4) -> None:
    """
    Create a topic; nothing changes where it is there already. The name server tells of it within 30 s, mostly at once.

    Raises:
        RemotingError: the broker refuses, such as another type for a topic that is there.
    """
    call(
        broker,
        UPDATE_TOPIC,
        {
            "topic": name,
            "defaultTopic": "TBW102",
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": "false",
            "attributes": f"+message.type={kind.upper()}",
        },
    )


def make_group(broker: Address, name: str, *, is_ordered: bool = False, retries: int = 16) -> None:
    """Create a consumer group; nothing changes where it is there already."""
    group = {
        "groupName": name,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeMessageOrderly": is_ordered,
        "retryQueueNums": 1,
        "retryMaxTimes": retries,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
    }
    call(broker, UPDATE_GROUP, {}, json.dumps(group).encode())


def brokers_of(name_server: Address) -> list[str]:
    """Return host:port of each master that a name server knows."""
    brokers = json.loads(call(name_server, CLUSTER_INFO))["brokerAddrTable"].values()
    return sorted(one["brokerAddrs"]["0"] for one in brokers if "0" in one["brokerAddrs"])
