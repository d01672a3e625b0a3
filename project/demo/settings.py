"""The shop's settings for the demo's processes, with shorter times, so that a day of orders takes half a minute."""

import json
import os
from datetime import timedelta

from project.settings import *  # noqa: F403
from project.settings import OUTBOX as SHOP_OUTBOX

# A relay that is killed after its decision leaves half messages. Here the broker sends check-backs about them long before the
# sweep of another relay would commit them, so that the demo shows the check-back endpoint at work.
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
quick = {"session.timeout.ms": 6000}  # the server's minimum; then the partitions of a killed consumer go to another one
KAFKA = {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": {**kafka, "CLIENT": quick}}

# RabbitMQ and Kafka have no half messages, so the view that publishes half first cannot work. The demo does not call it.
SILENCED_SYSTEM_CHECKS = ["outbox.E035"] if rabbitmq or kafka else []

OUTBOX = {
    **SHOP_OUTBOX,
    "BROKERS": {"default": ROCKETMQ if node else RABBITMQ if rabbitmq else KAFKA if kafka else EMBEDDED},
    "RELAY": {"SWEEP_AGE": timedelta(seconds=10)},
    "CONSUMER": {"INVISIBLE": timedelta(seconds=node.get("invisible", 3))},  # then messages of a killed consumer are redelivered
    "CHECK_BACK": {"URL": os.environ.get("DEMO_CHECK_BACK_URL", ""), "SECRETS": os.environ.get("DEMO_SECRET", "").split()},
}
