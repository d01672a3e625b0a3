"""Several databases on one broker, and tenants; on real databases. docs/how-to/several-databases.md quotes this."""

import os
import subprocess
import sys
from contextlib import closing
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created

from outbox import atomic as outbox_atomic
from outbox import consumer, database, publish
from outbox.check_backs.loop import CheckLoop
from outbox.checks.servers import check_fit, check_schemas
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.errors import ConfigurationError, NotMigrated
from outbox.models import CheckBack, MessageRow, Topic
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.testing.crash import crash
from tests.outbox.publishing.rows import OrderMade
from tests.quotes import ROOT, is_quoted, python_blocks
from tests.waiting import wait_until

TENANTS = ["default", "other"]


@pytest.fixture(autouse=True)
def _outbox(settings, monkeypatch):
    settings.OUTBOX = {
        "BROKERS": {"default": {"OPTIONS": {"CHECK_AFTER": timedelta(milliseconds=1)}}},
        "TOPICS": {"made": {"TYPE": "transaction"}},
        "CELERY_WAKEUP": False,
    }
    monkeypatch.setattr(register, "registered", {})


def relay(alias):
    return run_once(RelayTarget(alias, "default"), note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)


def consume(group):
    with closing(Worker(register.group(group), "default")) as worker:
        while worker.step(timedelta(0)):
            pass
        return worker.counts


def publish_in(alias, number, **options):
    with outbox_atomic(alias):
        publish(OrderMade(order_id=number), **options)


def in_each_database(model):
    return [model.objects.using(alias).count() for alias in TENANTS]


def register_tenants():
    for tenant in TENANTS:

        @consumer(OrderMade, group=f"greetings-{tenant}", tags={tenant}, using=tenant)
        def greet(message, context):
            Group.objects.using(context.tag).create(name=f"greeting of {message.order_id}")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestTwoDatabasesOnOneBroker:
    def test_are_told_apart_by_their_source(self):
        seen = []
        consumer(OrderMade, group="cart")(
            lambda message, context: seen.append((message.order_id, context.source, context.lane, context.number))
        )
        for number, alias in enumerate(TENANTS, 1):
            publish_in(alias, number)
            relay(alias)

        consume("cart")

        (first, here, *place), (second, there, *same_place) = sorted(seen)
        assert (first, second) == (1, 2)
        assert place == same_place
        assert here != there

    def test_each_answer_for_their_own_half_messages(self):
        publish_in("other", 1)
        with crash("after_decide"):
            relay("other")

        with closing(CheckLoop("default", "default")) as loop:
            wait_until(lambda: loop.turn() or CheckBack.objects.using("other").exists())

        assert CheckBack.objects.using("other").get().answer == "COMMIT"
        assert not CheckBack.objects.using("default").exists()

    def test_have_no_transaction_in_common(self):
        with transaction.atomic(), outbox_atomic("other"):
            publish(OrderMade(order_id=1))
            transaction.set_rollback(True, using="other")

        assert in_each_database(MessageRow) == [0, 0]


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestADatabaseForEachTenant:
    def test_has_its_messages_handled_there(self):
        register_tenants()
        for number, tenant in enumerate(TENANTS, 1):
            publish_in(tenant, number, tag=tenant)
            relay(tenant)

        for tenant in TENANTS:
            consume(f"greetings-{tenant}")

        assert [[group.name for group in Group.objects.using(tenant)] for tenant in TENANTS] == [
            ["greeting of 1"],
            ["greeting of 2"],
        ]


@pytest.fixture
def schema(django_db_setup, django_db_blocker):
    """Create a schema in the test's database, and drop it after the test."""
    with django_db_blocker.unblock(), database.connect("default") as own:
        own.execute("CREATE SCHEMA north")
        yield "north"
        own.execute("DROP SCHEMA north CASCADE")


def alias_of_schema(schema):
    options = {**connections["default"].settings_dict["OPTIONS"], "options": f"-c search_path={schema}"}
    return {**connections["default"].settings_dict, "OPTIONS": options}


@pytest.fixture
def north(schema, monkeypatch):
    """An alias whose connections use only that schema, which has the outbox."""
    monkeypatch.setitem(connections.settings, "north", alias_of_schema(schema))
    call_command("migrate", "outbox", database="north", verbosity=0)
    yield "north"
    connections["north"].close()
    del connections["north"]


@pytest.fixture
def mirror(monkeypatch):
    """An alias of the test's own database, as Django makes of a replica: TEST = {"MIRROR": "default"}."""
    settings = connections["default"].settings_dict
    monkeypatch.setitem(connections.settings, "mirror", {**settings, "TEST": {**settings["TEST"], "MIRROR": "default"}})
    yield "mirror"
    connections["mirror"].close()
    del connections["mirror"]


@pytest.mark.django_db(transaction=True)
class TestAMirror:
    def test_leads_to_the_same_messages(self, mirror):
        seen = []
        consumer(OrderMade, group="cart")(lambda message, context: seen.append((message.order_id, context.source)))
        publish_in("default", 1)
        relay(mirror)
        publish_in("default", 2)
        relay("default")

        counts = consume("cart")

        assert [number for number, _ in sorted(seen)] == [1, 2]
        assert len({source for _, source in seen}) == 1
        assert (counts.handled, counts.duplicates) == (2, 0)

    def test_has_its_messages_sent_once_in_a_test(self, mirror, outbox):
        publish_in("default", 1)

        assert outbox.run_until_idle().sent == 1


def set_search_path(path):
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('search_path', %s, false)", [path])


@pytest.fixture
def _search_path():
    yield
    set_search_path("public")
    connection.close()


class SharedSchemaOnly:
    """Allows the outbox's tables where no tenant's schema is set, as the router of django-tenants does."""

    def allow_migrate(self, db, app_label, **hints):
        return app_label != "outbox" or not hasattr(connections[db], "schema_name")


@pytest.mark.django_db(transaction=True)
class TestASchemaForEachTenant:
    def test_is_a_database_of_its_own_by_an_alias(self, north):
        seen = []
        consumer(OrderMade, group="cart")(lambda message, context: seen.append((message.order_id, context.source)))
        for number, alias in enumerate(["default", "north"], 1):
            publish_in(alias, number)  # before a relay looks at the topics again

        relay("default")
        relay("north")
        consume("cart")

        assert [number for number, _ in sorted(seen)] == [1, 2]
        assert len({source for _, source in seen}) == 2
        assert MessageRow.objects.using("north").count() == MessageRow.objects.count() == 1

    def test_has_its_topics_follow_the_settings(self, north, settings):
        settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {"made": {"TYPE": "normal"}}}

        relay("default")
        relay("north")

        assert Topic.objects.using("north").get(name="made").type == "normal"

    @pytest.mark.usefixtures("_search_path")
    def test_may_share_the_outbox_of_another(self, schema):
        seen = []
        consumer(OrderMade, group="cart")(lambda message, context: seen.append((message.order_id, context.headers["tenant"])))
        set_search_path(f"{schema}, public")
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE north.auth_group (LIKE public.auth_group INCLUDING ALL)")

        with outbox_atomic():
            group = Group.objects.create(name="the north's")
            publish(OrderMade(order_id=1), about=group, headers={"tenant": schema})
        relay("default")
        consume("cart")

        assert seen == [(1, "north")]

    def test_has_the_migration_and_the_relay_name_a_search_path_that_only_a_signal_sets(self, schema, monkeypatch, caplog):
        def lead_to_schema(connection, **kwargs):
            if connection.alias == "signalled":
                connection.cursor().execute(f"SET search_path = {schema}")

        connection_created.connect(lead_to_schema)
        monkeypatch.setitem(connections.settings, "signalled", alias_of_schema("void"))
        try:
            call_command("migrate", "outbox", database="signalled", verbosity=0)
            with pytest.raises(NotMigrated) as refused:
                relay("signalled")
            (warning,) = check_fit(databases=["signalled"])
            (lost,) = check_schemas(databases=["signalled"])
        finally:
            connections["signalled"].close()
            del connections["signalled"]

        step = '''or DATABASES['signalled']["OPTIONS"]["options"] = "-c search_path=north,public"'''
        assert step in refused.value.hint
        assert step in warning.hint
        assert step in lost.hint
        assert step in caplog.text
        assert "Run manage.py migrate" not in caplog.text

    def test_leaves_the_outbox_to_the_shared_schema_wherever_routers_are_asked(self, settings, monkeypatch):
        settings.DATABASE_ROUTERS = [SharedSchemaOnly()]
        monkeypatch.setattr(connection, "schema_name", "north", raising=False)

        assert "default" in database.outbox_databases()

    @pytest.mark.usefixtures("_search_path")
    def test_has_no_outbox_that_only_a_changed_search_path_sees(self, north):
        set_search_path("north, public")

        with pytest.raises(ConfigurationError, match=r"outbox's tables are in the schema 'north'. Relays open connections of"):
            publish_in("default", 1)

        assert not MessageRow.objects.exists()


@pytest.mark.django_db(transaction=True)
class TestTheCheckOfSchemas:
    def found(self):
        return [one for one in check_schemas(databases=["default"]) if one.id == "outbox.E034"]

    def test_finds_an_outbox_that_no_alias_leads_to(self, north, monkeypatch):
        monkeypatch.delitem(connections.settings, north)

        (problem,) = self.found()

        assert problem.msg == "Database 'default' has tables of the outbox in the schemas north, which no relay reads."
        assert problem.hint

    def test_is_content_with_an_alias(self, north):
        assert self.found() == []


MESSAGES = """
from outbox import Message

class {kind}(Message):
    class Meta:
        topic = "orders"
"""
CONSUMERS = """
from outbox import consumer
from {app}.messages import {kind}

@consumer({kind}, group="letters")
def write(message, context): ...
"""
SET_UP = """
import django
from django.conf import settings

settings.configure(INSTALLED_APPS=["outbox", "billing", "shipping"], OUTBOX={"TOPICS": {"orders": {}}})
django.setup()

from outbox.consuming.register import group

print(sorted(group("letters").consumers), list(group("letters").topics))
"""


class TestTwoApps:
    @pytest.fixture
    def set_up(self, tmp_path):
        def set_up(**apps):
            for app, kind in apps.items():
                (tmp_path / app).mkdir()
                for name, text in {"__init__": "", "messages": MESSAGES, "consumers": CONSUMERS}.items():
                    (tmp_path / app / f"{name}.py").write_text(text.format(app=app, kind=kind))
            environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
            return subprocess.run([sys.executable, "-c", SET_UP], env=environment, capture_output=True, text=True)

        return set_up

    def test_may_share_a_topic_and_a_group(self, set_up):
        outcome = set_up(billing="InvoicePaid", shipping="ParcelSent")

        assert outcome.stdout.strip() == "['InvoicePaid', 'ParcelSent'] ['orders']", outcome.stderr

    def test_may_not_give_two_types_one_name(self, set_up):
        outcome = set_up(billing="InvoicePaid", shipping="InvoicePaid")

        assert outcome.returncode
        assert outcome.stderr.strip().splitlines()[-1] == (
            "TypeError: Message type 'InvoicePaid' is defined twice: billing.messages.InvoicePaid and "
            "shipping.messages.InvoicePaid. Give one of them another `type` in its class Meta."
        )


class TestThePage:
    @pytest.mark.parametrize("block", python_blocks("how-to/several-databases.md"))
    def test_quotes_code_that_runs(self, block):
        assert is_quoted(block, "tests/outbox/test_several_databases.py", "tests/outbox/publishing/test_decorator.py")
