"""A real RocketMQ, one for all tests, started by the first that needs it."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from django.conf import settings

from outbox.message import TopicType
from project.servers.rocketmq import FAST_CHECKS, Cluster, RocketMQ
from project.servers.rocketmq_ports import Ports

GROUPS = ["group", "cart", "points", "shipment", "old-group", "new-group", "other"]

MARKS = "marks"  # a topic for messages that are sent to be found

# Holds shorter than 10 s and waits shorter than 5 s are for tests; a revive that runs each second, too.
PROXY = {"minInvisibleTimeMillsForRecv": 100, "grpcClientConsumerMinLongPollingTimeoutMillis": 100}
# A busy machine keeps a send in the queue for longer than 200 ms, the default.
BROKER = {**FAST_CHECKS, "reviveInterval": 100, "waitTimeMillsInSendQueue": 2000}


def jars() -> Path:
    """The folder that holds the server's jars, and data of tests beside them."""
    folder = Path(settings.BASE_DIR) / "var/rocketmq"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def own_node(broker: Mapping[str, object]) -> Iterator[RocketMQ]:
    """Start a node that no other test uses, with these settings of its broker."""
    folder = jars()
    data = Path(tempfile.mkdtemp(prefix="data-", dir=folder))
    with RocketMQ(folder, Ports.free(), settings=dict(broker), data=data) as found:
        yield found
    shutil.rmtree(data, ignore_errors=True)


@contextmanager
def own_cluster(nodes: int, broker: Mapping[str, object], proxy: Mapping[str, object]) -> Iterator[Cluster]:
    """Start a cluster that no other test uses, with these settings of its brokers and its proxy."""
    folder = jars()
    data = Path(tempfile.mkdtemp(prefix="data-", dir=folder))
    with Cluster(folder, nodes, settings=dict(broker), proxy=dict(proxy), data=data) as found:
        yield found
    shutil.rmtree(data, ignore_errors=True)


@cache
def server() -> RocketMQ:
    folder = jars()
    data = Path(tempfile.mkdtemp(prefix="data-", dir=folder))
    found = RocketMQ(folder, Ports.free(), settings=dict(BROKER), proxy=dict(PROXY), data=data)
    atexit.register(shutil.rmtree, data, ignore_errors=True)
    atexit.register(found.stop)
    found.start()
    found.make_topic(MARKS, TopicType.NORMAL)
    for group in GROUPS:
        found.make_group(group)
        found.make_group(f"{group}_fifo", is_ordered=True)
    return found
