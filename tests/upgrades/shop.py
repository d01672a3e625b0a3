"""The shop's processes on a database."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from outbox.failpoints import VARIABLE

TABLES = """
CREATE TABLE upgrade_case (number bigserial PRIMARY KEY, what text UNIQUE, topic text, key text, ends text);
CREATE TABLE upgrade_effect (number bigserial PRIMARY KEY, consumer_group text, what text);
"""


# What a relay, a check loop or a consumer still has to do.
OPEN = """
SELECT (SELECT count(*) FROM outbox_ticket JOIN outbox_topic topic ON topic.id = topic_id
        WHERE NOT paused AND broker = 'default'),
    (SELECT count(*) FROM outbox_delayed),
    (SELECT count(*) FROM outbox_batch JOIN outbox_topic topic ON topic.id = topic_id
        WHERE state IN (0, 1, 2) AND broker = 'default'),
    (SELECT count(*) FROM outbox_embedded_half WHERE state = 0 AND ask_at <= clock_timestamp()),
    (SELECT count(*) FROM outbox_embedded_delivery),
    (SELECT count(*) FROM outbox_deferred WHERE dead_at IS NULL),
    (SELECT count(*) FROM outbox_embedded_offset o JOIN outbox_embedded_queue q USING (topic_id, queue)
        JOIN outbox_embedded_topic t ON t.id = topic_id
        WHERE pos < last_pos AND (consumer_group = 'mail' OR t.name = 'orders'))
"""


def left_to_do(url: str) -> tuple[int, ...]:
    """Return how many tickets, delayed rows, batches, half messages, deliveries, delayed, deferred, unread messages are open."""
    with psycopg.connect(url) as connection:
        return connection.execute(OPEN).fetchone() or ()


class Shop:
    """
    Runs the shop's processes on a database.

    Args:
        variables: more of their environment.
    """

    def __init__(self, url: str, **variables: str) -> None:
        self.url = url
        self.variables = variables

    def start(self, *command: str, at: str = "") -> subprocess.Popen[str]:
        """Start `python -m ...`; `at` is a plan for failpoints."""
        environment = {
            **os.environ,
            "DATABASE_URL": self.url,
            "DJANGO_SETTINGS_MODULE": "tests.upgrades.settings",
            VARIABLE: at,
            **self.variables,
        }
        return subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, text=True)

    def run(self, *command: str, at: str = "", is_killed: bool = False, may_end_with: Container[int] = (0,)) -> str:
        """Run `python -m ...` to its end; return what it printed."""
        process = self.start(*command, at=at)
        said, _ = process.communicate(timeout=60)
        expected = (-signal.SIGKILL,) if is_killed or at else may_end_with
        assert process.returncode in expected, f"{command} ended with {process.returncode}, not {expected}:\n{said}"
        return said

    @contextmanager
    def stopped(self, *command: str, at: str) -> Iterator[None]:
        """Run `python -m ...` until it stops itself; in the end, kill it."""
        process = self.start(*command, at=f"{at}=stop")
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"{command} ended, and did not reach {at}"
        yield
        process.kill()
        process.communicate()

    def expect(self, what: str, topic: str, ends: str, key: str = "") -> None:
        """Note how a message ends."""
        with psycopg.connect(self.url) as connection:
            values = [what, topic, key, ends]
            connection.execute("INSERT INTO upgrade_case (what, topic, key, ends) VALUES (%s, %s, %s, %s)", values)

    def publish(self, what: str, *topics: str, ends: str = "handled", **more: Any) -> None:
        """Publish a message in each topic, with a key where the topic is ordered."""
        keys = {topic: "a" if topic in ("steps", "accounts") else "" for topic in topics}
        messages = [{"topic": topic, "what": f"{what} ({topic})", "key": key, **more} for topic, key in keys.items()]
        for one in messages:
            self.expect(one["what"], one["topic"], ends, one["key"])
        self.run("tests.upgrades.acts", "publish", json.dumps(messages))

    def relay(self, broker: str = "default", at: str = "") -> None:
        """Relay what waits; 1: messages were not accepted."""
        command = ("django", "outbox_relay", "--once", "--broker", broker)
        self.run(*command, at=f"{at}=kill" if at else "", may_end_with=(0, 1))

    def consume(self, group: str = "mail", at: str = "", *, is_killed: bool = False) -> None:
        command = ("django", "outbox_consume", "--group", group, "--until-idle")
        self.run(*command, at=f"{at}=kill" if at else "", is_killed=is_killed)

    def ids(self, what: str) -> list[str]:
        """Return the ids of messages by a part of what they are."""
        with psycopg.connect(self.url) as connection:
            rows = connection.execute(
                "SELECT id::text FROM outbox_message WHERE convert_from(body, 'UTF8') LIKE %s", [f"%{what}%"]
            )
            return [message_id for (message_id,) in rows]
