"""
The doctor checks everything that the delivery of messages needs, and says how to correct a problem.

It sends nothing and takes no lane. Its findings include those of `outbox_status`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from django.core import checks
from django.db import DatabaseError, connections, router
from django.db.migrations.executor import MigrationExecutor

from outbox import conf, database
from outbox.brokers.capabilities import TransactionalSends
from outbox.check_backs.ask import explain, probe
from outbox.checks.celery import CONSUME, OR_NO_WAKEUPS, beat_entries, wakeup_app
from outbox.checks.decorators import TAG
from outbox.checks.deployment import ask_broker
from outbox.checks.servers import UNFIT
from outbox.consuming.register import groups
from outbox.database import Connection
from outbox.database.identity import read_identity
from outbox.errors import BrokerUnavailable, ConfigurationError, NotMigrated, TablesLocked
from outbox.extensions import extensions
from outbox.findings import BROKER_AWAY, BROKER_WEAK, Finding, Needs, rule, rules, unreachable_broker
from outbox.logs import cut, error_text, line_of, one_line
from outbox.monitoring import stored
from outbox.monitoring.attention import find_attention
from outbox.monitoring.connection import connected
from outbox.monitoring.status import Status, read_status
from outbox.monitoring.text import count
from outbox.publishing.wakeup import TASK, count_waiting
from outbox.relay.hosts import relay_targets
from outbox.relay.transactions import find_lanes_ahead

ALWAYS_ERRORS = {BROKER_AWAY, UNFIT}  # errors here, not warnings: the doctor is run when all servers should be running
UNREADABLE = (NotMigrated, TablesLocked, psycopg.Error)  # errors after which nothing can be read from a database


def check() -> Iterator[Finding]:
    """Check the configuration, then databases and servers; yield each finding that is not silenced as soon as it is known."""
    configuration = list(check_configuration())
    yield from configuration
    if any(finding.is_serious() for finding in configuration):  # the rules below need valid settings
        return
    reported: set[tuple[object, object]] = set()  # ids and subjects of the findings of earlier rules
    for rule_ in rules(Needs.SERVERS):
        findings = []
        try:
            for finding in rule_.find():
                if not finding.is_silenced() and (finding.id, finding.obj) not in reported:
                    if finding.id in ALWAYS_ERRORS:
                        finding.level = checks.ERROR
                    findings.append(finding)
                    yield finding
        except Exception as error:
            yield rule_.failed(error)
        reported |= {(finding.id, finding.obj) for finding in findings if finding.id}


def _ok(subject: str, text: str) -> Finding:
    return Finding("", subject, text, level=checks.INFO)


def check_configuration() -> Iterator[Finding]:
    """Yield the findings of the system checks about settings, or a line that says that there are none."""
    yield from _run_checks(TAG) or [_ok("configuration", "the system checks found no problems")]


def _run_checks(tag: str, databases: Sequence[str] | None = None) -> list[Finding]:
    """Return, as findings, the problems that the outbox's system checks find and that the project has not silenced."""
    ours = tuple(f"{app.label}." for app in database.outbox_apps())
    return [
        Finding(
            *(str(problem.id), str(problem.obj or "configuration"), problem.msg, problem.hint or ""),
            level=problem.level,
        )
        for problem in checks.run_checks(tags=[tag], databases=databases)
        if str(problem.id).startswith(ours) and not problem.is_silenced()
    ]


CONNECT_SECONDS = 5  # to Celery's server
# Message ids contain the time of this host, and leases the time of the database. A larger difference is reported.
CLOCK_DIFFERENCE = timedelta(seconds=5)

VERSION_AND_TIME = "SELECT current_setting('server_version'), clock_timestamp()"

MAY_NOT_READ_MIGRATIONS = "SELECT NOT has_table_privilege(to_regclass('django_migrations'), 'SELECT')"

# Settings without which a committed transaction may be lost. synchronous_commit may have any value but off.
UNSAFE_SETTINGS = """
SELECT name, setting FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit') AND setting = 'off' ORDER BY name
"""


@rule(
    *("outbox.clock", "outbox.unsafe_database"),
    errors=("outbox.database_away", "outbox.migrations", "outbox.missing_grants"),
    needs=Needs.SERVERS,
)
def check_databases() -> Iterator[Finding]:
    """
    database_away: A database cannot be reached.
        Start it, or correct `DATABASES`.
    migrations: Migrations are missing.
        Run `migrate`.
    missing_grants: The role lacks privileges.
        As the owner of the tables, run the statements of the hint, or grant what the error names.
    clock: The clock of this host and the clock of a database or broker differ by more than some seconds.
        Synchronize them with a time server.
    unsafe_database: A crash of PostgreSQL may lose committed messages together with your rows.
        Set the parameter that the hint names to on.
    """
    aliases = database.outbox_databases()
    yield from _run_checks(checks.Tags.database, aliases)
    for alias in aliases:
        subject = f"database {alias!r}"
        try:
            with connected(alias, "outbox doctor") as connection:
                findings = list(_check_database(subject, alias, connection))
        except NotMigrated:  # a system check reports it
            pass
        except TablesLocked as error:
            yield _locked(alias, error)
        except psycopg.errors.InsufficientPrivilege as error:
            hint = "Grant the role what the error names, as the owner of the tables."
            yield Finding("outbox.missing_grants", subject, f"refuses a statement: {line_of(error)}", hint)
        except (ConfigurationError, psycopg.Error, DatabaseError) as error:
            text = f"cannot be reached: {line_of(error)}"
            yield Finding("outbox.database_away", subject, text, "Start it, or correct DATABASES.")
        else:
            yield from findings


def _locked(alias: str, error: TablesLocked) -> Finding:
    return Finding("outbox.blocked", f"database {alias!r}", error.message, error.hint)


def _check_database(subject: str, alias: str, connection: Connection) -> Iterator[Finding]:
    began, now = time.monotonic(), datetime.now(UTC)
    version, database_time = connection.execute(VERSION_AND_TIME).fetchone() or ("", now)
    took = time.monotonic() - began
    difference = abs(database_time - now - timedelta(seconds=took / 2))
    yield _ok(subject, f"PostgreSQL {version}, answers in {took * 1000:.0f} ms")
    if difference > CLOCK_DIFFERENCE:
        text = f"its clock and this host's are {difference.total_seconds():.0f} s apart"
        yield Finding("outbox.clock", subject, text, "Synchronize both with a time server (NTP).")
    yield from _check_migrations(subject, alias, connection)
    for name, setting in connection.execute(UNSAFE_SETTINGS).fetchall():
        text = f"{name} is {setting}: a crash may lose committed messages together with your rows"
        yield Finding("outbox.unsafe_database", subject, text, f"Set {name} = on, unless this server is for tests.")
    yield from _check_grants(subject, connection)


def _check_migrations(subject: str, alias: str, connection: Connection) -> Iterator[Finding]:
    if connection.execute(MAY_NOT_READ_MIGRATIONS).fetchone() == (True,):
        [role] = connection.execute(ROLE).fetchone() or ("",)
        hint = f"As the owner of the tables, run: GRANT SELECT ON django_migrations TO {role};"
        yield Finding("outbox.missing_grants", subject, f"role {role} lacks SELECT on django_migrations", hint)
        return
    for label, missing in _missing_migrations(alias).items():
        text = f"migrations are missing: {', '.join(missing)}"
        yield Finding("outbox.migrations", subject, text, f"Run manage.py migrate {label} --database {alias}.")


def _missing_migrations(alias: str) -> dict[str, list[str]]:
    """Return the unapplied migrations of the outbox's apps that routers allow in the database: app label -> names."""
    executor = MigrationExecutor(connections[alias])
    labels = {config.label for config in database.outbox_apps()}
    wanted = [node for node in executor.loader.graph.leaf_nodes() if node[0] in labels and router.allow_migrate(alias, node[0])]
    missing: dict[str, list[str]] = {}
    for migration, _ in executor.migration_plan(wanted):
        missing.setdefault(migration.app_label, []).append(migration.name)
    return missing


# The privileges that the current role lacks, each with its relations. Messages are written and read through the partitioned
# table, so daily partitions need no grants; the DEFAULT partition is also read directly. Sequences of identity columns need no
# grants either. The tables of extensions (`pruned`) need only those for maintenance, which deletes rows.
MISSING_GRANTS = """
SELECT privilege, array_agg(quote_ident(c.relname) ORDER BY c.relname)
FROM pg_class c, unnest(CASE
    WHEN c.relkind = 'v' THEN ARRAY['SELECT'] WHEN c.relkind = 'S' THEN ARRAY['USAGE']
    WHEN starts_with(c.relname, 'outbox_') THEN ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] ELSE ARRAY['SELECT', 'DELETE'] END
) WITH ORDINALITY wanted (privilege, n)
WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('outbox_wakeup'))
    AND (starts_with(c.relname, 'outbox_') OR c.relname = ANY(%(pruned)s))
    AND (NOT c.relispartition OR c.relname = 'outbox_message_default')
    AND CASE WHEN c.relkind IN ('r', 'p', 'v') THEN NOT has_table_privilege(c.oid, privilege)
        WHEN c.relkind = 'S' THEN NOT has_sequence_privilege(c.oid, privilege)
            AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'i')
        ELSE false END
GROUP BY privilege, n ORDER BY privilege = 'USAGE', n
"""

RELATIONS_NAMED = 3  # relations named in the text; the statements name all

ROLE = "SELECT quote_ident(current_user)"


def _check_grants(subject: str, connection: Connection) -> Iterator[Finding]:
    """Yield the privileges that the role of a connection lacks, with the statements that grant them."""
    pruned = [table for extension in extensions() for table in extension.tables]
    missing = connection.execute(MISSING_GRANTS, {"pruned": pruned}).fetchall()
    if not missing:
        return
    [role] = connection.execute(ROLE).fetchone() or ("",)
    lacks, grants = [], []
    for privilege, relations in missing:
        more = f" and {len(relations) - RELATIONS_NAMED} more" if len(relations) > RELATIONS_NAMED else ""
        lacks.append(f"{privilege} on {', '.join(relations[:RELATIONS_NAMED])}{more}")
        kind = "SEQUENCE " if privilege == "USAGE" else ""
        grants.append(f"GRANT {privilege} ON {kind}{', '.join(relations)} TO {role};")
    hint = f"As the owner of the tables, run: {' '.join(grants)}"
    yield Finding("outbox.missing_grants", subject, f"role {role} lacks {'; '.join(lacks)}", hint)


@rule("outbox.broker_away", "outbox.misconfigured", "outbox.broker_weak", "outbox.restored", needs=Needs.SERVERS)
def check_brokers() -> Iterator[Finding]:
    """
    broker_weak: A broker works, but its configuration does not keep all promises of its page.
        The hint says what to change at the server or in OPTIONS.
    restored: A database was restored, or lost commits, so its relays will send some messages again.
        Warn readers that are not groups of the outbox before you start relays.
    """
    for alias in sorted(conf.settings().brokers):
        if topics := conf.topics_of(alias):
            subject, began = f"broker {alias!r}", time.monotonic()
            findings = ask_broker(alias)
            yield from findings
            if all(finding.id == BROKER_WEAK for finding in findings):
                yield from _check_lanes(subject, alias)
            if not findings:
                took = f"answers in {(time.monotonic() - began) * 1000:.0f} ms"
                yield _ok(subject, f"{conf.broker_class(alias).__name__}, {count(len(topics), 'topic')} as in settings, {took}")


def _check_lanes(subject: str, alias: str) -> Iterator[Finding]:
    """Yield a finding for each database in which messages count as unsent although its relays committed them at a broker."""
    if not TransactionalSends.has(conf.broker_class(alias)):
        return
    with closing(conf.make_broker(alias)) as broker:
        if not TransactionalSends.has(broker):  # brokers of its class do so only with certain OPTIONS
            return
        for using in database.outbox_databases():
            try:
                with connected(using, "outbox doctor") as connection:
                    source, lanes = read_identity(connection).source, conf.settings().relay.lanes
                    if not find_lanes_ahead(connection, TransactionalSends.of(broker), source, lanes):
                        continue
                    waiting = sum(topic.unsent for topic in read_status(connection, using).topics if topic.broker == alias)
            except UNREADABLE:  # check_databases reports it
                continue
            except BrokerUnavailable as error:
                yield unreachable_broker(alias, "It cannot be reached.", line_of(error))
                return
            yield Finding(
                "outbox.restored",
                subject,
                f"has messages that database {using!r} does not know as sent: the database was restored, or failed over and lost "
                f"commits. Of its {count(waiting, 'unsent message')}, relays will send again those that were sent since then",
                "Groups of the outbox drop the copies. Warn other readers before you start relays.",
            )


WORKERS_ANSWER_SECONDS = 1.0  # each inspection takes this long, since Celery does not know how many workers will answer

NO_WORKERS_HINT = (
    'Start a worker of Celery for this queue. If all relays are long-running, set OUTBOX["CELERY_WAKEUP"] = '
    "False, and empty the queue with Celery's command purge."
)


@rule("outbox.celery_away", "outbox.no_worker", needs=Needs.SERVERS)
def check_wakeups() -> Iterator[Finding]:
    """
    celery_away: The server that wakeups go to cannot be reached.
        Start it, or set `CELERY_WAKEUP` to `False`.
    """
    for app in wakeup_app():
        try:
            with app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
                connection.connect()
                findings = [_ok("wakeups", f"Celery's server {connection.as_uri()} can be reached")]
                findings += _untaken_wakeups(app, connection, conf.settings().celery_queue)
        except Exception as error:  # transports raise errors of their own
            text = f"Celery's server cannot be reached: {one_line(cut(error_text(error)))}"
            step = f"Start it, or correct CELERY_BROKER_URL. {OR_NO_WAKEUPS}"
            findings = [Finding("outbox.celery_away", "wakeups", text, step)]
        yield from findings


def _untaken_wakeups(app: Any, connection: Any, queue: str) -> Iterator[Finding]:
    """Yield a finding if no worker takes wakeups, or some do not know the task. No answer at all counts only if tasks wait."""
    workers = app.control.inspect(timeout=WORKERS_ANSWER_SECONDS, connection=connection)
    queues, tasks = workers.active_queues() or {}, workers.registered() or {}
    takers = [worker for worker, consumed in queues.items() if queue in [entry["name"] for entry in consumed]]
    waiting = count_waiting(connection, queue)
    if not takers and (queues or waiting):
        text = f"{count(waiting, 'task')} in Celery's queue {queue!r}, and no worker that answers takes from it"
        yield Finding("outbox.no_worker", f"queue {queue!r}", text, NO_WORKERS_HINT)
    elif without_task := sorted(worker for worker in takers if TASK not in tasks.get(worker, [TASK])):
        text = f"Celery's workers {', '.join(without_task)} take from queue {queue!r} and discard {TASK}, which they do not know"
        hint = 'Add "outbox" to the packages of app.autodiscover_tasks(), or call it without arguments.'
        yield Finding("outbox.no_worker", f"queue {queue!r}", text, hint)


@rule("outbox.no_consumer", "outbox.blocked", needs=Needs.SERVERS)
def check_processes() -> Iterator[Finding]:
    """Check the heartbeats of relays and consumers, then yield the findings of `outbox_status`."""
    statuses: dict[str, Status] = {}
    attention: list[Finding] = []
    aliases = database.outbox_databases()
    for alias in aliases:
        try:
            with connected(alias, "outbox doctor") as connection:
                status = read_status(connection, alias)
                for finding in find_attention(connection, status):
                    if len(aliases) > 1 and not finding.obj.startswith(("database", "queue")):
                        finding.database = alias
                    attention.append(finding)
        except TablesLocked as error:
            yield _locked(alias, error)
        except UNREADABLE:  # check_databases reports it
            pass
        else:
            statuses[alias] = status
    for target in relay_targets():
        live = statuses[target.database].live("relay", target.broker) if target.database in statuses else []
        if not all(process.error for process in live):
            yield _ok(f"relay of {target}", "sends heartbeats")
    groups_of_beat = {str(argument) for entry in beat_entries(CONSUME) for argument in entry.get("args") or ()}
    for group in groups().values():
        subject = f"group {group.name!r}"
        is_reported = any((finding.id, finding.obj) == ("outbox.no_consumer", subject) for finding in attention)
        for alias in group.brokers if group.using in statuses and group.name not in groups_of_beat else ():
            live = statuses[group.using].live("consumer", alias, group.name)
            if not all(process.error for process in live):
                yield _ok(f"consumer of {subject}, broker {alias!r}", "sends heartbeats")
            if not live and not is_reported:  # `outbox_status` reports a group only if messages wait for it
                hint = f"Start outbox_consume --group {group.name}, or beat_schedule(consume=[...])."
                yield Finding("outbox.no_consumer", subject, f"No consumer is running for broker {alias!r}.", hint)
    yield from attention


@rule("outbox.unreadable", needs=Needs.SERVERS)
def check_stored_messages() -> Iterator[Finding]:
    """
    unreadable: This code cannot read a stored message that consumers are still to get. A sample of these messages is read.
        Do what the hint says.
    """
    for alias in stored.databases():
        try:
            readings = stored.read_stored(alias)
        except TablesLocked as error:
            yield _locked(alias, error)
            continue
        except UNREADABLE:  # check_databases or check_brokers reports it
            continue
        subject = f"messages in database {alias!r}"
        if readings.read and not readings.unreadable:
            yield _ok(subject, readings.text)
        yield from (Finding("outbox.unreadable", subject, text, hint) for text, hint in readings.problems())


@rule(errors=["outbox.check_back_endpoint"], needs=Needs.SERVERS)
def check_endpoint() -> Iterator[Finding]:
    """
    check_back_endpoint: The check-back endpoint whose URL is in settings cannot be reached, or does not accept our signature.
        Do what the hint says.
    """
    settings = conf.settings().check_back
    if not settings.url:
        return
    try:
        probe(settings.url, settings.secrets[0])
    except Exception as error:  # an error of the network or the server, or a wrong reply
        yield Finding("outbox.check_back_endpoint", "check-back endpoint", *explain(settings.url, error))
    else:
        yield _ok("check-back endpoint", f"{settings.url} accepts our signature")
