"""
What a web server does in a situation: it publishes a message to `orders` each second, and reads the status each second.

It reads lines of JSON, `[topic, body, count]`, and publishes them; it writes a line of JSON for each status: the entries of what
needs attention and the number of handled messages a minute; or null where the database cannot be asked.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import django

django.setup()

import psycopg  # noqa: E402
from django.db import connections  # noqa: E402

from outbox import atomic, publish_raw  # noqa: E402
from outbox.errors import OutboxError  # noqa: E402
from outbox.monitoring.attention import find_attention  # noqa: E402
from outbox.monitoring.connection import connected  # noqa: E402
from outbox.monitoring.status import read_status  # noqa: E402
from tests.journeys.attention.given import given  # noqa: E402

if given["celery"]:
    from tests.journeys.attention.app import invoice


pause = threading.Event().wait  # libfaketime breaks time.sleep()


def publish(topic: str, body: dict[str, str], count: int) -> None:
    with atomic():
        for _ in range(count):
            if topic == "tasks":
                from outbox.celery import send_in_transaction

                send_in_transaction(invoice.s())
            else:
                publish_raw(topic, body)


def flow() -> None:
    """Publish for ever; no error ends it, as no request ends a web server."""
    tasks: list[tuple[str, dict[str, str], int]] = [("tasks", {}, 1)] if given["celery"] and not given["wakeup"] else []
    while True:
        try:
            for one in [(given["topics"][0], {"do": "ok"}, 1), *tasks]:
                publish(*one)
        except Exception:
            connections.close_all()
        pause(1)


def read() -> dict[str, object] | None:
    try:
        with connected("default", "situation") as connection:
            status = read_status(connection, "default")
            attention = [*find_attention(connection, status)]
    except (OutboxError, psycopg.Error):
        return None
    return {
        "entries": [[f"{one.id} of {one.obj}", one.msg, one.hint, one.error] for one in attention],
        "handled": sum(one.per_minute for one in status.groups),
    }


def watch() -> None:
    while True:
        began = time.monotonic()
        print(json.dumps(read()), flush=True)  # noqa: T201
        pause(max(0.0, 1 - (time.monotonic() - began)))


for work in (watch, *([] if "silent" in sys.argv else [flow])):
    threading.Thread(target=work, daemon=True).start()
for line in sys.stdin:
    topic, body, count = json.loads(line)
    try:
        publish(topic, body, count)
    except Exception as error:
        print(f"not published: {error}", file=sys.stderr, flush=True)  # noqa: T201
        connections.close_all()
os._exit(0)
