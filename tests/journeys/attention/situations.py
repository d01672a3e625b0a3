"""
Everything that goes wrong, and what an operator reads then: one table, which docs/how-to/watch.md contains.

Each play does the harm, yields, and mends it. `test_situations.py` plays them and holds the page to
this list. Messages flow to topic `orders` in all of them, one a second, and group `shipping` handles them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from outbox.ids import first_id, uuid7
from tests.journeys.attention.stage import ROLE, UNREACHABLE, Stage
from tests.waiting import wait_until

Play = Callable[[Stage], Iterator[None]]

NOTHING = ""  # is named

RELAY_AND_CONSUMER = ("relay", "consumer")


@dataclass(frozen=True)
class Situation:
    """
    One line of the table.

    Args:
        name: what is wrong.
        entry: kind and subject of the entry that names it.
        within: seconds until it is named, on a busy machine.
        do: what the operator does.
        in_suite: whether `make test-journeys` plays it.
        needs, given, starts, web: of its stage.
    """

    name: str
    entry: str
    within: int
    do: str
    play: Play
    needs: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[str, ...] = RELAY_AND_CONSUMER
    web: Mapping[str, str] = field(default_factory=dict)
    in_suite: bool = False

    @property
    def id(self) -> str | None:
        """The id of its entry; None where the database cannot be asked, or nothing is named."""
        return None if self.entry in (UNREACHABLE, NOTHING) else self.entry.split(" ", 1)[0]


SITUATIONS: list[Situation] = []


def situation(name: str, entry: str, *, within: int, do: str, **more: Any) -> Callable[[Play], Play]:
    """Add a situation to the table."""

    def add(play: Play) -> Play:
        SITUATIONS.append(Situation(name, entry, within, do, play, **more))
        return play

    return add


NO_RELAY = "outbox.no_relay of broker 'default'"
NO_CONSUMER = "outbox.no_consumer of group 'shipping'"
BROKER_AWAY = "outbox.broker_away of broker 'default'"
TASKS_AWAY = "outbox.broker_away of broker 'celery'"
NO_BEAT = "outbox.no_beat of broker 'default'"
NO_MAINTENANCE = "outbox.no_maintenance of database 'default'"
MISCONFIGURED = "outbox.misconfigured of topic 'orders'"
SILENT_RELAY = "outbox.process_silent of broker 'default'"
SILENT_CONSUMER = "outbox.process_silent of group 'shipping'"
FAILS = "outbox.group_fails of group 'shipping'"
STUCK = "outbox.group_stuck of group 'shipping'"
GAP = "outbox.gap of group 'shipping'"

START_ANOTHER = "kill it, and start another"
STANDS_STILL = "see why its machine stands still"

Act = Callable[[Stage], object]


def nothing(stage: Stage) -> None:
    """Do nothing."""


def undone(harm: Act, mend: Act = nothing) -> Play:
    def play(stage: Stage) -> Iterator[None]:
        harm(stage)
        yield
        mend(stage)

    return play


# Processes


def killed(name: str) -> Play:
    return undone(lambda stage: stage.kill(name), lambda stage: stage.start(name))


def frozen(name: str) -> Play:
    def start_another(stage: Stage) -> None:
        stage.kill(name)
        stage.start(name)

    return undone(lambda stage: stage.freeze(name), start_another)


def start_second(stage: Stage, kind: str, **more: Any) -> None:
    """Start a second process of a kind, and wait until it works."""
    stage.start(kind, f"second {kind}", **more)
    wait_until(lambda: stage.execute(f"SELECT pid FROM outbox_process WHERE kind = '{kind}' OFFSET 1"))


situation("The relay is killed", NO_RELAY, within=12, do="start `outbox_relay`")(killed("relay"))
situation("The relay is frozen", NO_RELAY, within=12, do=START_ANOTHER, in_suite=True)(frozen("relay"))
situation("The relay was stopped", NO_RELAY, within=8, do="start `outbox_relay`")(
    undone(lambda stage: stage.stop("relay"), lambda stage: stage.start("relay"))
)


@situation("One of two relays is frozen", SILENT_RELAY, within=12, do=START_ANOTHER)
def one_relay_frozen(stage: Stage) -> Iterator[None]:
    start_second(stage, "relay")
    stage.freeze("second relay")
    yield
    stage.kill("second relay")
    stage.start("relay", "second relay")


situation("The consumer is killed", NO_CONSUMER, within=12, do="start `outbox_consume`", in_suite=True)(killed("consumer"))
situation("The consumer is frozen", NO_CONSUMER, within=12, do=START_ANOTHER)(frozen("consumer"))


@situation("One of two consumers is killed", SILENT_CONSUMER, within=12, do="start another")
def one_consumer_killed(stage: Stage) -> Iterator[None]:
    start_second(stage, "consumer")
    stage.kill("second consumer")
    yield
    stage.start("consumer", "second consumer")


BY_CELERY = {"needs": ("redis",), "given": {"wakeup": True}, "starts": ("worker", "beat", "consumer")}
CONSUMING = {"needs": ("redis",), "given": {"wakeup": True, "consumes": ["shipping"]}, "starts": ("relay", "worker", "beat")}

situation("Celery's worker, which relays, is killed", NO_RELAY, within=20, do="start the worker", **BY_CELERY)(killed("worker"))
situation("Celery's worker, which relays, is frozen", NO_RELAY, within=20, do=START_ANOTHER, **BY_CELERY)(frozen("worker"))
situation("Celery's beat is killed, and wakeups still come", NO_BEAT, within=60, do="start beat", **BY_CELERY)(killed("beat"))
situation("Celery's beat is frozen, and wakeups still come", NO_BEAT, within=60, do=START_ANOTHER, **BY_CELERY)(frozen("beat"))
situation("Celery's worker, which consumes, is killed", NO_CONSUMER, within=20, do="start the worker", **CONSUMING)(
    killed("worker")
)


@situation(
    "No worker takes the wakeups, and a relay sends the messages",
    "outbox.no_worker of queue 'outbox'",
    within=90,
    do="start a worker for the queue, or set `CELERY_WAKEUP` to `False`",
    needs=("redis",),
    given={"wakeup": True},
)
def no_worker(stage: Stage) -> Iterator[None]:
    yield
    stage.start("worker")
    stage.start("beat")


# Servers


def server_killed(name: str) -> Play:
    return undone(lambda stage: getattr(stage, name).kill(), lambda stage: getattr(stage, name).start())


def server_frozen(name: str) -> Play:
    return undone(lambda stage: getattr(stage, name).freeze(), lambda stage: getattr(stage, name).thaw())


situation("The Redis of wakeups and beat is killed", NO_RELAY, within=20, do="start Redis", **BY_CELERY)(server_killed("redis"))


# PostgreSQL

ON_ITS_OWN = {"needs": ("postgres",)}


def executed(harm: str, mend: str) -> Play:
    """Return a play that executes statements, in which `{database}` is the name of the stage's database."""

    def execute(statement: str) -> Act:
        return lambda stage: stage.execute(statement.format(database=_name(stage)))

    return undone(execute(harm), execute(mend))


situation("PostgreSQL is killed", UNREACHABLE, within=5, do="start it", in_suite=True, **ON_ITS_OWN)(server_killed("postgres"))
situation("PostgreSQL is frozen", UNREACHABLE, within=12, do=STANDS_STILL, **ON_ITS_OWN)(server_frozen("postgres"))
situation("PostgreSQL has no free connection", UNREACHABLE, within=5, do="raise `max_connections`, or use a pooler")(
    executed("ALTER DATABASE {database} CONNECTION LIMIT 0", "ALTER DATABASE {database} CONNECTION LIMIT -1")
)


@situation(
    "PostgreSQL is read-only",
    "outbox.read_only of database 'default'",
    within=5,
    do="set `default_transaction_read_only = off`, or see why it was made read-only",
    in_suite=True,
)
def postgres_read_only(stage: Stage) -> Iterator[None]:
    stage.execute(f"ALTER ROLE {ROLE} IN DATABASE {_name(stage)} SET default_transaction_read_only = on")
    _end_sessions(stage)
    yield
    stage.execute(f"ALTER ROLE {ROLE} IN DATABASE {_name(stage)} RESET default_transaction_read_only")
    _end_sessions(stage)


def revoked(privilege: str, table: str) -> Play:
    return executed(f"REVOKE {privilege} ON {table} FROM {ROLE}", f"GRANT {privilege} ON {table} TO {ROLE}")


RELAY_FAILS, GROUP_FAILS = (f"outbox.process_fails of {subject}" for subject in ("broker 'default'", "group 'shipping'"))

situation("The relay may not delete tickets", RELAY_FAILS, within=12, do="grant what the error names", in_suite=True)(
    revoked("DELETE", "outbox_ticket")
)
situation("The consumer may not write the inbox", GROUP_FAILS, within=12, do="grant what the error names")(
    revoked("INSERT", "outbox_inbox")
)
situation("The processes may not write heartbeats", NO_RELAY, within=12, do="grant what the processes log")(
    revoked("INSERT, UPDATE", "outbox_process")
)


@situation(
    "The relay's claims take longer than the `statement_timeout` of its role",
    "outbox.process_fails of broker 'default'",
    within=12,
    do="raise `statement_timeout`, which the error names",
)
def short_statements(stage: Stage) -> Iterator[None]:
    stage.execute(SLOW_CLAIMS)
    stage.execute(f"ALTER ROLE {ROLE} IN DATABASE {_name(stage)} SET statement_timeout = '200ms'")
    _end_sessions(stage)
    yield
    stage.execute(f"ALTER ROLE {ROLE} IN DATABASE {_name(stage)} RESET statement_timeout")
    _end_sessions(stage)


@situation(
    "A forgotten session has locked the tickets, and publishers wait",
    "outbox.blocked of session",
    within=15,
    do="end it with the command that the finding names",
    in_suite=True,
)
def tickets_locked(stage: Stage) -> Iterator[None]:
    with suppress(psycopg.Error), psycopg.connect(stage.url, application_name="psql") as session:
        session.execute("LOCK TABLE outbox_ticket IN SHARE ROW EXCLUSIVE MODE")
        yield
        step = stage.samples[-1].told("outbox.blocked of session")[1]
        stage.execute(step.partition("end it: ")[2].rstrip("."))


situation("A table of the outbox is gone", UNREACHABLE, within=5, do="restore it, or run `migrate`")(
    executed("ALTER TABLE outbox_lane RENAME TO elsewhere", "ALTER TABLE elsewhere RENAME TO outbox_lane")
)


@situation("The disk of PostgreSQL is full", RELAY_FAILS, within=30, do="make room", needs=("postgres", "small disk"))
def postgres_full(stage: Stage) -> Iterator[None]:
    stage.kill("relay")
    stage.publish("x" * 2000, 3000)
    wait_until(lambda: stage.execute("SELECT pos FROM outbox_ticket OFFSET 2999"))
    filler = stage.disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    stage.start("relay")
    yield
    filler.unlink()


# RabbitMQ

ON_RABBITMQ = {"needs": ("rabbitmq",)}
ON_VIRTUAL_HOST = {"needs": ("virtual host",)}


def told(harm: list[str], mend: list[str]) -> Play:
    """Return a play of commands of rabbitmqctl."""
    return undone(lambda stage: stage.rabbitmq.control(*harm), lambda stage: stage.rabbitmq.control(*mend))


def permitted(stage: Stage, configure: str, write: str) -> None:
    """Set the permissions of the stage's user in its virtual host."""
    name = stage.given["virtual_host"]
    stage.rabbitmq.control("set_permissions", "-p", name, name, configure, write, ".*")


situation("RabbitMQ is killed", BROKER_AWAY, within=15, do="start it", in_suite=True, **ON_RABBITMQ)(server_killed("rabbitmq"))
situation("RabbitMQ is frozen", BROKER_AWAY, within=15, do=STANDS_STILL, **ON_RABBITMQ)(server_frozen("rabbitmq"))
situation("RabbitMQ has no memory", BROKER_AWAY, within=20, do="see its memory alarm", **ON_RABBITMQ)(
    told(["set_vm_memory_high_watermark", "0.00001"], ["set_vm_memory_high_watermark", "0.6"])
)
situation("RabbitMQ's disk is full", BROKER_AWAY, within=25, do="see its disk alarm", **ON_RABBITMQ)(
    told(["set_disk_free_limit", "1000GB"], ["set_disk_free_limit", "50MB"])
)
situation(
    "A queue of RabbitMQ is full",
    BROKER_AWAY,
    within=30,
    do="start the group's consumers, or raise `MAX_LENGTH`",
    given={"max_length": 5},
    **ON_VIRTUAL_HOST,
)(killed("consumer"))


@situation(
    "The queue of a group was deleted with messages, and the relay declared it again",
    GAP,
    within=15,
    do="`outbox_replay --lost --all`",
    **ON_VIRTUAL_HOST,
)
def rabbitmq_queue_emptied(stage: Stage) -> Iterator[None]:
    stage.kill("consumer")
    stage.wait_for(lambda one: one.has(NO_CONSUMER), 30)
    stage.rabbitmq.control("delete_queue", "-p", stage.given["virtual_host"], "orders:shipping")
    stage.start("consumer")
    stage.wait_for(lambda one: not one.has(NO_CONSUMER), 30)
    yield
    stage.run("outbox_replay", "--lost", "--all")


@situation(
    "The queue of a group is deleted under its consumer, with messages",
    "outbox.gap of group 'shipping'",
    within=45,
    do="`outbox_replay --lost --all`",
    **ON_VIRTUAL_HOST,
)
def rabbitmq_queue_deleted(stage: Stage) -> Iterator[None]:
    stage.freeze("consumer")
    stage.publish("ok", 5)
    wait_until(lambda: stage.execute("SELECT count(*) > 5 FROM outbox_batch WHERE state = 3") == [(True,)], 30)
    stage.rabbitmq.control("delete_queue", "-p", stage.given["virtual_host"], "orders:shipping")
    stage.thaw("consumer")
    yield
    stage.run("outbox_replay", "--lost", "--all")


@situation(
    "A consumer is started with another server's address",
    "outbox.servers_differ of group 'shipping'",
    within=12,
    do="give it the address of the relay's broker",
    **ON_VIRTUAL_HOST,
)
def consumer_elsewhere(stage: Stage) -> Iterator[None]:
    stage.stop("consumer")
    name = stage.another_virtual_host()
    stage.start("consumer", given={"virtual_host": name, "user": name, "password": name})
    wait_until(lambda: stage.execute("SELECT pid FROM outbox_process WHERE kind = 'consumer'"))
    yield
    stage.stop("consumer")
    stage.start("consumer")


@situation(
    "The exchange of a topic was deleted, and the user may not declare it",
    MISCONFIGURED,
    within=10,
    do="give it the permission; with it, the relay declares the exchange again",
    **ON_VIRTUAL_HOST,
)
def rabbitmq_exchange_gone(stage: Stage) -> Iterator[None]:
    permitted(stage, "^$", ".*")
    exchange = f'rabbit_misc:r(<<"{stage.given["virtual_host"]}">>, exchange, <<"orders">>)'
    stage.rabbitmq.control("eval", f'rabbit_exchange:delete({exchange}, false, <<"operator">>).')
    yield
    permitted(stage, ".*", ".*")


@situation("The user of RabbitMQ may not write", MISCONFIGURED, within=20, do="give it the permission", **ON_VIRTUAL_HOST)
def rabbitmq_without_permission(stage: Stage) -> Iterator[None]:
    permitted(stage, ".*", "^$")
    stage.rabbitmq.control("close_all_user_connections", stage.given["virtual_host"], "permissions changed")
    yield
    permitted(stage, ".*", ".*")


@situation("RabbitMQ's password was changed", BROKER_AWAY, within=15, do="correct the password", **ON_VIRTUAL_HOST)
def rabbitmq_password(stage: Stage) -> Iterator[None]:
    name = stage.given["virtual_host"]
    stage.rabbitmq.control("change_password", name, "another")
    stage.rabbitmq.control("close_all_user_connections", name, "password changed")
    yield
    stage.rabbitmq.control("change_password", name, name)


# Redis, of tasks that are sent in the transaction

WITH_TASKS = {"needs": ("redis",)}


def said(harm: str, mend: str) -> Play:
    """Return a play of commands of Redis."""
    return undone(lambda stage: stage.redis.say(harm), lambda stage: stage.redis.say(mend))


situation("The Redis of Celery's tasks is killed", TASKS_AWAY, within=15, do="start it", **WITH_TASKS)(server_killed("redis"))
situation("The Redis of Celery's tasks is frozen", TASKS_AWAY, within=20, do=STANDS_STILL, **WITH_TASKS)(server_frozen("redis"))
situation("The Redis of Celery's tasks is full", TASKS_AWAY, within=20, do="raise `maxmemory`, or start workers", **WITH_TASKS)(
    said("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0")
)
situation("The Redis of Celery's tasks is a replica", TASKS_AWAY, within=20, do="point Celery at the master", **WITH_TASKS)(
    said("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE")
)
situation(
    "The user of Redis may not write",
    "outbox.misconfigured of topic 'celery-tasks'",
    within=20,
    do="give it the permission",
    **WITH_TASKS,
)(said("ACL SETUSER default -LPUSH", "ACL SETUSER default +@all"))


# What is gone


def deploy(stage: Stage, **given: Any) -> None:
    """End all processes, and start them with other code."""
    names = ("relay", "consumer", "web")
    stage.kill(*names)
    for name in names:
        stage.start(name, given=given)


def deployed(**given: Any) -> Play:
    """Return a play of a release with other code."""
    return undone(lambda stage: deploy(stage, **given), deploy)


@situation(
    "A topic was removed from the settings, with messages waiting",
    "outbox.unknown_topic of topic 'refunds'",
    within=10,
    do="restore the topic until they are sent",
)
def topic_removed(stage: Stage) -> Iterator[None]:
    stage.kill("relay")
    stage.publish("ok", 3, "refunds")
    wait_until(
        lambda: stage.execute("SELECT pos FROM outbox_ticket JOIN outbox_topic t ON t.id = topic_id WHERE name = 'refunds'")
    )
    deploy(stage, topics=["orders"])
    yield
    deploy(stage)


situation(
    "A group was removed from the code, with messages waiting",
    "outbox.no_consumer of group 'billing'",
    within=12,
    do="start a release that has it; or, if it was removed for good, `outbox_forget`",
    given={"groups": ["shipping", "billing"]},
)(deployed(groups=["shipping"]))
situation(
    "A topic of a group was removed from the code, with messages waiting",
    "outbox.no_handler of group 'shipping'",
    within=10,
    do="restore its handler, or `outbox_forget`",
)(deployed(handles=["refunds"]))


def maintain(stage: Stage) -> None:
    stage.run("outbox_maintenance")


def drop_tomorrow(stage: Stage) -> None:
    for name in _partitions(stage, "current_date + 1"):
        stage.execute(f"DROP TABLE {name}")


def drop_today(stage: Stage) -> None:
    [today, *_] = _partitions(stage, "current_date")
    stage.execute(
        f"ALTER TABLE outbox_message DETACH PARTITION {today};"
        f"INSERT INTO outbox_message_default SELECT * FROM {today};"
        f"DROP TABLE {today}"
    )


def make_old_partition(stage: Stage) -> None:
    day = datetime.now(UTC).date() - timedelta(days=30)
    first, end = first_id(day), first_id(day + timedelta(days=1))
    stage.execute(
        f"CREATE TABLE outbox_message_{day:%Y%m%d} PARTITION OF outbox_message FOR VALUES FROM ('{first}') TO ('{end}');"
        f"ALTER TABLE outbox_message_{day:%Y%m%d} OWNER TO {ROLE}"
    )


situation("The partition of tomorrow is missing", NO_MAINTENANCE, within=5, do="run `outbox_maintenance`", in_suite=True)(
    undone(drop_tomorrow, maintain)
)
situation("The partition of today is missing", NO_MAINTENANCE, within=10, do="run `outbox_maintenance`")(
    undone(drop_today, maintain)
)
situation("Messages are kept past their retention", NO_MAINTENANCE, within=5, do="run `outbox_maintenance`")(
    undone(make_old_partition, maintain)
)


# Clocks


def _clock(hours: int) -> dict[str, str]:
    """Return an environment with a clock that is wrong by so much; only its wall clock."""
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), "")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"{hours:+d}h",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def started_at(hours: int) -> Play:
    """Return a play in which relay and consumer have a wrong clock."""

    def start(stage: Stage) -> None:
        stage.kill(*RELAY_AND_CONSUMER)
        for name in RELAY_AND_CONSUMER:
            stage.start(name, **_clock(hours))
        stage.wait_for(lambda sample: sample.entries == {}, 30)

    return undone(start)


for hours, text in ((1, "an hour ahead"), (-1, "an hour behind")):
    situation(f"The web server's clock is {text}", NOTHING, within=0, do="correct it", web=_clock(hours))(undone(nothing))
for hours, text in ((1, "an hour ahead"), (-1, "an hour behind")):
    situation(f"The relay's and the consumer's clocks are {text}", NOTHING, within=0, do="correct them")(started_at(hours))


# Messages


def mend_handlers(stage: Stage) -> None:
    stage.kill("consumer")
    stage.start("consumer", given={"mended": True})


def published(*message: Any) -> Play:
    return undone(lambda stage: stage.publish(*message), mend_handlers)


def hanging(*message: Any) -> Play:
    """Return a play in which a handler hangs in one of two processes."""

    def hang(stage: Stage) -> None:
        start_second(stage, "consumer")
        stage.publish(*message)

    def mend(stage: Stage) -> None:
        stage.kill("second consumer")
        mend_handlers(stage)

    return undone(hang, mend)


def ran(harm: Act, *mend: str) -> Play:
    """Return a play that a command mends."""
    return undone(harm, lambda stage: stage.run(*mend))


def publish_too_large(stage: Stage) -> None:
    one = uuid7()
    stage.execute(PUBLISH_TOO_LARGE, one, json.dumps({"ce-id": str(one), "content-type": "application/json"}))


def pause_for_a_day(stage: Stage) -> None:
    stage.run("outbox_pause", "orders")
    stage.execute("UPDATE outbox_topic SET paused_at = now() - interval '25 hours' WHERE name = 'orders'")


def lose(stage: Stage) -> None:
    stage.kill("consumer")
    stage.publish("ok", 20)
    waiting = wait_until(lambda: (found := stage.execute(NOT_HANDLED)) and len(found) > 15 and found)
    stage.execute("DELETE FROM outbox_embedded_message WHERE message_id = %s", waiting[3][0])
    stage.start("consumer")


LIMIT_TIME = "kill the consumer; set a `time_limit`"

situation("A message fails beside healthy ones", FAILS, within=80, do="correct the handler")(published("fail"))
situation("All messages of another topic of the group fail", FAILS, within=80, do="correct the handler")(
    published("fail", 6, "refunds")
)
situation("A message hangs beside healthy ones", STUCK, within=80, do=LIMIT_TIME)(hanging("hang"))
situation("A message of another topic of the group hangs", STUCK, within=80, do=LIMIT_TIME)(hanging("hang", 1, "refunds"))
situation(
    "A handler rejected a message",
    "outbox.dead_letters of group 'shipping'",
    within=10,
    do="correct the cause, then `outbox_replay`, or discard",
    in_suite=True,
)(ran(lambda stage: stage.publish("reject"), "outbox_replay", "--all", "--discard", "--no-input"))
situation(
    "The broker rejected a message",
    "outbox.rejected of topic 'orders'",
    within=10,
    do="`outbox_replay --unsent`, or discard it",
)(ran(publish_too_large, "outbox_replay", "--unsent", "--all", "--discard", "--no-input"))
situation(
    "A topic was paused, and not resumed for a day",
    "outbox.paused of topic 'orders'",
    within=10,
    do="`outbox_pause orders --resume`",
)(ran(pause_for_a_day, "outbox_pause", "orders", "--resume"))
situation("A message was lost by the broker", GAP, within=30, do="`outbox_replay --lost --all`")(
    ran(lose, "outbox_replay", "--lost", "--all")
)
situation(
    "A half message was checked back about too often",
    "outbox.parked of topic 'orders'",
    within=5,
    do="check back about it in the admin",
)(undone(lambda stage: stage.execute(PARKED_HALF), lambda stage: stage.execute("DELETE FROM outbox_embedded_half")))


@situation(
    "A group is too slow for what comes",
    "outbox.group_slow of group 'shipping'",
    within=60,
    do="start more consumers, or set `batch_size`",
)
def slow(stage: Stage) -> Iterator[None]:
    stage.publish("slow", 3000)
    yield
    stage.kill("consumer")
    for number in range(2):
        stage.start("consumer", f"consumer {number}", given={"mended": True})


@situation(
    "Two processes of a group have had different code for an hour",
    "outbox.code_differs of group 'shipping'",
    within=10,
    do="deploy the same code to both",
)
def code_differs(stage: Stage) -> Iterator[None]:
    start_second(stage, "consumer", given={"handles": ["orders"]})
    stage.execute("UPDATE outbox_process SET started_at = started_at - interval '2 hours'")
    yield
    stage.stop("second consumer")


situation("A topic is paused", NOTHING, within=0, do="its page shows who paused it; resume it")(
    undone(lambda stage: stage.run("outbox_pause", "orders", "--reason", "stock-taking"))
)


SLOW_CLAIMS = """
CREATE FUNCTION slow_claim() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END';
CREATE TRIGGER slow_claim BEFORE INSERT ON outbox_batch FOR EACH STATEMENT EXECUTE FUNCTION slow_claim()
"""
NOT_HANDLED = """
SELECT message_id FROM outbox_embedded_message m
WHERE NOT EXISTS (SELECT FROM outbox_inbox WHERE message_id = m.message_id::uuid) ORDER BY m.pos
"""

# As publish() writes a message, which refuses one of more than 4 MB.
PUBLISH_TOO_LARGE = """
WITH message AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, body)
    SELECT %s, id, '', %s, convert_to(repeat('x', 5000000), 'UTF8') FROM outbox_topic WHERE name = 'orders' RETURNING id, topic_id
)
INSERT INTO outbox_ticket (message_id, topic_id) SELECT id, topic_id FROM message
"""

PARKED_HALF = """
INSERT INTO outbox_embedded_half
    (id, topic_id, queue, message_id, source, key, tag, headers, body, token, born_at, ask_at, asked, state)
SELECT nextval('outbox_embedded_half_id'), id, 0, gen_random_uuid(), 'urn:warehouse', '', '', '{}', '{}', '',
    now() - interval '3 hours', now() + interval '1 hour', 15, 1 FROM outbox_embedded_topic WHERE name = 'orders'
"""


def _name(stage: Stage) -> str:
    return str(stage.execute("SELECT current_database()")[0][0])


def _end_sessions(stage: Stage) -> None:
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    stage.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")


def _partitions(stage: Stage, since: str) -> list[str]:
    """Return the partitions from a day on."""
    rows = stage.execute(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_message'::regclass"
        f" AND inhrelid::regclass::text BETWEEN to_char({since}, '\"outbox_message_\"YYYYMMDD') AND 'outbox_message_a' ORDER BY 1"
    )
    return [name for (name,) in rows]


ALERTS = Path(__file__).parents[3] / "docs/monitoring/alerts.yml"


def table() -> str:
    """Return the table of docs/how-to/watch.md: each situation with its entry, and the alert rule that fires."""
    rows = ["| situation | entry | named within | alert | do |", "|" + "---|" * 5]
    for one in SITUATIONS:
        if one.entry == NOTHING:
            rows.append(f"| {one.name} | none | | | {one.do} |")
        else:
            entry = "`outbox_database_up` is 0" if one.id is None else f"`{one.id}`{one.entry.removeprefix(one.id)}"
            rows.append(f"| {one.name} | {entry} | {one.within} s | `{_alert(one.id)}` | {one.do} |")
    return "\n".join(rows)


def _alert(kind: str | None) -> str:
    """Return the rule of docs/monitoring/alerts.yml that fires at an id, or without a database."""
    if kind is None:
        return "OutboxDatabaseDown"
    rules = re.findall(r'- alert: (\w+)\n +expr: .*\{id=~"(.*)"\}', ALERTS.read_text())
    return next((name for name, ids in rules if kind in ids.split("|")), "OutboxNeedsAttention")
