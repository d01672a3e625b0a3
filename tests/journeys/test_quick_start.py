"""The README, followed in a fresh project, with the package as it is here. test_wheel.py installs it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from project.servers.rabbitmq import RabbitMQ
from tests import rabbitmq_node
from tests.journeys import readme
from tests.journeys.newcomer.project import CELERY_APP
from tests.journeys.readme import ROOT
from tests.waiting import wait_until

LINES = 150
EXAMPLE_LINES = 35
SECONDS = 60

IMPORTS = """
from django.db import transaction
from outbox import publish
from shop.messages import OrderPlaced
from shop.models import Order
from shop.tasks import send_receipt
"""


class Project:
    """A project of Django's, and what its shell says."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._started: list[subprocess.Popen[bytes]] = []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._variables = {**os.environ, "DATABASE_URL": database, "PYTHONPATH": str(ROOT), "PATH": path}
        self._variables.pop("DJANGO_SETTINGS_MODULE", None)
        self.run("django-admin startproject mysite . && python manage.py startapp shop")

    def run(self, line: str) -> str:
        """Type a line into a shell; return what it says."""
        shell = ["sh", "-c", line]
        done = subprocess.run(
            shell, cwd=self.folder, env=self._variables, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str, stack: ExitStack) -> None:
        """Start a process that runs until the stack is left."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(shlex.split(line), cwd=self.folder, env=self._variables, stdout=log, stderr=log)
        self._started.append(process)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the processes run."""
        wait_until(lambda: condition() or any(process.poll() is not None for process in self._started), SECONDS)
        assert condition(), self.log.read_text()

    def replace(self, name: str, old: str, new: str) -> None:
        """Replace a text in a file."""
        text = (self.folder / name).read_text()
        assert old in text, old
        (self.folder / name).write_text(text.replace(old, new))


@pytest.fixture
def project(tmp_path, fresh_database):
    return Project(tmp_path, fresh_database)


@pytest.fixture
def virtual_host():
    """A virtual host of a RabbitMQ: (the node, its name)."""
    node, name = rabbitmq_node.server(), "readme"
    node.control("add_vhost", name)
    node.control("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
    yield node, name
    node.control("delete_vhost", name)


class TestTheReadme:
    def test_is_short(self):
        example = sum(len(lines.strip().splitlines()) for _, _, lines in readme.files(readme.EXAMPLE))

        assert len(readme.text().splitlines()) <= LINES
        assert 0 < example <= EXAMPLE_LINES

    @pytest.mark.timeout(180)
    def test_leads_to_a_message_that_is_handled(self, project):
        migrate, relay, consume, order, look = readme.commands(readme.EXAMPLE)

        readme.write(project.folder)
        project.run(migrate)
        project.run(order)
        project.run(f"{relay} --once")
        project.run(f"{consume} --until-idle")

        assert "'points': 10" in project.run(look)
        assert "1 passed" in project.run("python -m pytest -p outbox.testing.plugin --ds mysite.settings shop/tests.py")

    @pytest.mark.rabbitmq
    @pytest.mark.skipif(not RabbitMQ.is_here(), reason="There is no rabbitmq-server: apt-get install rabbitmq-server.")
    @pytest.mark.timeout(240)
    def test_leads_to_a_task_and_a_message_through_rabbitmq_and_celery(self, project, virtual_host, fresh_database):
        node, name = virtual_host
        readme.write(project.folder, also=["with RabbitMQ", "with tasks", "on Celery"])
        project.replace("mysite/settings.py", '["localhost:5672"]', f'["{node.address}"], "VIRTUAL_HOST": "{name}"')
        project.replace("mysite/settings.py", "\nOUTBOX =", f'\nCELERY_BROKER_URL = "{node.url[:-1]}{name}"\nOUTBOX =')
        (project.folder / "mysite/celery.py").write_text(CELERY_APP)
        (project.folder / "mysite/__init__.py").write_text("from mysite.celery import app\n")
        migrate, *_ = readme.commands(readme.EXAMPLE)
        project.run(migrate)

        with ExitStack() as stack, psycopg.connect(fresh_database, autocommit=True) as books:
            for line in readme.commands(readme.RUN):
                project.start(line, stack)
            project.run(f"python manage.py shell --no-imports -c {shlex.quote(IMPORTS + readme.introduction())}")

            project.wait_until(lambda: books.execute("SELECT points FROM shop_order").fetchall() == [(10,)])
            project.wait_until(lambda: "receipt of order 1" in project.log.read_text())
