"""
Sends tasks in a transaction, and one that is rolled back; prints their ids.

    python -m tests.journeys.celery_tasks.publisher FIRST COUNT [killed]

killed: by SIGKILL, right after the commit.
"""

import os
import signal
import sys

import django
from django.db import transaction

django.setup()

from tests.journeys.celery_tasks.app import run  # noqa: E402  (its task sends through models)

first, count = int(sys.argv[1]), int(sys.argv[2])
with transaction.atomic():
    ids = [run.delay_in_transaction(number).id for number in range(first, first + count)]
    print(*ids, flush=True)  # noqa: T201
with transaction.atomic():
    run.delay_in_transaction(-1)
    transaction.set_rollback(True)
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
