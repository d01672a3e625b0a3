"""The shop's settings for the demo's processes. Times are shorter than a shop's, so that a day passes in half a minute."""

import json
import os
from datetime import timedelta

from project.settings import *  # noqa: F403
from project.settings import OUTBOX as SHOP_OUTBOX

# A relay that dies after its decision leaves half messages. Here the broker asks about them long before another relay
# would end them in its sweep, so that the check-back endpoint decides.
EMBEDDED = {
    "BACKEND": "outbox.embedded.EmbeddedBroker",
    "OPTIONS": {"DATABASE": "default", "CHECK_AFTER": timedelta(seconds=1), "CHECK_INTERVAL": timedelta(seconds=2)},
}

node = json.loads(os.environ.get("DEMO_ROCKETMQ", "{}"))
ROCKETMQ = {
    "BACKEND": "outbox.brokers.rocketmq.RocketMQBroker",
    "OPTIONS": {**node.get("options", {}), "CHECK_HORIZON": timedelta(seconds=node.get("check_horizon", 600))},
}

rabbitmq = json.loads(os.environ.get("DEMO_RABBITMQ", "{}"))
RABBITMQ = {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": rabbitmq}

kafka = json.loads(os.environ.get("DEMO_KAFKA", "{}"))
quick = {"session.timeout.ms": 6000}  # until a killed consumer's partitions go to another one: the server's least
KAFKA = {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": {**kafka, "CLIENT": quick}}

# These have no half messages, so the view that announces orders half first cannot work. The demo's customers do not call it.
SILENCED_SYSTEM_CHECKS = ["outbox.E035"] if rabbitmq or kafka else []

OUTBOX = {
    **SHOP_OUTBOX,
    "BROKERS": {"default": ROCKETMQ if node else RABBITMQ if rabbitmq else KAFKA if kafka else EMBEDDED},
    "RELAY": {"SWEEP_AGE": timedelta(seconds=10)},
    "CONSUMER": {"INVISIBLE": timedelta(seconds=node.get("invisible", 3))},  # what a killed consumer held comes back then
    "CHECK_BACK": {"URL": os.environ.get("DEMO_CHECK_BACK_URL", ""), "SECRETS": os.environ.get("DEMO_SECRET", "").split()},
}
