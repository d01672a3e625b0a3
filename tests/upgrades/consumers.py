"""
Handlers that write down what they handle. Nothing keeps them from writing it twice but the inbox.

Where the variable MISBEHAVES is set, those of one group do what their message says.
"""

import os
import signal
from datetime import timedelta
from typing import Any

from django.db import connection

from outbox import Context, Reject, RetryLater, RetryPolicy, consumer

GROUPS = {"mail": ["orders", "notes", "steps", "alarms", "held", "moods"], "stock": ["orders"]}
NOTE = "INSERT INTO upgrade_effect (consumer_group, what) VALUES (%s, %s)"


def handle(body: dict[str, Any], context: Context) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [context.group, body["what"]])
    if "MISBEHAVES" in os.environ and context.group == "mail":
        misbehave(body["do"], context.delivery_count)


def misbehave(how: str, delivery_count: int) -> None:
    match how:
        case "fail":
            raise ValueError("not yet")
        case "reject":
            raise Reject("of no use")
        case "kill" if delivery_count == 1:
            raise RetryLater(0)  # a first run that never ends is not written down
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


for group, topics in GROUPS.items():
    for topic in topics:
        consumer(topic=topic, group=group, retry=RetryPolicy(delays=[timedelta(hours=1)]))(handle)
