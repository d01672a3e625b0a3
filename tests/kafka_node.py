"""A real Kafka, one for all tests of a process, started by the first that needs it."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from django.conf import settings

from project.servers.kafka import Kafka

JARS = Path(settings.BASE_DIR) / "var/kafka/lib"


@cache
def server() -> Kafka:
    home = Path(tempfile.mkdtemp(prefix="outbox-kafka-"))
    found = Kafka(home, jars=JARS)
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    atexit.register(found.stop)
    found.start()
    return found
