"""One PostgreSQL for all tests here, and the processes of each."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.conf import settings as django_settings

from tests.journeys.shutdown.scene import Scene, Server, end
from tests.waiting import wait_until

collect_ignore_glob = [] if importlib.util.find_spec("rocketmq") else ["test_rocketmq.py"]

TABLES = """
SELECT string_agg(relname, ', ') FROM pg_class
WHERE relname LIKE 'outbox\\_%' AND relkind IN ('r', 'p') AND NOT relispartition
  AND relname NOT IN ('outbox_source', 'outbox_topic', 'outbox_embedded_topic')
"""

COMMANDS = ["outbox_relay", "outbox_consume"]


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "pg")
        environment = {
            **os.environ,
            "DATABASE_URL": server.url,
            "DJANGO_SETTINGS_MODULE": "tests.journeys.shutdown.settings",
        }
        command = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
        subprocess.run(command, env=environment, cwd=django_settings.BASE_DIR, check=True)
        yield server
        server.stop()


@pytest.fixture
def options() -> dict[str, object]:
    """OPTIONS of a RocketMQ broker; none: the embedded one."""
    return {}


@pytest.fixture
def scene(server: Server, tmp_path: Path, options: dict[str, object]) -> Iterator[Scene]:
    with psycopg.connect(server.url) as connection:
        [(tables,)] = connection.execute(TABLES).fetchall()
        connection.execute(f"TRUNCATE {tables}")
    scene = Scene(server, tmp_path, options)
    yield scene
    server.thaw()
    print(f"sent {scene.sent()}, handled {scene.handled()}\n{scene.logs()}")  # noqa: T201  (shown where the test failed)
    scene.close()


@pytest.fixture(params=COMMANDS)
def busy(request: pytest.FixtureRequest, scene: Scene) -> subprocess.Popen[str]:
    """A relay or a consumer with much to do."""
    scene.publish(400)
    relay = scene.start("django", "outbox_relay")
    if request.param == "outbox_relay":
        wait_until(scene.sent)
        return relay
    wait_until(lambda: scene.sent() == 400)
    end(relay)
    consumer = scene.start("django", "outbox_consume")
    wait_until(scene.handled)
    return consumer


@pytest.fixture(params=COMMANDS)
def idle(request: pytest.FixtureRequest, scene: Scene) -> subprocess.Popen[str]:
    """A relay or a consumer that waits."""
    process = scene.start("django", request.param)
    is_relay = request.param == "outbox_relay"
    wait_until(lambda: scene.backends("outbox listener" if is_relay else "outbox embedded broker"))
    return process
