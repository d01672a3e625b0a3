"""The README's quick start, followed in a fresh project, with the package as it lies here. test_wheel.py installs it."""

import json
import os
import subprocess
import sys

import pytest

from tests.journeys import readme
from tests.journeys.readme import ROOT

LINES = 30

ORDER = """
from django.test import Client
print(Client(SERVER_NAME="localhost").post("/orders/").content.decode())
"""

POINTS = "from shop.models import Order; print(list(Order.objects.values_list('points', flat=True)))"


class TestQuickStart:
    def test_is_short(self):
        lines = sum(len(body.strip().splitlines()) for _, body in readme.blocks())

        assert 0 < lines <= LINES

    @pytest.mark.timeout(180)
    def test_leads_to_a_message_that_is_handled(self, tmp_path, fresh_database):
        environment = {**os.environ, "DATABASE_URL": fresh_database, "PYTHONPATH": str(ROOT)}
        environment.pop("DJANGO_SETTINGS_MODULE", None)

        def run(*command):
            done = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run("-m", "django", "startproject", "mysite", ".")
        run("manage.py", "startapp", "shop")
        readme.write(tmp_path)
        run("manage.py", "makemigrations", "shop")
        run("manage.py", "migrate")

        order = json.loads(run("manage.py", "shell", "--no-imports", "-c", ORDER))
        run("manage.py", "outbox_relay", "--once")
        run("manage.py", "outbox_consume", "--group", "points", "--until-idle")

        assert order == {"order": 1}
        assert run("manage.py", "shell", "--no-imports", "-c", POINTS).strip() == "[10]"
        assert "1 passed" in run("-m", "pytest", "shop/tests.py", "-p", "outbox.testing.plugin")
