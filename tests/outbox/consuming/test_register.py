from functools import partial

import pytest

from outbox import Message, RetryPolicy, conf, consumer
from outbox.consuming.register import group
from outbox.errors import ConfigurationError, UnknownTopic
from tests.outbox.consuming.messages import Cancelled, Placed


def handler(message, context):
    return "called"


def other_handler(message, context): ...


class TestConsumer:
    def test_leaves_the_function_as_it_is(self):
        decorated = consumer(Placed, group="cart")(handler)

        assert decorated is handler
        assert decorated(Placed("A1"), None) == "called"

    def test_takes_several_message_types(self):
        consumer(Placed, Cancelled, group="cart")(handler)

        assert set(group("cart").consumers) == {"tests.Placed", "tests.Cancelled"}

    def test_takes_a_class_and_makes_one_of_it(self):
        @consumer(Placed, group="cart")
        class ClearCart:
            calls = 0

            def handle(self, message, context):
                self.calls += 1
                return self.calls

        found = group("cart").consumers["tests.Placed"]

        assert isinstance(ClearCart, type)
        assert [found.handler(None, None), found.handler(None, None)] == [1, 2]

    @pytest.mark.parametrize("kind", ["function", "coroutine function", "class"])
    def test_takes_a_handler_without_the_context(self, kind):
        seen = []

        async def handle(message):
            seen.append(message)

        class Handler:
            def handle(self, message):
                seen.append(message)

        consumer(Placed, group="cart")({"function": seen.append, "coroutine function": handle, "class": Handler}[kind])

        group("cart").consumers["tests.Placed"].handler("message", "context")

        assert seen == ["message"]

    def test_tells_brokers_the_group_of_its_topic(self):
        consumer(topic="orders", group="cart")(handler)

        groups = {topic.name: topic.groups for topic in conf.topics_of("default")}

        assert groups == {**dict.fromkeys(groups, frozenset()), "orders": {"cart"}}

    def test_names_both_functions_when_two_have_one_name(self):
        consumer(Placed, group="cart")(handler)

        with pytest.raises(ConfigurationError) as error:
            consumer(Placed, group="cart")(other_handler)

        assert str(error.value).startswith("tests.outbox.consuming.test_register.handler and ")
        assert "test_register.other_handler" in str(error.value)

    def test_names_both_functions_when_two_take_one_plain_topic(self):
        consumer(topic="plain", group="cart")(handler)

        with pytest.raises(ConfigurationError, match="topic plain"):
            consumer(topic="plain", group="cart")(other_handler)

    def test_takes_a_module_that_is_imported_anew(self):
        consumer(Placed, group="cart")(handler)
        consumer(Placed, group="cart", retry=RetryPolicy(limit=3))(handler)

        assert group("cart").consumers["tests.Placed"].retry.limit == 3

    def test_keeps_a_groups_inbox_in_one_database(self):
        consumer(Placed, group="cart")(handler)

        with pytest.raises(ConfigurationError, match="different databases"):
            consumer(Cancelled, group="cart", using="other")(other_handler)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"types": [Placed], "group": ""}, "needs the name of a group"),
            ({"types": [Placed]}, "needs the name of a group"),
            ({"types": [Placed], "group": None}, "needs the name of a group"),
            ({"types": [handler]}, r"takes message types, not <function handler .*: @consumer\(OrderPlaced, group="),
            ({"types": [Placed], "group": "cart", "time_limit": 5}, "time_limit must be a timedelta above zero, not 5"),
            ({"types": [Placed], "group": "cart", "batch_size": "10"}, "batch_size must be 2 to 500, not '10'"),
            ({"types": [Placed], "group": "cart", "retry": 5}, r"retry must be a policy, such as RetryPolicy\(limit=3\), not 5"),
            (
                {"types": [Placed], "group": "cart", "idempotency_key": "id"},
                "idempotency_key must be a function .* not 'id'",
            ),
            ({"types": [], "group": "cart"}, "message types or a plain topic"),
            ({"types": [Placed], "group": "cart", "topic": "orders"}, "message types or a plain topic"),
            ({"types": ["Placed"], "group": "cart"}, "takes message types"),
            ({"types": [Message], "group": "cart"}, "Message is abstract, so no message is of this type. Pass its types"),
            ({"types": [Placed], "group": "cart", "tags": "placed"}, "set of strings"),
            ({"types": [Placed], "group": "cart", "tags": []}, "set of strings"),
            ({"types": [Placed], "group": "cart", "tags": {"*", "placed"}}, "stands for all tags"),
            ({"types": [Placed], "group": "cart", "on_dead": "explode"}, "on_dead"),
        ],
    )
    def test_refuses_arguments_that_contradict_each_other(self, arguments, text):
        with pytest.raises(ConfigurationError, match=text):
            consumer(*arguments.pop("types"), **arguments)

    def test_refuses_a_type_without_a_topic(self, monkeypatch):
        monkeypatch.setattr("outbox.message.registered", {})

        class Homeless(Message):
            pass

        with pytest.raises(ConfigurationError, match=r"Homeless has no topic\. Add `topic` to its class Meta\."):
            consumer(Homeless, group="cart")

    @pytest.mark.parametrize("target", [lambda: None, lambda message, context, more: None, type("NoHandle", (), {})])
    def test_refuses_what_cannot_be_called_with_message_and_context(self, target):
        with pytest.raises(ConfigurationError, match="cannot be called as"):
            consumer(Placed, group="cart")(target)

    @pytest.mark.parametrize("target", [lambda context, message: None, lambda self, message: None])
    def test_refuses_what_takes_something_else_for_the_message(self, target):
        with pytest.raises(ConfigurationError, match=r"is the message, but is named .* Write handler\(message, context\)"):
            consumer(Placed, group="cart")(target)

    @pytest.mark.parametrize("kind", ["generator", "async generator", "partial", "class", "callable object"])
    def test_refuses_a_generator_whose_code_would_not_run(self, kind):
        def generator(message, context):
            yield

        async def async_generator(message, context):
            yield

        class Handler:
            def handle(self, message, context):
                yield

        class Callable:
            def __call__(self, message, context):
                yield

        target = {
            "generator": generator,
            "async generator": async_generator,
            "partial": partial(generator, context=None),
            "class": Handler,
            "callable object": Callable(),
        }[kind]

        with pytest.raises(ConfigurationError, match="is a generator: none of its code would run"):
            consumer(Placed, group="cart")(target)


class TestGroup:
    def test_asks_each_broker_for_its_own_topics(self):
        consumer(Placed, group="cart")(handler)
        consumer(topic="elsewhere", group="cart")(other_handler)

        assert group("cart").brokers == ["default", "second"]
        assert group("cart").topics_of("default") == ["orders"]
        assert group("cart").topics_of("second") == ["elsewhere"]

    def test_says_what_became_of_an_option(self):
        with pytest.raises(ConfigurationError, match=r"no option 'ordered' any more\. Remove the option"):
            consumer(Placed, group="cart", ordered=True)
        with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
            consumer(Placed, group="cart", order=True)

    def test_refuses_a_topic_that_is_not_in_settings(self):
        consumer(topic="plane", group="cart")(handler)

        with pytest.raises(UnknownTopic, match="Did you mean 'plain'"):
            group("cart").topics_of("default")
