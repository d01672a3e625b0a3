"""
Publishes numbers until it is stopped: `python -m tests.journeys.publish MODULE FIRST`.

The module's `publish` gets one number after the other, each PAUSE seconds behind the last.
"""

import sys
import time
from contextlib import suppress
from importlib import import_module
from itertools import count

import django

STEP = 1_000_000  # between the first numbers of two publishers


class Undone(Exception):
    """Raised to roll a transaction back."""


def main() -> None:
    django.setup()
    from django.db import Error

    from outbox.errors import HalfNotStored

    module = import_module(sys.argv[1])
    for number in count(int(sys.argv[2])):
        with suppress(Undone, HalfNotStored, Error):
            module.publish(number)
        time.sleep(module.PAUSE)


if __name__ == "__main__":
    from tests.journeys import publish  # whose Undone is the one that modules raise

    publish.main()
