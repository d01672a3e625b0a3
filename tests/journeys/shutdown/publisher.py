"""Publishes as many messages as each line of its input says, each in a transaction of its own, as soon as that is possible."""

import json
import sys
import time

import django
from django.db import InterfaceError, OperationalError, close_old_connections

django.setup()

from outbox import atomic, publish_raw  # noqa: E402


def publish(body: object) -> None:
    while True:
        try:
            with atomic():
                publish_raw("work", body)
        except (OperationalError, InterfaceError):
            close_old_connections()
            time.sleep(0.02)
        else:
            return


for line in sys.stdin:
    count, body = json.loads(line)
    for _ in range(count):
        publish(body)
    print(count, flush=True)  # noqa: T201
