"""
What a new user reads after a mistake: a small project with one mistake in it, and what Django's commands print then.

MISTAKES_TABLE names a Markdown file for what was printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from django.db import connection

from project.settings import BASE_DIR

TABLE = os.environ.get("MISTAKES_TABLE", "")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SETTINGS = """
import os, dj_database_url
SECRET_KEY = "s"
USE_TZ = True
ROOT_URLCONF = "urls"
WSGI_APPLICATION = "mysite.wsgi"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "outbox", "outbox.embedded", "shop"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
OUTBOX = {"TOPICS": {"orders": {}}, "CELERY_WAKEUP": False}
"""
MODELS = """
from django.db import models
class Order(models.Model):
    customer = models.CharField(max_length=100)
"""
MESSAGES = """
from outbox import Message
class OrderPlaced(Message):
    order_id: int
    class Meta:
        topic = "orders"
"""
CONSUMERS = """
from outbox import consumer
from shop.messages import OrderPlaced
@consumer(OrderPlaced, group="points")
def give_points(message, context): ...
"""
IMPORTS = "from outbox import *; from outbox import publish, publish_raw; from django.db import transaction, connection; "
IMPORTS += "from shop.models import Order; from shop.messages import OrderPlaced; from django.db.transaction import atomic\n"
CHECK = ("check",)
DATABASE = ("check", "--database", "default")
DEPLOY = ("check", "--deploy")


class Mistake(NamedTuple):
    """
    A mistake, and what helps.

    Args:
        words: what has to be among the words printed.
        files: what is different in the project: a name ending in "+" is added to.
    """

    name: str
    words: str
    command: tuple[str, ...] = CHECK
    files: Mapping[str, str] = {}


def settings(line: str) -> dict[str, str]:
    return {"settings.py+": line}


def broker(backend: str, options: str = "{}") -> str:
    return f"OUTBOX['BROKERS'] = {{'default': {{'BACKEND': 'outbox.brokers.{backend}', 'OPTIONS': {options}}}}}"


def publishing(call: str) -> tuple[str, ...]:
    return shell(f"with atomic(): {call}")


def shell(code: str) -> tuple[str, ...]:
    return "shell", "--no-imports", "-c", IMPORTS + code


MISTAKES = [
    # Settings
    Mistake(
        "outbox is not in INSTALLED_APPS",
        'INSTALLED_APPS += ["outbox"]',
        publishing("publish(OrderPlaced(order_id=1))"),
        settings('INSTALLED_APPS.remove("outbox")'),
    ),
    Mistake(
        "outbox.embedded is not in INSTALLED_APPS", "outbox.embedded", files=settings('INSTALLED_APPS.remove("outbox.embedded")')
    ),
    Mistake("OUTBOX is a list", "dict", files=settings("OUTBOX = ['orders']")),
    Mistake("TOPICS is a list", "TOPICS", files=settings("OUTBOX = {'TOPICS': ['orders']}")),
    Mistake("a setting is misspelt", "TOPICS", files=settings("OUTBOX = {'TOPIC': {'orders': {}}}")),
    Mistake("an option of a topic is misspelt", "TYPE", files=settings("OUTBOX = {'TOPICS': {'orders': {'TYP': 'fifo'}}}")),
    Mistake(
        "a topic has a type that does not exist", "fifo", files=settings("OUTBOX = {'TOPICS': {'orders': {'TYPE': 'ordered'}}}")
    ),
    Mistake(
        "a topic names a broker that does not exist",
        "kafka",
        files=settings("OUTBOX = {'TOPICS': {'orders': {'BROKER': 'kafka'}}}"),
    ),
    Mistake("BACKEND cannot be imported", "such as outbox.embedded.EmbeddedBroker", files=settings(broker("RabbitMQ"))),
    Mistake("a retention is a number", "timedelta", files=settings("OUTBOX['RETENTION'] = 7")),
    Mistake(
        "the database is SQLite",
        "PostgreSQL",
        files=settings("DATABASES['default'] = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'db'}"),
    ),
    Mistake(
        "a router keeps the outbox out",
        "outbox",
        DATABASE,
        files={
            "settings.py+": "DATABASE_ROUTERS = ['routers.Never']",
            "routers.py": "class Never:\n    def allow_migrate(self, db, app_label, **hints): return app_label != 'outbox'\n",
        },
    ),
    Mistake(
        "a router names a database that does not exist",
        "db_for_write",
        files={
            "settings.py+": "DATABASE_ROUTERS = ['routers.Other']",
            "routers.py": "class Other:\n    def db_for_write(self, model, **hints): return 'other'\n",
        },
    ),
    Mistake("migrate was forgotten", "migrate", DATABASE),
    # Brokers
    Mistake("NODES of RabbitMQ is a text", "list", files=settings(broker("rabbitmq.RabbitMQBroker", "{'NODES': 'rabbit:5672'}"))),
    Mistake(
        "an option of RabbitMQ is misspelt",
        "VIRTUAL_HOST",
        files=settings(broker("rabbitmq.RabbitMQBroker", "{'NODES': ['r'], 'VHOST': 'a'}")),
    ),
    Mistake("Kafka has no servers", "SERVERS", files=settings(broker("kafka.KafkaBroker"))),
    Mistake(
        "RabbitMQ does not run",
        "Start it",
        ("outbox_doctor",),
        files=settings(broker("rabbitmq.RabbitMQBroker", "{'NODES': ['127.0.0.1:1']}")),
    ),
    Mistake("the memory broker in production", "BACKEND", DEPLOY, files=settings(broker("memory.MemoryBroker"))),
    # Messages
    Mistake("a message has no topic", "topic", files={"shop/messages.py": MESSAGES.replace('topic = "orders"', "pass")}),
    Mistake(
        "a message's topic is not in the settings", "TOPICS", files={"shop/messages.py": MESSAGES.replace("orders", "oders")}
    ),
    Mistake(
        "a message's field cannot be JSON",
        "order",
        files={"shop/messages.py": "from shop.models import Order\n" + MESSAGES.replace("order_id: int", "order: Order")},
    ),
    Mistake("a message's key is no field", "order_id", files={"shop/messages.py": MESSAGES + '        key = "order"\n'}),
    Mistake(
        "a field has no annotation", "annotation", files={"shop/messages.py": MESSAGES.replace("order_id: int", "order_id = 1")}
    ),
    Mistake(
        "two messages have one type",
        "OrderPlaced",
        files={"shop/messages.py+": 'class Other(Message):\n    class Meta:\n        topic, type = "orders", "OrderPlaced"\n'},
    ),
    Mistake("an option of Meta is misspelt", "version", files={"shop/messages.py": MESSAGES + "        vresion = 2\n"}),
    # Consumers
    Mistake(
        "a consumer is a coroutine's generator",
        "yield",
        files={"shop/consumers.py": CONSUMERS.replace("context): ...", "context):\n    yield message")},
    ),
    Mistake(
        "a consumer takes no argument", "argument", files={"shop/consumers.py": CONSUMERS.replace("(message, context)", "()")}
    ),
    Mistake(
        "@consumer without arguments",
        "group",
        files={"shop/consumers.py": "from outbox import consumer\n@consumer\ndef give(message): ...\n"},
    ),
    Mistake("a consumer's group is missing", "group", files={"shop/consumers.py": CONSUMERS.replace(', group="points"', "")}),
    Mistake(
        "an old option of a consumer",
        "idempotency_key",
        files={"shop/consumers.py": CONSUMERS.replace('group="points"', 'group="points", dedupe=str')},
    ),
    Mistake(
        "two handlers of a type in one group",
        "points",
        files={"shop/consumers.py+": '@consumer(OrderPlaced, group="points")\ndef again(message): ...\n'},
    ),
    Mistake(
        "handlers.py instead of consumers.py",
        "consumers.py",
        ("outbox_consume", "--group", "points", "--once"),
        files={"shop/handlers.py": CONSUMERS, "shop/consumers.py": ""},
    ),
    Mistake("a group is misspelt", "points", ("outbox_consume", "--group", "point", "--once")),
    # Publishing
    Mistake("publish() outside a transaction", "atomic", shell("publish(OrderPlaced(order_id=1))")),
    Mistake("publish() in on_commit", "on_commit", publishing("transaction.on_commit(lambda: publish(OrderPlaced(order_id=1)))")),
    Mistake("publish() of a dict", "publish_raw", publishing("publish({'order_id': 1})")),
    Mistake("publish_raw() to an unknown topic", "TOPICS", publishing("publish_raw('oders', {})")),
    Mistake("publish() of a field of a wrong type", "order_id", publishing("publish(OrderPlaced(order_id='x'))")),
    Mistake("publish(about=) of a row that is not saved", "save", publishing("publish(OrderPlaced(order_id=1), about=Order())")),
    Mistake("publish(delay=) of a number", "timedelta", publishing("publish(OrderPlaced(order_id=1), delay=5)")),
    Mistake("publish(headers=) of a list", "dict", publishing("publish(OrderPlaced(order_id=1), headers=['a'])")),
    Mistake("publish() before migrate", "migrate", publishing("publish(OrderPlaced(order_id=1))")),
    # Celery
    Mistake(
        "a Celery app without the schedule of the outbox",
        "beat_schedule",
        files=settings(
            "OUTBOX['CELERY_WAKEUP'] = True\nimport celery\ncelery_app = celery.Celery('mysite')\ncelery_app.set_default()"
        ),
    ),
    Mistake(
        "beat_schedule(consume=) of a text",
        "list",
        files=settings("from outbox.schedule import beat_schedule\nCELERY_BEAT_SCHEDULE = beat_schedule(consume='points')"),
    ),
    # The check-back endpoint
    Mistake("a secret of the endpoint is short", "32", files=settings("OUTBOX['CHECK_BACK'] = {'SECRETS': ['whsec_c2hvcnQ=']}")),
    Mistake("a secret of the endpoint has no prefix", "whsec_", files=settings("OUTBOX['CHECK_BACK'] = {'SECRETS': ['secret']}")),
    Mistake("SECRETS is a text", "list", files=settings("OUTBOX['CHECK_BACK'] = {'SECRETS': 'whsec_c2hvcnQ='}")),
    Mistake(
        "the endpoint's URL without a secret",
        "SECRETS",
        files=settings("OUTBOX['CHECK_BACK'] = {'URL': 'https://shop.example/outbox/check-back/'}"),
    ),
    # REST framework, templates, URLs
    Mistake(
        "the endpoint is not among the URLs",
        "outbox.api.urls",
        files=settings("OUTBOX['CHECK_BACK'] = {'URL': 'https://shop.example/', 'SECRETS': ['whsec_' + 'c2hvcnQ' * 8 + '=']}"),
    ),
]
UNMIGRATED = {"migrate was forgotten", "publish() before migrate"}


@pytest.fixture(scope="module")
def databases(django_db_setup: None, django_db_blocker: Any) -> Iterator[dict[bool, str]]:
    """Return the URLs of a database with tables (True), and of one without."""
    with django_db_blocker.unblock():
        connection.ensure_connection()
        info = connection.connection.info
        names = {is_migrated: f"{info.dbname}_mistakes_{is_migrated:d}" for is_migrated in (True, False)}
        with psycopg.connect(info.dsn, password=info.password, dbname="postgres", autocommit=True) as server:
            for name in names.values():
                server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
                server.execute(f'CREATE DATABASE "{name}"')
            place = f"?host={info.host}"
            yield {key: f"postgresql://{info.user}@:{info.port}/{name}{place}" for key, name in names.items()}
            for name in names.values():
                server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(scope="module")
def migrated(databases: dict[bool, str], tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    run(write(tmp_path_factory.mktemp("migrated"), {}), databases[True], "migrate")
    return databases


@pytest.fixture(scope="module")
def printed() -> Iterator[list[tuple[str, str, str]]]:
    rows: list[tuple[str, str, str]] = []
    yield rows
    if TABLE:
        cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
        head = ["| mistake | command | printed |", "|---|---|---|"]
        Path(TABLE).write_text("\n".join([*head, *(f"| {' | '.join(row)} |" for row in cells)]) + "\n")


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write the project with its mistake into a folder."""
    project = {
        "settings.py": SETTINGS,
        "urls.py": "urlpatterns = []\n",
        "shop/__init__.py": "",
        "shop/models.py": MODELS,
        "shop/messages.py": MESSAGES,
        "shop/consumers.py": CONSUMERS,
    }
    for name, text in files.items():
        is_added = name.endswith("+")
        project[name.rstrip("+")] = project[name.rstrip("+")] + text + "\n" if is_added else text
    (folder / "shop").mkdir()
    for name, text in project.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, url: str, *command: str) -> str:
    """Run a command of Django's in a project; return what it prints, a traceback by its last lines."""
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "settings",
        "DATABASE_URL": url,
        "PYTHONPATH": f"{folder}:{BASE_DIR}",
        "COLUMNS": "1000",
    }
    line = [sys.executable, "-m", "django", *command]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    text = done.stdout + done.stderr
    return re.sub(r"Traceback \(most recent call last\):\n(?:[ +|].*\n|\n(?=  ))*", "", text).strip()


class TestEachMistake:
    @pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
    def test_is_told_with_what_helps(
        self, mistake: Mistake, migrated: dict[bool, str], tmp_path: Path, printed: list[tuple[str, str, str]]
    ):
        url = migrated[mistake.name not in UNMIGRATED]

        text = run(write(tmp_path, mistake.files), url, *mistake.command)

        printed.append((mistake.name, mistake.command[0], text))
        assert mistake.words in text
