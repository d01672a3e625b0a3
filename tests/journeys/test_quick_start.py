"""The README's quick start, read out of the README and followed in a fresh project."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from django.db import connection

ROOT = Path(__file__).resolve().parents[2]
DATABASE = "quick_start"
LINES = 30

SETTINGS = """
import os
import dj_database_url
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}
"""

ORDER = """
from django.test import Client
print(Client(SERVER_NAME="localhost").post("/orders/").content.decode())
"""

POINTS = "from shop.models import Order; print(list(Order.objects.values_list('points', flat=True)))"


@pytest.fixture
def database_url(django_db_blocker, db):
    """A database of its own on the test server; committed, for other processes read it."""
    info = connection.connection.info
    with psycopg.connect(info.dsn, password=info.password, dbname="postgres", autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {DATABASE}")
        server.execute(f"CREATE DATABASE {DATABASE}")
        yield f"postgresql://{info.user}@:{info.port}/{DATABASE}?host={info.host}"
        server.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


def blocks():
    """Read the quick start's files out of the README: (name, lines)."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Put it into a project") : text.index("Then, each in a shell of its own")]
    found = re.findall(r"```python\n# (\S+)\n(.*?)```", section, re.DOTALL)
    return [(name, body) for name, body in found]


class TestQuickStart:
    def test_is_short(self):
        lines = sum(len(body.strip().splitlines()) for _, body in blocks())

        assert 0 < lines <= LINES

    def test_leads_to_a_message_that_is_handled(self, tmp_path, database_url):
        environment = {**os.environ, "DATABASE_URL": database_url, "PYTHONPATH": str(ROOT)}
        environment.pop("DJANGO_SETTINGS_MODULE", None)

        def run(*command):
            done = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run("-m", "django", "startproject", "mysite", ".")
        run("manage.py", "startapp", "shop")
        for name, body in [("mysite/settings.py", SETTINGS), *blocks()]:
            with (tmp_path / name).open("a") as file:
                file.write(f"\n{body}")
        run("manage.py", "makemigrations", "shop")
        run("manage.py", "migrate")

        order = json.loads(run("manage.py", "shell", "--no-imports", "-c", ORDER))
        run("manage.py", "outbox_relay", "--once")
        run("manage.py", "outbox_consume", "--group", "points", "--until-idle")

        assert order == {"order": 1}
        assert run("manage.py", "shell", "--no-imports", "-c", POINTS).strip() == "[10]"
