"""A real Kafka that refuses: what is said of it, whose messages wait, and that it goes on once somebody has corrected it."""

import uuid
from datetime import timedelta

import pytest
from django.db.models import F

from outbox import database
from outbox.brokers.base import SendStatus
from outbox.brokers.kafka import receiver
from outbox.brokers.kafka.marker import marker_topic
from outbox.errors import BrokerMisconfigured, BrokerUnavailable
from outbox.models import Batch, State
from outbox.relay.rounds import Relay
from tests.factories import TicketFactory, TopicFactory
from tests.outbox.brokers.kafka.cluster import message, new_source
from tests.outbox.brokers.kafka.secured import (
    CREATE,
    DESCRIBE,
    READ,
    WRITE,
    allow,
    allow_group,
    allow_transactions,
    create_topic,
    forbid,
    login,
    open_broker,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

ACCEPTED, MISCONFIGURED, UNAVAILABLE = SendStatus.ACCEPTED, SendStatus.MISCONFIGURED, SendStatus.UNAVAILABLE
LANE = 1


@pytest.fixture
def source() -> str:
    return new_source()


def opens(broker, source) -> bool:
    """Return whether a lane can be opened now; what the server was told a moment ago takes effect a little later."""
    try:
        broker.open_lane(source, LANE)
    except BrokerUnavailable:
        return False
    return True


def allowed(*topics: str, source: str) -> None:
    allow_transactions(source)
    allow(marker_topic(source), READ, WRITE, CREATE)
    for topic in topics:
        allow(topic, WRITE)


def sends(broker, source, messages) -> bool:
    """Return whether messages can be sent now."""
    if not broker.is_lane_open(LANE) and not opens(broker, source):
        return False
    return {result.status for result in broker.send_transaction(LANE, messages, "batch 2")} == {ACCEPTED}


class TestConnection:
    @pytest.mark.parametrize(
        ("client", "error", "text"),
        [
            ({"sasl.password": "wrong"}, BrokerMisconfigured, r'Invalid username or password.*password in OPTIONS\["CLIENT"\]'),
            ({"sasl.mechanism": "SCRAM-SHA-256"}, BrokerMisconfigured, 'supported mechanisms: PLAIN.*Correct "sasl.mechanism"'),
            (
                {"security.protocol": "SASL_SSL"},
                BrokerUnavailable,
                'connecting to a PLAINTEXT broker listener.*"security.protocol"',
            ),
            ({"security.protocol": "PLAINTEXT"}, BrokerUnavailable, '"security.protocol" in OPTIONS'),
        ],
        ids=["wrong password", "another mechanism", "tls to a port without", "no tls and no password"],
    )
    def test_that_the_server_refuses_names_the_setting(self, source, client, error, text):
        with pytest.raises(error, match=text):
            open_broker(client=client).open_lane(source, LANE)

    def test_with_a_wrong_password_sends_nothing_and_refuses_no_message(self):
        topic = create_topic()
        broker = open_broker(topic, client={"sasl.password": "wrong"}, TRANSACTIONS=False)

        [result] = broker.send([message(topic)])

        assert result.status is UNAVAILABLE
        assert 'password in OPTIONS["CLIENT"]' in result.reason


class TestLane:
    @pytest.mark.parametrize(
        ("has", "missing"),
        [
            ([], "Allow this user Read and Write on the marker topic"),
            ([DESCRIBE], "does not allow this user Read and Write on marker topic"),
            ([READ], "does not allow this user Write on marker topic"),
            ([WRITE], "does not allow this user Read on marker topic"),
        ],
        ids=["nothing", "describe", "read", "write"],
    )
    def test_is_not_opened_without_permission_on_the_marker_topic(self, source, has, missing):
        topic = marker_topic(source)
        create_topic(topic, partitions=2)
        allow_transactions(source)
        if has:
            allow(topic, *has)
        broker = open_broker()

        found = wait_until(lambda: _refusal(broker, source, missing))
        allow(topic, READ, WRITE)

        assert topic in found
        wait_until(lambda: opens(broker, source))

    def test_is_not_opened_without_permission_to_create_the_marker_topic(self, source):
        topic = marker_topic(source)
        allow_transactions(source)
        allow(topic, READ, WRITE)
        broker = open_broker()

        wait_until(lambda: _refusal(broker, source, r"does not exist, and Kafka did not create it"))
        found = _refusal(broker, source, "allow this user Create on it")
        create_topic(topic, partitions=2)

        assert "Create it with 2 partitions or more" in found
        wait_until(lambda: opens(broker, source))

    def test_is_not_opened_without_permission_on_its_transactional_id(self, source):
        allow(marker_topic(source), READ, WRITE, CREATE)
        broker = open_broker()

        found = wait_until(lambda: _refusal(broker, source, "Transactional Id authorization failed"))
        allow_transactions(source)

        assert 'Write on transactional ids that begin with "outbox."' in found
        wait_until(lambda: opens(broker, source))

    def test_is_not_opened_with_a_time_out_above_that_of_the_cluster(self, source, monkeypatch):
        allowed(source=source)
        broker = open_broker()
        wait_until(lambda: opens(broker, source))
        monkeypatch.setattr("outbox.brokers.kafka.client.TRANSACTION_TIMEOUT", timedelta(minutes=16))

        found = _refusal(broker, source, "INVALID_TRANSACTION_TIMEOUT")

        assert "transaction.max.timeout.ms" in found
        monkeypatch.undo()
        assert opens(broker, source)


def _refusal(broker, source, text: str) -> str:
    """Return what is said of a lane that cannot be opened, if it has a text."""
    try:
        broker.open_lane(source, LANE)
    except BrokerMisconfigured as error:
        return str(error) if text in str(error) else ""
    return ""


class TestTransaction:
    @pytest.mark.parametrize("has", [[], [DESCRIBE]], ids=["nothing", "describe"])
    def test_blames_the_topic_without_permission_only(self, source, has):
        denied, other = create_topic(), create_topic()
        allowed(other, source=source)
        broker = open_broker(denied, other)
        messages = [message(other), message(denied), message(other)]
        wait_until(lambda: sends(broker, source, messages[:1]))
        if has:
            allow(denied, *has)

        found = broker.send_transaction(LANE, messages, "batch 1")

        assert [result.status for result in found] == [UNAVAILABLE, MISCONFIGURED, UNAVAILABLE]
        assert f"Kafka refused topic {denied!r}" in found[1].reason
        assert "Allow this user Write on the topic" in found[1].reason
        allow(denied, WRITE)
        wait_until(lambda: sends(broker, source, messages))

    def test_names_the_permission_that_was_taken_from_the_marker_topic(self, source):
        topic = create_topic()
        allowed(topic, source=source)
        broker = open_broker(topic)
        wait_until(lambda: sends(broker, source, [message(topic)]))
        forbid(marker_topic(source))

        reason = wait_until(lambda: _reason(broker, source, topic))

        assert "TOPIC_AUTHORIZATION_FAILED" in reason
        allow(marker_topic(source), READ, WRITE)
        wait_until(lambda: sends(broker, source, [message(topic)]))


def _reason(broker, source, topic) -> str:
    """Return why a transaction was not committed."""
    [result] = broker.send_transaction(LANE, [message(topic)], "batch 1")
    return result.reason


@pytest.mark.django_db
class TestRelay:
    def test_sends_the_other_topics_and_counts_no_failure(self):
        denied, other = create_topic(), create_topic()
        connection = database.raw("default")
        relay = Relay(connection, open_broker(denied, other), LANE)
        allowed(other, source=database.identity.read_identity(connection).source)
        wait_until(lambda: _steps(relay))
        tickets = [TicketFactory(topic=TopicFactory(name=name)) for name in (denied, other, denied)]

        relay.drain()

        sent = Batch.objects.filter(state=State.SENT)
        waiting = Batch.objects.exclude(state=State.SENT)
        assert [str(one) for batch in sent for one in batch.message_ids] == [str(tickets[1].message_id)]
        assert set(waiting.values_list("state", "tx_lane")) == {(State.RELEASED, None)}
        assert "Allow this user Write on the topic" in waiting[0].last_error
        allow(denied, WRITE)
        wait_until(lambda: _all_sent(relay))


def _steps(relay: Relay) -> bool:
    try:
        relay.step()
    except BrokerUnavailable:
        return False
    return True


def _all_sent(relay: Relay) -> bool:
    Batch.objects.update(due_at=F("due_at") - timedelta(minutes=5))
    relay.drain()
    return set(Batch.objects.values_list("state", flat=True)) == {State.SENT}


class TestConsumer:
    def test_receives_nothing_without_permissions_names_each_and_goes_on_when_it_has_them(self, monkeypatch):
        monkeypatch.setattr(receiver, "REFUSED_SECONDS", 0.2)
        topic, group = create_topic(), f"group-{uuid.uuid4().hex[:8]}"
        broker = open_broker(topic)
        open_broker(topic, client=login("admin")).send([message(topic, b"a")])

        def refused(what: str) -> bool:
            try:
                found = receive(broker, group)
            except BrokerMisconfigured as error:
                return what in str(error)
            return found == [] and what in broker.refusals.get(topic, "")

        wait_until(lambda: refused("Allow this user Read on the topic"))
        allow(topic, READ, WRITE)
        wait_until(lambda: refused("Allow this user Read on the group"))
        allow_group(group)

        found = wait_until(lambda: receive(broker, group))

        assert [one.body for one in found] == [b"a"]
        assert broker.refusals == {}
        broker.close()


def receive(broker, group):
    return broker.receive(group, list(broker.topics), limit=10, invisible_for=timedelta(minutes=5), wait=timedelta(seconds=0.2))
