"""
The shop's settings for the comparison. All three ways use one RabbitMQ.

Celery is configured for safety: publisher confirms here; late acknowledgement, redelivery of the tasks of killed workers, durable
queues and persistent messages in the shop's settings and Celery's defaults.
"""

import os

from project.demo.compare.shop import way
from project.settings import *  # noqa: F403
from project.settings import OUTBOX as SHOP_OUTBOX

NODE = os.environ["DEMO_RABBITMQ"]  # host:port

ROOT_URLCONF = "project.demo.compare.shop.urls"

CELERY_BROKER_URL = f"amqp://guest:guest@{NODE}//"
CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}
CELERY_IMPORTS = ["project.demo.compare.shop.tasks"]
CELERY_TASK_DEFAULT_QUEUE = f"shop-{way()}"

OUTBOX = {
    **SHOP_OUTBOX,
    "BROKERS": {
        "default": {
            "BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker",
            "OPTIONS": {"NODES": [NODE]},
        },
    },
    "CELERY_WAKEUP": False,
}

# A view of the shop publishes half first, for which RabbitMQ has no half messages. The comparison does not use that view.
SILENCED_SYSTEM_CHECKS = ["outbox.E035"]
