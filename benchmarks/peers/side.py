"""The publishing process of one package: runs the commands of its input, and answers each with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

import django
from django.core.management import call_command
from django.db import connection, transaction

from benchmarks.figure import percentile

CUSTOMER, TOTAL = "17850", "15.30"
PER_ROUND = 10
PER_TRANSACTION = 100


def main() -> None:
    django.setup()
    call_command("migrate", verbosity=0)
    from benchmarks.models import TABLE

    with connection.cursor() as cursor:
        cursor.execute(TABLE)
    package = import_module(f"benchmarks.peers.{os.environ['PEERS_PACKAGE']}")
    side = _Side(package.write)
    _answer([_version(package.DISTRIBUTION), package.RELAY_COMMAND])
    for line in sys.stdin:
        name, *numbers = line.split()
        _answer(getattr(side, name)(*map(float, numbers)))


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # ours, which is not installed here
        return "unreleased"


class _Side:
    def __init__(self, write: Callable[[str, str], int]) -> None:
        self._written = 0
        self._write = partial(self._count, write)

    def _count(self, write: Callable[[str, str], int], customer: str, total: str) -> int:
        self._written += 1
        return write(customer, total)

    def without(self) -> float:
        """Return the p50 of a transaction that writes the order alone, in microseconds."""
        from benchmarks.models import Order

        return _p50(lambda: Order.objects.create(customer=CUSTOMER, total=TOTAL))

    def along(self) -> float:
        """Return the p50 of one that writes the order and its message."""
        return _p50(lambda: self._write(CUSTOMER, TOTAL))

    def fill(self, count: float) -> int:
        """Write `count` messages, rounded up to hundreds; return how many are waiting."""
        for _ in range(0, int(count), PER_TRANSACTION):
            with transaction.atomic():
                for _ in range(PER_TRANSACTION):
                    self._write(CUSTOMER, TOTAL)
        return self._written

    def trickle(self, count: float, pause_seconds: float) -> dict[int, float]:
        """Write messages with a pause after each; return the commit time of each."""
        committed = {}
        for _ in range(int(count)):
            with transaction.atomic():
                number = self._write(CUSTOMER, TOTAL)
            committed[number] = time.time()
            time.sleep(pause_seconds)
        return committed


def _p50(work: Callable[[], object]) -> float:
    seen = []
    for _ in range(PER_ROUND):
        began = time.perf_counter()
        with transaction.atomic():
            work()
        seen.append((time.perf_counter() - began) * 1e6)
    return percentile(seen, 0.5)


if __name__ == "__main__":
    main()
