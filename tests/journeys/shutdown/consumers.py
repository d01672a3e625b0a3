"""A handler that does what its message says: nothing, hold on while a file is there, or also catch each exception meanwhile."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from outbox import consumer
from tests.journeys.shutdown import TIME_LIMIT

limit = os.environ.get(TIME_LIMIT)


@consumer(topic="work", group="shutdown", time_limit=timedelta(seconds=float(limit)) if limit else None)
def work(message: dict[str, Any], context: Any) -> None:
    if path := message.get("waits_while"):
        Path(path).with_suffix(".begun").touch()
        while Path(path).exists():
            with suppress(BaseException if message.get("catches") else ()):
                time.sleep(0.1)
