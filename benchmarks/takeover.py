"""A relay is killed (SIGKILL) between half message and decision; another one runs. When is its batch sent?"""

from __future__ import annotations

import signal
import statistics

from django.db import transaction

from benchmarks.figure import Figure
from benchmarks.messages import BenchOrder
from benchmarks.processes import command, count, is_stopped, is_up, wait_until
from outbox import publish

UNSENT = "SELECT count(*) FROM outbox_batch WHERE state IN (0, 1, 2)"
WAITING = "SELECT count(*) FROM outbox_ticket"


def measure(scale: float) -> list[Figure]:
    """Take the median of some kills."""
    seen = [_kill_one() for _ in range(max(2, int(5 * scale)))]
    note = f"slowest of {len(seen)}: {max(seen):.2f} s"
    return [Figure("kill -9 of a relay to batch sent again", statistics.median(seen), "s", 2, at_most=True, note=note)]


def _kill_one() -> float:
    """Pause the second relay while the first claims the message and dies; return the seconds from then on."""
    doomed = command("outbox_relay", "--broker", "default", OUTBOX_FAILPOINTS="relay.after_half=kill")
    with command("outbox_relay", "--broker", "default") as heir, doomed as first:
        wait_until(lambda: is_up(heir) and is_up(first), 30, "two relays")
        heir.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(heir.pid), 30, "the stop of the second relay")
        with transaction.atomic():
            publish(BenchOrder(order_id=1, customer="17850", total="15.30"))
        died = wait_until(lambda: first.poll() is not None, 30, "the death of the first relay")
        heir.send_signal(signal.SIGCONT)
        sent = wait_until(lambda: not count(UNSENT) and not count(WAITING), 30, "the batch sent")
    return sent - died
