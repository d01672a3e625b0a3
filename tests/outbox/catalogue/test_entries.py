from __future__ import annotations

from datetime import timedelta

import pytest

from outbox import Message, consumer, message
from outbox.catalogue.entries import TopicEntry, read_entries
from outbox.consuming import register
from outbox.consuming.register import RetryPolicy


@pytest.fixture(autouse=True)
def _alone(monkeypatch, settings):
    """No types and handlers but those of a test."""
    monkeypatch.setattr(message, "registered", {})
    monkeypatch.setattr(register, "registered", {})
    settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"orders": {"TYPE": "fifo"}}}


def entry(name: str) -> TopicEntry:
    return next(one for one in read_entries() if one.name == name)


def handle(message: object, context: object) -> None:
    """Handle nothing."""


def declare_types() -> tuple[type[Message], type[Message]]:
    class Paid(Message):
        """
        An order was paid.

        In full.
        """

        order_id: int

        class Meta:
            topic = "orders"
            key = "order_id"
            version = 3

    @Paid.upgrade_from(2)
    def upgrade(content: dict[str, object]) -> dict[str, object]:
        return content

    class Lost(Message):
        order_id: int

        class Meta:
            topic = "unknown"

    return Paid, Lost


class TestTypes:
    def test_are_described_by_their_classes(self):
        declare_types()

        [paid] = entry("orders").types

        assert (paid.name, paid.version, paid.upgrades, paid.key) == ("Paid", 3, [2], "order_id")
        assert paid.description == "An order was paid.\n\nIn full."
        assert paid.example == {"order_id": 1}
        assert "order_id" in str(paid.schema)

    def test_of_a_topic_that_the_settings_lack_are_shown_without_a_promise(self):
        declare_types()

        found = entry("unknown")

        assert [one.name for one in found.types] == ["Lost"]
        assert (found.broker, found.type, found.promise) == ("", "", None)

    def test_without_a_topic_are_left_out(self):
        class Draft(Message):
            order_id: int

        assert [one.name for one in read_entries()] == ["orders"]

    def test_that_json_cannot_represent_are_named(self):
        class Odd(Message):
            number: complex

            class Meta:
                topic = "orders"

        found = {kind.name: kind for kind in entry("orders").types}

        assert "Odd cannot be described" in found.pop("Odd").trouble
        assert [kind.trouble for kind in found.values()] == [""] * len(found)


class TestTopics:
    def test_of_a_broker_whose_client_is_not_installed_are_shown_without_a_promise(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {"default": {"BACKEND": "missing.Broker"}}, "TOPICS": {"orders": {}}}

        found = entry("orders")

        assert (found.broker, found.type, found.promise) == ("default", "", None)

    def test_have_their_promise(self):
        found = entry("orders")

        assert (found.broker, found.type) == ("default", "fifo")
        assert found.promise is not None
        assert "in the order of the database commits" in found.promise.order


class TestHandlers:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({}, "16 retries, after 1.0 s to 30 min, then blocks its key"),
            ({"retry": RetryPolicy(limit=0)}, "no retry"),
            ({"retry": RetryPolicy(limit=1, delays=[timedelta(minutes=5)])}, "1 retry, after 5 min, then blocks its key"),
            ({"on_dead": "skip", "retry": RetryPolicy(limit=1)}, "1 retry, after 1.0 s, then a dead letter"),
        ],
    )
    def test_say_when_they_try_again(self, options, words):
        paid, _ = declare_types()
        consumer(paid, group="billing", **options)(handle)

        [handler] = entry("orders").handlers

        assert handler.retry == words

    def test_get_a_type_by_its_name_or_else_by_its_topic(self):
        paid, _ = declare_types()
        consumer(paid, group="billing")(handle)
        consumer(topic="orders", group="billing")(handle)
        consumer(topic="orders", group="archive")(handle)

        found = entry("orders")

        assert [(one.group, one.takes) for one in found.handlers] == [("archive", ""), ("billing", ""), ("billing", "Paid")]
        assert {(one.group, one.takes) for one in found.handlers_of("Paid")} == {("archive", ""), ("billing", "Paid")}
        assert {(one.group, one.takes) for one in found.handlers_of("Other")} == {("archive", ""), ("billing", "")}

    def test_of_a_topic_get_the_tags_that_the_one_of_the_type_does_not_take(self):
        paid, _ = declare_types()
        consumer(paid, group="billing", tags=["b", "a"])(handle)
        consumer(topic="orders", group="billing")(handle)

        found = entry("orders")

        assert [(one.takes, one.tags) for one in found.handlers_of("Paid")] == [("", []), ("Paid", ["a", "b"])]
