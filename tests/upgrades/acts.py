"""What the shop's processes do: `python -m tests.upgrades.acts ACT ...`."""

import json
import sys
import time
from contextlib import closing, suppress
from datetime import timedelta
from itertools import count
from typing import Any

import django
from django.core.management import call_command
from django.db import connection


def publish(messages: str) -> None:
    """Publish messages in one transaction: a JSON list of objects with topic, what and perhaps do, key, seconds and so on."""
    from outbox import atomic, publish_raw

    with atomic():
        for one in json.loads(messages):
            body = {"what": one["what"], "do": one.get("do", "")}
            delay = timedelta(seconds=one["seconds"]) if "seconds" in one else None
            publish_raw(one["topic"], body, key=one.get("key", ""), delay=delay, idempotency_key=one.get("idempotency_key"))


def half_first(what: str) -> None:
    """Publish an order half first."""
    from outbox import atomic
    from tests.upgrades.messages import Order

    with atomic(half_first=Order(what=what)), connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def check() -> None:
    """Ask about the half messages that are due."""
    from outbox.check_backs.loop import CheckLoop

    with closing(CheckLoop("default", "default")) as loop:
        loop.turn()


def operate() -> None:
    """
    Relay to the broker in this process's memory, replay all that was given up, resume the paused topic, and relay again.

    Prints what that broker shows after the first relay, and in the end.
    """
    first = _relay_to_memory()
    call_command("outbox_replay", "--all", stdout=sys.stderr)
    call_command("outbox_replay", "--unsent", "--all", stdout=sys.stderr)
    call_command("outbox_pause", "held", "--resume", stdout=sys.stderr)
    print(json.dumps([first, _relay_to_memory()]))  # noqa: T201


def _relay_to_memory() -> list[str]:
    from outbox import conf
    from outbox.relay.hosts import NO_IDLE_TIMEOUT, RelayTarget, run_once

    run_once(RelayTarget("default", "ledger"), note="ledger", at_most=timedelta(seconds=30), idle_timeout=NO_IDLE_TIMEOUT)
    with closing(conf.make_broker("ledger")) as broker:
        shown: Any = [message for topic in broker.topics for message in broker.visible(topic)]  # type: ignore[attr-defined]
    return [json.loads(message.body)["what"] for message in shown]


class Undone(Exception):
    """Rolls a transaction back."""


def go_on(name: str) -> None:
    """Publish until killed: transactions with several topics, some half first, some rolled back."""
    from outbox import atomic, publish_raw
    from tests.upgrades.messages import Order

    for number in count():
        what = f"{name} {number}"
        transaction = atomic(half_first=Order(what=what)) if number % 5 == 0 else atomic()
        with suppress(Undone), transaction, connection.cursor() as cursor:
            topics = {"notes": "", "alarms": "", "steps": "abc"[number % 3]}
            for topic, key in topics.items():
                delay = timedelta(milliseconds=300) if topic == "alarms" else None
                publish_raw(topic, {"what": f"{what} {topic}", "do": ""}, key=key, delay=delay)
            if number % 5:
                publish_raw("orders", {"what": what, "do": ""})
            rows = [(what, "orders", ""), *((f"{what} {topic}", topic, key) for topic, key in topics.items())]
            cursor.executemany("INSERT INTO upgrade_case (what, topic, key) VALUES (%s, %s, %s)", rows)
            if number % 7 == 0:
                raise Undone
        time.sleep(0.1)


ACTS = {act.__name__: act for act in (publish, half_first, check, operate, go_on)}


if __name__ == "__main__":
    django.setup()
    ACTS[sys.argv[1]](*sys.argv[2:])
