"""The settings of processes whose servers go away: a database of their own, and the embedded broker or a RocketMQ."""

import json
import os
from datetime import timedelta

from tests.journeys.shutdown import INVISIBLE, VARIABLE
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS

options = json.loads(os.environ.get(VARIABLE, "{}"))

del DATABASES["other"]
INSTALLED_APPS = [*(app for app in INSTALLED_APPS if not app.startswith("project.")), "tests.journeys.shutdown"]
ROOT_URLCONF = None
ROCKETMQ = {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": options}
OUTBOX = {
    "BROKERS": {"default": ROCKETMQ if options else {"BACKEND": "outbox.embedded.EmbeddedBroker"}},
    "TOPICS": {"work": {"TYPE": "transaction"}},
    "CONSUMER": {"INVISIBLE": timedelta(seconds=float(os.environ.get(INVISIBLE, "5")))},
    "CELERY_WAKEUP": False,
}
