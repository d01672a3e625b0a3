"""A handler that does what its message says: nothing, or hold on while a file is there."""

import time
from pathlib import Path
from typing import Any

from outbox import consumer


@consumer(topic="work", group="endings")
def work(message: dict[str, Any], context: Any) -> None:
    if path := message.get("waits_while"):
        Path(path).with_suffix(".begun").touch()
        while Path(path).exists():
            time.sleep(0.02)
