"""One step of a periodic task: what may go wrong without anybody's fault is a line in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from django.db import InterfaceError, OperationalError

from outbox.errors import BrokerUnavailable, LaneNotHeld, NotMigrated
from outbox.logs import get_logger

logger = get_logger(__name__)

EXPECTED = (psycopg.OperationalError, psycopg.InterfaceError, OperationalError, InterfaceError, BrokerUnavailable)


def try_step(step: Callable[..., object], *args: Any, **options: Any) -> None:
    """Run a step; log an outage of database or broker. The next task does the step again."""
    try:
        step(*args, **options)
    except LaneNotHeld as error:
        logger.debug("%s", error)  # others are at work
    except NotMigrated as error:
        logger.info("%s", error)
    except EXPECTED as error:
        logger.warning("%s does not succeed now: %s", step.__qualname__, str(error).strip())
