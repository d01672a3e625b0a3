"""
Write a dump of a database of this release with work in flight: `python -m tests.upgrades.dump 0.1.0`.

The shop's processes do what they do in production, and are killed at the points where they leave something for others. The table
`upgrade_case` says of each message how it ends.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from outbox.testing.postgres import Postgres
from tests.upgrades.shop import TABLES, Shop

FOLDER = Path(__file__).parent
HOUR = 3600
RELAY = ("django", "outbox_relay", "--once", "--broker", "default")

HEAD = "-- A database of release {release} with work in flight. Written by python -m tests.upgrades.dump.\n-- Made at {now}.\n\n"

# Partitions of days without messages; the next migration makes those that are needed.
EMPTY_DAYS = """
SELECT relid::regclass::text FROM pg_partition_tree('outbox_message')
WHERE isleaf AND relid <> 'outbox_message_default'::regclass AND pg_relation_size(relid) = 0
"""

NOBODY = "UPDATE outbox_operator_act SET acted_by = 'an operator'; UPDATE outbox_process SET host = 'a host'"

# What differs by machine, or cannot be read by an older server.
LEFT_OUT = re.compile(r"^(--.*|SET .*|SELECT pg_catalog\.set_config.*|\\(un)?restrict .*)\n", re.MULTILINE)


def play(shop: Shop) -> None:
    """Leave work in each state that a message passes through."""
    shop.run("django", "migrate", "--verbosity", "0")
    with psycopg.connect(shop.url) as connection:
        connection.execute(TABLES)
    finish_some(shop)
    with ExitStack() as stopped:
        leave_handled(shop, stopped)
        leave_halves(shop)
        leave_deliveries(shop)
        leave_transactions(shop)
        leave_batches(shop, stopped)
    leave_waiting(shop)


def finish_some(shop: Shop) -> None:
    """Send and handle messages to their end."""
    shop.publish("handled before", "orders", "notes", "steps", "moods")
    shop.publish("published once by its idempotency key", "notes", idempotency_key="once")
    shop.relay()
    shop.consume()
    shop.consume("stock")


def leave_handled(shop: Shop, stopped: ExitStack) -> None:
    """Let a consumer handle what relays have sent, and not marked."""
    for point, topic in (("relay.after_commit", "orders"), ("relay.after_send", "notes")):
        shop.publish("handled, though not marked as sent", topic)
        stopped.enter_context(shop.stopped(*RELAY, at=point))
    shop.consume()


def leave_halves(shop: Shop) -> None:
    """Kill processes that publish half first, and ask about one whose transaction is open."""
    half_first = ("tests.upgrades.acts", "half_first")
    with shop.stopped(*half_first, "half first, open when it was asked about", at="half_first.after_work"):
        shop.expect("half first, open when it was asked about", "orders", "rolled back")
        make_halves_due(shop)
        shop.run("tests.upgrades.acts", "check")
    shop.expect("half first, committed and answered", "orders", "handled")
    shop.run(*half_first, "half first, committed and answered", at="half_first.after_commit=kill")
    shop.expect("half first, rolled back and answered", "orders", "rolled back")
    shop.run(*half_first, "half first, rolled back and answered", at="half_first.after_half=kill")
    make_halves_due(shop)
    shop.run("tests.upgrades.acts", "check")
    for point, ends in (("prepare", "rolled back"), ("half", "rolled back"), ("commit", "handled"), ("end", "handled")):
        what = f"half first, killed after {point}"
        shop.expect(what, "orders", ends)
        shop.run(*half_first, what, at=f"half_first.after_{point}=kill")


def make_halves_due(shop: Shop) -> None:
    with psycopg.connect(shop.url) as connection:
        connection.execute("UPDATE outbox_embedded_half SET ask_at = now() WHERE state = 0 AND asked = 0")


def leave_deliveries(shop: Shop) -> None:
    """Let handlers fail, and kill consumers."""
    shop.publish("fails, and waits for its retry", "notes", "orders", "steps", do="fail")
    shop.publish("waits behind one of its key that failed", "steps")
    shop.publish("rejected", "notes", ends="dead letter", do="reject")
    shop.publish("rejected and replayed", "notes", do="reject")
    shop.publish("rejected and discarded", "notes", ends="discarded", do="reject")
    shop.relay()
    shop.consume()
    shop.publish("kills its consumer at the second delivery", "notes", do="kill")
    shop.relay()
    shop.consume(is_killed=True)
    for point in ("before_handler", "after_handler", "after_commit"):
        shop.publish(f"its consumer was killed at {point}, first", "notes", "orders")
        shop.publish(f"its consumer was killed at {point}, last", "notes")
        shop.relay()
        shop.consume(at=f"consumer.{point}")
    shop.run("django", "outbox_replay", *shop.ids("rejected and replayed"))
    shop.run("django", "outbox_replay", "--discard", "--no-input", *shop.ids("rejected and discarded"))


def leave_transactions(shop: Shop) -> None:
    """Kill relays that send in transactions: one before its transaction, whose broker then has lost its marker."""
    shop.publish("in doubt, and dead", "entries", "accounts", ends="dead")
    shop.publish("in doubt, dead and discarded", "entries", ends="discarded")
    shop.publish("in doubt, dead, replayed and in doubt again", "entries", ends="dead")
    shop.relay("ledger", at="relay.before_transaction")
    shop.relay("ledger")
    shop.run("django", "outbox_replay", "--unsent", *shop.ids("in doubt, dead, replayed"))
    shop.run("django", "outbox_replay", "--unsent", "--discard", "--no-input", *shop.ids("in doubt, dead and discarded"))
    shop.publish("waits behind a dead one of its key", "accounts", ends="sent after the dead one")


def leave_batches(shop: Shop, stopped: ExitStack) -> None:
    """Stop relays at each of their points, to be killed together, so that none finishes the work of another."""
    for point, topics in {
        "relay.after_decide": ("orders",),
        "relay.after_commit": ("orders",),
        "relay.after_send": ("notes", "alarms"),
        "relay.after_half": ("orders", "notes"),
        "relay.after_claim": ("orders", "notes", "steps", "alarms"),
    }.items():
        for which in ("first", "last"):
            shop.publish(f"its relay was killed at {point}, {which}", *topics)
        stopped.enter_context(shop.stopped(*RELAY, at=point))
    shop.publish("claimed for a transaction that began or not", "entries", ends="dead")
    stopped.enter_context(shop.stopped(*RELAY[:-1], "ledger", at="relay.before_transaction"))
    shop.publish("refused because its topic's type was wrong", "moods")
    Shop(shop.url, **shop.variables, MOODS="transaction").relay()
    shop.publish("waits", "orders", "notes", "steps", "alarms")
    shop.publish("waits for a transaction", "entries", ends="sent")


def leave_waiting(shop: Shop) -> None:
    """Publish messages that no relay sees."""
    shop.publish("is due in an hour", "notes", "alarms", seconds=HOUR)
    shop.publish("waits in a paused topic", "held", ends="paused")
    shop.run("django", "outbox_pause", "held", "--reason", "its consumer is being repaired", "--by", "an operator")


def dump(server: Postgres, release: str) -> str:
    """Return the database as SQL that psycopg can execute."""
    assert server.programs is not None
    with psycopg.connect(server.url) as connection:
        for (day,) in connection.execute(EMPTY_DAYS).fetchall():
            connection.execute(f"DROP TABLE {day}")
        connection.execute(NOBODY)
    command = [server.programs / "pg_dump", "--no-owner", "--no-privileges", "--column-inserts", "--rows-per-insert=1000"]
    environment = {**os.environ, "PGTZ": "UTC"}
    done = subprocess.run([*command, server.url], env=environment, check=True, capture_output=True, text=True)
    text = re.sub(r"\n{3,}", "\n\n", LEFT_OUT.sub("", done.stdout)).replace(f"{FOLDER.parent.parent}/", "")
    return HEAD.format(release=release, now=datetime.now(UTC).replace(microsecond=0)) + text


def main(release: str) -> None:
    with Postgres() as server:
        play(Shop(server.url, MISBEHAVES="1"))
        (FOLDER / f"{release}.sql").write_text(dump(server, release))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Name the release: python -m tests.upgrades.dump 0.1.0")
    main(sys.argv[1])
