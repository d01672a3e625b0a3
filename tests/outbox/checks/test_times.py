from datetime import timedelta

import pytest

from outbox import consumer
from outbox.brokers.base import Limits
from outbox.brokers.memory import MemoryBroker

SECOND = timedelta(seconds=1)


class SlowBroker(MemoryBroker):
    @classmethod
    def limits(cls, options, topic):
        return Limits(send=20 * SECOND, check_back=100 * SECOND)


def outbox(topics=("orders",), kind="transaction", options=None, **settings):
    broker = {"BACKEND": f"{__name__}.SlowBroker", "OPTIONS": options or {}}
    return {"BROKERS": {"default": broker}, "TOPICS": {name: {"TYPE": kind} for name in topics}, **settings}


class TestW019:
    def test_warns_of_a_lease_that_a_send_may_outlast(self, settings, found):
        settings.OUTBOX = outbox(RELAY={"LEASE": 24.9 * SECOND})

        (problem,) = found()

        assert problem.id == "outbox.W019"
        assert problem.msg.startswith('OUTBOX["RELAY"]["LEASE"] is 24.9 s, but a send to broker \'default\' may take 20 s')
        assert problem.hint.startswith("Set it to 25 s or more")

    @pytest.mark.parametrize(
        "outbox",
        [
            outbox(RELAY={"LEASE": 25 * SECOND}),
            outbox(RELAY={"LEASE": SECOND}, topics=()),
            outbox(RELAY={"LEASE": SECOND}, options={"NO_OPTION": 1}),
        ],
        ids=["long enough", "a broker that nothing goes to", "a broker whose options are wrong"],
    )
    def test_is_quiet_otherwise(self, settings, found, outbox):
        settings.OUTBOX = outbox

        assert "outbox.W019" not in [problem.id for problem in found()]

    @pytest.mark.parametrize("backend", ["outbox.embedded.EmbeddedBroker", "outbox.brokers.memory.MemoryBroker"])
    def test_is_quiet_about_our_brokers_as_they_come(self, settings, found, backend):
        settings.OUTBOX = {"BROKERS": {"default": {"BACKEND": backend}}, "TOPICS": {"orders": {}}}

        assert found() == []


class TestE020:
    def test_finds_a_retention_that_half_messages_may_outlive(self, settings, found):
        settings.OUTBOX = outbox(RETENTION=99 * SECOND)

        (problem,) = found()

        assert problem.id == "outbox.E020"
        assert problem.msg == (
            "OUTBOX[\"RETENTION\"] is 0:01:39, but broker 'default' may check back about a half message for 0:01:40."
        )
        assert problem.hint

    @pytest.mark.parametrize(
        "outbox", [outbox(RETENTION=100 * SECOND), outbox(RETENTION=99 * SECOND, kind="normal")], ids=["long enough", "no halves"]
    )
    def test_is_quiet_otherwise(self, settings, found, outbox):
        settings.OUTBOX = outbox

        assert found() == []


def handler(message, context): ...


class TestW050:
    RABBITMQ = {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": {"NODES": ["rabbit-1"]}}},
        "TOPICS": {"orders": {"TYPE": "normal"}, "ordered": {"TYPE": "fifo"}},
    }

    @pytest.mark.parametrize("topic", ["orders", "ordered"])
    def test_warns_of_a_handler_that_may_outlast_its_delivery(self, settings, found, topic):
        settings.OUTBOX = self.RABBITMQ
        consumer(topic=topic, group="cart", time_limit=timedelta(minutes=27))(handler)
        enough = found()
        consumer(topic=topic, group="points", time_limit=timedelta(minutes=27, seconds=1))(handler)

        (problem,) = found()

        assert enough == []
        assert problem.id == "outbox.W050"
        assert "lets a consumer hold a delivery for 0:27:00 only" in problem.msg
        assert problem.hint.startswith("Lower it to 0:27:00")

    def test_is_quiet_where_a_delivery_is_held_for_any_time(self, settings, found):
        settings.OUTBOX = outbox(kind="normal")
        consumer(topic="orders", group="cart", time_limit=timedelta(days=1))(handler)

        assert "outbox.W050" not in [problem.id for problem in found()]


class TestW052:
    @staticmethod
    def rabbitmq(topic, **settings):
        broker = {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": {"NODES": ["rabbit-1"]}}
        return {"BROKERS": {"default": broker}, "TOPICS": {"orders": {"TYPE": "normal", **topic}}, **settings}

    def test_warns_of_a_topic_that_is_kept_longer_than_inbox_rows(self, settings, found):
        settings.OUTBOX = self.rabbitmq({"RETENTION": timedelta(days=14)}, RETENTION=timedelta(days=10))

        (problem,) = found()

        assert problem.id == "outbox.W052"
        assert problem.msg.startswith(
            "Broker 'default' keeps messages of topic 'orders' for 14 days, 0:00:00 "
            '(OUTBOX["TOPICS"]["orders"]["RETENTION"]), but inbox rows are kept for 10 days, 0:00:00'
        )
        assert problem.hint == (
            'Set OUTBOX["RETENTION"] to 14 days, 0:00:00 or more, or lower OUTBOX["TOPICS"]["orders"]["RETENTION"].'
        )

    def test_is_quiet_where_both_are_the_same(self, settings, found):
        settings.OUTBOX = self.rabbitmq({})

        assert found() == []

    def test_is_quiet_where_the_broker_knows_what_it_may_deliver_again(self, settings, found):
        settings.OUTBOX = {
            "BROKERS": {"default": {"BACKEND": "outbox.embedded.EmbeddedBroker"}},
            "TOPICS": {"orders": {"TYPE": "normal", "RETENTION": timedelta(days=14)}},
        }

        assert "outbox.W052" not in [problem.id for problem in found()]
