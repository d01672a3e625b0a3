"""The demo on a real RocketMQ: a node that is started for it, or a running one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings

from outbox import conf
from outbox.consuming.register import groups
from project.demo.brokers import UNHANDLED, DemoBroker, write_copies
from project.demo.processes import DemoError
from project.demo.report import LEDGERS, Connection, Kills, number

if TYPE_CHECKING:  # importing it needs RocketMQ's client, which is not installed for other demos
    from outbox.brokers.rocketmq.remoting.frames import StoredMessage

HALVES = "RMQ_SYS_TRANS_HALF_TOPIC"

# A node that is started for the demo has shorter times than others: it sends the first check-back about a half message after 6 s,
# then one each second, and redelivers a message of a killed consumer after 3 s.
CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 15, "reviveInterval": 100}
PROXY = {"minInvisibleTimeMillsForRecv": 100, "grpcClientConsumerMinLongPollingTimeoutMillis": 100}
OWN_SECONDS = {"check_horizon": 30, "invisible": 3}
OTHER_SECONDS = {"check_horizon": 600, "invisible": 10}

# A batch that only waits for its check-back is not counted, since its messages are counted until they are handled. The last part
# is for relays that were killed before they decided: the server may ask about their half messages when all other work is done.
WAITING = f"""
{LEDGERS}
SELECT {UNHANDLED}
    + greatest(0, %d - (SELECT count(*) FROM outbox_check_back WHERE answer = 'ROLLBACK'))
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Node:
    """A running RocketMQ with one broker, at whose remoting port topics and groups are created, and messages are read."""

    endpoints: str
    name_server: str
    seconds: dict[str, int]


class RocketMQ(DemoBroker):
    """
    RocketMQ 5. It sends check-backs to the relays and to a separate checker.

    Args:
        node: a running node without messages in the shop's topics; None to start one.
    """

    doors = ("broker",)
    settle_seconds = 90
    commands = {"checker": "outbox_checker"}

    def __init__(self, node: Node | None = None) -> None:
        self._given = node
        self._node = node
        self.opening = "" if node else "starting RocketMQ, which takes a while; the first time its jars are fetched, 100 MB"

    @contextmanager
    def run(self, folder: Path) -> Iterator[None]:
        if importlib.util.find_spec("rocketmq") is None:
            raise DemoError("RocketMQ's client is not installed: make demo-rocketmq, or pip install rocketmq-python-client.")
        if self._given is None:
            with _own_node(folder / "rocketmq") as self._node:
                yield
        else:
            _prepare(self._given)
            yield

    def environment(self) -> dict[str, str]:
        assert self._node is not None
        options = {"ENDPOINTS": self._node.endpoints, "NAME_SERVERS": [self._node.name_server]}
        return {"DEMO_ROCKETMQ": json.dumps({"options": options, **self._node.seconds})}

    def count_open(self, connection: Connection, kills: Kills) -> int:
        return number(connection, WAITING % (kills.unacked, min(kills.undecided, 1)))

    def show(self, connection: Connection) -> None:
        """Read the server's log: each copy of a message, and the id of each half message once, even if it is stored twice."""
        from outbox.brokers.rocketmq.codec import stored_delivery

        assert self._node is not None
        topics = conf.topics_of("default")
        visible = [stored for topic in topics for stored in _read(self._node, topic.name, topic.queues)]
        halves = {
            stored.properties["UNIQ_KEY"]
            for stored in _read(self._node, HALVES, 1)
            if stored.properties.get("REAL_TOPIC") in {topic.name for topic in topics}
        }
        deliveries = [stored_delivery(stored, group="", topic="", receipt="", dead_letter_reason="") for stored in visible]
        copies = [(delivery.message_id, delivery.key) for delivery in deliveries]
        write_copies(connection, copies, halves)


@contextmanager
def _own_node(data: Path) -> Iterator[Node]:
    from project.servers.program import ServerError
    from project.servers.rocketmq import RocketMQ as Server
    from project.servers.rocketmq_ports import Ports

    server = Server(settings.BASE_DIR / "var/rocketmq", Ports.free(), settings=dict(CHECKS), proxy=dict(PROXY), data=data)
    try:
        with server:
            node = Node(server.endpoints, server.name_server, OWN_SECONDS)
            _prepare(node)
            yield node
    except ServerError as error:
        raise DemoError(str(error)) from error


def _prepare(node: Node) -> None:
    """
    Create topics and groups.

    Raises:
        DemoError: a topic has messages already, or the node cannot be used.
    """
    from outbox.brokers.rocketmq.remoting.frames import RemotingError
    from project.servers.rocketmq_admin import make_group, make_topic

    try:
        broker = _address(node)
        for topic in conf.topics_of("default"):
            make_topic(broker, topic.name, topic.type, topic.queues)
            if _read(node, topic.name, topic.queues):
                raise DemoError(
                    f"Topic {topic.name!r} at {node.name_server} has messages already. Use a new node, or leave --rocketmq out."
                )
        for group in groups():
            make_group(broker, group)
    except (OSError, RemotingError) as error:
        raise DemoError(f"The RocketMQ of name server {node.name_server} cannot be used: {error}.") from error


def _read(node: Node, topic: str, queues: int) -> list[StoredMessage]:
    from project.servers.remoting import read_all

    return list(read_all(_address(node), topic, queues))


def _address(node: Node) -> tuple[str, int]:
    from outbox.brokers.rocketmq.options import parse_address
    from project.servers.rocketmq_admin import brokers_of

    return parse_address(brokers_of(parse_address(node.name_server))[0])
