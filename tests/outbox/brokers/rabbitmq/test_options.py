"""OPTIONS: what is wrong is named before anything connects."""

from datetime import timedelta
from typing import Any

import pytest

from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.options import RabbitMQOptions, addresses
from outbox.message import TopicSpec, TopicType

GOOD: dict[str, Any] = {"NODES": ["rabbit-1:5672"]}


class TestCheckOptions:
    def test_finds_nothing_in_good_ones(self):
        assert RabbitMQBroker.check_settings(GOOD) == []

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, "OPTIONS has no NODES, which is required. Choices are: NODES, USER, "),
            ({"NODES": []}, "is empty"),
            ({"NODES": ["amqp://rabbit"]}, "not host:port"),
            ({**GOOD, "HEARTBEAT": "PT0S"}, "must be greater than zero"),
            ({**GOOD, "DELIVERY_LIMIT": 0}, "DELIVERY_LIMIT"),
            ({**GOOD, "TLS_CA_FILE": "/nowhere.pem", "TLS": True}, "no such file"),
            ({**GOOD, "MANAGEMENT_URL": "rabbit-1:15672"}, "is not a URL"),
            ({**GOOD, "HOST": "rabbit"}, "OPTIONS has an unknown setting 'HOST'. Choices are: NODES, USER, "),
            ({"NODES": "rabbit"}, """OPTIONS["NODES"] has a wrong value: Expected a list, got `str`."""),
            (
                {**GOOD, "GROUPS": {"orders": "a"}},
                """OPTIONS["GROUPS"]["orders"] has a wrong value: Expected a list, got `str`.""",
            ),
        ],
        ids=str,
    )
    def test_names_what_is_wrong(self, options: dict[str, Any], text: str):
        [problem] = RabbitMQBroker.check_settings(options)

        assert text in f"{problem.text} {problem.hint}"


class TestCheckTopics:
    def test_names_a_group_of_a_topic_that_is_not_there(self):
        topics = [TopicSpec("orders", TopicType.NORMAL)]

        [problem] = RabbitMQBroker.check_settings({**GOOD, "GROUPS": {"order": ["billing"]}}, topics)

        assert "'order'" in problem.text

    def test_names_a_group_that_is_spelt_otherwise_in_the_code(self):
        topics = [TopicSpec("orders", TopicType.NORMAL, groups=frozenset({"billing"}))]

        [problem] = RabbitMQBroker.check_settings({**GOOD, "GROUPS": {"orders": ["biling", "billing", "elsewhere"]}}, topics)

        assert "the group 'biling'" in problem.text
        assert problem.hint.startswith("Did you mean 'billing'?")
        assert not problem.is_serious()

    @pytest.mark.parametrize(("days", "is_refused"), [(3650, False), (3651, True)])
    def test_refuses_a_retention_that_no_queue_can_have(self, days: int, is_refused: bool):
        found = RabbitMQBroker.check_settings(GOOD, [TopicSpec("orders", TopicType.NORMAL, retention=timedelta(days=days))])

        assert ['OUTBOX["TOPICS"]["orders"]["RETENTION"]' in problem.text for problem in found] == [True] * is_refused


class TestAddresses:
    def test_have_the_port_of_the_protocol_where_none_is_given(self):
        assert addresses(RabbitMQOptions(nodes=["a", "b:1", "[::1]"])) == ["a:5672", "b:1", "[::1]:5672"]
        assert addresses(RabbitMQOptions(nodes=["a"], tls=True)) == ["a:5671"]
