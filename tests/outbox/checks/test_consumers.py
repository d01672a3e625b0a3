import pytest
from django.db import connections
from psycopg import IsolationLevel

from outbox import Message, consumer
from tests.outbox.checks.conftest import BROKERS


@pytest.fixture(autouse=True)
def _topics(settings):
    settings.OUTBOX = {"BROKERS": BROKERS, "TOPICS": {"orders": {}}}


def handler(message, context):
    pass


class TestE016:
    def test_finds_a_plain_topic_that_is_not_in_settings(self, found):
        consumer(topic="oders", group="cart")(handler)

        (problem,) = found()

        assert problem.id == "outbox.E016"
        assert problem.msg == f"{__name__}.handler: Topic 'oders' is not in OUTBOX[\"TOPICS\"]."
        assert problem.hint == "Did you mean 'orders'?"

    def test_finds_a_topic_of_a_broker_that_only_sends(self, found, settings):
        app = "tests.outbox.celery.app.app"
        tasks = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": app}}
        settings.OUTBOX = {**settings.OUTBOX, "BROKERS": {**BROKERS, "celery": tasks}}
        consumer(topic="celery-tasks", group="cart")(handler)

        (problem,) = found()

        assert problem.id == "outbox.E016"
        assert "its broker 'celery' (CeleryBroker) has no consumer groups" in problem.msg

    def test_leaves_a_types_topic_to_the_check_of_types(self, found):
        class Stray(Message):
            class Meta:
                topic = "nowhere"

        consumer(Stray, group="cart")(handler)

        assert [problem.id for problem in found()] == ["outbox.E006"]


class NoOutboxInOther:
    def allow_migrate(self, db, app_label, **hints):
        return db != "other" if app_label == "outbox" else None


class TestE017:
    def test_finds_a_database_that_is_not_there(self, found):
        consumer(topic="orders", group="cart", using="elsewhere")(handler)

        (problem,) = found()

        assert problem.id == "outbox.E017"
        assert "'elsewhere', which is not in DATABASES" in problem.msg
        assert problem.hint == "Choices are: default, other."

    def test_finds_a_database_without_inbox(self, found, routed):
        routed(NoOutboxInOther())
        consumer(topic="orders", group="cart", using="other")(handler)

        (problem,) = found()

        assert problem.id == "outbox.E017"
        assert "'other', where routers do not allow the tables of the outbox" in problem.msg
        assert "allow_migrate()" in problem.hint

    def test_finds_a_default_that_is_left_empty_for_routers(self, found, routed, monkeypatch):
        monkeypatch.setattr(connections["default"], "vendor", "unknown")  # as of Django's backend for an empty one
        routed(EverythingToOther())
        consumer(topic="orders", group="cart")(handler)

        (problem,) = found()

        assert problem.id == "outbox.E017"
        assert "'default', which is not PostgreSQL, so it has no inbox" in problem.msg
        assert problem.hint == "Name another: @consumer(..., using=...). Choices are: other."

    def test_leaves_the_database_of_messages_to_its_own_check(self, found, monkeypatch):
        monkeypatch.setattr(connections["default"], "vendor", "sqlite")
        consumer(topic="orders", group="cart")(handler)

        assert [problem.id for problem in found()] == ["outbox.E007"]

    def test_asks_routers_that_know_tenants_about_the_shared_schema(self, found, routed, monkeypatch):
        routed(SharedSchemaOnly())
        monkeypatch.setattr(connections["default"], "schema_name", "north", raising=False)
        consumer(topic="orders", group="cart")(handler)

        assert found() == []


class EverythingToOther:
    def db_for_read(self, model, **hints):
        return "other"

    db_for_write = db_for_read


class SharedSchemaOnly:
    """Allows the outbox's tables in the schema that is set on no connection, as the router of django-tenants does."""

    def allow_migrate(self, db, app_label, **hints):
        return app_label != "outbox" or not hasattr(connections[db], "schema_name")


class TestW018:
    def test_warns_of_a_groups_name_that_not_all_brokers_take(self, found):
        consumer(topic="orders", group="the cart")(handler)

        (problem,) = found()

        assert problem.id == "outbox.W018"
        assert problem.msg == "A consumer group is called 'the cart', a name that some brokers do not accept."
        assert "1 to 127 letters" in problem.hint


class TestW046:
    @pytest.fixture
    def level(self, monkeypatch):
        def level(value):
            options = {**connections["other"].settings_dict["OPTIONS"], "isolation_level": value}
            monkeypatch.setitem(connections["other"].settings_dict, "OPTIONS", options)

        return level

    @pytest.mark.parametrize(
        ("value", "name"), [(IsolationLevel.REPEATABLE_READ, "REPEATABLE READ"), (IsolationLevel.SERIALIZABLE, "SERIALIZABLE")]
    )
    def test_finds_transactions_that_may_have_to_be_done_again(self, found, level, value, name):
        level(value)
        consumer(topic="orders", group="cart", using="other")(handler)
        consumer(topic="orders", group="mail")(handler)

        (problem,) = found()

        assert problem.id == "outbox.W046"
        assert f"group 'cart' writes to database 'other', whose transactions are {name}" in problem.msg

    def test_takes_what_is_the_servers_default(self, found, level):
        level(IsolationLevel.READ_COMMITTED)
        consumer(topic="orders", group="cart", using="other")(handler)

        assert found() == []

    def test_is_not_about_databases_without_consumers(self, found, level):
        level(IsolationLevel.SERIALIZABLE)

        assert found() == []
