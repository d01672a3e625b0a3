"""Run a release: each step in this process, with what became of it as a line of JSON."""

import json
import sys
from collections.abc import Callable
from io import StringIO

import django
from django.core.management import CommandError, call_command

import outbox
from outbox.message import message_types

handled: list[str] = []


def call(command: str, *arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it printed."""
    out = StringIO()
    try:
        call_command(command, *arguments, stdout=out, stderr=out)
    except CommandError as error:
        return error.returncode, f"{out.getvalue()}{error}"
    except SystemExit as end:
        return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


def publish() -> tuple[int, str]:
    """Publish a message of the old release."""
    with outbox.atomic():
        outbox.publish(message_types()["OrderPlaced"](order_id=1, customer="Ann"))
    return 0, ""


STEPS: dict[str, Callable[[], tuple[int, str]]] = {
    "migrate": lambda: call("migrate", "--verbosity", "0"),
    "write": lambda: call("outbox_schema", "--write"),
    "check": lambda: call("outbox_schema", "--check"),
    "against": lambda: call("outbox_schema", "--against-database"),
    "publish": publish,
    "relay": lambda: call("outbox_relay", "--once"),
    "consume": lambda: call("outbox_consume", "--once"),
    "handled": lambda: (len(handled), "\n".join(handled)),
}


def main(steps: list[str]) -> None:
    django.setup()
    for step in steps:
        sys.stdout.write(f"{json.dumps(STEPS[step]())}\n")


if __name__ == "__main__":
    sys.modules["tests.journeys.releases.run"] = sys.modules["__main__"]  # where handlers note what they get
    main(sys.argv[1:])
