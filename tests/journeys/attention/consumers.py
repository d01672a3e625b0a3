"""A handler that does what its message says."""

from __future__ import annotations

import threading

from outbox import Reject, consumer


@consumer(topic="orders", group="shipping")
def ship(message: dict[str, str], context: object) -> None:
    if message["do"] == "hang":
        threading.Event().wait(60)
    if message["do"] == "reject":
        raise Reject("no such parcel")
