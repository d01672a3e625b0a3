"""The handlers whose start the latency benchmarks measure."""

from __future__ import annotations

import time

from django.conf import settings
from django.db import connection

from benchmarks.messages import Clocked, ClockedOnRocketMQ
from outbox import consumer

INSERT = "INSERT INTO bench_handled (number, handled_at) VALUES (%s, %s)"


@consumer(Clocked, group="bench")
def note(message: Clocked | ClockedOnRocketMQ, context: object) -> None:
    """Write down when the handler began."""
    began = time.time()
    with connection.cursor() as cursor:
        cursor.execute(INSERT, [message.number, began])


if "rocketmq" in settings.OUTBOX["BROKERS"]:
    consumer(ClockedOnRocketMQ, group="bench-rocketmq")(note)
