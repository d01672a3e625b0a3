"""Handlers that do what their message says."""

import threading
import time
from datetime import timedelta

from outbox import Reject, RetryPolicy, consumer
from tests.journeys.attention.given import given

if given["celery"]:
    from tests.journeys.attention import app  # noqa: F401


def handle(message: dict[str, str], context: object) -> None:
    if given["mended"]:
        return
    if message["do"] == "hang":
        threading.Event().wait(600)
    if message["do"] == "slow":
        time.sleep(1)
    if message["do"] == "fail":
        raise ValueError("the order has no address")
    if message["do"] == "reject":
        raise Reject("no such parcel")


RETRY = RetryPolicy(limit=1000, delays=[timedelta(seconds=5)])

for group in given["groups"]:
    for topic in sorted({*given["topics"]} & {*given["handles"]}):
        consumer(topic=topic, group=group, retry=RETRY)(handle)
