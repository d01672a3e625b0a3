"""A journey: topics and a group of its own, processes on the test's database, and what their handlers wrote."""

import importlib.util
import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from outbox import atomic, publish_raw
from outbox.failpoints import VARIABLE as FAILPOINTS
from outbox.message import TopicType
from tests.journeys.processes import Processes
from tests.journeys.rocketmq.names import VARIABLE, names, outbox
from tests.journeys.tables import rows, tables

HERE = Path(__file__).parent

collect_ignore_glob = [] if importlib.util.find_spec("rocketmq") else ["test_*.py"]

QUEUES = 8  # of the ordered topic

TABLES = """
CREATE TABLE journey_effect (id bigserial, topic text, key text, number int);
CREATE TABLE journey_stuck (key text)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.rocketmq)
            item.add_marker(pytest.mark.timeout(600))


class Journey(Processes):
    """
    Publishes, starts processes, and reads what came of it.

    Args:
        folder: for logs, permits to kill and Celery's files.
    """

    def __init__(self, folder: Path, options: dict[str, Any], unique: str) -> None:
        super().__init__(folder, "tests.journeys.rocketmq.settings")
        self.unique = unique
        self.options = options
        self.with_ordered = True  # consumers read the ordered topic, too
        self.work, self.steps, self.group = names(unique)

    def publish(self, topic: str, *numbers: int, key: str = "") -> None:
        """Publish numbered messages, each in a transaction of its own."""
        for number in numbers:
            with atomic():
                publish_raw(topic, {"number": number}, key=key)

    def start(self, *command: str, failpoints: str = "", **variables: str) -> subprocess.Popen[bytes]:
        told = {"unique": self.unique, "options": self.options, "ordered": self.with_ordered}
        return super().start(*command, **{VARIABLE: json.dumps(told), FAILPOINTS: failpoints, **variables})

    def consume(self, **options: str) -> subprocess.Popen[bytes]:
        return self.start("django", "outbox_consume", "--group", self.group, **options)

    def effects(self, topic: str) -> list[tuple[str, int]]:
        """List key and number of what was handled in a topic, in that order."""
        return rows("SELECT key, number FROM journey_effect WHERE topic = %s ORDER BY id", [topic])

    def stick(self, key: str) -> None:
        """Make the handler of the ordered topic fail for a key."""
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO journey_stuck VALUES (%s)", [key])

    def unstick(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM journey_stuck")

    def kills(self, place: str) -> str:
        """Return the failpoint that kills a process where, and each time, it is permitted."""
        return f"{place}=kill:{self.folder / place}"

    def permit(self, place: str) -> None:
        (self.folder / place).touch()

    def is_used(self, place: str) -> bool:
        """Whether the last permit was."""
        return not (self.folder / place).exists()


@pytest.fixture
def journey(tmp_path: Path, transactional_db: None, settings: Any) -> Iterator[Journey]:
    from project.celery import app
    from tests.rocketmq_node import server

    node = server()
    found = Journey(tmp_path, {"ENDPOINTS": node.endpoints, "NAME_SERVERS": [node.name_server]}, uuid.uuid4().hex[:8])
    node.make_topic(found.work, TopicType.TRANSACTION)
    node.make_topic(found.steps, TopicType.FIFO, QUEUES)
    node.make_group(found.group)
    node.make_group(f"{found.group}_fifo", is_ordered=True)
    settings.OUTBOX = outbox(found.unique, found.options)
    files = app.conf.broker_transport_options
    before = files["folder"]
    files["folder"] = str(tmp_path / "celery")  # wakeups of this process, too
    with tables(TABLES):
        yield found
        found.close()
        files["folder"] = before
        print(found.logs())  # noqa: T201  (pytest shows it where the test failed)
