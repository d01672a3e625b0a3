"""Migrates a database and publishes messages and tasks; with an argument, publishes until it is killed."""

import sys
import time

import django

django.setup()

from celery import shared_task  # noqa: E402
from django.core.management import call_command  # noqa: E402

from outbox import atomic, publish  # noqa: E402
from outbox.celery import send_in_transaction  # noqa: E402
from tests.journeys.quiet.consumers import Quiet  # noqa: E402


@shared_task(name="tests.quiet")
def quiet() -> None: ...


def fill(number: int) -> None:
    with atomic():
        publish(Quiet(number=number))
        send_in_transaction(quiet.s())


if len(sys.argv) == 1:
    call_command("migrate", verbosity=0)
    for number in range(100):
        fill(number)
while len(sys.argv) > 1:
    fill(0)
    time.sleep(0.1)
