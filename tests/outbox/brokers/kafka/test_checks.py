"""What the doctor finds on a real Kafka."""

import pytest

from outbox.brokers.kafka.broker import KafkaBroker
from outbox.brokers.kafka.client import TRANSACTION_TIMEOUT
from outbox.brokers.kafka.marker import marker_topic
from outbox.brokers.kafka.server_checks import ONE_NODE, KafkaServerChecks
from outbox.findings import BROKER_WEAK, Finding
from outbox.message import TopicSpec, TopicType
from tests.outbox.brokers.kafka import cluster, secured
from tests.outbox.brokers.kafka.secured import READ, WRITE
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

LANES = 16


def texts(problems: list[Finding]) -> list[str]:
    return [problem.text for problem in problems]


@pytest.fixture
def source() -> str:
    return cluster.new_source()


class TestTopics:
    def test_of_a_node_for_development_have_one_line(self):
        broker = cluster.open_broker(cluster.create_topic(), cluster.create_topic())

        [problem] = broker.check()

        assert "The cluster has one node" in problem.text
        assert problem.id == BROKER_WEAK

    def test_that_are_missing_are_named(self):
        found = cluster.open_broker("a-missing", "b-missing").check()

        assert "Kafka has no topics 'a-missing', 'b-missing'." in texts(found)

    def test_that_this_user_may_not_write_to_are_named(self):
        hidden, read_only, fine = (secured.create_topic() for _ in range(3))
        secured.allow(read_only, READ)
        secured.allow(fine, WRITE)
        broker = secured.open_broker(hidden, read_only, fine)

        found = wait_until(lambda: _with(broker.check(), f"This user may not write to topic {read_only!r}."))

        assert f"This user may not see topic {hidden!r}, or it does not exist." in found
        assert any(
            f"The settings of topics {', '.join(map(repr, sorted([read_only, fine])))} were not checked" in one for one in found
        )

    def test_that_take_nothing_or_are_weaker_than_promised_are_named(self, monkeypatch):
        blocked = cluster.create_topic(config={"min.insync.replicas": "2"})
        unclean = cluster.create_topic(config={"unclean.leader.election.enable": "true"})
        monkeypatch.setattr(KafkaServerChecks, "_count_nodes", lambda self: 3)

        found = texts(cluster.open_broker(blocked, unclean).check())

        assert any(f"Topic {blocked!r} cannot be written to" in one for one in found)
        assert any(f"Topic {unclean!r} may lose confirmed messages, or leave transactions open" in one for one in found)
        assert any(f"Topics {', '.join(map(repr, sorted([blocked, unclean])))} may lose" in one for one in found)


def _with(problems: list[Finding], text: str) -> list[str]:
    found = texts(problems)
    return found if any(text in one for one in found) else []


def problems_of_lanes(broker: KafkaBroker, source: str) -> list[Finding]:
    broker.checked_lanes = {source: LANES}
    return [problem for problem in broker.check() if problem.text != ONE_NODE]


class TestLanes:
    def test_without_a_marker_topic_have_no_problem_since_a_relay_creates_it(self, source):
        assert problems_of_lanes(cluster.open_broker(), source) == []

    def test_with_a_marker_topic_of_the_broker_have_no_problem(self, source):
        broker = cluster.open_broker()
        broker.open_lane(source, 1)

        assert problems_of_lanes(broker, source) == []

    def test_with_a_marker_topic_of_another_form_name_what_to_change(self, source):
        topic = cluster.create_topic(marker_topic(source), partitions=4, config={"cleanup.policy": "delete"})

        few, deleted = problems_of_lanes(cluster.open_broker(), source)

        assert few.text == f"Marker topic {topic!r} has 4 partitions, so no relay can use lanes 4 to 16."
        assert few.hint == 'Give it 17 partitions or more, or lower OUTBOX["RELAY"]["LANES"].'
        assert f"Marker topic {topic!r} has cleanup.policy=delete" in deleted.text

    def test_without_permissions_name_them(self, source):
        topic = secured.create_topic(marker_topic(source), partitions=20)

        hidden, denied = problems_of_lanes(secured.open_broker(), source)

        assert hidden.text == f"This user may not see the marker topic {topic!r}."
        assert "Transactional Id authorization failed" in denied.text
        assert "Allow this user Write on transactional ids" in denied.hint

    def test_may_be_checked_while_a_relay_sends(self, source):
        topic = cluster.create_topic()
        broker = cluster.open_broker(topic)
        broker.open_lane(source, 1)

        problems_of_lanes(cluster.open_broker(), source)

        assert broker.send_transaction(1, [cluster.message(topic)], "batch 1")[0].status == "accepted"


def test_the_lease_that_is_asked_for_is_longer_than_the_time_out_of_a_transaction():
    assert KafkaBroker.limits({"SERVERS": ["kafka:9092"]}, TopicSpec("orders", TopicType.NORMAL)).send > TRANSACTION_TIMEOUT
