"""A handler that does what its message says, the worst included."""

import asyncio
import os
import signal
import sys
import threading
from datetime import timedelta

from outbox import RetryLater, RetryPolicy, consumer
from outbox.consuming import lease_thread
from project.shop.models import CartEntry

if seconds := os.environ.get("GIVE_UP_SECONDS"):
    lease_thread.GIVE_UP_SECONDS = float(seconds)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@consumer(
    topic="orders",
    group="poisoned",
    retry=RetryPolicy(limit=2, delays=[timedelta(milliseconds=50)], jitter=0),
    time_limit=timedelta(seconds=0.5),
)
def do_as_told(message: dict[str, str], context: object) -> None:
    CartEntry.objects.create(invoice=message["invoice"], change=1)
    match message["do"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            threading.Event().wait(0.4)
        case "exit":
            sys.exit(5)
        case "cancel":
            raise asyncio.CancelledError
        case "unspeakable":
            raise Unspeakable
        case "loop":
            while True:
                pass
        case "stuck":  # in a call that Python cannot break off
            threading.Lock().acquire() and threading.Event().wait(3600)
        case "never":
            raise RetryLater(timedelta.max)
