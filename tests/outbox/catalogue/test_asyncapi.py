from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from outbox import Message, consumer, message
from outbox.catalogue.asyncapi import HEADERS, HEADERS_OF_TYPES, document
from outbox.catalogue.entries import read_entries
from outbox.consuming import register
from tests.outbox.brokers.messages_page import names
from tests.outbox.catalogue.declared import CELERY, EMBEDDED, RABBITMQ, SECRET, TOPICS, declare, outbox_settings


@pytest.fixture(autouse=True)
def _alone(monkeypatch, settings):
    """No types and handlers but those of a test."""
    monkeypatch.setattr(message, "registered", {})
    monkeypatch.setattr(register, "registered", {})
    settings.OUTBOX = outbox_settings(EMBEDDED)


def made() -> dict[str, Any]:
    return document(read_entries())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(root: dict[str, Any], reference: str) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def read(message: object, context: object) -> None:
    """Handle nothing."""


def messages_of(operation: dict[str, Any]) -> set[str]:
    return {one["$ref"].rpartition("/")[2] for one in operation["messages"]}


class TestADocument:
    @pytest.mark.parametrize("broker", [EMBEDDED, RABBITMQ])
    def test_resolves_its_references(self, broker, settings):
        settings.OUTBOX = outbox_settings(broker)
        declare()

        found = made()

        assert all(resolve(found, one) for one in references(found))
        assert set(found["components"]["schemas"]) > {"Placed", "Category", "Article", "Size", "Cash", "Card"}
        assert "$defs" not in json.dumps(found)

    def test_is_the_same_for_the_same_code_and_settings(self, settings):
        declare()
        before = made()

        again = made()
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**TOPICS, "new": {}}}
        after = made()

        assert json.dumps(again) == json.dumps(before)
        assert after["info"]["version"] != before["info"]["version"]

    def test_has_no_secrets_of_the_options(self, settings):
        settings.OUTBOX = outbox_settings(RABBITMQ)
        declare()

        assert SECRET not in json.dumps(made())

    def test_names_the_project(self):
        assert made()["info"]["title"] == "shop"

    def test_leaves_out_topics_that_a_broker_has_for_itself(self, settings):
        brokers = {"default": EMBEDDED, "celery": CELERY}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": brokers}

        found = made()

        assert {one["title"] for one in found["channels"].values()} == set(TOPICS)
        assert set(found["servers"]) == {"default"}

    def test_of_an_empty_project_has_no_channels(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {}}

        assert made()["channels"] == {}


class TestServers:
    def test_are_those_that_the_options_name(self, settings):
        settings.OUTBOX = outbox_settings(RABBITMQ)

        found = made()

        assert {key: (one["protocol"], one["host"], one["pathname"]) for key, one in found["servers"].items()} == {
            "default.1": ("amqp", "rabbit-1:5672", "/%2Fshop"),
            "default.2": ("amqp", "rabbit-2:5673", "/%2Fshop"),
        }
        assert [one["$ref"] for one in found["channels"]["orders"]["servers"]] == ["#/servers/default.1", "#/servers/default.2"]

    def test_of_which_the_settings_name_no_host_leave_it_to_the_reader(self):
        [server] = made()["servers"].values()

        assert (server["protocol"], server["host"]) == ("outbox", "{host}")
        assert set(server["variables"]) == {"host"}


class TestChannels:
    def test_say_what_is_promised_there_and_how_to_read_it(self):
        found = made()["channels"]["orders"]

        assert found["address"] == "orders"
        assert "in the order of the database commits" in found["description"]
        assert found["description"].endswith("Only consumers of the outbox can read it, because its tables are internal.")

    def test_on_rabbitmq_are_exchanges_with_the_tag_as_routing_key(self, settings):
        settings.OUTBOX = outbox_settings(RABBITMQ)

        found = made()["channels"]["partners-1"]

        assert (found["address"], set(found["parameters"])) == ("{tag}", {"tag"})
        amqp = found["bindings"]["amqp"]
        assert (amqp["is"], amqp["exchange"]["name"], amqp["exchange"]["vhost"]) == ("routingKey", "partners / 1", "/shop")

    def test_that_the_settings_lack_have_no_address_and_nothing_is_sent_there(self):
        declare()

        found = made()

        lost = found["channels"]["unknown"]
        assert (lost["address"], set(lost["messages"])) == (None, {"Lost"})
        assert {key for key, one in found["operations"].items() if one["channel"]["$ref"] == "#/channels/unknown"} == {
            "receive.lost.Lost"
        }

    def test_have_keys_of_their_own_where_names_differ_by_signs_only(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"a/b": {}, "a b": {}, "a-b": {}}}

        found = made()

        assert {key: one["address"] for key, one in found["channels"].items()} == {"a-b": "a b", "a-b-2": "a-b", "a-b-3": "a/b"}


class TestMessages:
    def test_are_described_by_their_types(self):
        declare()

        found = made()["components"]["messages"]["shop-Order-Placed"]

        assert (found["name"], found["title"], found["contentType"]) == ("shop/Order Placed", "Placed", "application/json")
        assert (found["summary"], found["description"]) == ("An order was placed.", "Once for each order.")
        assert found["payload"] == {"$ref": "#/components/schemas/Placed"}

    def test_have_examples_that_their_schemas_accept(self):
        declare()
        found = made()

        examples = [
            (one, shown["payload"]) for one in found["components"]["messages"].values() for shown in one.get("examples", [])
        ]

        assert len(examples) == 4
        for one, payload in examples:
            jsonschema.Draft7Validator({**found, **one["payload"]}).validate(payload)
        placed = next(payload for one, payload in examples if one["title"] == "Placed")
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator({**found, "$ref": "#/components/schemas/Placed"}).validate({**placed, "sizes": [1, "M"]})

    def test_have_their_headers(self):
        declare()

        found = made()["components"]["messages"]

        headers = found["shop-Order-Placed"]["headers"]
        assert headers["properties"]["ce-type"] == {
            "type": "string",
            "description": "The type's name.",
            "const": "shop/Order Placed",
        }
        assert headers["properties"]["ce-typeversion"]["const"] == "3"
        assert headers["properties"]["ce-subject"]["description"] == "The key: the field invoice, as text."
        assert {"ce-id", "ce-source", "ce-type"} < set(headers["required"])
        assert found["Cancelled"]["headers"]["properties"]["ce-tag"]["examples"] == ["cancelled"]
        assert "ce-deliverat" in found["Due"]["headers"]["properties"]
        assert "ce-deliverat" not in headers["properties"]
        assert found["Due"]["correlationId"] == {"location": "$message.header#/ce-correlationid"}

    def test_have_the_headers_of_their_broker(self, settings):
        settings.OUTBOX = outbox_settings(RABBITMQ)
        declare()

        headers = made()["components"]["messages"]["Due"]["headers"]["properties"]

        assert {"ce-id", "outbox-key", "outbox-tag", "outbox-stored-at"} < set(headers)

    def test_have_the_headers_that_the_page_for_other_programs_lists(self):
        ours = {*HEADERS, *(name for headers in HEADERS_OF_TYPES.values() for name in headers)}

        assert ours == names("Ours")

    def test_of_other_types_are_in_topics_without_types_and_where_a_group_reads_all(self):
        declare()

        channels = made()["channels"]

        assert set(channels["imports"]["messages"]) == {"imports.other"}
        assert set(channels["orders"]["messages"]) == {"Cancelled", "shop-Order-Placed", "orders.other"}
        assert set(channels["reminders"]["messages"]) == {"Due"}

    def test_of_other_programs_need_no_headers(self):
        declare()

        other = made()["components"]["messages"]["imports.other"]

        assert other["headers"]["required"] == []
        assert "payload" not in other


class TestOperations:
    def test_send_each_type(self):
        declare()

        found = made()["operations"]

        assert {key for key, one in found.items() if one["action"] == "send"} == {
            "send.Cancelled",
            "send.Due",
            "send.shop-Order-Placed",
        }
        assert messages_of(found["send.Due"]) == {"Due"}

    def test_receive_what_each_handler_takes(self):
        declare()

        found = made()["operations"]

        assert {key: messages_of(one) for key, one in found.items() if one["action"] == "receive"} == {
            "receive.cart.shop-Order-Placed": {"shop-Order-Placed"},
            "receive.cart.Cancelled": {"Cancelled"},
            "receive.cart.orders.other": {"orders.other"},
            "receive.copies.orders.other": {"Cancelled", "shop-Order-Placed", "orders.other"},
            "receive.copies.imports.other": {"imports.other"},
            "receive.lost.Lost": {"Lost"},
        }
        assert found["receive.copies.orders.other"]["description"].endswith("only messages with the tag cancelled or late.")

    def test_are_not_mixed_up_where_a_type_has_the_name_of_its_topic(self):
        class Import(Message):
            number: int

            class Meta:
                topic = type = "imports"

        consumer(topic="imports", group="copies")(read)
        consumer(Import, group="copies")(read)

        found = made()["operations"]

        assert {key: messages_of(one) for key, one in found.items()} == {
            "send.imports": {"imports"},
            "receive.copies.imports": {"imports"},
            "receive.copies.imports.other": {"imports.other"},
        }


class TestSchemas:
    def test_of_classes_with_the_same_name_have_names_of_their_own(self):
        class Article(Message):
            number: int

            class Meta:
                topic = "orders"

        declare()

        schemas = made()["components"]["schemas"]

        assert sorted(name for name in schemas if name.endswith("Article")) == [
            "tests.outbox.catalogue.declared.Article",
            "tests.outbox.catalogue.test_asyncapi.TestSchemas.test_of_classes_with_the_same_name_have_names_of_their_own._locals_.Article",
        ]
