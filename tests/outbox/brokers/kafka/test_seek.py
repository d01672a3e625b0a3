"""`outbox_seek`: a group of the real Kafka goes on at another place."""

import json
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from outbox import conf, consumer
from outbox.consuming import register
from tests.kafka_node import server
from tests.outbox.brokers.kafka.cluster import create_topic, message

pytestmark = [pytest.mark.kafka, pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

MINUTE = timedelta(minutes=1)


@pytest.fixture
def topic(settings, monkeypatch) -> str:
    """A topic with four messages, and a handler of the group `billing` for it."""
    name = create_topic()
    kafka = {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": {"SERVERS": [server().address], "TRANSACTIONS": False}}
    memory = {"BACKEND": "outbox.brokers.memory.MemoryBroker"}
    settings.OUTBOX = {
        "BROKERS": {"default": kafka, "memory": memory},
        "TOPICS": {name: {"TYPE": "normal"}, "letters": {"BROKER": "memory"}},
    }
    monkeypatch.setattr(register, "registered", {})
    consumer(topic=name, group=f"billing-{name}")(handle)
    with closing(conf.make_broker("default")) as broker:
        broker.send([message(name, body) for body in (b"1", b"2", b"3", b"4")])
    return name


def handle(message: object, context: object) -> None:
    """Handle nothing."""


@pytest.fixture
def receive(topic) -> Callable[[], list[bytes]]:
    """Return a function that starts a member of the group, and returns the bodies that it has received and finished."""

    def receive() -> list[bytes]:
        with closing(conf.make_broker("default")) as broker:
            found = []
            while new := broker.receive(f"billing-{topic}", [topic], limit=10, invisible_for=MINUTE, wait=timedelta(seconds=5)):
                found += new
                broker.ack(new)
            return [one.body for one in found]

    return receive


@pytest.fixture
def seek(topic) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs the command without a confirmation, and returns what it has moved."""

    def seek(*arguments: str) -> list[dict[str, Any]]:
        out = StringIO()
        call_command("outbox_seek", f"billing-{topic}", *arguments, "--no-input", "--json", stdout=out)
        moved: list[dict[str, Any]] = json.loads(out.getvalue())["moved"]
        return moved

    return seek


class TestSeek:
    def test_has_a_group_read_its_topic_again(self, topic, receive, seek):
        before = receive()

        [moved] = seek("--to", "first")

        assert (moved["topic"], moved["pos"], moved["wanted"], moved["ahead"]) == (topic, 4, 0, -4)
        assert before == receive() == [b"1", b"2", b"3", b"4"]

    def test_skips_what_waits(self, receive, seek):
        assert [one["ahead"] for one in seek("--to", "last")] == [4]

        assert receive() == []

    def test_goes_on_at_a_time(self, receive, seek):
        receive()

        assert [one["wanted"] for one in seek("--to", "1h")] == [0]
        assert [one["wanted"] for one in seek("--to", "2099-01-01")] == [4]  # nothing is stored since then
        with pytest.raises(SystemExit) as exit_:
            seek("--to", "last")
        assert exit_.value.code == 1

    def test_is_refused_while_the_group_has_members(self, topic, seek):
        with closing(conf.make_broker("default")) as broker:
            broker.receive(f"billing-{topic}", [topic], limit=1, invisible_for=MINUTE, wait=timedelta(seconds=10))

            with pytest.raises(CommandError, match="still has members"):
                seek("--to", "last")

    def test_asks_before_it_moves(self, topic, receive):
        with pytest.raises(CommandError, match="there is no terminal for the confirmation"):
            call_command("outbox_seek", f"billing-{topic}", to="last")

        assert len(receive()) == 4

    @pytest.mark.parametrize(
        ("chosen", "text"),
        [
            ("others", "has no handler for topic 'others'. Choices are: letters, orders-"),
            ("letters", "Broker 'memory', which has topic 'letters', cannot move a group."),
        ],
    )
    def test_names_what_it_cannot_move(self, topic, seek, chosen, text):
        consumer(topic="letters", group=f"billing-{topic}")(handle)

        with pytest.raises(CommandError, match=text):
            seek("--to", "first", "--topic", chosen)

    def test_names_a_place_that_is_none(self, seek):
        with pytest.raises(CommandError, match="invalid position value: 'yesterday'"):
            seek("--to", "yesterday")
