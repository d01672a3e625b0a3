"""Real Kafkas for all tests of a process, each started by the first that needs it."""

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from django.conf import settings

from project.servers.kafka import Kafka

JARS = Path(settings.BASE_DIR) / "var/kafka/lib"
PASSWORD = "p"
# Asks for a password, and lets "admin" do everything, and "relay" what it is allowed to.
SECURED = {
    "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.plaintext.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'username="admin" password="{PASSWORD}" user_admin="{PASSWORD}" user_relay="{PASSWORD}";',
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:admin;User:ANONYMOUS",
}


@cache
def server() -> Kafka:
    return _start({})


@cache
def secured_server() -> Kafka:
    return _start(SECURED)


def _start(changes: Mapping[str, str]) -> Kafka:
    home = Path(tempfile.mkdtemp(prefix="outbox-kafka-"))
    found = Kafka(home, jars=JARS, settings=changes)
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    atexit.register(found.stop)
    found.start()
    return found
