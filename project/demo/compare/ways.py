"""The three ways to send a message about rows of the same transaction, and the processes of each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from project.demo.compare import shop
from project.demo.compare.kills import WORKER
from project.demo.kills import LONG_RUNNING
from project.demo.stage import GROUPS, MANAGE

CELERY = [sys.executable, "-m", "celery", "-A", "project", "worker", "--concurrency", "4", "--loglevel", "WARNING"]


@dataclass(frozen=True, slots=True)
class Way:
    """
    One way to send.

    Args:
        title: the heading of its column.
        words: its name in lines of progress.
        processes: the processes beside the web server: name -> command.
    """

    name: str
    title: str
    words: str
    processes: Mapping[str, Sequence[str]]


DELAY = Way(shop.DELAY, "delay()", "task.delay() inside the transaction", {WORKER: CELERY})
ON_COMMIT = Way(shop.ON_COMMIT, "on_commit", "transaction.on_commit(task.delay)", {WORKER: CELERY})
OUTBOX = Way(
    shop.OUTBOX,
    "outbox",
    "publish(), a relay and consumers",
    {LONG_RUNNING: [*MANAGE, "outbox_relay"], **{group: [*MANAGE, "outbox_consume", "--group", group] for group in GROUPS}},
)
WAYS = (DELAY, ON_COMMIT, OUTBOX)
