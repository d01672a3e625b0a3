"""What the RocketMQ broker says about its options, topics and process."""

import logging
import os
from datetime import timedelta

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.errors import BrokerUnavailable
from outbox.findings import BROKER_WEAK
from outbox.message import TopicSpec, TopicType
from project.servers.rocketmq import RocketMQ
from tests.contracts.acts import Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.waiting import wait_until

NORMAL = TopicType.NORMAL


class TestOptions:
    def test_are_right(self):
        options = {"ENDPOINTS": "127.0.0.1:8081;proxy:8081", "NAME_SERVERS": ["namesrv:9876", "[::1]:9876"]}

        assert RocketMQBroker.check_settings({**options, "BROKER_ADDRESSES": {"broker-a": "broker:10911"}}) == []

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({}, "endpoints"),
            ({"ENDPOINTS": "http://proxy:8081"}, "not host:port"),
            ({"ENDPOINTS": "proxy"}, "not host:port"),
            ({"ENDPOINTS": "proxy:1", "BROKER_ADDRESSES": ["broker:10911"]}, "BROKER_ADDRESSES"),
            ({"ENDPOINTS": "proxy:1", "BROKER_ADDRESSES": {"broker-a": "broker"}}, "BROKER_ADDRESSES"),
            ({"ENDPOINTS": "proxy:1", "NAME_SERVERS": ["namesrv"]}, "NAME_SERVERS"),
            ({"ENDPOINTS": "proxy:1", "COMMIT_WINDOW": timedelta()}, "COMMIT_WINDOW"),
            ({"ENDPOINTS": "proxy:1", "BROKER_TLS": True, "TLS_CA_FILE": "/nowhere.pem"}, "TLS_CA_FILE"),
            ({"ENDPOINTS": "proxy:1", "ACCESS_KEY": "me"}, "SECRET_KEY"),
            ({"ENDPOINTS": "proxy:1", "IN_FLIGHT": 0}, ">= 1"),
            ({"ENDPOINTS": "proxy:1", "NAME_SERVER": "x"}, "NAME_SERVER"),
        ],
    )
    def test_are_wrong(self, options: dict[str, object], words: str):
        [problem] = RocketMQBroker.check_settings(options)

        assert words.lower() in problem.text.lower()


class TestCheck:
    def test_finds_no_fault_with_topics_as_they_are(self, harness: RocketMQHarness):
        broker = harness.open(COMMIT_WINDOW=timedelta(seconds=2))

        # Again where the machine stood still between two looks at clocks.
        [warning] = wait_until(lambda: len(found := broker.check()) == 1 and found)

        assert warning.id == BROKER_WEAK
        assert "flushDiskType=ASYNC_FLUSH" in warning.text  # it is a server for tests

    def test_names_a_group_that_the_server_gives_up_on_soon_until_it_is_mended(
        self, harness: RocketMQHarness, acts: Acts, broker: Broker, server: RocketMQ
    ):
        name = f"soon-{NORMAL}"
        server.make_group(name, retries=16)
        acts.send_bodies(b"a")
        acts.receive(group=name, count=1)

        found = wait_until(lambda: [problem for problem in broker.check() if name in problem.text])
        server.make_group(name)

        assert [problem.text.partition(" of topic")[0] for problem in found] == [
            f"Broker {server.broker} moves a message to a dead-letter queue after 17 deliveries to group {name}"
        ]
        assert [problem for problem in broker.check() if name in problem.text] == []

    def test_finds_a_topic_that_is_missing_or_of_another_type(self, harness: RocketMQHarness):
        normal = harness.topics[NORMAL]
        harness.topics[NORMAL] = replace(normal, type=TopicType.TRANSACTION)
        harness.topics[TopicType.FIFO] = TopicSpec("nowhere", TopicType.FIFO)

        texts = sorted(
            problem.text for problem in harness.open().check() if problem.id != BROKER_WEAK and "Topic" in problem.text
        )

        assert len(texts) == 2
        assert f"Topic '{normal.name}' has type transaction in settings, but accepts ['NORMAL']" in texts[0]
        assert "Topic 'nowhere': RocketMQ says 40402" in texts[1]

    def test_says_that_the_server_is_away(self, harness: RocketMQHarness):
        with pytest.raises(BrokerUnavailable, match="No answer from RocketMQ"):
            harness.open_unreachable().check()


class TestProcess:
    def test_takes_no_broker_along_over_a_fork(self, broker: Broker):
        broker.check()
        child = os.fork()
        if not child:
            try:
                broker.check()
            except RuntimeError as error:
                os._exit(0 if "before a fork" in str(error) else 2)
            finally:
                os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_writes_no_log_into_the_users_home(self):
        assert logging.getLogger("rocketmq-python-client").handlers == []
