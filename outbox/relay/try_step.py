"""One step of a periodic task: an error is logged, and the next run does the step again."""

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
    """Run a step; log an error, so that the next steps are not left out."""
    try:
        step(*args, **options)
    except LaneNotHeld as error:
        logger.debug("%s", error)  # other relays are at work
    except NotMigrated as error:
        logger.info("%s", error)
    except EXPECTED as error:
        logger.warning("%s failed for now: %s", step.__qualname__, str(error).strip())
    except Exception as error:
        logger.exception("%s failed: %s", step.__qualname__, str(error).strip() or repr(error))
