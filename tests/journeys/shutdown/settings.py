"""The settings of processes whose servers go away: a database of their own, and the embedded broker or a RocketMQ."""

import json
import os
from datetime import timedelta

from tests.journeys.settings import *  # noqa: F403
from tests.journeys.settings import INSTALLED_APPS
from tests.journeys.shutdown import INVISIBLE, VARIABLE

options = json.loads(os.environ.get(VARIABLE, "{}"))

INSTALLED_APPS = [*INSTALLED_APPS, "tests.journeys.shutdown"]
ROCKETMQ = {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": options}
OUTBOX = {
    "BROKERS": {"default": ROCKETMQ if options else {"BACKEND": "outbox.embedded.EmbeddedBroker"}},
    "TOPICS": {"work": {"TYPE": "transaction"}},
    "CONSUMER": {"INVISIBLE": timedelta(seconds=float(os.environ.get(INVISIBLE, "5")))},
    "CELERY_WAKEUP": False,
}
