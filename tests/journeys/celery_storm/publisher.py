"""
A process that sends numbered tasks until it is stopped: `python -m tests.journeys.celery_storm.publisher FIRST`.

Each number is written into a table by the transaction of its task. Every fifth transaction is rolled back; every fiftieth task is
one that the server refuses.
"""

import sys
import time
from contextlib import suppress

import django

django.setup()

from django.db import Error, connection, transaction  # noqa: E402

from tests.journeys.celery_storm.app import run  # noqa: E402
from tests.journeys.celery_storm.given import GOOD, POISON  # noqa: E402

PAUSE = 0.05  # seconds

NOTE = "INSERT INTO storm_published (number, kind, task_id) VALUES (%s, %s, %s)"


def publish(number: int) -> None:
    """Send a task and write its number down, in one transaction."""
    kind = POISON if number % 50 == 7 else GOOD
    with transaction.atomic(), connection.cursor() as cursor:
        task = run.apply_in_transaction((number,), queue=kind)
        cursor.execute(NOTE, [number, kind, task.id])
        if number % 5 == 0:
            transaction.set_rollback(True)


def main() -> None:
    """Publish for ever."""
    number = int(sys.argv[1])
    while True:
        with suppress(Error):
            publish(number)
        number += 1
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
