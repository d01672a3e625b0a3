"""A node that wants requests signed (ACL 2.0) and speaks TLS: at the proxy, at the broker's own port and at the name server."""

import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from outbox.brokers.base import Broker, Delivery, Ended, HalfRef, HalfStatus, Outgoing, SendResult, SendStatus, ServerResource
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.errors import BrokerMisconfigured
from outbox.findings import BROKER_WEAK
from outbox.message import COMMIT, TopicSpec, TopicType
from project.servers.rocketmq import RocketMQ
from project.servers.rocketmq_admin import make_user
from project.servers.rocketmq_ports import Ports
from tests.rocketmq_node import jars
from tests.waiting import wait_until

ADMIN = ("admin", "the-administrators-secret")
SHOP = ("shop", "the-shops-secret")
READER = ("reader", "the-readers-secret")
MAKER = ("maker", "the-makers-secret")

HALVES = "Topic:RMQ_SYS_TRANS_HALF_TOPIC"
RIGHTS = {
    "Topic:orders": ["Pub", "Sub", "Get"],
    "Topic:plain": ["Pub", "Sub", "Get"],
    HALVES: ["Sub"],
    "Group:TOOLS_CONSUMER": ["Sub"],
    "Group:cart": ["Sub", "Get"],
    "Topic:%DLQ%cart": ["Sub", "Get"],
}

TOPICS = [TopicSpec("orders", TopicType.TRANSACTION), TopicSpec("plain", TopicType.NORMAL)]

AUTH, PROXY = "org.apache.rocketmq.auth", "org.apache.rocketmq.proxy.auth"


def acl(metadata: str) -> dict[str, str]:
    return {
        "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": metadata.format("Authentication"),
        "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": metadata.format("Authorization"),
        "initAuthenticationUser": json.dumps({"username": ADMIN[0], "password": ADMIN[1]}),
        "innerClientAuthenticationCredentials": json.dumps({"accessKey": ADMIN[0], "secretKey": ADMIN[1]}),
    }


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="data-", dir=jars()))
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(found / "key.pem"), "-out", str(found / "cert.pem")]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *names], check=True, capture_output=True)
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[RocketMQ]:
    key, certificate = folder / "key.pem", folder / "cert.pem"
    broker = {"authenticationEnabled": "true", "authorizationEnabled": "true"}
    broker |= acl(f"{AUTH}.authentication.provider.Local{{}}MetadataProvider")
    broker["authorizationMetadataProvider"] = f"{AUTH}.authorization.provider.LocalAuthorizationMetadataProvider"
    proxy: dict[str, object] = {"authenticationEnabled": True, "authorizationEnabled": True}
    proxy |= acl(f"{PROXY}.Proxy{{}}MetadataProvider")
    proxy |= {"tlsTestModeEnable": False, "tlsKeyPath": str(key), "tlsCertPath": str(certificate)}
    flags = ["-Dtls.server.mode=permissive", "-Dtls.test.mode.enable=false"]
    flags += [f"-Dtls.server.keyPath={key}", f"-Dtls.server.certPath={certificate}"]
    with RocketMQ(
        jars(), Ports.free(), settings=dict(broker), proxy=proxy, data=folder / "data", flags=flags, keys=ADMIN
    ) as found:
        for topic in TOPICS:
            found.make_topic(topic.name, topic.type)
        found.make_group("cart")
        make_user(found.broker_address, *SHOP, RIGHTS, keys=ADMIN)
        make_user(found.broker_address, *READER, {"Topic:orders": ["Sub"]}, keys=ADMIN)
        make_user(found.broker_address, *MAKER, {"Topic:made": ["Get", "Create"], "Topic:denied": ["Get"]}, keys=ADMIN)
        yield found


@pytest.fixture
def open_as(node: RocketMQ, folder: Path) -> Iterator[Callable[..., RocketMQBroker]]:
    opened: list[Broker] = []

    def open_one(user: tuple[str, str] = SHOP, topics: Sequence[TopicSpec] = TOPICS, **options: Any) -> RocketMQBroker:
        access_key, secret_key = user
        given = {
            "ENDPOINTS": node.endpoints,
            "NAME_SERVERS": [node.name_server],
            "TLS": True,
            "BROKER_TLS": True,
            "TLS_CA_FILE": str(folder / "cert.pem"),
            "ACCESS_KEY": access_key,
            "SECRET_KEY": secret_key,
        }
        opened.append(broker := RocketMQBroker("default", {**given, **options}, topics))
        return broker

    yield open_one
    for broker in opened:
        broker.close()


def send_half(broker: RocketMQBroker) -> tuple[SendResult, HalfRef]:
    message = Outgoing(str(uuid.uuid4()), "orders", b"{}")
    [result] = broker.send_halves([message])
    return result, HalfRef("orders", result.half_id, message.message_id, result.place)


def resources(broker: RocketMQBroker) -> dict[str, ServerResource]:
    return {one.name: one for one in broker.list_resources(sources=[], lanes=16, readers=[])}


class TestASecuredNode:
    @pytest.mark.parametrize("options", [{}, {"NAMESPACE": "ours"}], ids=["", "namespace"])
    def test_takes_signed_messages_half_messages_and_look_ups(self, open_as, options: dict[str, str]):
        broker = open_as(**options)

        sent, half = send_half(broker)
        [ended] = broker.end([half], COMMIT)
        [plain] = broker.send([Outgoing(str(uuid.uuid4()), "plain", b"{}")])

        assert (sent.status, ended.ended, plain.status) == (SendStatus.ACCEPTED, Ended.COMMITTED, SendStatus.ACCEPTED)
        wait_until(lambda: broker.look_up_halves([half]) == [HalfStatus.VISIBLE])
        assert [found.state for found in broker.find(half.message_id)] == ["visible"]
        assert broker.backlog("cart").waiting == {}
        assert not [problem for problem in broker.check() if problem.id != BROKER_WEAK]

    def test_returns_what_it_gave_up_to_who_may_read_it(self, open_as, node: RocketMQ):
        broker, held = open_as(), {"invisible_for": timedelta(minutes=1), "wait": timedelta(seconds=1)}
        node.make_group("cart", retries=1)
        [sent] = broker.send([message := Outgoing(str(uuid.uuid4()), "plain", b"{}")])
        dead_letters: list[Delivery] = []  # with those of other tests

        def is_given_up() -> bool:
            broker.release(broker.receive("cart", ["plain"], limit=10, **held))
            dead_letters[:] = broker.receive_dead_letters("cart", ["plain"], limit=10)
            return message.message_id in {delivery.message_id for delivery in dead_letters}

        wait_until(is_given_up, 60)

        assert sent.status is SendStatus.ACCEPTED
        assert open_as(READER).receive_dead_letters("cart", ["plain"], limit=10) == []
        assert all(broker.ack(dead_letters))
        assert open_as().receive_dead_letters("cart", ["plain"], limit=10) == []

    def test_refuses_a_wrong_secret(self, open_as):
        sent, _ = send_half(open_as((SHOP[0], "not it")))

        assert sent.status is SendStatus.MISCONFIGURED
        assert "check signature failed" in sent.reason

    def test_refuses_who_may_only_read_and_check_names_the_rights(self, open_as):
        broker = open_as(READER)

        sent, _ = send_half(broker)
        texts = " ".join(problem.text for problem in broker.check())

        assert sent.status is SendStatus.MISCONFIGURED
        assert "no permission to access Topic:orders" in sent.reason
        for right in ("Get on Topic:orders", "Pub on Topic:orders", f"Sub on {HALVES}, to look", "and Group:TOOLS_CONSUMER"):
            assert right in texts

    def test_lists_topics_and_names_those_that_it_may_not_tell_of(self, open_as):
        shops, readers = resources(open_as(SHOP)), resources(open_as(READER))

        assert (shops["orders"].exists, shops["orders"].differences, shops["orders"].trouble) == (True, (), "")
        assert readers["orders"].exists is None
        assert "Grant ACCESS_KEY Get on Topic:orders (ACL 2.0)" in readers["orders"].trouble

    def test_creates_a_topic_for_who_may_and_names_the_permission_of_who_may_not(self, open_as):
        topics = [TopicSpec("made", TopicType.NORMAL), TopicSpec("denied", TopicType.NORMAL)]
        maker = open_as(MAKER, topics=topics)
        missing = resources(maker)

        missing["made"].create()
        with pytest.raises(BrokerMisconfigured, match=r"did not create topic 'denied'.*Create on Topic:denied \(ACL 2\.0\)"):
            missing["denied"].create()

        assert {name: one.exists for name, one in resources(maker).items()} == {"made": True, "denied": False}

    def test_says_that_a_secret_is_wrong_where_topics_are_listed(self, open_as):
        found = resources(open_as((SHOP[0], "not it")))

        assert found["orders"].exists is None
        assert "check signature failed" in found["orders"].trouble

    def test_is_not_believed_without_the_certificate_of_who_vouches_for_it(self, open_as):
        sent, _ = send_half(open_as(TLS=False, TLS_CA_FILE=""))

        assert sent.status is SendStatus.UNAVAILABLE
        assert "certificate verify failed" in sent.reason

    def test_is_asked_in_the_clear_where_tls_is_off_at_the_ports_alone(self, open_as):
        with closing(open_as(BROKER_TLS=False)) as broker:
            sent, _ = send_half(broker)

        assert sent.status is SendStatus.ACCEPTED  # this server takes both
