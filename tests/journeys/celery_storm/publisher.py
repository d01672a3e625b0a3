"""
Sends numbered tasks.

Each number is written into a table by the transaction of its task. Every fifth transaction is rolled back; every fiftieth task is
one that the server refuses.
"""

from django.db import connection, transaction

from tests.journeys.celery_storm.app import run
from tests.journeys.celery_storm.given import GOOD, POISON
from tests.journeys.publish import Undone

PAUSE = 0.05  # seconds

NOTE = "INSERT INTO storm_published (number, kind, task_id) VALUES (%s, %s, %s)"


def publish(number: int) -> None:
    """Send a task and write its number down, in one transaction."""
    kind = POISON if number % 50 == 7 else GOOD
    with transaction.atomic(), connection.cursor() as cursor:
        task = run.apply_in_transaction((number,), queue=kind)
        cursor.execute(NOTE, [number, kind, task.id])
        if number % 5 == 0:
            raise Undone
