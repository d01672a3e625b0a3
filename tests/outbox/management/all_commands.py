"""Runs each command on the database of DATABASE_URL, in one process; prints what became of each as a line of JSON."""

import json
import os
import sys
import traceback
from io import StringIO
from unittest import mock

import django

CALLS = {
    "outbox_archive": [],
    "outbox_audit": ["--no-store"],
    "outbox_catalogue": [],
    "outbox_check_back": ["0199d3a4-7f6e-7c3e-9d3b-3d9f1c5f2a11"],
    "outbox_checker": [],
    "outbox_consume": ["--once"],
    "outbox_doctor": [],
    "outbox_pause": ["orders"],
    "outbox_maintenance": [],
    "outbox_record": [],
    "outbox_relay": ["--once"],
    "outbox_forget": ["mail", "--no-input"],
    "outbox_replay": ["--unsent", "--all"],
    "outbox_schema": ["--against-database"],
    "outbox_seek": ["cart", "--to", "first"],
    "outbox_status": [],
    "outbox_topics": [],
}
"""Every command, with arguments by which it soon ends."""


def run(command: str) -> dict[str, object]:
    """Run a command as `manage.py` does; return its exit code, what it said, and the traceback where it failed unexpectedly."""
    from django.core.management import CommandError, call_command

    out, trace, code = StringIO(), "", 0
    try:
        call_command(command, *CALLS[command], stdout=out, stderr=out)
    except CommandError as error:
        code, _ = error.returncode, out.write(str(error))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        code, trace = -1, traceback.format_exc()
    return {"command": command, "code": code, "said": out.getvalue(), "trace": trace}


def main(commands: list[str]) -> None:
    django.setup()
    with mock.patch("outbox.consuming.worker.PATIENCE_SECONDS", 0.5):
        for command in commands or CALLS:
            sys.stdout.write(f"{json.dumps(run(command))}\n")


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.outbox.management.settings")
    main(sys.argv[1:])
