"""A role that may only read and write rows, with the grants of docs/how-to/deploy.md; another role owns the tables."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections

from outbox import RetryPolicy, atomic, consumer, database, publish, topics
from outbox.batches.operators import replay_all
from outbox.consuming import register
from outbox.consuming.worker import Worker
from outbox.database import partitions
from outbox.errors import ConfigurationError, InboxRefused
from outbox.models import DeadMessage, Duplicate, MessageRow, Process, State
from outbox.monitoring.attention import read_attention
from outbox.monitoring.doctor import check_databases
from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once
from outbox.relay.loops import RelayThread, RepeatingThread
from outbox.relay.maintenance import maintain
from tests.commands import refused
from tests.factories import BatchFactory, TopicFactory, message_id
from tests.outbox.publishing.rows import OrderMade
from tests.quotes import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

TARGET = RelayTarget("default", "default")
ROLE = "outbox_role_of_a_test"
PAGE = (ROOT / "docs/how-to/deploy.md").read_text()
GRANTS = re.search(r"### Roles.*?```sql\n(.*?)```", PAGE, re.DOTALL)[1].replace("shop_app", ROLE)
PUBLISHER = re.search(r"\| a process that only publishes \|(.*)\|", PAGE)[1]
TO_PUBLISH = re.findall(r"((?:`[A-Z]+`(?:, | and )?)+) on ((?:`\w+`(?:, | and )?)+)", PUBLISHER)
OLD = datetime(2001, 2, 3, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _outbox(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
    settings.OUTBOX = {"BROKERS": {"default": embedded}, "TOPICS": {"made": {}}, "CELERY_WAKEUP": False}
    monkeypatch.setattr(register, "registered", {})


@pytest.fixture
def as_owner() -> Callable[[str], None]:
    """Run SQL as the owner of the tables."""
    options = {**connections["default"].settings_dict["OPTIONS"]}

    def run(statements: str) -> None:
        given = connections["default"].settings_dict["OPTIONS"]
        connections["default"].settings_dict["OPTIONS"] = options
        try:
            with database.connect("default") as own:
                own.execute(statements)
        finally:
            connections["default"].settings_dict["OPTIONS"] = given

    return run


@pytest.fixture
def role(as_owner: Callable[[str], None], transactional_db: None) -> Iterator[str]:
    """A role without grants, which all connections of this process have in `as_role()`."""
    as_owner(f"CREATE ROLE {ROLE}")
    yield ROLE
    as_owner(f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")


@contextmanager
def as_role(name: str = ROLE) -> Iterator[None]:
    wrapper = connections["default"]
    before = wrapper.settings_dict["OPTIONS"]
    wrapper.close()
    wrapper.settings_dict["OPTIONS"] = {**before, "assume_role": name}
    try:
        yield
    finally:
        wrapper.close()
        wrapper.settings_dict["OPTIONS"] = before


@pytest.fixture
def granted(role: str, as_owner: Callable[[str], None]) -> str:
    """A role with the grants of the page."""
    as_owner(GRANTS)
    return role


@pytest.fixture
def day(as_owner: Callable[[str], None]) -> Iterator[Callable[[date], None]]:
    """Create a partition as the owner; all partitions that should exist do so after the test."""
    made = []

    def make(one: date) -> None:
        made.append(one)
        with database.connect("default") as own:
            partitions.create_partition(own, one)

    yield make
    for one in made:
        as_owner(f"DROP TABLE IF EXISTS {partitions.table_of(one)}")
    partitions.create_partitions("default")


def concerns() -> list[tuple[str, str, str]]:
    found = [one for one in check_databases() if "'default'" in one.obj and one.id not in ("", "outbox.unsafe_database")]
    return [(one.level_name, one.text, one.hint) for one in found]


def without_tomorrow() -> Iterator[None]:
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    with database.connect("default") as own:
        own.execute(f"DROP TABLE {partitions.table_of(tomorrow)}")
    yield
    partitions.create_partitions("default")


no_tomorrow = pytest.fixture(without_tomorrow, name="no_tomorrow")


@pytest.fixture
def schema_in_front(as_owner: Callable[[str], None]) -> Iterator[None]:
    """An empty schema, which comes before the tables' own in the search path of all new connections."""
    database = connections["default"].settings_dict["NAME"]
    as_owner(f'CREATE SCHEMA "Front-1"; ALTER DATABASE "{database}" SET search_path = "Front-1", public')
    yield
    as_owner(f'ALTER DATABASE "{database}" RESET search_path; DROP SCHEMA "Front-1"')


class TestARoleWithTheGrantsOfThePage:
    def test_has_all_that_the_doctor_asks_for(self, granted):
        partitions.create_partitions("default")

        with as_role():
            assert concerns() == []

    def test_is_told_what_it_lacks_although_another_schema_comes_first(self, granted, as_owner, schema_in_front):
        partitions.create_partitions("default")
        as_owner(f'GRANT USAGE ON SCHEMA "Front-1" TO {granted}; REVOKE INSERT ON outbox_gap FROM {granted}')

        with as_role():
            [(level, text, hint)] = concerns()

        assert (level, text) == ("error", f"role {granted} lacks INSERT on outbox_gap")
        assert hint.endswith(f"run: GRANT INSERT ON outbox_gap TO {granted};")

    def test_is_told_that_it_cannot_see_which_migrations_are_missing(self, granted, as_owner):
        partitions.create_partitions("default")
        as_owner(f"REVOKE SELECT ON django_migrations FROM {granted}; REVOKE INSERT ON outbox_gap FROM {granted}")

        with as_role():
            found = concerns()

        grant = f"run: GRANT SELECT ON django_migrations TO {granted};"
        assert [text for _, text, _ in found] == [
            f"role {granted} lacks SELECT on django_migrations",
            f"role {granted} lacks INSERT on outbox_gap",
        ]
        assert found[0][2].endswith(grant)

    def test_hears_that_it_is_refused_and_not_that_the_database_is_away(self, granted, as_owner):
        as_owner(f"REVOKE ALL ON outbox_source, outbox_message FROM {granted}")

        with as_role():
            [(level, text, _)] = concerns()
            with refused("Database 'default' refuses a statement: permission denied"):
                call_command("outbox_check_back", str(message_id()))

        assert (level, text[:42]) == ("error", "refuses a statement: permission denied for")

    def test_publishes_relays_and_consumes(self, granted):
        handled: list[int] = []

        @consumer(OrderMade, group="points", retry=RetryPolicy(limit=0))
        def give_points(message, context):
            handled.append(message.order_id)
            if message.order_id == 2:
                raise ValueError("no such customer")

        with as_role():
            for number in (1, 2):
                with atomic():
                    publish(OrderMade(order_id=number))
            done = run_once(TARGET, note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)
            with closing(Worker(register.group("points"), "default")) as worker:
                counts = worker.run(until_idle=True)

        assert done.sent == 2
        assert sorted(handled) == [1, 2]
        assert (counts.handled, counts.dead_letters) == (1, 1)

    def test_retries_a_dead_message_whose_day_was_dropped(self, granted):
        gone, topic = message_id(OLD), TopicFactory(name="old")
        batch = BatchFactory(topic=topic, message_ids=[gone], state=State.DEAD)
        about = {"key": "", "headers": "{}", "about": "", "body": b"1", "reason": "refused"}
        DeadMessage.objects.create(message_id=gone, batch_id=batch.id, topic="old", **about)

        with as_role(), database.connect("default") as own:
            result = replay_all(own, by="ada")

        assert result.messages == 1
        assert MessageRow.objects.filter(id=gone).exists()
        MessageRow.objects.filter(id=gone).delete()

    def test_deletes_rows_and_leaves_days_to_their_owner_in_silence(self, granted, day, caplog):
        day((datetime.now(UTC) - timedelta(days=9)).date())  # past its retention since yesterday
        Duplicate.objects.create(consumer_group="g", message_id=message_id(), topic="t", delivery_count=2, dropped_at=OLD)

        with as_role():
            done = maintain("default")

        assert done.made == []
        assert done.rows["outbox_duplicate"] == 1
        assert list(done.kept.values()) == ["another role, which owns the tables and has to run outbox_maintenance"]
        assert caplog.messages == []

    def test_deletes_rows_although_days_are_missing(self, granted, no_tomorrow):
        Duplicate.objects.create(consumer_group="g", message_id=message_id(), topic="t", delivery_count=2, dropped_at=OLD)

        with as_role(), pytest.raises(ConfigurationError):
            maintain("default")

        assert not Duplicate.objects.exists()

    def test_is_told_of_days_that_their_owner_does_not_drop(self, granted, day, caplog):
        day(OLD.date())

        with as_role():
            maintain("default")
        with database.connect("default") as own:
            attention = [one.line for one in read_attention(own, "default") if one.id == "outbox.no_maintenance"]

        assert "keeps daily partitions past their retention: 2001-02-03 (another role" in caplog.text
        assert "Messages of 1 day are kept past their retention, from 2001-02-03 on." in attention[0]


class TestARelayThatMayNotCreatePartitions:
    def test_says_so_once_and_in_heartbeat_and_status_until_the_owner_has_done_it(self, granted, no_tomorrow, caplog):
        caplog.set_level(logging.WARNING)
        with as_role():
            relay = RelayThread(TARGET)
            beside = RepeatingThread("Maintenance", self._maintain, pause=0.1)
            relay.start()
            beside.start()
            try:
                named = wait_until(lambda: [one for one in self._named() if "Maintenance fails." in one])
                wait_until(lambda: beside._failures > 3)
                error = Process.objects.get(kind="relay").errors["maintenance"]
                self._as_owner()
                wait_until(lambda: not self._named())
            finally:
                relay.stop()
                beside.stop()
                relay.join(10)
                beside.join(10)

        assert error.startswith("Database 'default' has no partition for tomorrow, and role 'outbox_role_of_a_test' may")
        assert "Maintenance fails. Tomorrow's partition does not exist." in named[0]
        assert "run outbox_maintenance as " in named[0]
        assert [one for one in caplog.messages if "may not create it" in one] == caplog.messages[:1]

    def _maintain(self) -> bool:
        maintain("default")
        return False

    def _named(self) -> list[str]:
        with database.connect("default") as own:
            return [one.line for one in read_attention(own, "default") if one.id == "outbox.no_maintenance"]

    def _as_owner(self) -> None:
        ours = connections["default"]
        owner = ours.copy()
        del owner.settings_dict["OPTIONS"]["assume_role"]
        connections["default"] = owner  # in this thread only: the relay's remain those of the role
        try:
            call_command("outbox_maintenance", "--database", "default")
        finally:
            owner.close()
            connections["default"] = ours


class TestAConsumerWhoseInboxIsRefused:
    @pytest.mark.parametrize("table", ["outbox_inbox", "outbox_deferred", "outbox_failed_delivery"])
    def test_says_so_and_blames_no_handler_until_it_is_corrected(self, table, granted, as_owner):
        @consumer(OrderMade, group="points", retry=RetryPolicy(limit=0))
        def give_points(message, context):
            raise ValueError("no such customer")

        with atomic():
            publish(OrderMade(order_id=1))
        run_once(TARGET, note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)
        as_owner(f"REVOKE INSERT ON {table} FROM {ROLE}")
        stop = threading.Event()
        with as_role(), closing(Worker(register.group("points"), "default", stop=stop)) as worker:
            thread = threading.Thread(target=self._run, args=[worker])
            thread.start()
            try:
                named = wait_until(self._named)
                as_owner(f"GRANT INSERT ON {table} TO {ROLE}")
                wait_until(lambda: worker.counts.dead_letters)
                wait_until(lambda: not self._named())
            finally:
                stop.set()
                thread.join(20)

        assert f"permission denied for table {table}" in named[0]
        assert "Group 'points': (outbox.process_fails) The consumer of process " in named[0]
        assert worker.counts.dead_letters == 1

    def test_gives_up_no_message_that_nobody_wants(self, granted, as_owner):
        consumer(OrderMade, group="points", tags=["other"])(lambda message, context: None)
        with atomic():
            publish(OrderMade(order_id=1), tag="mine")
        run_once(TARGET, note="test", at_most=timedelta(seconds=10), idle_timeout=NO_IDLE_TIMEOUT)
        as_owner(f"REVOKE INSERT ON outbox_inbox FROM {ROLE}")

        with as_role(), closing(Worker(register.group("points"), "default")) as worker:
            with pytest.raises(InboxRefused):
                worker.step(timedelta(0))
            as_owner(f"GRANT INSERT ON outbox_inbox TO {ROLE}")
            wait_until(lambda: worker.step(timedelta(0)) and worker.counts.ignored)

        assert worker.counts.dead_letters == 0

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        finally:
            connections.close_all()

    def _named(self) -> list[str]:
        with database.connect("default") as own:
            return [one.line for one in read_attention(own, "default") if one.id == "outbox.process_fails"]


class TestADoctor:
    def test_names_what_its_role_lacks_and_the_statements_that_grant_it(self, granted, as_owner):
        partitions.create_partitions("default")
        as_owner(f"REVOKE DELETE ON outbox_ticket FROM {ROLE}; REVOKE USAGE ON SEQUENCE outbox_embedded_half_id FROM {ROLE}")

        with as_role():
            [(level, text, hint)] = concerns()
        as_owner(hint.partition("run: ")[2])
        with as_role():
            after = concerns()

        assert level == "error"
        assert text == f"role {ROLE} lacks DELETE on outbox_ticket; USAGE on outbox_embedded_half_id"
        assert after == []

    def test_names_tables_whose_rows_the_server_hides_and_the_statements_that_show_them(self, granted, as_owner):
        partitions.create_partitions("default")
        for table in ("outbox_ticket", "outbox_source"):
            as_owner(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")

        with as_role():
            [(_, text, hint)] = concerns()
        as_owner(hint)
        with as_role():
            after = concerns()

        assert text.startswith("It hides the rows of outbox_source, outbox_ticket from role")
        assert after == []

    def test_accepts_row_level_security_with_a_policy(self, granted, as_owner):
        partitions.create_partitions("default")
        as_owner("ALTER TABLE outbox_ticket ENABLE ROW LEVEL SECURITY")
        as_owner(f"CREATE POLICY every_row ON outbox_ticket TO {ROLE} USING (true)")

        with as_role():
            found = concerns()
        as_owner("DROP POLICY every_row ON outbox_ticket; ALTER TABLE outbox_ticket DISABLE ROW LEVEL SECURITY")

        assert found == []


def _listed(text: str) -> str:
    return ", ".join(re.findall(r"`(\w+)`", text))


class TestARoleThatOnlyPublishes:
    def test_needs_what_the_page_says(self, role, as_owner):
        as_owner(f"GRANT USAGE ON SCHEMA public TO {role}")
        for privileges, tables in TO_PUBLISH:
            as_owner(f"GRANT {_listed(privileges)} ON {_listed(tables)} TO {role}")

        topics.forget("default")  # the first publish of a process looks more up
        with as_role():
            for options in ({}, {"delay": timedelta(days=1)}, {"idempotency_key": "a"}, {"idempotency_key": "a"}):
                with atomic():
                    publish(OrderMade(order_id=1), **options)
            with pytest.raises(psycopg.errors.InsufficientPrivilege), database.connect("default") as own:
                own.execute("SELECT FROM outbox_batch")

        assert MessageRow.objects.count() == 3
        assert not DeadMessage.objects.exists()
