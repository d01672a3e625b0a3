"""The handler whose start the latency benchmark measures."""

from __future__ import annotations

import time

from django.db import connection

from benchmarks.messages import Clocked
from outbox import consumer

INSERT = "INSERT INTO bench_handled (number, handled_at) VALUES (%s, %s)"


@consumer(Clocked, group="bench")
def note(message: Clocked, context: object) -> None:
    """Write down when the handler began."""
    began = time.time()
    with connection.cursor() as cursor:
        cursor.execute(INSERT, [message.number, began])
